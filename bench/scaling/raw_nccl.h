// NCCL without voxgrad, on a communicator of its own: what nccl-tests times.
#pragma once

#include <memory>

#include "nn/distributed/communicator.h"

namespace scaling {

class RawNccl {
 public:
  /// All ranks call it. Null in a build without NCCL.
  static std::unique_ptr<RawNccl> make(voxgrad::distributed::Communicator& world);
  virtual ~RawNccl() = default;
  /// Queues the sum of `from`, which may be `to`, on a stream of its own, which waits for nothing.
  virtual void all_reduce(const voxgrad::Tensor& from, const voxgrad::Tensor& to) = 0;
};

}  // namespace scaling
