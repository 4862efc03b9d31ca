#include "cuda/conv/merged_groups.h"

#include "cuda/conv/fprop_dgrad/split.h"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

/// Returns weights (out, in, taps) as a view (groups, merged, out, in, taps). The input channels of a group begin
/// `in_step` after those of the previous group.
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

MergedGroups::MergedGroups(const ConvCall& call, int64_t count, const Launch& launch) : call_(call) {
  const int64_t groups = call.geometry.groups / count, in = call.w.size[1];
  View& w = call_.w;
  w.size[1] *= count;
  const int inner = call.pass == ConvPass::dgrad && w.dtype == DType::f32 ? 0 : 1;  // for TF32, the axis of K
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

}  // namespace voxgrad::cuda
