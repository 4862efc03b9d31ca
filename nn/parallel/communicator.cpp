#include "nn/parallel/communicator.h"

#include "core/autograd.h"

namespace voxgrad::parallel {

void Communicator::all_reduce(const Tensor& tensor, ReduceOp op) {
  check_in_place("all_reduce", tensor);
  const Tensor values = tensor.detach(), dense = values.contiguous();
  all_reduce_async(dense, op)->wait();
  if (!dense.is_same(values)) values.copy_(dense);
}

}  // namespace voxgrad::parallel
