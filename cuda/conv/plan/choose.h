// The choice of the kernel family and the plan of a convolution.
#pragma once

#include <memory>
#include <variant>

#include "cuda/conv/plan/depthwise.h"
#include "cuda/conv/plan/few_inputs.h"
#include "cuda/conv/plan/few_outputs.h"
#include "cuda/conv/plan/multistage_wgrad.h"
#include "cuda/conv/plan/pointwise.h"
#include "cuda/conv/plan/rewrites.h"
#include "cuda/conv/plan/sm80.h"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/conv/plan/sm90_wgrad.h"
#include "cuda/conv/plan/small_channel.h"

namespace voxgrad::cuda {

/// The plan of a kernel family. std::monostate selects the plain kernels (simt/), which support f32 and f64.
using FamilyPlan =
    std::variant<std::monostate, DepthwisePlan, PointwisePlan, FewInputsPlan, FewOutputsPlan, FpropDgradPlan, WgradPlan,
                 SmallChannelPlan, SmallChannelWgradPlan, MmaSyncPlan, MmaSyncWgradPlan, MultistageWgradPlan>;

/// The plan of a convolution.
struct ConvPlan {
  ConvRewrite rewrite = ConvRewrite::none;
  ConvProblem problem{};      ///< the problem that the family computes, after the rewrite
  int64_t merged_groups = 1;  ///< groups that ConvRewrite::merged_groups merges into one
  int64_t samples = 1;        ///< samples of a launch, for which the plan was made. Less than the batch if the copies
                              ///< of all samples would be too large
  FamilyPlan family{};
  double cycles = 0;                         ///< estimated clocks for all samples
  std::shared_ptr<const ConvPlan> rest{};    ///< the plan of the last launch, if it has fewer samples than the others
  std::shared_ptr<const ConvPlan> copies{};  ///< null, or the plan of `problem`, which then has no family
};

/// Returns the plan of a problem. Equal problems get the same plan. Plans are cached, because comparing all tiles takes
/// longer than a small convolution. Thread-safe.
std::shared_ptr<const ConvPlan> choose(const ConvProblem& problem);

}  // namespace voxgrad::cuda
