#include "cuda/conv/width_as_channels.h"

#include <algorithm>

#include "cuda/conv/plan_common.h"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

/// Copies one channel. Along the width, the copy has the positions that taps read, from the first to the last, with
/// zeros outside of the input.
View padded_width(const View& in, const View& w, const View& out, const ConvGeometry& g,
                  std::optional<Workspace>& memory, const Launch& launch) {
  View padded = in;
  padded.size[4] = (out.size[4] - 1) * g.stride[2] + (w.size[4] - 1) * g.dilation[2] + 1;
  memory.emplace(launch, static_cast<size_t>(padded.numel() * item_size(in.dtype)));
  padded = dense_like(padded, memory->as<void>(), in.dtype);
  kernel::fill(padded, 0);
  View from = in, to = padded;
  to.size[4] = from.size[4] = std::clamp<int64_t>(padded.size[4] - g.padding[2], 0, in.size[4]);
  to.data = to.as<char>() + g.padding[2] * item_size(in.dtype);
  if (from.size[4] > 0) kernel::copy(to, from);
  return padded;
}

}  // namespace

WidthAsChannels::WidthAsChannels(const ConvCall& call, const ConvProblem& problem, const Launch& launch) : call_(call) {
  View &in = call_.in, &w = call_.w, &out = call_.out;
  ConvGeometry& geometry = call_.geometry;
  const int64_t taps = w.size[4];
  if (has_width_of_stride(problem)) {
    const bool dgrad = call.pass == ConvPass::dgrad;
    View& strided = dgrad ? out : in;
    strided.size[1] *= taps;
    strided.size[4] = dgrad ? in.size[4] : out.size[4];
    strided.stride[4] *= taps;
    w.size[1] *= taps;
    strided.stride[1] = w.stride[1] = 1;
  } else {
    in = padded_width(in, w, out, geometry, padded_, launch);
    in.size[1] = w.size[1] = taps;
    in.stride[1] = geometry.dilation[2];
    in.size[4] = out.size[4];
    in.stride[4] = geometry.stride[2];
    w.stride[1] = w.stride[4];
  }
  w.size[4] = 1;
  geometry.stride[2] = geometry.dilation[2] = 1;
  geometry.padding[2] = 0;
  if (call.epilogue.bias && call.epilogue.bias->size[0] != out.size[1]) repeat_bias(launch);
}

void WidthAsChannels::repeat_bias(const Launch& launch) {
  View from = bias_ = *call_.epilogue.bias;
  from.rank = 2;
  from.size[1] = from.size[0];
  from.stride[1] = from.stride[0];
  from.size[0] = call_.out.size[1] / from.size[1];
  from.stride[0] = 0;
  biases_.emplace(launch, static_cast<size_t>(call_.out.size[1] * item_size(from.dtype)));
  kernel::copy(dense_like(from, biases_->as<void>(), from.dtype), from);
  bias_.data = biases_->as<void>();
  bias_.size[0] = call_.out.size[1];
  bias_.stride[0] = 1;
  call_.epilogue.bias = &bias_;
}

}  // namespace voxgrad::cuda
