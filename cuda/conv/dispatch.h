// The arguments of a convolution, and the host functions that launch each kernel family.
#pragma once

#include "cuda/conv/plan/choose.h"
#include "cuda/detail/launch.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// The arguments of a convolution. `in` and `out` are those of ConvProblem. fprop and dgrad write `out`; wgrad writes
/// `w`.
struct ConvCall {
  const char* op;
  ConvPass pass;
  View in;
  View out;
  View w;
  ConvEpilogue epilogue;
  ConvGeometry geometry;
};

/// Launch the kernels of one family. `problem` is ConvPlan::problem. The overload for std::monostate runs the plain
/// kernels.
void run_plan(const ConvCall& call, const ConvProblem& problem, const DepthwisePlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const FewInputsPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const FewOutputsPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const FpropDgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const WgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelWgradPlan& plan,
              const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncWgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const MultistageWgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, std::monostate, const Launch& launch);

/// Launch the plain kernels, which support every problem of f32 and f64.
void simt_fprop_dgrad(const ConvCall& call, const Launch& launch);
void simt_wgrad(const ConvCall& call, const Launch& launch);

/// Sets out[n][c][...] to the value of results that no tap of the kernel reaches: bias[c], or relu(bias[c]) if
/// epilogue.relu is true, or 0 without a bias.
void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch);

}  // namespace voxgrad::cuda
