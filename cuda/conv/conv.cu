// Which kernel takes a convolution (fprop), or its data gradient (dgrad, the transposed convolution).
#include "cuda/conv/dispatch.h"
#include "cuda/conv/fprop_dgrad/launch.h"
#include "cuda/conv/plan_common.h"
#include "cuda/conv/simt/tile.cuh"
#include "cuda/conv/width_as_channels.h"
#include "cuda/kernels.h"
#include "ops/halves.h"

namespace voxgrad::cuda {
namespace {

void convolve(const char* op, const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
              const ConvGeometry& geometry, ConvPass pass) {
  if (out.numel() == 0) return;
  const bool transposed = pass == ConvPass::dgrad;
  check_positions(op, transposed ? out : in, w, transposed ? in : out, geometry);
  check(w.numel() / std::max<int64_t>(out.size[1] / geometry.groups, 1) < INT32_MAX, op,
        "the CUDA kernels take fewer than 2^31 weights an output channel");
  const Launch launch(out);
  if (const ConvProblem problem = conv_problem(pass, in, out, w, geometry); suits_width_as_channels(problem)) {
    WidthAsChannels same(in, w, out, problem, launch);
    if (fprop_dgrad(same.out, same.in, same.w, same.epilogue(epilogue), same.geometry, pass, launch)) return;
  }
  if (small_channel_fprop_dgrad(out, in, w, epilogue, geometry, pass, launch)) return;
  if (fprop_dgrad(out, in, w, epilogue, geometry, pass, launch)) return;
  if (mma_sync_fprop_dgrad(out, in, w, epilogue, geometry, pass, launch)) return;
  if (is_half(out.dtype))
    return through_float32(out, in, w, epilogue.bias, [&](const View& o, const View& i, const View& v, const View* b) {
      convolve(op, o, i, v, {b, epilogue.relu}, geometry, pass);
    });
  simt_fprop_dgrad(op, out, in, w, epilogue, geometry, pass, launch);
}

}  // namespace

namespace kernel {

void conv_forward(const View& y, const View& x, const View& w, const ConvEpilogue& epilogue,
                  const ConvGeometry& geometry) {
  convolve("conv", y, x, w, epilogue, geometry, ConvPass::fprop);
}

void conv_backward_data(const View& x, const View& y, const View& w, const ConvEpilogue& epilogue,
                        const ConvGeometry& geometry) {
  convolve("conv_transpose", x, y, w, epilogue, geometry, ConvPass::dgrad);
}

void conv_transpose_backward(const View& dy, const View& dw, const View& dx, const View& y, const View& w,
                             const ConvGeometry& geometry) {
  conv_forward(dy, dx, w, {}, geometry);
  conv_backward_weight(dw, dx, y, geometry);
}

}  // namespace kernel
}  // namespace voxgrad::cuda
