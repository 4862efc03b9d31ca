// Applies the rewrites of plan/rewrites.h to the tensors of a convolution.
#include "cuda/conv/rewrites.h"

#include <algorithm>

#include "cuda/conv/plan/common.h"
#include "cuda/conv/sm90/fprop_dgrad/split.h"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

/// Copies `in`, which has one channel. Along the width, the copy has the positions that taps read, from the first to
/// the last, with zeros outside of the input.
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

/// Returns weights (output channels, input channels, taps) as a view (groups, merged, output channels, input channels,
/// taps), where `merged` is the number of original groups in a merged group. The `in` input channels of an original
/// group begin `in_step` channels after those of the previous original group.
View by_groups(const View& w, int64_t groups, int64_t merged, int64_t in, int64_t in_step) {
  const int64_t out = w.size[0] / (groups * merged);
  View view = w;
  view.rank = 7;
  const int64_t size[] = {groups, merged, out, in};
  const int64_t stride[] = {merged * out * w.stride[0], out * w.stride[0] + in_step * w.stride[1], w.stride[0],
                            w.stride[1]};
  for (int a = 0; a < 4; ++a) {
    view.size[a] = size[a];
    view.stride[a] = stride[a];
  }
  for (int a = 2; a < 5; ++a) {
    view.size[a + 2] = w.size[a];
    view.stride[a + 2] = w.stride[a];
  }
  return view;
}

}  // namespace

WidthAsChannels::WidthAsChannels(const ConvCall& call, const ConvProblem& problem, const Launch& launch) : call_(call) {
  View &in = call_.in, &w = call_.w, &out = call_.out;
  ConvGeometry& geometry = call_.geometry;
  const int64_t taps = w.size[4];
  const bool dgrad = call.pass == ConvPass::dgrad;
  if (dgrad || problem.in_channels_last) {  // the kernel is as wide as its stride
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

MergedGroups::MergedGroups(const ConvCall& call, int64_t count, const Launch& launch) : call_(call) {
  const int64_t groups = call.geometry.groups / count, in = call.w.size[1];
  View& w = call_.w;
  w.size[1] *= count;
  const int inner = call.pass == ConvPass::dgrad && w.dtype == DType::f32 ? 0 : 1;  // the contiguous axis; TF32 needs K
  const int64_t elements = implicit_gemm::lay_out(w, {inner, 4, 3, 2, 1 - inner});
  weights_.emplace(launch, static_cast<size_t>(elements * item_size(w.dtype)));
  w.data = weights_->as<void>();
  call_.geometry.groups = groups;
  diagonal_ = by_groups(w, groups, count, in, in);
  original_ = by_groups(call.w, groups, count, in, 0);
  if (call.pass == ConvPass::wgrad) return;
  kernel::fill(w, 0);
  kernel::copy(diagonal_, original_);
}

void MergedGroups::finish() const {
  if (call_.pass == ConvPass::wgrad) kernel::copy(original_, diagonal_);
}

PatchesAsChannels::PatchesAsChannels(const ConvCall& call, const Launch& launch)
    : call_(call), patches_(call.pass == ConvPass::dgrad ? call.out : call.in), original_(patches_) {
  const bool dgrad = call.pass == ConvPass::dgrad;
  View &x = dgrad ? call_.out : call_.in, &w = call_.w;
  const int64_t step = weight_row_stride(w);  // the order of the channels is that of the weights
  for (int a = 2; a < 5; ++a) {
    x.size[a] = (dgrad ? call.in : call.out).size[a];
    x.size[1] *= w.size[a];
    w.size[a] = 1;
  }
  w.size[1] = x.size[1];
  w.stride[1] = step;
  call_.geometry = {};
  const int64_t elements = implicit_gemm::lay_out(x, {1, 4, 3, 2, 0});
  copy_.emplace(launch, static_cast<size_t>(elements * item_size(x.dtype)));
  x.data = copy_->as<void>();

  patches_.data = x.data;
  patches_.rank = original_.rank = 8;
  patches_.stride[0] = x.stride[0];
  patches_.stride[1] = call.w.stride[1] / step;
  for (int a = 2; a < 5; ++a) {
    const int patch = 2 * a - 2, tap = 2 * a - 1;
    const int64_t stride = (dgrad ? call.out : call.in).stride[a];
    patches_.size[patch] = original_.size[patch] = x.size[a];
    patches_.size[tap] = original_.size[tap] = call.w.size[a];
    patches_.stride[patch] = x.stride[a];
    patches_.stride[tap] = call.w.stride[a] / step;
    original_.stride[patch] = stride * call.w.size[a];
    original_.stride[tap] = stride;
  }
  if (!dgrad) kernel::copy(patches_, original_);
  if (!dgrad || !call.epilogue.bias) return;
  View from = patches_, to = patches_;  // one patch, in which each channel has its bias
  biases_.emplace(launch, static_cast<size_t>(x.size[1] * item_size(from.dtype)));
  to.data = biases_->as<void>();
  from.data = call.epilogue.bias->data;
  from.dtype = to.dtype = call.epilogue.bias->dtype;
  for (int axis = 0; axis < 8; ++axis) {
    from.stride[axis] = axis == 1 ? call.epilogue.bias->stride[0] : 0;
    if (axis % 2 == 0) from.size[axis] = to.size[axis] = 1;
  }
  kernel::copy(to, from);
  bias_ = *call.epilogue.bias;
  bias_.data = to.data;
  bias_.size[0] = x.size[1];
  bias_.stride[0] = 1;
  call_.epilogue.bias = &bias_;
}

void PatchesAsChannels::finish() const {
  if (call_.pass == ConvPass::dgrad) kernel::copy(original_, patches_);
}

ConvCall mirrored(ConvCall call, const ConvProblem& problem) {
  View& w = call.w;
  std::swap(w.size[0], w.size[1]);
  std::swap(w.stride[0], w.stride[1]);
  for (int a = 2; a < 5; ++a) {
    w.data = w.as<char>() + (w.size[a] - 1) * w.stride[a] * item_size(w.dtype);
    w.stride[a] = -w.stride[a];
  }
  if (call.pass == ConvPass::wgrad) std::swap(call.in, call.out);
  call.pass = problem.pass;
  call.geometry = problem.geometry;
  return call;
}

ConvCall samples_of(ConvCall call, int64_t first, int64_t count) {
  for (View* view : {&call.in, &call.out}) {
    view->data = view->as<char>() + first * view->stride[0] * item_size(view->dtype);
    view->size[0] = count;
  }
  return call;
}

}  // namespace voxgrad::cuda
