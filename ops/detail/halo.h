// What operators on slabs (ops/spatial.h) do together with other ranks. Private to the library.
#pragma once

#include <array>

#include "../../core/communicator.h"
#include "../../core/error.h"
#include "../../core/tensor.h"

namespace voxgrad {

/// (N, C, planes, H, W) of, or for, the rank in front and the rank behind; undefined where there is none.
using Planes = std::array<Tensor, 2>;

/// What planes have in common with the volume (N, C, D, H, W) that they belong to.
struct PlaneForm {
  Shape shape;
  TensorOptions options;
  MemoryFormat format;

  explicit PlaneForm(const Tensor& x) : shape(x.shape()), options(x.options()), format(x.suggest_memory_format()) {}
};

/// An exchange of planes under way.
class PlaneExchange {
 public:
  /// Sends planes to the ranks in front and behind, and receives so many from each of them.
  PlaneExchange(distributed::Communicator& group, const PlaneForm& form, const Planes& send,
                const std::array<int64_t, 2>& count);
  const Planes& wait();

 private:
  std::unique_ptr<distributed::Work> work_;
  Planes received_;
};

/// The sum over the ranks, on all of them. Differentiable: so is the gradient.
Tensor sum_over_ranks(const Tensor& t, distributed::Communicator& group);

/// The ranks that share a volume of `rank` axes; null if there are none.
inline distributed::Communicator* sharing_ranks(int64_t rank) {
  return rank == 5 ? distributed::spatial_group() : nullptr;
}

/// Throws unless what is done along D stays within a slab, or no ranks share volumes.
inline void check_within_slab(const char* op, bool within) {
  check(within || !distributed::spatial_group(), op,
        "reaches along D from one slab into the next, which it cannot where ranks share a volume (SpatialParallel)");
}

}  // namespace voxgrad
