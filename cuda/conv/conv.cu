// Runs convolutions, data gradients (the transposed convolutions) and weight gradients with the kernels that choose()
// selects.
#include <optional>

#include "cuda/conv/dispatch.h"
#include "cuda/conv/merged_groups.h"
#include "cuda/conv/simt/tile.cuh"
#include "cuda/conv/width_as_channels.h"
#include "cuda/detail/kernels.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {

void convolve(const ConvCall& call) {
  const View &in = call.in, &out = call.out, &w = call.w;
  const View& result = call.pass == ConvPass::wgrad ? w : out;
  if (result.numel() == 0) return;
  const bool transposed = call.pass == ConvPass::dgrad;
  check_positions(call.op, transposed ? out : in, w, transposed ? in : out, call.geometry);
  check(w.numel() / std::max<int64_t>(out.size[1] / call.geometry.groups, 1) < INT32_MAX - 256, call.op,
        "the CUDA kernels support fewer than 2^31 weights per output channel, summed over the groups");
  const Launch launch(result);
  const ConvProblem problem = conv_problem(call.pass, in, out, w, call.geometry);
  const auto plan = choose(problem);
  std::optional<WidthAsChannels> same;
  if (plan->width_as_channels) same.emplace(call, problem, launch);
  std::optional<MergedGroups> merged;
  if (plan->merged_groups > 1) merged.emplace(call, plan->merged_groups, launch);
  const ConvCall& planned = same ? same->call() : merged ? merged->call() : call;
  std::visit([&](const auto& family) { run_plan(planned, plan->problem, family, launch); }, plan->family);
  if (merged) merged->finish();
}

void run_plan(const ConvCall& call, const ConvProblem&, std::monostate, const Launch& launch) {
  const bool wgrad = call.pass == ConvPass::wgrad;
  if (!is_half(call.w.dtype)) return wgrad ? simt_wgrad(call, launch) : simt_fprop_dgrad(call, launch);
  through_float32(wgrad ? call.w : call.out, call.in, wgrad ? call.out : call.w, call.epilogue.bias,
                  [&](const View& result, const View& in, const View& other, const View* bias) {
                    convolve({call.op,
                              call.pass,
                              in,
                              wgrad ? other : result,
                              wgrad ? result : other,
                              {bias, call.epilogue.relu},
                              call.geometry});
                  });
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
