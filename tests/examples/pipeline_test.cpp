// Tests of nnU-Net's preprocessing against formulas in double precision. predict_test.cpp compares the whole pipeline
// with nnU-Net.
#include "examples/nnunet/pipeline.h"

#include <cmath>

#include "tests/support.h"

namespace nnunet {
namespace {

using namespace voxgrad;

/// Returns a plan with these channels for images with a spacing of 1 mm, so that images are not resampled.
ModelPlan plan_for(std::vector<ChannelPlan> channels) {
  ModelPlan plan;
  plan.spacing = {1, 1, 1};
  plan.normalization = std::move(channels);
  return plan;
}

Case case_of(const Tensor& image, const Tensor& label = {}) {
  return {"case", image, label, {image[0].shape(), {1, 1, 1}, {}}};
}

PreparedImage prepared(const Tensor& image, const ModelPlan& plan) {
  const Case c = case_of(image);
  return prepare(orient(c.image, c.geometry, plan), plan);
}

TEST(Pipeline, NormalizesByTheMeanOfTheImageOrOfTheMask) {
  Generator random(2);
  Tensor image = randn({1, 5, 6, 7}, {}, &random) * 7 + 100;
  for (int64_t d = 0; d < 5; ++d) image.set({0, d, 0, 3}, 0);  // zeros that reach the border are outside the mask
  for (const bool use_mask : {false, true}) {
    const std::vector<double> x = image.to_vector(),
                              y = prepared(image, plan_for({{Normalization::z_score, use_mask, {}}})).image.to_vector();
    double count = 0, total = 0, squares = 0;
    const auto in = [&](size_t i) { return !use_mask || x[i] != 0; };
    for (size_t i = 0; i < x.size(); ++i) {
      if (!in(i)) continue;
      ++count;
      total += x[i];
    }
    for (size_t i = 0; i < x.size(); ++i)
      if (in(i)) squares += (x[i] - total / count) * (x[i] - total / count);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_NEAR(y[i], in(i) ? (x[i] - total / count) / std::sqrt(squares / count) : 0, 1e-5);
  }
  EXPECT_EQ(prepared(full({1, 2, 2, 2}, 3), plan_for({{}})).image.to_vector(), std::vector<double>(8, 0));
}

TEST(Pipeline, ClampsAndScalesCtAndRanges) {
  const Tensor image = reshape(tensor({-1000, 100, 3000}), {1, 1, 1, 3});
  const auto values = [&](Normalization kind) {
    return prepared(image, plan_for({{kind, false, {-100, 300, 50, 10}}})).image.to_vector();
  };
  EXPECT_EQ(values(Normalization::ct), (std::vector<double>{-15, 5, 25}));
  EXPECT_EQ(values(Normalization::none), (std::vector<double>{-1000, 100, 3000}));
  EXPECT_NEAR(values(Normalization::rgb_to_0_1)[1], 100 / 255.0, 1e-6);
  EXPECT_NEAR(values(Normalization::rescale_to_0_1)[1], 1100 / 4000.0, 1e-6);
}

TEST(Pipeline, PreparedLabelsMapBackToTheOriginalVoxels) {
  Tensor image = zeros({1, 10, 12, 14}), label = zeros({10, 12, 14}, {.dtype = u8});
  image.narrow(1, 2, 6).narrow(2, 3, 8).narrow(3, 4, 10).fill_(1);
  label.narrow(0, 4, 2).narrow(1, 5, 2).narrow(2, 6, 4).fill_(3);
  ModelPlan plan = plan_for({{Normalization::none, false, {}}});
  plan.labels.values = {0, 3};
  plan.resample_logits.order = 1;
  plan.transpose_forward = {2, 0, 1};
  for (const double spacing : {1.0, 0.5}) {
    plan.spacing = {spacing, spacing, spacing};
    const TrainingVolume volume = prepare_for_training(case_of(image, label), plan);
    const auto scale = static_cast<int64_t>(1 / spacing);
    EXPECT_EQ(volume.image.shape(), (Shape{1, 10 * scale, 6 * scale, 8 * scale}));
    EXPECT_EQ(volume.label.shape(), (Shape{10 * scale, 6 * scale, 8 * scale}));
    EXPECT_EQ(sum(gt(volume.label, 0)).item(), 16 * std::pow(scale, 3));
    // labels_of() must map logits that favor the resampled label back to the original label.
    const OrientedImage oriented = orient(image, case_of(image).geometry, plan);
    const PreparedImage input = prepare(oriented, plan);
    const Tensor favored = gt(volume.label, 0).to(f32) - 0.5;
    EXPECT_EQ(unorient(labels_of(stack({neg(favored), favored}), input, plan), oriented).to_vector(),
              label.to_vector());
    const Tensor map = unorient(probabilities_of(stack({neg(favored), favored}), input, plan), oriented);
    EXPECT_EQ(map.shape(), (Shape{2, 10, 12, 14}));
    EXPECT_EQ(map.at({0, 0, 0, 0}), 1);  // background outside the nonzero box
    EXPECT_LT(abs(sum(map, 0) - 1).amax().item(), 1e-6);
  }
  EXPECT_ERROR(prepare_for_training(case_of(zeros({1, 2, 2, 2}), zeros({2, 2, 2}, {.dtype = u8})), plan),
               "all voxels of case 'case' are 0");
}

}  // namespace
}  // namespace nnunet
