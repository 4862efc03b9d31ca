// Runs convolutions, data gradients (the transposed convolutions) and weight gradients with the rewrites and
// the kernels that choose() selects.
#include "cuda/conv/dispatch.h"
#include "cuda/conv/rewrites.h"
#include "cuda/conv/simt/tile.cuh"
#include "cuda/detail/kernels.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

void run_family(const ConvCall& call, const ConvPlan& plan, const Launch& launch) {
  std::visit([&](const auto& family) { run_plan(call, plan.problem, family, launch); }, plan.family);
}

/// Runs the kernels of a plan, with its rewrite, for plan.problem.batch samples.
void run_samples(const ConvCall& call, const ConvPlan& plan, const Launch& launch);

/// Runs a plan. If the plan is for fewer samples than the call has, launches its kernels for some samples at a time.
void run(const ConvCall& call, const ConvPlan& plan, const Launch& launch) {
  const int64_t batch = call.in.size[0];
  if (plan.samples == batch) return run_samples(call, plan, launch);
  for (int64_t first = 0; first < batch; first += plan.samples) {
    const int64_t count = std::min(plan.samples, batch - first);
    run(samples_of(call, first, count), count < plan.samples ? *plan.rest : plan, launch);
  }
}

void run_samples(const ConvCall& call, const ConvPlan& plan, const Launch& launch) {
  if (plan.rewrite == ConvRewrite::none) return run_family(call, plan, launch);
  if (plan.rewrite == ConvRewrite::float32_copies) {
    const bool wgrad = call.pass == ConvPass::wgrad;
    return through_float32(wgrad ? call.w : call.out, call.in, wgrad ? call.out : call.w, call.epilogue.bias,
                           [&](const View& result, const View& in, const View& other, const View* bias) {
                             ConvCall wide = call;
                             wide.in = in;
                             wide.out = wgrad ? other : result;
                             wide.w = wgrad ? result : other;
                             wide.epilogue.bias = bias;
                             run(wide, *plan.copies, launch);
                           });
  }
  const RewrittenCall rewritten(call, plan, launch);
  plan.copies ? run(rewritten.call(), *plan.copies, launch) : run_family(rewritten.call(), plan, launch);
  rewritten.finish();
}

void convolve(const ConvCall& call) {
  const View &in = call.in, &out = call.out, &w = call.w;
  const View& result = call.pass == ConvPass::wgrad ? w : out;
  if (result.numel() == 0) return;
  if (in.size[0] == 0) return kernel::fill(w, 0);  // a weight gradient, because other results would be empty
  const bool transposed = call.pass == ConvPass::dgrad;
  check_positions(call.op, transposed ? out : in, w, transposed ? in : out, call.geometry);
  check(w.numel() / std::max<int64_t>(out.size[1] / call.geometry.groups, 1) < INT32_MAX - 256, call.op,
        "the CUDA kernels support fewer than 2^31 weights per output channel, summed over the groups");
  run(call, *choose(conv_problem(call.pass, in, out, w, call.geometry)), Launch(result));
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem&, std::monostate, const Launch& launch) {
  call.pass == ConvPass::wgrad ? simt_wgrad(call, launch) : simt_fprop_dgrad(call, launch);
}

namespace kernel {

void conv_forward(const View& y, const View& x, const View& w, const ConvEpilogue& epilogue,
                  const ConvGeometry& geometry) {
  convolve({"conv", ConvPass::fprop, x, y, w, epilogue, geometry});
}

void conv_backward_data(const View& x, const View& y, const View& w, const ConvEpilogue& epilogue,
                        const ConvGeometry& geometry) {
  convolve({"conv_transpose", ConvPass::dgrad, y, x, w, epilogue, geometry});
}

void conv_backward_weight(const View& w, const View& x, const View& y, const ConvGeometry& geometry) {
  convolve({"conv weight gradient", ConvPass::wgrad, x, y, w, {}, geometry});
}

}  // namespace kernel
}  // namespace voxgrad::cuda
