// Tests of random patches: positions, foreground oversampling, padding, and files as sources.
#include "nn/data/patches.h"

#include <map>

#include "nn/data/loader.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/core/file_support.h"

namespace voxgrad::data {
namespace {

using PatchTest = FileTest;

struct Case {
  Tensor image;  ///< (C, D, H, W) f32
  Tensor label;  ///< (D, H, W) u8
};

PatchSource patch_source(const Case& c) { return data::patch_source(c.image, c.label); }

/// Returns a case whose image has the values 1, 2, 3, ..., with two voxels of class 1 and one of class 2.
Case example() {
  Case c{arange(1, 10 * 12 * 8 + 1).reshape({1, 10, 12, 8}), zeros({10, 12, 8}, {.dtype = u8})};
  c.label.set({0, 0, 0}, 1);
  c.label.set({5, 6, 4}, 1);
  c.label.set({8, 9, 1}, 2);
  return c;
}

TEST_F(PatchTest, AThirdOfThePatchesIsCenteredAtForeground) {
  const PatchDataset dataset({patch_source(example())}, {.size = {3, 3, 3}, .samples = 3000, .batch_size = 3});
  EXPECT_EQ(dataset.size(), 3000);
  std::map<Dims, int, decltype([](const Dims&a, const Dims&b) {
             return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
           })>
      forced, free;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    Generator random(static_cast<uint64_t>(i));
    const Sample sample = dataset.get(i, random);
    ASSERT_EQ(concat(describe(sample.input)), "[1, 3, 3, 3] f32 on cpu");
    ASSERT_EQ(concat(describe(sample.target)), "[3, 3, 3] u8 on cpu");
    const int64_t first = sample.input.at<int64_t>({0, 0, 0, 0}) - 1;
    const Dims start{first / 96, first / 8 % 12, first % 8};
    EXPECT_EQ(sample.input.at({0, 2, 2, 2}), first + 1 + 2 * 96 + 2 * 8 + 2);
    ++(i % 3 == 2 ? forced : free)[start];
  }
  // Both classes are equally likely, and so are both voxels of class 1. Patches at the border are moved inside.
  ASSERT_EQ(forced.size(), 3u);
  EXPECT_NEAR((forced[{0, 0, 0}]), 250, 50);
  EXPECT_NEAR((forced[{4, 5, 3}]), 250, 50);
  EXPECT_NEAR((forced[{7, 8, 0}]), 500, 60);
  EXPECT_GT(free.size(), 400u);  // there are 8 * 10 * 6 positions
  EXPECT_EQ(free.count({7, 9, 5}), 1u);
}

TEST_F(PatchTest, OversamplingRoundsAsInNnUNet) {
  Case c = example();
  c.label = zeros({10, 12, 8}, {.dtype = u8});
  c.label.set({5, 6, 4}, 3);
  for (const auto& [batch, expected] : std::map<int64_t, int64_t>{{1, 0}, {2, 1}, {3, 1}, {6, 2}, {12, 4}}) {
    const PatchDataset dataset({patch_source(c)}, {.size = {1, 1, 1}, .samples = batch, .batch_size = batch});
    int64_t found = 0;
    for (int64_t i = 0; i < batch; ++i) {
      Generator random(7);
      found += dataset.get(i, random).target.item<int64_t>() == 3;
    }
    EXPECT_EQ(found, expected) << batch;
  }
  const PatchDataset all({patch_source(c)}, {.size = {1, 1, 1}, .foreground = 1, .ignore_index = 3});
  Generator random(7);
  EXPECT_EQ(all.get(0, random).target.item(), 0);  // the only foreground voxel is ignored
}

TEST_F(PatchTest, PadsPatchesLargerThanTheCase) {
  const Case c = example();
  const PatchDataset dataset({patch_source(c)}, {.size = {13, 12, 4}, .foreground = 1});
  Generator random(1);
  const Sample sample = dataset.get(0, random);
  EXPECT_EQ(sample.input.shape(), (Shape{1, 13, 12, 4}));
  EXPECT_EQ(sample.target.shape(), (Shape{13, 12, 4}));
  // The patch has one plane of zeros before the case and two after it.
  EXPECT_EQ(sum(sample.input.narrow(1, 0, 1)).item() + sum(sample.input.narrow(1, 11, 2)).item(), 0);
  EXPECT_EQ(amin(sample.input.narrow(1, 1, 10)).item() > 0, true);
  EXPECT_EQ(sum(sample.target.narrow(0, 0, 1)).item() + sum(sample.target.narrow(0, 11, 2)).item(), 0);
  EXPECT_GT(sum(sample.target).item(), 0);
}

TEST_F(PatchTest, FilesGiveTheSamePatchesAsMemory) {
  const Case c = example();
  save_npy(path("image.npy"), c.image);
  save_npy(path("label.npy"), c.label);
  const PatchOptions options{.size = {4, 14, 5}, .samples = 20};
  const PatchDataset memory({patch_source(c), patch_source(c)}, options);
  const PatchSource npy = data::patch_source(NpyFile(path("image.npy")), NpyFile(path("label.npy")));
  const PatchDataset files({npy, npy}, options);
  Loader a(memory, {.batch_size = 2, .seed = 3}), b(files, {.batch_size = 2, .num_workers = 3, .seed = 3});
  auto from_files = b.begin();
  for (const auto& [x, y] : a) {
    EXPECT_EQ(x.shape(), (Shape{2, 1, 4, 14, 5}));
    EXPECT_EQ(x.to_vector(), from_files->input.to_vector());
    EXPECT_EQ(y.to_vector(), from_files->target.to_vector());
    ++from_files;
  }
  EXPECT_EQ(from_files, b.end());
}

TEST_F(PatchTest, DrawsVoxelsOfALargeClassUniformly) {
  const Case c{arange(0, 40000).reshape({1, 20, 40, 50}), ones({20, 40, 50}, {.dtype = u8})};  // one class
  const PatchDataset dataset({patch_source(c)}, {.size = {1, 1, 1}, .foreground = 1});
  Generator random(5);
  double total = 0, late = 0;
  for (int i = 0; i < 4000; ++i) {
    const double at = dataset.get(0, random).input.item();
    total += at;
    late += at >= 30000;
  }
  EXPECT_NEAR(total / 4000, 20000, 1000);
  EXPECT_NEAR(late / 4000, 0.25, 0.05);
}

// As in nnU-Net, every patch is centered at a labeled voxel if the case has ignored voxels. Otherwise patches without
// forced foreground lie anywhere.
TEST_F(PatchTest, CentersPatchesAtLabeledVoxels) {
  Case c = example();
  c.label = full({10, 12, 8}, 7, {.dtype = u8});
  c.label.set({5, 6, 4}, 0);
  c.label.set({2, 3, 4}, 1);
  const PatchDataset dataset({patch_source(c)}, {.size = {1, 1, 1}, .batch_size = 2, .ignore_index = 7});
  int background = 0;
  for (int64_t i = 0; i < 100; ++i) {
    Generator random(static_cast<uint64_t>(i));
    const auto label = dataset.get(i, random).target.item<int64_t>();
    EXPECT_EQ(label, i % 2 == 1 ? 1 : label == 1) << i;  // every second patch is forced to contain foreground
    background += label == 0;
  }
  EXPECT_NEAR(background, 25, 15);
  c.label = ones({10, 12, 8}, {.dtype = u8});
  const PatchOptions options{.size = {1, 1, 1}, .foreground = 0};
  PatchOptions ignoring = options;
  ignoring.ignore_index = 7;
  for (uint64_t i = 0; i < 10; ++i) {
    Generator a(i), b(i);
    EXPECT_EQ(PatchDataset({patch_source(c)}, options).get(0, a).input.item(),
              PatchDataset({patch_source(c)}, ignoring).get(0, b).input.item());
  }
}

TEST_F(PatchTest, RejectsReadersWithWrongResults) {
  const PatchSource good = patch_source(example());
  const auto returning = [](const Tensor& tensor) { return [tensor](const Dims&, const Shape&) { return tensor; }; };
  const auto get = [](const PatchSource& source) {
    Generator random(1);
    PatchDataset({source}, {.size = {2, 2, 2}}).get(0, random);
  };
  for (const Tensor& image : {zeros({1, 2, 2, 3}), zeros({2, 2, 2}), zeros({1, 2, 2, 2}, {.dtype = f64}), Tensor()}) {
    const PatchSource source{good.shape, returning(image), good.label};
    EXPECT_ERROR(get(source), "PatchDataset: the image reader must return (C, D, H, W) f32 with D, H, W of [");
    EXPECT_ERROR(get(source),
                 concat("must return (C, D, H, W) f32 with D, H, W of [2, 2, 2] at [6, 3, 3], got ", describe(image)));
  }
  EXPECT_ERROR(get({good.shape, good.image, returning(zeros({9, 12, 8}, {.dtype = u8}))}),
               "PatchDataset: the label reader must return [10, 12, 8] u8 at [0, 0, 0], got [9, 12, 8] u8");
  EXPECT_ERROR(get({good.shape, good.image, returning(zeros({10, 12, 8}))}), "got [10, 12, 8] f32");
  // This reader returns the whole label correctly, but patches with a wrong shape.
  const auto label = [&](const Dims& start, const Shape& size) {
    return size == good.shape ? good.label(start, size) : zeros({2, 2, 1}, {.dtype = u8});
  };
  EXPECT_ERROR(get({good.shape, good.image, label}), "must return [2, 2, 2] u8 at [6, 3, 3], got [2, 2, 1] u8");
}

TEST_F(PatchTest, RejectsInvalidOptionsAndCases) {
  const PatchSource source = patch_source(example());
  EXPECT_ERROR(PatchDataset({}, {.size = {1, 1, 1}}), "there are no sources");
  EXPECT_ERROR(PatchDataset({source}, {}), "the size of a patch must be three positive numbers (D, H, W), got []");
  EXPECT_ERROR(PatchDataset({source}, {.size = {1, 0, 1}}), "got [1, 0, 1]");
  EXPECT_ERROR(PatchDataset({source}, {.size = {1, 1, 1}, .foreground = 2}), "got 500, 2 and 2");
  EXPECT_ERROR(PatchDataset({source}, {.size = {1, 1, 1}, .batch_size = 0}), "got 500, 0 and 0.33");
  Case c = example();
  c.label = {};
  EXPECT_ERROR(
      patch_source(c),
      "expected an image (C, D, H, W) f32 and a label (D, H, W) u8, got [1, 10, 12, 8] f32 on cpu and undefined");
  save_npy(path("image.npy"), zeros({1, 2, 3, 4}));
  save_npy(path("label.npy"), zeros({2, 3, 5}, {.dtype = u8}));
  EXPECT_ERROR(data::patch_source(NpyFile(path("image.npy")), NpyFile(path("label.npy"))),
               "the image has shape [1, 2, 3, 4], but its label has shape [2, 3, 5]");
  EXPECT_ERROR(data::patch_source(NpyFile(path("label.npy")), NpyFile(path("label.npy"))),
               "expected an image (C, D, H, W) f32");
}

}  // namespace
}  // namespace voxgrad::data
