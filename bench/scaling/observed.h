// A communicator that notes what is reduced, and when it was ready.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cuda/cuda.h"
#include "nn/parallel/communicator.h"

namespace scaling {

/// Passes everything on to another one.
class ObservedCommunicator final : public voxgrad::parallel::Communicator {
 public:
  struct Reduction {
    int64_t numel = 0;
    voxgrad::DType dtype{};
    std::unique_ptr<voxgrad::cuda::Event> ready;  ///< in the stream that made the values
  };

  explicit ObservedCommunicator(voxgrad::parallel::Communicator& base) : base_(base) {}
  /// Of all reductions since the last call.
  std::vector<Reduction> take() { return std::exchange(reductions_, {}); }

  int rank() const override { return base_.rank(); }
  int size() const override { return base_.size(); }
  int local_rank() const override { return base_.local_rank(); }
  voxgrad::Device device() const override { return base_.device(); }
  void set_timeout(double seconds) override { base_.set_timeout(seconds); }
  std::unique_ptr<voxgrad::parallel::Work> all_reduce_async(const voxgrad::Tensor& tensor,
                                                            voxgrad::parallel::ReduceOp op) override {
    auto ready = std::make_unique<voxgrad::cuda::Event>(device().index);
    ready->record();
    reductions_.push_back({tensor.numel(), tensor.dtype(), std::move(ready)});
    return base_.all_reduce_async(tensor, op);
  }
  void broadcast(const voxgrad::Tensor& tensor, int root) override { base_.broadcast(tensor, root); }
  std::unique_ptr<voxgrad::parallel::Work> send_receive_async(
      const std::vector<voxgrad::parallel::Message>& sends,
      const std::vector<voxgrad::parallel::Message>& receives) override {
    return base_.send_receive_async(sends, receives);
  }
  voxgrad::Tensor all_gather(const voxgrad::Tensor& tensor) override { return base_.all_gather(tensor); }
  voxgrad::Tensor reduce_scatter(const voxgrad::Tensor& tensor, voxgrad::parallel::ReduceOp op) override {
    return base_.reduce_scatter(tensor, op);
  }
  void barrier() override { base_.barrier(); }
  void abort(int code) override { base_.abort(code); }

 private:
  voxgrad::parallel::Communicator& base_;
  std::vector<Reduction> reductions_;
};

}  // namespace scaling
