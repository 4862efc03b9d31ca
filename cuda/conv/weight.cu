// Which kernel takes a weight gradient (wgrad).
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan_common.h"
#include "cuda/conv/simt/tile.cuh"
#include "cuda/conv/wgrad/launch.h"
#include "cuda/conv/width_as_channels.h"
#include "cuda/kernels.h"
#include "ops/halves.h"

namespace voxgrad::cuda::kernel {

void conv_backward_weight(const View& w, const View& x, const View& y, const ConvGeometry& geometry) {
  constexpr const char* kOp = "conv weight gradient";
  if (w.numel() == 0) return;
  check_positions(kOp, x, w, y, geometry);
  check(w.numel() / w.size[0] < INT32_MAX - 256, kOp, "the CUDA kernels take fewer than 2^31 weights a channel");
  const Launch launch(w);
  const ConvProblem problem = conv_problem(ConvPass::wgrad, x, y, w, geometry);
  if (suits_width_as_channels(problem)) {
    const WidthAsChannels same(x, w, y, problem, launch);
    if (wgrad(same.w, same.in, y, same.geometry, launch)) return;
  }
  // Of few channels, what wgrad would copy is the longer part.
  const bool as_they_lie = is_half(w.dtype) && problem.in_channels_last && problem.out_channels_last;
  if (as_they_lie && wgrad(w, x, y, geometry, launch)) return;
  if (small_channel_wgrad(w, x, y, geometry, launch) || wgrad(w, x, y, geometry, launch)) return;
  if (mma_sync_wgrad(w, x, y, geometry, launch)) return;
  if (is_half(w.dtype))
    return through_float32(w, x, y, nullptr, [&](const View& weight, const View& a, const View& b, const View*) {
      conv_backward_weight(weight, a, b, geometry);
    });
  simt_wgrad(kOp, w, x, y, geometry, launch);
}

}  // namespace voxgrad::cuda::kernel
