// Which family of kernels takes a convolution, and with which plan: the one place that decides.
#pragma once

#include <memory>
#include <variant>

#include "cuda/conv/fprop_dgrad/plan.h"
#include "cuda/conv/mma_sync/plan.h"
#include "cuda/conv/pointwise/plan.h"
#include "cuda/conv/small_channel/plan.h"
#include "cuda/conv/wgrad/plan.h"

namespace voxgrad::cuda {

/// The plan of a family; of none: the plain kernels take it, halves by way of float32 copies.
using FamilyPlan = std::variant<std::monostate, PointwisePlan, FpropDgradPlan, WgradPlan, SmallChannelPlan,
                                SmallChannelWgradPlan, MmaSyncPlan, MmaSyncWgradPlan>;

struct ConvPlan {
  ConvProblem problem;             // that the family plans: as it was asked, or
  bool width_as_channels = false;  // with taps along the width as channels (width_as_channels.h)
  int64_t merged_groups = 1;       // with so many groups as one (merged_groups.h)
  FamilyPlan family;
};

/// The same for the same problem, and made once: to look at all tiles takes longer than a small convolution. From any
/// thread.
std::shared_ptr<const ConvPlan> choose(const ConvProblem& problem);

}  // namespace voxgrad::cuda
