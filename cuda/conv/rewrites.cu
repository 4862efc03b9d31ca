// Applies the rewrites of plan/rewrites.h to the tensors of a convolution.
#include "cuda/conv/rewrites.h"

#include <algorithm>
#include <array>

#include "cuda/conv/plan/common.h"
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

/// Allocates memory for a view, and sets its strides to those of lay_out().
void allocate(View& view, const std::array<int, 5>& axes, std::optional<Workspace>& memory, const Launch& launch) {
  memory.emplace(launch, static_cast<size_t>(lay_out(view, axes) * item_size(view.dtype)));
  view.data = memory->as<void>();
}

/// Returns weights (output channels, input channels, taps) as a view (groups, merged, output channels, input channels,
/// taps), where `merged` is the number of original groups in a merged group. The `in` input channels of an original
/// group begin `in_step` channels after those of the previous original group.
View by_groups(const View& w, int64_t groups, int64_t merged, int64_t in, int64_t in_step) {
  const int64_t out = w.size[0] / (groups * merged);
  return {.data = w.data,
          .dtype = w.dtype,
          .device = w.device,
          .rank = 7,
          .size = {groups, merged, out, in, w.size[2], w.size[3], w.size[4]},
          .stride = {merged * out * w.stride[0], out * w.stride[0] + in_step * w.stride[1], w.stride[0], w.stride[1],
                     w.stride[2], w.stride[3], w.stride[4]}};
}

}  // namespace

RewrittenCall::RewrittenCall(const ConvCall& original, const ConvPlan& plan, const Launch& launch) : call_(original) {
  switch (plan.rewrite) {
    case ConvRewrite::width_as_channels:
      view_width_as_channels(plan.problem, launch);
      break;
    case ConvRewrite::phases_as_channels:
      view_phases_as_channels(plan.problem, launch);
      break;
    case ConvRewrite::merged_groups:
      merge_groups(plan.merged_groups, launch);
      break;
    case ConvRewrite::patches_as_channels:
      copy_patches(launch);
      break;
    case ConvRewrite::channels_last_copies:
      copy_to_channels_last(launch);
      break;
    case ConvRewrite::mirrored:
      mirror(plan.problem);
      break;
    case ConvRewrite::none:
    case ConvRewrite::float32_copies:
      break;
  }
}

void RewrittenCall::finish() const {
  if (target_.rank > 0) kernel::copy(target_, result_);
}

void RewrittenCall::view_width_as_channels(const ConvProblem& problem, const Launch& launch) {
  View &in = call_.in, &w = call_.w, &out = call_.out;
  ConvGeometry& geometry = call_.geometry;
  const int64_t taps = w.size[4], channels = out.size[1];
  const bool dgrad = call_.pass == ConvPass::dgrad;
  if (dgrad || problem.in_channels_last) {  // the kernel is as wide as its stride
    View& strided = dgrad ? out : in;
    strided.size[1] *= taps;
    strided.size[4] = dgrad ? in.size[4] : out.size[4];
    strided.stride[4] *= taps;
    w.size[1] *= taps;
    strided.stride[1] = w.stride[1] = 1;
  } else {
    in = padded_width(in, w, out, geometry, copy_, launch);
    in.size[1] = w.size[1] = taps;
    in.stride[1] = geometry.dilation[2];
    in.size[4] = out.size[4];
    in.stride[4] = geometry.stride[2];
    w.stride[1] = w.stride[4];
  }
  w.size[4] = 1;
  geometry.stride[2] = geometry.dilation[2] = 1;
  geometry.padding[2] = 0;
  if (dgrad) repeat_bias({.rank = 2, .size = {taps, channels}, .stride = {channels, 1}}, launch);
}

void RewrittenCall::view_phases_as_channels(const ConvProblem& problem, const Launch& launch) {
  View &w = call_.w, &out = call_.out;
  const View original = w;
  const int64_t phases = call_.geometry.stride[2], channels = out.size[1], taps = problem.kernel[2];
  out.size[1] *= phases;
  out.size[4] /= phases;
  out.stride[4] *= phases;
  out.stride[1] = 1;
  w.size[1] *= phases;
  w.size[4] = taps;
  const int inner = w.dtype == DType::f32 ? 0 : 1;  // contiguous axis; TF32 needs K
  allocate(w, {inner, 4, 3, 2, 1 - inner}, copy_, launch);
  kernel::fill(w, 0);
  for (int64_t phase = 0; phase < phases; ++phase) {
    const int64_t first =
        phase + call_.geometry.padding[2] - phases * problem.geometry.padding[2];  // original of tap 0
    const int64_t begin = first < 0 ? divide_up(-first, phases) : 0;
    View from = original, to = w;
    to.size[1] = channels;
    to.size[4] = from.size[4] =
        std::min(divide_up(std::max<int64_t>(original.size[4] - first, 0), phases), taps) - begin;
    if (to.size[4] <= 0) continue;
    from.data = from.as<char>() + (first + begin * phases) * original.stride[4] * item_size(w.dtype);
    from.stride[4] *= phases;
    to.data = to.as<char>() + (phase * channels * w.stride[1] + begin * w.stride[4]) * item_size(w.dtype);
    kernel::copy(to, from);
  }
  call_.geometry = problem.geometry;
  repeat_bias({.rank = 2, .size = {phases, channels}, .stride = {channels, 1}}, launch);
}

void RewrittenCall::repeat_bias(View to, const Launch& launch) {
  if (!call_.epilogue.bias) return;
  View from = to;
  bias_ = *call_.epilogue.bias;
  from.data = bias_.data;
  from.dtype = to.dtype = bias_.dtype;
  from.device = to.device = bias_.device;
  for (int axis = 0; axis < to.rank; ++axis) from.stride[axis] = axis == 1 ? bias_.stride[0] : 0;
  other_copy_.emplace(launch, static_cast<size_t>(call_.out.size[1] * item_size(to.dtype)));
  bias_.data = to.data = other_copy_->as<void>();
  bias_.size[0] = call_.out.size[1];
  bias_.stride[0] = 1;
  kernel::copy(to, from);
  call_.epilogue.bias = &bias_;
}

void RewrittenCall::merge_groups(int64_t count, const Launch& launch) {
  const int64_t groups = call_.geometry.groups / count, in = call_.w.size[1];
  const View original = by_groups(call_.w, groups, count, in, 0);
  View& w = call_.w;
  w.size[1] *= count;
  const int inner = call_.pass == ConvPass::dgrad && w.dtype == DType::f32 ? 0 : 1;  // contiguous axis; TF32 needs K
  allocate(w, {inner, 4, 3, 2, 1 - inner}, copy_, launch);
  call_.geometry.groups = groups;
  const View diagonal = by_groups(w, groups, count, in, in);
  if (call_.pass == ConvPass::wgrad) {
    result_ = diagonal;
    target_ = original;
    return;
  }
  kernel::fill(w, 0);
  kernel::copy(diagonal, original);
}

void RewrittenCall::copy_patches(const Launch& launch) {
  const bool dgrad = call_.pass == ConvPass::dgrad;
  View &x = dgrad ? call_.out : call_.in, &w = call_.w;
  const View weights = w, grid = dgrad ? call_.in : call_.out;
  View patches = x, original = x;             // (batch, channels, D, taps, H, taps, W, taps)
  const int64_t step = weight_row_stride(w);  // the order of the channels is that of the weights
  for (int a = 2; a < 5; ++a) {
    x.size[a] = grid.size[a];
    x.size[1] *= w.size[a];
    w.size[a] = 1;
  }
  w.size[1] = x.size[1];
  w.stride[1] = step;
  call_.geometry = {};
  allocate(x, {1, 4, 3, 2, 0}, copy_, launch);
  patches.data = x.data;
  patches.rank = original.rank = 8;
  patches.stride[0] = x.stride[0];
  patches.stride[1] = weights.stride[1] / step;
  View patch = patches;  // one patch, in which each channel has its bias
  for (int a = 4; a > 1; --a) {
    const int at = 2 * a - 2, tap = 2 * a - 1;
    const int64_t stride = original.stride[a];
    patches.size[at] = original.size[at] = x.size[a];
    patches.size[tap] = original.size[tap] = weights.size[a];
    patches.stride[at] = x.stride[a];
    patches.stride[tap] = weights.stride[a] / step;
    original.stride[at] = stride * weights.size[a];
    original.stride[tap] = stride;
  }
  if (!dgrad) return kernel::copy(patches, original);
  patch = patches;
  for (int axis = 0; axis < 8; axis += 2) patch.size[axis] = 1;
  repeat_bias(patch, launch);
  result_ = patches;
  target_ = original;
}

void RewrittenCall::copy_to_channels_last(const Launch& launch) {
  const bool wgrad = call_.pass == ConvPass::wgrad;
  const View in = call_.in, out = call_.out;
  // The plan may be for a view whose only sample would make it channels-last, but not aligned.
  if (!has_channels_innermost(in) || !is_tma_tensor(in)) {
    allocate(call_.in, {1, 4, 3, 2, 0}, copy_, launch);
    kernel::copy(call_.in, in);
  }
  if (has_channels_innermost(out) && is_tma_tensor(out)) return;
  allocate(call_.out, {1, 4, 3, 2, 0}, other_copy_, launch);
  if (wgrad) return kernel::copy(call_.out, out);
  result_ = call_.out;
  target_ = out;
}

void RewrittenCall::mirror(const ConvProblem& problem) {
  View& w = call_.w;
  std::swap(w.size[0], w.size[1]);
  std::swap(w.stride[0], w.stride[1]);
  for (int a = 2; a < 5; ++a) {
    w.data = w.as<char>() + (w.size[a] - 1) * w.stride[a] * item_size(w.dtype);
    w.stride[a] = -w.stride[a];
  }
  if (call_.pass == ConvPass::wgrad) std::swap(call_.in, call_.out);
  call_.pass = problem.pass;
  call_.geometry = problem.geometry;
}

ConvCall samples_of(ConvCall call, int64_t first, int64_t count) {
  for (View* view : {&call.in, &call.out}) {
    view->data = view->as<char>() + first * view->stride[0] * item_size(view->dtype);
    view->size[0] = count;
  }
  return call;
}

}  // namespace voxgrad::cuda
