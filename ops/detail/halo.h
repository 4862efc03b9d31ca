// Communication between ranks that share a volume, of which each rank has a slab: consecutive planes along D
// (ops/spatial.h). Private to the library.
#pragma once

#include <array>

#include "../../core/communicator.h"
#include "../../core/error.h"
#include "../../core/tensor.h"

namespace voxgrad {

/// Planes (N, C, planes, H, W) that are sent to, or received from, the previous rank (element 0) and the next rank
/// (element 1). A tensor is undefined if the rank does not exist or exchanges no planes.
using Planes = std::array<Tensor, 2>;

/// Shape, options and memory format of the slab (N, C, D, H, W) to which exchanged planes belong.
struct PlaneForm {
  Shape shape;
  TensorOptions options;
  MemoryFormat format;

  explicit PlaneForm(const Tensor& x) : shape(x.shape()), options(x.options()), format(x.suggest_memory_format()) {}
};

/// An asynchronous exchange of planes with the two neighboring ranks.
class PlaneExchange {
 public:
  /// Starts sending `send` to the previous and the next rank, and receiving count[0] and count[1] planes from them.
  PlaneExchange(distributed::Communicator& group, const PlaneForm& form, const Planes& send,
                const std::array<int64_t, 2>& count);
  /// Waits for the exchange and returns the received planes.
  const Planes& wait();

 private:
  std::unique_ptr<distributed::Work> work_;
  Planes received_;
};

/// Returns the sum of t over the ranks of `group`, on every rank. The result is differentiable any number of times.
Tensor sum_over_ranks(const Tensor& t, distributed::Communicator& group);

/// Returns the ranks that share the volume of a tensor with `axes` axes, or null if this rank has the whole tensor.
/// Only tensors (N, C, D, H, W) are shared.
inline distributed::Communicator* sharing_ranks(int64_t axes) {
  return axes == 5 ? distributed::spatial_group() : nullptr;
}

/// Throws Error if ranks share volumes and an operator reads across the boundary of a slab. `within` is true if the
/// operator reads only elements of the slab.
inline void check_within_slab(const char* op, bool within) {
  check(within || !distributed::spatial_group(), op,
        "reads across the boundary of a slab along D, which is not supported while ranks share a volume "
        "(SpatialParallel)");
}

}  // namespace voxgrad
