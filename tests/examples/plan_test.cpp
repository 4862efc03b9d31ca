// Tests of plan_unet() against nnU-Net's planner (recorded by tests/nn/nnunet_models.py).
#include "examples/nnunet/plan.h"

#include <cmath>
#include <vector>

#include "tests/support.h"

namespace nnunet {
namespace {

using namespace voxgrad;

struct PlanReference {
  Triple patch_size;
  std::array<double, 3> spacing;
  std::vector<Triple> kernel_sizes;
  std::vector<Triple> strides;
  Triple padded;  // `patch_size`, rounded up to multiples of the product of all strides
};
#include "tests/examples/nnunet_plans.inc"

TEST(PlanUNet, MatchesNnUNetsPlans) {
  for (const PlanReference& row : kPlanReference) {
    if (row.strides.size() == 1) {
      EXPECT_ERROR(plan_unet(row.patch_size, row.spacing), "too small for a second stage");
      continue;
    }
    const Plan plan = plan_unet(row.patch_size, row.spacing);
    std::vector<Triple> kernel_sizes, strides;
    for (const nn::UNetStage& stage : plan.network.stages) {
      kernel_sizes.push_back(stage.kernel_size);
      strides.push_back(stage.stride);
    }
    EXPECT_EQ(kernel_sizes, row.kernel_sizes) << row.patch_size;
    EXPECT_EQ(strides, row.strides) << row.patch_size;
    EXPECT_EQ(plan.patch_size, row.padded) << row.patch_size;
  }
}

TEST(PlanUNet, PlansFeaturesAndConvolutions) {
  const auto numbers = [](bool residual) {
    const Plan plan = plan_unet(128, {1, 1, 1}, {.in_channels = 4, .num_classes = 5, .residual = residual});
    EXPECT_EQ(plan.network.in_channels, 4);
    EXPECT_EQ(plan.network.num_classes, 5);
    EXPECT_EQ(plan.network.residual, residual);
    std::vector<std::array<int64_t, 3>> rows;
    for (const nn::UNetStage& stage : plan.network.stages)
      rows.push_back({stage.features, stage.convs, stage.decoder_convs});
    return rows;
  };
  using Rows = std::vector<std::array<int64_t, 3>>;
  EXPECT_EQ(numbers(false), (Rows{{32, 2, 2}, {64, 2, 2}, {128, 2, 2}, {256, 2, 2}, {320, 2, 2}, {320, 2, 2}}));
  EXPECT_EQ(numbers(true), (Rows{{32, 1, 1}, {64, 3, 1}, {128, 4, 1}, {256, 6, 1}, {320, 6, 1}, {320, 6, 1}}));
}

TEST(PlanUNet, HasAsManyParametersAsNnUNet) {
  const Plan plan = plan_unet(128, {1, 1, 1}, {.num_classes = 3});
  const nn::UNet model(plan.network);
  int64_t count = 0;
  for (const Tensor& p : model.parameters()) count += p.numel();
  EXPECT_EQ(count, 31196399);  // parameters of nnU-Net's PlainConvUNet
}

TEST(PlanUNet, RejectsInvalidArguments) {
  EXPECT_ERROR(plan_unet({16, 0, 16}, {1, 1, 1}), "plan_unet: patch_size must lie in [1, 2^31), got [16, 0, 16]");
  EXPECT_ERROR(plan_unet({16, 16, INT64_MAX}, {1, 1, 1}), "plan_unet: patch_size must lie in [1, 2^31)");
  EXPECT_ERROR(plan_unet(16, {1, 1, 1}, {.base_features = INT64_MAX, .max_features = INT64_MAX}),
               "base_features, max_features and min_size must lie in [1, 2^31)");
  EXPECT_ERROR(plan_unet(16, {1, 1, 1}, {.min_size = INT64_MAX}), "min_size must lie in [1, 2^31)");
  EXPECT_ERROR(plan_unet(16, {1, std::nan(""), 1}), "plan_unet: spacing must be positive");
  EXPECT_ERROR(plan_unet(16, {1, 1, -1}), "plan_unet: spacing must be positive, got [1, 1, -1]");
  EXPECT_ERROR(plan_unet(16, {1, 1, 1}, {.min_size = 0}), "base_features, max_features and min_size");
}

}  // namespace
}  // namespace nnunet
