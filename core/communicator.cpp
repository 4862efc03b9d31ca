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

void check_message(const char* op, const Message& message, const Communicator& group) {
  check(message.peer >= 0 && message.peer < group.size() && message.peer != group.rank(), op, "rank ", group.rank(),
        " has no peer ", message.peer, " among ", group.size());
  const Tensor& t = message.tensor;
  check(t.is_contiguous() || t.is_contiguous(MemoryFormat::channels_last), op, "the tensor is not dense: ", describe(t),
        " with strides ", t.strides());
}

Communicator* spatial_group() { return current_group; }
SpatialGroupGuard::SpatialGroupGuard(Communicator* group) : previous_(std::exchange(current_group, group)) {}
SpatialGroupGuard::~SpatialGroupGuard() { current_group = previous_; }

}  // namespace voxgrad::parallel
