// A communicator that records the size of each all-reduce and the time at which its input was ready.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cuda/cuda.h"
#include "nn/distributed/communicator.h"

namespace scaling {

/// Passes all collectives to the communicator `base` and records the all-reduces.
class ObservedCommunicator final : public voxgrad::distributed::Communicator {
 public:
  struct Reduction {
    int64_t numel = 0;
    voxgrad::DType dtype{};
    std::unique_ptr<voxgrad::cuda::Event> ready;  ///< recorded on the stream that computes the input
  };

  explicit ObservedCommunicator(voxgrad::distributed::Communicator& base)
      : Communicator(base.rank(), base.size(), base.local_rank(), base.device()), base_(base) {}
  /// Returns the all-reduces since the last call.
  std::vector<Reduction> take() { return std::exchange(reductions_, {}); }

  std::unique_ptr<voxgrad::distributed::Work> start(const voxgrad::distributed::Collective& collective) override {
    if (collective.kind == voxgrad::distributed::Collective::Kind::all_reduce) {
      auto ready = std::make_unique<voxgrad::cuda::Event>(device().index);
      ready->record();
      reductions_.push_back({collective.in.numel(), collective.in.dtype(), std::move(ready)});
    }
    return base_.start(collective);
  }
  void abort(int code) override { base_.abort(code); }

 private:
  voxgrad::distributed::Communicator& base_;
  std::vector<Reduction> reductions_;
};

}  // namespace scaling
