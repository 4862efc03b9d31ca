#include "core/communicator.h"

#include <utility>

#include "core/autograd.h"

namespace voxgrad::parallel {
namespace {
thread_local Communicator* current_group = nullptr;
}  // namespace

void Communicator::all_reduce(const Tensor& tensor, ReduceOp op) {
  check_in_place("all_reduce", tensor);
  const Tensor values = tensor.detach(), dense = values.contiguous();
  all_reduce_async(dense, op)->wait();
  if (!dense.is_same(values)) values.copy_(dense);
}

Tensors Communicator::checked(const char* op, const std::vector<Message>& sends,
                              const std::vector<Message>& receives) const {
  Tensors tensors;
  for (const auto* messages : {&sends, &receives})
    for (const auto& [t, peer] : *messages) {
      check(peer >= 0 && peer < size() && peer != rank(), op, "rank ", rank(), " has no peer ", peer, " among ",
            size());
      check(t.defined() && t.device() == device(), op, "this rank's tensors lie on ", device(), ", got ", describe(t));
      check(t.is_contiguous() || t.is_contiguous(MemoryFormat::channels_last), op,
            "the tensor is not dense: ", describe(t), " with strides ", t.strides());
      tensors.push_back(t);
    }
  return tensors;
}

Communicator* spatial_group() { return current_group; }
SpatialGroupGuard::SpatialGroupGuard(Communicator* group) : previous_(std::exchange(current_group, group)) {}
SpatialGroupGuard::~SpatialGroupGuard() { current_group = previous_; }

}  // namespace voxgrad::parallel
