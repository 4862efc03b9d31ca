// NCCL's all-reduce, called without voxgrad, as in nccl-tests.
#pragma once

#include <memory>

#include "nn/distributed/communicator.h"

namespace scaling {

/// An NCCL communicator with its own stream.
class RawNccl {
 public:
  /// Creates a communicator for the ranks of `world`. All ranks must call this function. Returns null if bench/scaling
  /// was built without NCCL.
  static std::unique_ptr<RawNccl> make(voxgrad::distributed::Communicator& world);
  virtual ~RawNccl() = default;
  /// Queues an all-reduce that writes the sum of `from` over all ranks to `to`. Both may be the same tensor. The stream
  /// does not wait for other streams.
  virtual void all_reduce(const voxgrad::Tensor& from, const voxgrad::Tensor& to) = 0;
};

}  // namespace scaling
