// A convolution on its way to its kernels: what the host sides of the families share.
#pragma once

#include "cuda/conv/choose.h"
#include "cuda/detail/launch.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

struct ConvCall {
  const char* op;
  ConvPass pass;
  View in, out, w;  // in and out as in ConvProblem; wgrad writes w, the others out
  ConvEpilogue epilogue;
  ConvGeometry geometry;
};

/// Runs it by the family that choose() names.
void convolve(const ConvCall& call);

/// The families' host sides. `problem` is the one of the plan; of none, halves go by way of float32 copies.
void run_plan(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const FpropDgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const WgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelWgradPlan& plan,
              const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncWgradPlan& plan, const Launch& launch);
void run_plan(const ConvCall& call, const ConvProblem& problem, std::monostate, const Launch& launch);

/// The plain kernels, for every problem of f32 and f64.
void simt_fprop_dgrad(const ConvCall& call, const Launch& launch);
void simt_wgrad(const ConvCall& call, const Launch& launch);

/// out[n][c][...] = bias[c], behind the ReLU if there is one: what no tap reaches.
void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch);

}  // namespace voxgrad::cuda
