// Tests of the segmentation program: training, resuming, preprocessed files and errors.
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "core/io/nifti.h"
#include "core/io/npy.h"
#include "core/io/safetensors.h"
#include "core/random.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/interpolate.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/examples/programs.h"

namespace voxgrad {
namespace {

class Segment : public Programs {};

/// Writes three volumes with one bright ball each, in nnU-Net's folder layout.
void make_dataset(const fs::path& folder) {
  for (const char* part : {"imagesTr", "labelsTr"}) fs::create_directories(folder / part);
  Generator random(1);
  for (const char* name : {"a", "b", "c"}) {
    NiftiImage image;
    image.data = zeros({16, 18, 20});
    image.affine[0][3] = -7;
    NiftiImage label = image;
    label.data = zeros({16, 18, 20}, {.dtype = u8});
    const int64_t middle[] = {6 + random.next_below(4), 6 + random.next_below(6), 6 + random.next_below(8)};
    float* voxels = image.data.mutable_data<float>();
    uint8_t* labels = label.data.mutable_data<uint8_t>();
    for (int64_t i = 0; i < image.data.numel(); ++i) {
      const int64_t at[] = {i / 360 - middle[0], i / 20 % 18 - middle[1], i % 20 - middle[2]};
      labels[i] = at[0] * at[0] + at[1] * at[1] + at[2] * at[2] < 20;
      voxels[i] = static_cast<float>(1 + 3 * labels[i]) + static_cast<float>(random.next_below(100)) / 100;
    }
    save_nifti(folder / "imagesTr" / (std::string(name) + "_0000.nii.gz"), image);
    save_nifti(folder / "labelsTr" / (std::string(name) + ".nii.gz"), label);
  }
  std::ofstream(folder / "dataset.json") << R"({"channel_names": {"0": "T1"}, "labels": {"background": 0, "ball": 1},
    "numTraining": 3, "file_ending": ".nii.gz"})";
}
constexpr const char* kModel = "model/fold_0/checkpoint_final.safetensors";
constexpr const char* kBrainSlab = "slices 117 to 120 along y of left half";
const std::string kSegment = "segment --dataset balls --device cpu --batch 2 --patch 16 --spacing 1 --channels 4 ";

TEST_F(Segment, LearnsADatasetInNnUNetsLayout) {
  make_dataset(folder_ / "balls");
  const Result result = run(kSegment + "--steps 60 --lr 1e-2 --ema 0.9 --out out --probabilities --tensorboard events");
  ASSERT_EQ(result.code, 0) << result.output;
  const size_t row = result.output.find("| ball | ");
  ASSERT_NE(row, std::string::npos) << result.output;
  EXPECT_GT(std::stod(result.output.substr(row + 9)), 0.8) << result.output;
  const fs::path out = folder_ / "out";
  EXPECT_NE(result.output.find("training on 2 cases, validating on case a (fold 0 of 3)"), std::string::npos);
  const std::string report = read(out / "report.md");
  for (const char* text : {"Validated on case a (fold 0 of 3)", "## a (validation)", "(a.png)"})
    EXPECT_NE(report.find(text), std::string::npos) << report;
  for (const char* picture : {"a.png", "curves.png"}) EXPECT_EQ(read(out / picture).substr(1, 3), "PNG");
  const NiftiImage labels = load_nifti(out / "a.nii.gz");
  EXPECT_EQ(labels.data.shape(), (Shape{16, 18, 20}));
  EXPECT_EQ(labels.affine[0][3], -7);
  EXPECT_EQ(load_nifti(out / "a-probabilities.nii.gz").data.shape(), (Shape{2, 16, 18, 20}));
  EXPECT_FALSE(load_safetensors(out / kModel).empty());
  EXPECT_FALSE(fs::is_empty(folder_ / "events"));
}

TEST_F(Segment, WritesAModelFolderForPredict) {
  make_dataset(folder_ / "balls");
  for (const char* options : {"--spacing 1 --patch 16 ", "--spacing 1.5 --patch 16 --network resenc-m ",
                              "--network mednext-b --spacing 1 --patch 32 "}) {
    const Result trained = run(std::string("segment --dataset balls --device cpu --batch 2 --channels 4 ") +
                               "--steps 30 --lr 1e-2 --out out --probabilities " + options);
    ASSERT_EQ(trained.code, 0) << trained.output;
    const Result predicted =
        run("predict out/model balls/imagesTr/a_0000.nii.gz p.nii.gz --device cpu --no-mirroring --probabilities");
    ASSERT_EQ(predicted.code, 0) << predicted.output;
    const NiftiImage labels = load_nifti(folder_ / "p.nii.gz"), expected = load_nifti(folder_ / "out/a.nii.gz");
    EXPECT_EQ(labels.data.to_vector(), expected.data.to_vector());
    EXPECT_EQ(labels.affine, expected.affine);
    EXPECT_EQ(load_nifti(folder_ / "p_probabilities.nii.gz").data.to_vector(),
              load_nifti(folder_ / "out/a-probabilities.nii.gz").data.to_vector());
    EXPECT_NE(predicted.output.find("ball"), std::string::npos) << predicted.output;
  }
}

TEST_F(Segment, EnlargesTheKernelsOfMedNeXt) {
  make_dataset(folder_ / "balls");
  const std::string program =
      "segment --dataset balls --device cpu --batch 1 --patch 32 --spacing 1 --channels 4 --network mednext-b "
      "--steps 1 --lr 1e-9 --ema 0 --out ";
  ASSERT_EQ(run(program + "small").code, 0);
  const Result large = run(program + "large --kernel-size 5 --upkern small/model");
  ASSERT_EQ(large.code, 0) << large.output;
  const TensorMap a = load_safetensors(folder_ / "small" / kModel), b = load_safetensors(folder_ / "large" / kModel);
  EXPECT_EQ(b.at("blocks.0.0.depthwise.0.weight").shape(), (Shape{4, 1, 5, 5, 5}));
  const Tensor kernel = a.at("blocks.0.0.depthwise.0.weight");
  const Tensor expected = interpolate(kernel, {.size = Dims{5, 5, 5}, .mode = InterpolateMode::trilinear});
  EXPECT_LT(abs(b.at("blocks.0.0.depthwise.0.weight") - expected).amax().item(), 1e-5);
  EXPECT_LT(abs(b.at("stem.weight") - a.at("stem.weight")).amax().item(), 1e-5);
  expect_failure(kSegment + "--upkern small/model", 1, "blocks.0.0");
}

TEST_F(Segment, PrintsTheTimeOfAnEpoch) {
  const Result result = run("segment --benchmark --device cpu --steps 2 --batch 1 --patch 16 --channels 2 --spacing 4");
  ASSERT_EQ(result.code, 0) << result.output;
  double total = 0, alone = 0;
  const std::string line = result.output.substr(result.output.rfind("epoch of"));
  EXPECT_EQ(std::sscanf(line.c_str(), "epoch of 250 steps: %lf s; without data loading and augmentation: %lf", &total,
                        &alone),
            2)
      << result.output;
  EXPECT_GT(total, 0);
  EXPECT_GT(alone, 0);
}

TEST_F(Segment, AcceptsPlansOfNnUNet) {
  make_dataset(folder_ / "balls");
  const fs::path plans = fs::path(TESTS_DIR) / "examples/nnunet/iso_plain/model/plans.json";
  const Result result =
      run("segment --dataset balls --device cpu --steps 1 --batch 1 --plans '" + plans.string() + "'");
  ASSERT_EQ(result.code, 0) << result.output;
  const TensorMap model = load_safetensors(folder_ / "out/segment" / kModel);
  EXPECT_EQ(model.at("encoder.stages.2.0.convs.0.conv.weight").shape(), (Shape{24, 16, 3, 3, 3}));
  expect_failure("segment --device cpu --plans '" + plans.string() + "'", 1, "--plans needs --dataset");
}

// save_model() cannot write these networks, so the program must stop before it preprocesses cases and trains.
TEST_F(Segment, RejectsPlansThatItCannotSave) {
  make_dataset(folder_ / "balls");
  const std::string plans = read(fs::path(TESTS_DIR) / "examples/nnunet/iso_plain/model/plans.json");
  for (const auto& [from, to] : {std::pair("instancenorm.InstanceNorm3d", "batchnorm.BatchNorm3d"),
                                 {"\"torch.nn.LeakyReLU\"", "\"torch.nn.ReLU\""}}) {
    std::string text = plans;
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += std::strlen(to))
      text.replace(at, std::strlen(from), to);
    ASSERT_NE(text, plans) << from;
    std::ofstream(folder_ / "plans.json") << text;
    expect_failure("segment --dataset balls --device cpu --steps 1 --batch 1 --plans plans.json --out out", 1,
                   "save_model: expected a network with InstanceNorm and LeakyReLU");
    for (const char* file : {"preprocessed", "checkpoint.safetensors"})
      EXPECT_FALSE(fs::exists(folder_ / "out" / file));
  }
}

TEST_F(Segment, ResumesBitwiseAfterAnInterrupt) {
  make_dataset(folder_ / "balls");
  expect_same_bits_resumed(kSegment + "--validate-every 8 ", kModel, "history.csv");
}

TEST_F(Segment, ResumesBitwiseAfterAKill) {
  make_dataset(folder_ / "balls");
  const std::string program = kSegment + "--validate-every 8 --steps 80 --tensorboard events --out ";
  ASSERT_EQ(run(program + "whole").code, 0);
  fs::remove_all(folder_ / "events");
  const int code = run_until("test -e parts/checkpoint.safetensors", "KILL", program + "parts");
  ASSERT_TRUE(code == 128 + SIGKILL || code == 0) << read(folder_ / "log");
  int64_t losses = 0;
  // A record consists of its length, a checksum, the bytes and another checksum.
  for (const auto& entry : fs::directory_iterator(folder_ / "events")) {
    const std::string events = read(entry.path());
    uint64_t length = 0, at = 0;
    for (; at + sizeof length <= events.size(); at += length + 16) {
      std::memcpy(&length, events.data() + at, sizeof length);
      ASSERT_LE(at + length + 16, events.size());
      losses += events.substr(at, length + 16).find("loss") != std::string::npos;
    }
    EXPECT_EQ(at, events.size());
  }
  EXPECT_GE(losses, 8);
  expect_failure(program + "parts --resume --precision bf16", 1,
                 "was written with precision = highest, but this run has precision = bf16");
  const Result resumed = run(program + "parts --resume");
  EXPECT_EQ(resumed.code, 0) << resumed.output;
  for (const char* file : {kModel, "history.csv", "a.nii.gz"})
    EXPECT_EQ(read(folder_ / "whole" / file), read(folder_ / "parts" / file)) << file;
}

// Training reads patches from files. A resumed run reuses a file only if it is complete and unchanged.
TEST_F(Segment, ReusesOnlyValidPreprocessedFiles) {
  make_dataset(folder_ / "balls");
  const std::string program = kSegment + "--steps 3 --out out ";
  const fs::path stored = folder_ / "out/preprocessed";
  const auto expect_written = [&](const std::string& options, const std::string& count) {
    const Result result = run(program + options);
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_NE(result.output.find("in out/preprocessed: " + count), std::string::npos) << result.output;
  };
  expect_written("", "2 written, 0 reused");
  EXPECT_EQ(load_npy(stored / "c-image.npy").shape(), (Shape{1, 16, 18, 20}));
  EXPECT_EQ(load_npy(stored / "b-label.npy").dtype(), u8);
  EXPECT_FALSE(fs::exists(stored / "a-image.npy"));  // case 'a' is for validation
  std::map<std::string, std::string> files;
  for (const char* name : {"c-image.npy", "c-label.npy", "b-image.npy", "b-label.npy", "contents.txt"})
    files[name] = read(stored / name);
  const auto expect_restored = [&](const std::string& count) {
    expect_written("--resume", count);
    for (const auto& [name, bytes] : files) EXPECT_EQ(read(stored / name), bytes) << name;
  };
  expect_restored("0 written, 2 reused");
  expect_written("", "2 written");

  fs::resize_file(stored / "c-image.npy", 500);
  expect_restored("1 written, 1 reused");
  std::string bytes = files["b-label.npy"];
  bytes.back() ^= 1;
  std::ofstream(stored / "b-label.npy", std::ios::binary) << bytes;
  fs::remove(stored / "c-label.npy");
  expect_restored("2 written, 0 reused");
  bytes = files["b-image.npy"];
  bytes.replace(bytes.find("18, 20"), 6, "20, 18");  // another shape with the same number of voxels
  std::ofstream(stored / "b-image.npy", std::ios::binary) << bytes;
  expect_restored("1 written, 1 reused");
  fs::remove(stored / "contents.txt");
  expect_restored("2 written, 0 reused");

  expect_failure(
      "segment --dataset balls --device cpu --batch 2 --patch 16 --spacing 2 --channels 4 --steps 3 "
      "--out out --resume",
      1, "was written with spacing = 1, but this run has spacing = 2");
  expect_restored("0 written, 2 reused");
  NiftiImage label = load_nifti(folder_ / "balls/labelsTr/b.nii.gz");
  label.data.set({0, 0, 0}, 1);
  save_nifti(folder_ / "balls/labelsTr/b.nii.gz", label);
  expect_written("--resume", "1 written, 1 reused");
  EXPECT_EQ(load_npy(stored / "b-label.npy").at({0, 0, 0}), 1);
}

TEST_F(Segment, NamesAMissingPreprocessedFile) {
  make_dataset(folder_ / "balls");
  EXPECT_EQ(run_until("test -e out/checkpoint.safetensors && rm out/preprocessed/c-image.npy", "0",
                      kSegment + "--validate-every 8 --steps 100000 --out out"),
            1);
  EXPECT_NE(read(folder_ / "log").find("out/preprocessed/c-image.npy'"), std::string::npos) << read(folder_ / "log");
}

TEST_F(Segment, SegmentsTheBrain) {
  const Result result =
      run("segment --device cpu --steps 1 --spacing 8 --patch 16 --channels 2 --network resenc-m --out out");
  ASSERT_EQ(result.code, 0) << result.output;
  // 0.810 is the mean Dice of the baseline, which predicts the labels of the left half for the mirrored right half.
  EXPECT_NE(result.output.find("| 0.810 |"), std::string::npos) << result.output;
  // The program trains on the left half, except for the slices that it uses for validation.
  EXPECT_NE(result.output.find(kBrainSlab), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("right half, mirrored (test)"), std::string::npos) << result.output;
  const std::string report = read(folder_ / "out/report.md");
  EXPECT_NE(report.find(std::string("Validated on ") + kBrainSlab), std::string::npos) << report;
  EXPECT_NE(report.find("## right half, mirrored (test)"), std::string::npos) << report;
}

TEST_F(Segment, SplitsASingleCaseBySlices) {
  make_dataset(folder_ / "balls");
  const std::string pair = "--image balls/imagesTr/a_0000.nii.gz --label balls/labelsTr/a.nii.gz ";
  const std::string program =
      "segment " + pair + "--device cpu --batch 1 --patch 16 --spacing 1 --channels 2 --steps 2 ";
  const Result result = run(program + "--out out");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_NE(result.output.find("training on 1 case, validating on slices "), std::string::npos) << result.output;
  EXPECT_NE(result.output.find(" along x of a_0000.nii.gz"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("a_0000.nii.gz (validation)"), std::string::npos) << result.output;

  // Training must not use the labels of these slices.
  const std::string at = result.output.substr(result.output.find("slices "));
  const int64_t slice = std::stoll(at.substr(7));
  EXPECT_EQ(at.find(concat("slices ", slice, " to ", slice, " along x")), 0u) << at;
  const fs::path path = folder_ / "balls/labelsTr/a.nii.gz";
  NiftiImage label = load_nifti(path);
  label.data.narrow(2, slice, 1).narrow(0, 2, 1).fill_(1);
  save_nifti(path, label);
  ASSERT_EQ(run(program + "--out other").code, 0);
  EXPECT_EQ(read(folder_ / "out" / kModel), read(folder_ / "other" / kModel));

  // A class that lies in a single slice cannot be split.
  label.data.zero_();
  label.data.set({8, 8, 8}, 1);
  save_nifti(path, label);
  expect_failure(program + "--out out", 1, "'a_0000.nii.gz' is the only case, and no slices of it can be held out");
}

TEST_F(Segment, ValidatesOnTheLastOfSeveralPairs) {
  make_dataset(folder_ / "balls");
  const Result result =
      run("segment --image balls/imagesTr/a_0000.nii.gz balls/imagesTr/b_0000.nii.gz --label balls/labelsTr/a.nii.gz "
          "balls/labelsTr/b.nii.gz --device cpu --batch 1 --patch 16 --spacing 1 --channels 2 --steps 2 --out out");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_NE(result.output.find("training on 1 case, validating on case b_0000.nii.gz"), std::string::npos)
      << result.output;
  const std::string history = read(folder_ / "out/history.csv");
  EXPECT_EQ(history.find("step,training_loss,validation_dice\n"), 0u) << history;
  // The final table shows the last validation.
  const double dice = std::stod(history.substr(history.rfind(',') + 1));
  const size_t row = result.output.find("| **mean** | **");
  ASSERT_NE(row, std::string::npos) << result.output;
  EXPECT_NEAR(std::stod(result.output.substr(row + 15)), dice, 5e-4) << result.output;
}

/// Adds an ignore label to dataset.json. Changes the label of all voxels for which `ignored(d, h, w)` is true to the
/// ignore label.
template <class F>
void ignore_voxels(const fs::path& folder, const F& ignored) {
  std::ofstream(folder / "dataset.json") << R"({"channel_names": {"0": "T1"}, "numTraining": 3,
    "labels": {"background": 0, "ball": 1, "ignore": 2}, "file_ending": ".nii.gz"})";
  for (const char* name : {"a", "b", "c"}) {
    const fs::path path = folder / "labelsTr" / (std::string(name) + ".nii.gz");
    NiftiImage label = load_nifti(path);
    for (int64_t d = 0; d < 16; ++d)
      for (int64_t h = 0; h < 18; ++h)
        for (int64_t w = 0; w < 20; ++w)
          if (ignored(d, h, w)) label.data.set({d, h, w}, 2);
    save_nifti(path, label);
  }
}

TEST_F(Segment, IgnoresVoxelsWithTheIgnoreLabel) {
  make_dataset(folder_ / "balls");
  ignore_voxels(folder_ / "balls", [](int64_t d, int64_t, int64_t w) { return w < 6 || (d + w) % 3 == 0; });
  const Result result = run(kSegment + "--steps 60 --lr 1e-2 --ema 0.9 --out out --probabilities");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(result.output.find("ignore"), std::string::npos) << result.output;
  const size_t row = result.output.find("| ball | ");
  ASSERT_NE(row, std::string::npos) << result.output;
  EXPECT_GT(std::stod(result.output.substr(row + 9)), 0.8) << result.output;
  EXPECT_EQ(load_nifti(folder_ / "out/a-probabilities.nii.gz").data.shape(), (Shape{2, 16, 18, 20}));
  const NiftiImage found = load_nifti(folder_ / "out/a.nii.gz");
  const std::vector<double> labels = found.data.to_vector();
  EXPECT_LE(*std::max_element(labels.begin(), labels.end()), 1);  // the ignored label is never predicted

  // At half the resolution, deep supervision uses the odd planes, so no voxel has a label.
  make_dataset(folder_ / "balls");
  ignore_voxels(folder_ / "balls", [](int64_t d, int64_t, int64_t) { return d % 2 == 1; });
  const Result sparse = run(kSegment + "--steps 3 --no-augmentation --out sparse");
  EXPECT_EQ(sparse.code, 0) << sparse.output;
}

TEST_F(Segment, NormalizesEachChannelByItsName) {
  make_dataset(folder_ / "balls");
  for (const char* name : {"a", "b", "c"}) {
    const fs::path images = folder_ / "balls/imagesTr";
    fs::copy(images / (std::string(name) + "_0000.nii.gz"), images / (std::string(name) + "_0001.nii.gz"));
  }
  const auto range_of = [&](const char* name, int64_t channel) {  // returns the smallest and the largest value
    std::ofstream(folder_ / "balls/dataset.json")
        << R"({"channel_names": {"0": "T1", "1": ")" << name
        << R"("}, "labels": {"background": 0, "ball": 1}, "numTraining": 3, "file_ending": ".nii.gz"})";
    const Result result = run(kSegment + "--steps 1 --out out");
    EXPECT_EQ(result.code, 0) << result.output;
    const std::vector<double> values =
        load_npy(folder_ / "out/preprocessed/b-image.npy").select(0, channel).contiguous().to_vector();
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return std::pair(*low, *high);
  };
  const auto z_score = range_of("T2", 1);
  EXPECT_LT(z_score.first, -0.5);
  EXPECT_EQ(range_of("noNorm", 0), z_score);  // channel 0 is still normalized by its own name
  EXPECT_NEAR(range_of("nonorm", 1).second, 4.99, 0.02);
  EXPECT_EQ(range_of("rescale_to_0_1", 1), std::pair(0.0, 1.0));
  EXPECT_NEAR(range_of("RGB_to_0_1", 1).second, 4.99 / 255, 1e-4);
  const auto ct = range_of("ct", 1);  // distances from the mean intensity of the balls, in standard deviations
  EXPECT_NEAR(ct.first, -1.7, 0.1);
  EXPECT_NEAR(ct.second, 1.7, 0.1);
}

TEST_F(Segment, RejectsInvalidOptions) {
  make_dataset(folder_ / "balls");
  expect_failure("segment --image a.nii", 2, "--image requires --label");
  expect_failure("segment --label a.nii", 2, "--label requires --image");
  expect_failure("segment --image a.nii b.nii --label a.nii", 2,
                 "give one --label for each --image, got 1 --label and 2 --image");
  expect_failure("segment --dataset balls --image a.nii --label b.nii", 2, "--dataset excludes --image");
  expect_failure("segment --dataset balls --label b.nii", 2, "--label");
  for (const char* option : {"--lr", "--ema", "--spacing"})
    for (const char* value : {"nan", "inf", "-nan", "1e999", "x"})
      expect_failure(std::string("segment ") + option + ' ' + value, 2,
                     std::string(option) + ": " + value + " is not a number from");
  expect_failure("segment --gpus 2 --device cpu", 2,
                 "--gpus 2 uses the first GPUs, so --device must be auto or cuda, got cpu");
  expect_failure("segment --dataset nowhere", 1, "nowhere");
  fs::remove(folder_ / "balls/labelsTr/b.nii.gz");
  expect_failure(kSegment, 1, "b.nii.gz");
}

// The program must name the file with the error and stop before it trains.
TEST_F(Segment, RejectsBadData) {
  const fs::path image = "balls/imagesTr/b_0000.nii.gz", label = "balls/labelsTr/b.nii.gz",
                 about = "balls/dataset.json";
  const auto expect_failure_with = [&](const fs::path& file, const auto& change, const std::string& message) {
    make_dataset(folder_ / "balls");
    NiftiImage volume = load_nifti(folder_ / file);
    change(volume);
    save_nifti(folder_ / file, volume);
    expect_failure(kSegment + "--out out", 1, message);
    EXPECT_FALSE(fs::exists(folder_ / "out/checkpoint.safetensors"));
  };
  expect_failure_with(
      label,
      [](NiftiImage& b) {
        b.data.set({1, 2, 3}, 2);
      },
      "'" + label.string() + "': voxel [1, 2, 3] is 2, expected a label from 0 to 1");
  expect_failure_with(
      label,
      [](NiftiImage& b) {
        b.data.set({1, 2, 3}, 0.5);
      },
      "'" + label.string() + "': voxel [1, 2, 3] is 0.5, expected a label from 0 to 1");
  expect_failure_with(
      label, [](NiftiImage& b) { b.data.zero_(); }, "'" + label.string() + "': there is nothing but background");
  expect_failure_with(
      label, [](NiftiImage& b) { b.data = b.data.narrow(0, 0, 15).contiguous(); },
      "'" + label.string() + "' has shape [15, 18, 20], '" + image.string() + "' has [16, 18, 20]");
  expect_failure_with(
      label, [](NiftiImage& b) { b.affine[1][3] += 4; },
      "the voxels of '" + label.string() + "' and of '" + image.string() + "' lie up to 4 mm apart");
  expect_failure_with(
      image,
      [](NiftiImage& b) {
        b.data.set({1, 2, 3}, std::nan(""));
      },
      "'" + image.string() + "': voxel [1, 2, 3] is nan, not a finite number");
  expect_failure_with(
      image, [](NiftiImage& b) { b.data.zero_(); }, "all voxels of case 'b' are 0");

  expect_failure_with(
      "balls/imagesTr/a_0000.nii.gz",  // the case for validation
      [](NiftiImage& a) {
        a.data.set({1, 2, 3}, std::nan(""));
      },
      "'balls/imagesTr/a_0000.nii.gz': voxel [1, 2, 3] is nan, not a finite number");

  const auto expect_failure_with_json = [&](const char* original, const char* replacement, const std::string& message) {
    make_dataset(folder_ / "balls");
    std::string text = read(folder_ / about);
    text.replace(text.find(original), std::strlen(original), replacement);
    std::ofstream(folder_ / about) << text;
    expect_failure(kSegment + "--out out", 1, message);
  };
  expect_failure_with_json("numTraining\": 3", "numTraining\": 4",
                           about.string() + "': numTraining is 4, but imagesTr has 3 cases");
  expect_failure_with_json("\"0\": \"T1\"", "\"0\": \"T1\", \"1\": \"T2\"",
                           "'balls/imagesTr/a_0001.nii.gz' is missing");
  expect_failure_with_json("ball\": 1", "ball\": 2",
                           about.string() + "': labels.ball is 2, but there are only 2 labels");
  expect_failure_with_json(".nii.gz", ".nii", "does not end with .nii, the file_ending of dataset.json");
  expect_failure_with_json("}", "", about.string() + "' is not valid JSON at byte");
}

}  // namespace
}  // namespace voxgrad
