// Implements nnU-Net's rules for the stages of a U-Net.
#include "examples/nnunet/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace nnunet {

using namespace voxgrad;
using nn::UNetStage;

namespace {

using Spacing = std::array<double, 3>;

/// Returns true if the spacing along an axis is less than twice the smallest spacing.
bool within_two(const Spacing& spacing, int axis, double smallest) {
  return spacing[static_cast<size_t>(axis)] / smallest < 2;
}

/// Returns the stride of the next stage, or 1 if no axis can be halved.
Triple stride_down(const Triple& size, const Spacing& spacing, int64_t min_size) {
  double smallest = std::numeric_limits<double>::infinity();
  for (int axis = 0; axis < 3; ++axis)
    if (size[axis] >= 2 * min_size) smallest = std::min(smallest, spacing[static_cast<size_t>(axis)]);
  Triple stride = 1;
  int count = 0, last = 0;
  for (int axis = 0; axis < 3; ++axis) {
    if (size[axis] < 2 * min_size || !within_two(spacing, axis, smallest)) continue;
    stride[axis] = 2;
    last = axis;
    ++count;
  }
  return count == 1 && size[last] < 3 * min_size ? Triple(1) : stride;
}

void check_plan(const Triple& patch_size, const Spacing& spacing, const PlanOptions& options) {
  constexpr const char* kOp = "plan_unet";
  const auto valid = [](int64_t value) { return value >= 1 && value < int64_t{1} << 31; };
  check(valid(options.base_features) && valid(options.max_features) && valid(options.min_size), kOp,
        "base_features, max_features and min_size must lie in [1, 2^31), got ", options.base_features, ", ",
        options.max_features, " and ", options.min_size);
  check(std::ranges::all_of(patch_size.values, valid), kOp, "patch_size must lie in [1, 2^31), got ", patch_size);
  const bool spacings = std::ranges::all_of(spacing, [](double step) { return std::isfinite(step) && step > 0; });
  check(spacings, kOp, "spacing must be positive, got [", spacing[0], ", ", spacing[1], ", ", spacing[2], ']');
}

}  // namespace

Plan plan_unet(const Triple& patch_size, const std::array<double, 3>& given_spacing, const PlanOptions& options) {
  check_plan(patch_size, given_spacing, options);
  constexpr std::array<int64_t, 4> kBlocks{1, 3, 4, 6};  // residual blocks per stage; the last value repeats
  Plan plan{{.in_channels = options.in_channels, .num_classes = options.num_classes, .residual = options.residual},
            patch_size};
  std::vector<UNetStage>& stages = plan.network.stages;
  Spacing spacing = given_spacing;
  Triple size = patch_size, kernel_size = 1, total = 1;
  int64_t features = std::min(options.base_features, options.max_features);
  for (Triple stride = 1, next = 1; stages.empty() || !(stride == 1); stride = next) {
    next = stride_down(size, spacing, options.min_size);
    const double smallest = std::ranges::min(spacing);
    for (int axis = 0; axis < 3; ++axis) {
      if (next == 1 || within_two(spacing, axis, smallest)) kernel_size[axis] = 3;  // last stage: 3 on all axes
      size[axis] = (size[axis] + next[axis] - 1) / next[axis];
      spacing[static_cast<size_t>(axis)] *= static_cast<double>(next[axis]);
      total[axis] *= next[axis];
    }
    const int64_t blocks = kBlocks[std::min(stages.size(), kBlocks.size() - 1)];
    stages.push_back({features, kernel_size, stride, options.residual ? blocks : 2, options.residual ? 1 : 2});
    features = std::min(2 * features, options.max_features);
  }
  check(stages.size() > 1, "plan_unet", "patches ", patch_size, " are too small for a second stage with at least ",
        options.min_size, " voxels per axis");
  for (int axis = 0; axis < 3; ++axis)
    plan.patch_size[axis] = (patch_size[axis] + total[axis] - 1) / total[axis] * total[axis];
  return plan;
}

}  // namespace nnunet
