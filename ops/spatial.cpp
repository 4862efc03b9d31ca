// Exchange of planes and sums between ranks that share a volume, and the functions of SpatialParallel.
#include "ops/spatial.h"

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/halo.h"
#include "ops/shape.h"

namespace voxgrad {

PlaneExchange::PlaneExchange(distributed::Communicator& group, const PlaneForm& form, const Planes& send,
                             const std::array<int64_t, 2>& count) {
  std::vector<distributed::Message> sends, receives;
  for (size_t i = 0; i < 2; ++i) {
    const int peer = group.rank() + (i == 0 ? -1 : 1);
    if (peer < 0 || peer >= group.size()) continue;
    if (send[i].defined()) sends.push_back({send[i].detach().contiguous(form.format), peer});
    if (count[i] == 0) continue;
    Shape shape = form.shape;
    shape[2] = count[i];
    received_[i] = empty(shape, form.options, form.format);
    receives.push_back({received_[i], peer});
  }
  work_ = group.send_receive_async(sends, receives, form.shape);
}

const Planes& PlaneExchange::wait() {
  work_->wait();
  return received_;
}

Tensor sum_over_ranks(const Tensor& t, distributed::Communicator& group) {
  const Tensor total = t.detach().clone();
  group.all_reduce(total);
  return record("all_reduce", total, {t},
                [&group](const Tensor& grad) { return Tensors{sum_over_ranks(grad, group)}; });
}

namespace distributed {

Tensor SpatialParallel::slab(const Tensor& whole) const {
  constexpr const char* kOp = "SpatialParallel::slab";
  check(whole.defined() && whole.dim() >= 3, kOp, "the volume must be (..., D, H, W)");
  const int64_t axis = whole.dim() - 3, depth = whole.size(axis), ranks = group_.size();
  check(depth % ranks == 0, kOp, "the ", depth, depth == 1 ? " plane of " : " planes of ", describe(whole),
        " cannot be divided equally among ", ranks, " ranks");
  return narrow(whole, axis, group_.rank() * depth / ranks, depth / ranks).contiguous(whole.suggest_memory_format());
}

Tensor SpatialParallel::gather(const Tensor& slab) const {
  constexpr const char* kOp = "SpatialParallel::gather";
  check(slab.defined() && slab.dim() >= 3, kOp, "the slab must be (..., D, H, W)");
  const NoGradGuard no_grad;
  const Tensor all = group_.all_gather(slab);
  Tensors slabs;
  for (int64_t rank = 0; rank < group_.size(); ++rank) slabs.push_back(select(all, 0, rank));
  return cat(slabs, slab.dim() - 3).contiguous(slab.suggest_memory_format());
}

}  // namespace distributed
}  // namespace voxgrad
