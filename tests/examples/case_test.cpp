// Tests of cases: loading, errors, preprocessing against formulas in double precision, and restoring predictions to the
// geometry of the files.
#include "examples/nnunet/case.h"

#include <cmath>
#include <limits>

#include "tests/core/file_support.h"

namespace nnunet {
namespace {

using namespace voxgrad;

using CaseTest = FileTest;

/// Returns a volume of zeros with voxels of 0.5 x 1.5 x 2 mm (W, H, D), rotated by 30 degrees about x and mirrored
/// along x.
NiftiImage volume(const Shape& shape) {
  const double c = std::sqrt(0.75), s = 0.5;
  NiftiImage image;
  image.data = zeros(shape);
  image.affine = {{{-0.5, 0, 0, 40}, {0, 1.5 * c, -2 * s, -30}, {0, 1.5 * s, 2 * c, 10}, {0, 0, 0, 1}}};
  image.spacing = {2, 1.5, 0.5};
  return image;
}

/// Returns the world coordinates of voxel (d, h, w).
std::array<double, 3> world(const std::array<std::array<double, 4>, 4>& affine, double d, double h, double w) {
  std::array<double, 3> at{};
  for (size_t row = 0; row < 3; ++row)
    at[row] = affine[row][0] * w + affine[row][1] * h + affine[row][2] * d + affine[row][3];
  return at;
}
/// A linear function of world coordinates, which linear interpolation reproduces.
double linear(const std::array<double, 3>& at) { return at[0] + 2 * at[1] - 3 * at[2]; }

NiftiImage linear_volume(const Shape& shape) {
  NiftiImage image = volume(shape);
  for (int64_t d = 0; d < shape[0]; ++d)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t w = 0; w < shape[2]; ++w)
        image.data.set({d, h, w}, linear(world(image.affine, static_cast<double>(d), static_cast<double>(h),
                                               static_cast<double>(w))));
  return image;
}

NiftiImage with_label(NiftiImage image, const Dims& at, double value) {
  image.data = zeros(image.data.shape());
  image.data.set(at, value);
  return image;
}

TEST_F(CaseTest, LoadsChannelsAndLabel) {
  const NiftiImage image = linear_volume({4, 5, 6});
  save_nifti(path("a.nii.gz"), image);
  save_nifti(path("b.nii"), volume({4, 5, 6}));
  save_nifti(path("l.nii.gz"), with_label(image, {1, 2, 3}, 2));
  const Case c = load_case("case", {path("a.nii.gz"), path("b.nii")}, path("l.nii.gz"), 3);
  EXPECT_EQ(concat(describe(c.image)), "[2, 4, 5, 6] f32 on cpu");
  EXPECT_EQ(c.image[0].to_vector(), image.data.to_vector());
  EXPECT_EQ(concat(describe(c.label)), "[4, 5, 6] u8 on cpu");
  EXPECT_EQ(c.label.at({1, 2, 3}), 2);
  EXPECT_EQ(sum(c.label).item(), 2);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(c.geometry.spacing[i], image.spacing[i], 1e-6);
  EXPECT_FALSE(load_case("case", {path("a.nii.gz")}).label.defined());
}

TEST_F(CaseTest, ErrorsNameTheBadFile) {
  const NiftiImage image = linear_volume({4, 5, 6});
  const auto expect_rejected = [&](NiftiImage a, NiftiImage l, const char* file, const std::string& message) {
    save_nifti(path("a.nii"), a);
    save_nifti(path("l.nii"), l);
    EXPECT_ERROR(load_case("case", {path("a.nii")}, path("l.nii"), 3), message);
    EXPECT_ERROR(load_case("case", {path("a.nii")}, path("l.nii"), 3), "'" + path(file).string() + "'");
  };
  const NiftiImage good = with_label(image, {0, 0, 0}, 1);
  NiftiImage bad = linear_volume({4, 5, 6});
  bad.data.set({3, 1, 2}, std::numeric_limits<double>::quiet_NaN());
  expect_rejected(bad, good, "a.nii", "voxel [3, 1, 2] is nan, not a finite number");
  bad.data.set({3, 1, 2}, -std::numeric_limits<double>::infinity());
  expect_rejected(bad, good, "a.nii", "voxel [3, 1, 2] is -inf");
  for (const double label : {3.0, -1.0, 0.5, 1e30})
    expect_rejected(image, with_label(image, {0, 1, 5}, label), "l.nii",
                    concat("voxel [0, 1, 5] is ", label, ", expected a label from 0 to 2"));
  expect_rejected(image, with_label(image, {0, 1, 5}, 0), "l.nii", "nothing but background");
  expect_rejected(image, volume({4, 5, 7}), "l.nii",
                  "has shape [4, 5, 7], '" + path("a.nii").string() + "' has [4, 5, 6]");
  NiftiImage moved = good;
  moved.affine[2][3] += 0.06;
  expect_rejected(image, moved, "l.nii", "lie up to 0.06");
  moved.affine[2][3] -= 0.02;  // a shift of 0.04 mm is below the tolerance, a tenth of the smallest voxel size
  save_nifti(path("l.nii"), moved);
  EXPECT_EQ(load_case("case", {path("a.nii")}, path("l.nii"), 3).label.at({0, 0, 0}), 1);
  moved.affine[0][0] = -moved.affine[0][0];
  expect_rejected(image, moved, "l.nii", "their affines differ");
  save_nifti(path("a.nii"), volume({2, 4, 5, 6}));
  EXPECT_ERROR(load_case("case", {path("a.nii")}), "a.nii': expected one volume, got a series [2, 4, 5, 6]");
  EXPECT_ERROR(load_case("case", {path("none.nii")}), "none.nii");
  EXPECT_ERROR(load_case("case", {}), "'case' has 0 images");
}

TEST_F(CaseTest, ReadsPartsOfAnOpenCase) {
  NiftiImage image = linear_volume({4, 5, 6});
  save_nifti(path("a.nii"), image);
  save_nifti(path("l.nii"), with_label(image, {1, 2, 3}, 2));
  const std::vector<std::filesystem::path> images{path("a.nii"), path("a.nii")};
  const Case c = load_case("case", images, path("l.nii"), 3);
  const PatchSource source = open_case(images, path("l.nii"), 3);
  EXPECT_EQ(source.shape, (Shape{4, 5, 6}));
  const Tensor part = source.image({1, 2, 3}, {2, 3, 1});
  EXPECT_EQ(part.to_vector(), c.image.narrow(1, 1, 2).narrow(2, 2, 3).narrow(3, 3, 1).to_vector());
  EXPECT_EQ(concat(describe(source.label({1, 2, 3}, {2, 3, 1}))), "[2, 3, 1] u8 on cpu");
  EXPECT_EQ(source.label({1, 2, 3}, {2, 3, 1}).at({0, 0, 0}), 2);
  image.data.set({3, 4, 5}, std::nan(""));
  save_nifti(path("a.nii"), image);
  save_nifti(path("l.nii"), with_label(image, {3, 4, 5}, 7));
  const PatchSource broken = open_case(images, path("l.nii"), 3);
  EXPECT_NO_THROW(broken.image({0, 0, 0}, {3, 5, 6}));
  EXPECT_ERROR(broken.image({2, 1, 0}, {2, 4, 6}), "'" + path("a.nii").string() + "': voxel [3, 4, 5] is nan");
  EXPECT_ERROR(broken.label({2, 1, 0}, {2, 4, 6}), "'" + path("l.nii").string() + "': voxel [3, 4, 5] is 7");
  save_nifti(path("l.nii"), volume({4, 5, 7}));
  EXPECT_ERROR(open_case(images, path("l.nii"), 3), "has shape");
}

TEST_F(CaseTest, CropAndResampleKeepVoxelsInPlace) {
  const NiftiImage image = linear_volume({9, 10, 12});
  save_nifti(path("a.nii"), image);
  save_nifti(path("l.nii"), with_label(image, {4, 5, 6}, 1));
  const Case whole = load_case("case", {path("a.nii")}, path("l.nii"));
  const Case part = crop(whole, {{1, 2, 3}, {8, 7, 9}});
  EXPECT_EQ(part.image.shape(), (Shape{1, 8, 7, 9}));
  EXPECT_EQ(part.label.at({3, 3, 3}), 1);
  for (const Case& c : {part, resample(part, {1, 1.5, 0.75}), resample(part, {3.2, 1, 1})}) {
    EXPECT_EQ(c.image[0].shape(), c.geometry.shape);
    EXPECT_EQ(c.label.shape(), c.geometry.shape);
    for (int64_t d = 1; d + 1 < c.geometry.shape[0]; ++d)  // skips the border, where interpolation repeats voxels
      for (int64_t h = 1; h + 1 < c.geometry.shape[1]; ++h)
        for (int64_t w = 1; w + 1 < c.geometry.shape[2]; ++w)
          EXPECT_NEAR(
              c.image.at({0, d, h, w}),
              linear(world(c.geometry.affine, static_cast<double>(d), static_cast<double>(h), static_cast<double>(w))),
              1e-3);
  }
  const Case fine = resample(part, {1, 1.5, 0.75});
  EXPECT_EQ(fine.geometry.shape, (Shape{16, 7, 6}));
  const std::array<double, 3> spacing{1, 1.5, 0.75};
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(fine.geometry.spacing[i], spacing[i], 1e-6);
  EXPECT_EQ(fine.box.start, (Dims{1, 2, 3}));
  EXPECT_EQ(resample(part, {100, 1.5, 0.5}).geometry.shape, (Shape{1, 7, 9}));
  EXPECT_ERROR(crop(fine, {{0, 0, 0}, {1, 1, 1}}), "case 'case' was already resampled");
  EXPECT_ERROR(crop(part, {{-1, 0, 0}, {1, 1, 1}}), "a box of size [1, 1, 1] at [-1, 0, 0] does not lie within case");
  EXPECT_ERROR(crop(part, {{0, 0, 1}, {8, 7, 9}}), "does not lie within case 'case' [8, 7, 9]");
  EXPECT_ERROR(resample(part, {0, 1, 1}), "spacing must be positive, got 0");
  EXPECT_ERROR(resample(part, {1e-9, 1, 1}), "voxels along an axis");
}

TEST_F(CaseTest, CubicMatchesKeysConvolutionAlongEachAxis) {
  Generator random(1);
  Case c{"case", randn({2, 6, 5, 4}, {}, &random), {}, {{6, 5, 4}, {1, 1, 1}, {}}, {}, {}};
  const auto weight = [](double x) {  // Keys 1981 with a = -0.75
    x = std::abs(x);
    return x <= 1 ? (1.25 * x - 2.25) * x * x + 1 : x < 2 ? -0.75 * (((x - 5) * x + 8) * x - 4) : 0;
  };
  for (size_t axis = 0; axis < 3; ++axis) {
    std::array<double, 3> spacing{1, 1, 1};
    spacing[axis] = 0.5;
    const Case fine = resample(c, spacing, /*cubic=*/true);
    const auto dim = static_cast<int64_t>(axis) + 1;
    const int64_t n = c.image.size(dim);
    ASSERT_EQ(fine.image.size(dim), 2 * n);
    for (int64_t i = 0; i < 2 * n; ++i) {
      const double at = (static_cast<double>(i) + 0.5) / 2 - 0.5;
      Tensor expected = zeros_like(c.image.select(dim, 0));
      for (auto tap = static_cast<int64_t>(std::floor(at)) - 1; tap <= std::floor(at) + 2; ++tap)
        expected =
            expected + c.image.select(dim, std::clamp<int64_t>(tap, 0, n - 1)) * weight(at - static_cast<double>(tap));
      EXPECT_LT(abs(fine.image.select(dim, i) - expected).amax().item(), 1e-5) << axis << ' ' << i;
    }
  }
}

TEST_F(CaseTest, RestoresPredictionsToTheFileGeometry) {
  const NiftiImage image = linear_volume({8, 9, 10});
  NiftiImage label = image;
  label.data = zeros({8, 9, 10});
  for (int64_t d = 2; d < 6; ++d)
    for (int64_t h = 3; h < 7; ++h) label.data.set({d, h, d + 1}, static_cast<double>(d - 1));
  save_nifti(path("a.nii"), image);
  save_nifti(path("l.nii"), label);
  const Case whole = load_case("case", {path("a.nii")}, path("l.nii"));
  const Case c = resample(crop(whole, {{1, 2, 2}, {6, 6, 6}}), {0.7, 0.5, 0.25});
  const NiftiImage back = restore(c.label, c);
  EXPECT_EQ(back.data.dtype(), u8);
  EXPECT_EQ(back.data.to_vector(), label.data.to_vector());
  EXPECT_EQ(back.affine, load_nifti(path("a.nii")).affine);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(back.spacing[i], image.spacing[i], 1e-6);
  const Tensor one = c.label.to(f32) * 0.25;
  const Tensor map = restore(stack({1 - one, one}), c).data;
  EXPECT_EQ(map.shape(), (Shape{2, 8, 9, 10}));
  EXPECT_EQ(map.at({0, 0, 0, 0}), 1);  // background outside the box
  EXPECT_EQ(map.at({1, 0, 0, 0}), 0);
  EXPECT_LT(abs(map.sum(0) - 1).amax().item(), 1e-5);
  EXPECT_ERROR(restore(zeros({6, 6, 6}), c), "expected a prediction (D, H, W) or (K, D, H, W) of");
  save_nifti(path("out.nii.gz"), back);
  EXPECT_EQ(load_nifti(path("out.nii.gz")).data.to_vector(), label.data.to_vector());
}

TEST(Normalize, ZScoreUsesTheImageOrAMask) {
  Generator random(2);
  const Tensor image = randn({2, 3, 4, 5}, {}, &random) * 7 + 100;
  const Tensor mask = gt(randn({3, 4, 5}, {}, &random), 0);
  for (const Tensor& within : {Tensor(), mask}) {
    const Tensor y = z_score(image, within);
    for (int64_t c = 0; c < 2; ++c) {
      double count = 0, total = 0, squares = 0;
      const auto x = image[c].to_vector(), m = mask.to_vector(), result = y[c].to_vector();
      const auto in = [&](size_t i) { return !within.defined() || m[i] != 0; };
      for (size_t i = 0; i < x.size(); ++i)
        if (in(i)) ++count, total += x[i];
      for (size_t i = 0; i < x.size(); ++i)
        if (in(i)) squares += (x[i] - total / count) * (x[i] - total / count);
      for (size_t i = 0; i < x.size(); ++i)
        EXPECT_NEAR(result[i], in(i) ? (x[i] - total / count) / std::sqrt(squares / count) : 0, 1e-4);
    }
  }
  EXPECT_EQ(z_score(full({1, 2, 2, 2}, 3)).to_vector(), std::vector<double>(8, 0));
  EXPECT_ERROR(z_score(image, zeros({3, 4, 5}, {.dtype = b8})), "the mask is empty");
  EXPECT_ERROR(z_score(image, zeros({3, 4, 5})), "expected a bool mask");
  EXPECT_ERROR(z_score(image[0]), "expected an image (C, D, H, W) f32, got [3, 4, 5]");
}

TEST(Normalize, FindsTheBoxOfNonzeroVoxels) {
  Tensor image = zeros({2, 5, 6, 7});
  EXPECT_ERROR(nonzero_box(image), "all voxels of the image [2, 5, 6, 7] are 0");
  image.set({0, 1, 2, 3}, -1);
  EXPECT_EQ(nonzero_box(image).start, (Dims{1, 2, 3}));
  EXPECT_EQ(nonzero_box(image).size, (Shape{1, 1, 1}));
  image.set({1, 3, 0, 6}, 1e-30);
  EXPECT_EQ(nonzero_box(image).start, (Dims{1, 0, 3}));
  EXPECT_EQ(nonzero_box(image).size, (Shape{3, 3, 4}));
  EXPECT_EQ(sum(nonzero_mask(image)).item(), 2);
}

TEST(Normalize, CtUsesForegroundIntensities) {
  std::vector<float> values(1001);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 10) % 1001);
  const Intensities intensities = measure_intensities(values);
  EXPECT_NEAR(intensities.low, 5, 1e-9);
  EXPECT_NEAR(intensities.high, 995, 1e-9);
  EXPECT_NEAR(intensities.mean, 500, 1e-9);
  EXPECT_NEAR(intensities.std, std::sqrt((1001.0 * 1001 - 1) / 12), 1e-9);
  EXPECT_NEAR(measure_intensities({1, 3}).high, 2.99, 1e-6);  // numpy.percentile([1, 3], 99.5)
  EXPECT_ERROR(measure_intensities({}), "there are no values");
  const Tensor y = ct_normalize(tensor({{{{-1000, 100, 3000}}}}), {{-100, 300, 50, 10}});
  EXPECT_EQ(y.to_vector(), (std::vector<double>{-15, 5, 25}));
  EXPECT_ERROR(ct_normalize(zeros({2, 1, 1, 1}), {{}}), "has 2 channels, but there are intensities for 1");

  Case c{"case", arange(0, 24).reshape({1, 2, 3, 4}), zeros({2, 3, 4}, {.dtype = u8}), {}, {}, {}};
  Generator random(3);
  EXPECT_ERROR(sample_foreground(c, 0, 9, random), "case 'case' has nothing but background");
  c.label.set({0, 0, 1}, 1);
  c.label.set({1, 2, 3}, 2);
  const auto sample = sample_foreground(c, 0, 100, random);
  EXPECT_EQ(std::count(sample.begin(), sample.end(), 1.f) + std::count(sample.begin(), sample.end(), 23.f), 100);
  EXPECT_GT(std::count(sample.begin(), sample.end(), 1.f), 30);
  const auto of_class_2 = sample_foreground(c, 0, 50, random, 1);
  EXPECT_EQ(std::count(of_class_2.begin(), of_class_2.end(), 23.f), 50);
  EXPECT_TRUE(sample_foreground(c, 0, 0, random).empty());
  EXPECT_ERROR(sample_foreground(c, 0, -1, random), "sample_foreground: count must not be negative, got -1");
  EXPECT_ERROR(sample_foreground(c, 1, 9, random), "channel 1 is out of range: case 'case' has 1");
  c.label = zeros({2, 3, 5}, {.dtype = u8});
  EXPECT_ERROR(sample_foreground(c, 0, 9, random), "must be u8 and fit the image [1, 2, 3, 4], got [2, 3, 5] u8");
  EXPECT_ERROR(measure_intensities({1, std::numeric_limits<float>::quiet_NaN()}), "the values must be finite");
}

}  // namespace
}  // namespace nnunet
