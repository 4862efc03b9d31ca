// The choice of the kernel family and the plan of a convolution.
#pragma once

#include <memory>
#include <variant>

#include "cuda/conv/direct/depthwise_plan.h"
#include "cuda/conv/fprop_dgrad/plan.h"
#include "cuda/conv/mma_sync/plan.h"
#include "cuda/conv/pointwise/plan.h"
#include "cuda/conv/small_channel/plan.h"
#include "cuda/conv/wgrad/plan.h"

namespace voxgrad::cuda {

/// The plan of a kernel family. std::monostate selects the plain kernels, which compute halves with float32 copies.
using FamilyPlan = std::variant<std::monostate, DepthwisePlan, PointwisePlan, FpropDgradPlan, WgradPlan,
                                SmallChannelPlan, SmallChannelWgradPlan, MmaSyncPlan, MmaSyncWgradPlan>;

/// The plan of a convolution.
struct ConvPlan {
  ConvProblem problem;             ///< the problem that the family computes, after the transformations below
  bool width_as_channels = false;  ///< taps along the width are channels (width_as_channels.h)
  int64_t merged_groups = 1;       ///< groups that are computed as one (merged_groups.h)
  FamilyPlan family;
};

/// Returns the plan of a problem. Equal problems get the same plan. Plans are cached, because comparing all tiles takes
/// longer than a small convolution. Thread-safe.
std::shared_ptr<const ConvPlan> choose(const ConvProblem& problem);

}  // namespace voxgrad::cuda
