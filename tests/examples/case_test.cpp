// Tests of cases, which are the images and the label of one patient: loading, errors, and statistics of the
// intensities.
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
/// Returns a linear function of world coordinates.
double linear(const std::array<double, 3>& at) { return at[0] + 2 * at[1] - 3 * at[2]; }

/// Returns volume(shape) with the values of linear() at the world coordinates of the voxels.
NiftiImage linear_volume(const Shape& shape) {
  NiftiImage image = volume(shape);
  for (int64_t d = 0; d < shape[0]; ++d)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t w = 0; w < shape[2]; ++w)
        image.data.set({d, h, w}, linear(world(image.affine, static_cast<double>(d), static_cast<double>(h),
                                               static_cast<double>(w))));
  return image;
}

/// Returns a label map with the geometry of `image`. All voxels are 0 except voxel `at`, which has the value `value`.
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

TEST(Case, FindsTheBoxOfNonzeroVoxels) {
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

TEST(Intensities, AreMeasuredInTheForeground) {
  std::vector<float> values(1001);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 10) % 1001);
  const Intensities intensities = measure_intensities(values);
  EXPECT_NEAR(intensities.low, 5, 1e-9);
  EXPECT_NEAR(intensities.high, 995, 1e-9);
  EXPECT_NEAR(intensities.mean, 500, 1e-9);
  EXPECT_NEAR(intensities.std, std::sqrt((1001.0 * 1001 - 1) / 12), 1e-9);
  EXPECT_NEAR(measure_intensities({1, 3}).high, 2.99, 1e-6);  // numpy.percentile([1, 3], 99.5)
  EXPECT_ERROR(measure_intensities({}), "there are no values");
  Case c{"case", arange(0, 24).reshape({1, 2, 3, 4}), zeros({2, 3, 4}, {.dtype = u8}), {}};
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
  EXPECT_ERROR(sample_foreground(c, 1, 9, random), "channel 1 is out of range: case 'case' has 1 channel");
  c.label = zeros({2, 3, 5}, {.dtype = u8});
  EXPECT_ERROR(sample_foreground(c, 0, 9, random), "must be u8 and fit the image [1, 2, 3, 4], got [2, 3, 5] u8");
  EXPECT_ERROR(measure_intensities({1, std::numeric_limits<float>::quiet_NaN()}), "the values must be finite");
}

}  // namespace
}  // namespace nnunet
