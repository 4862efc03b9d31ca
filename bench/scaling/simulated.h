// Many ranks on one GPU: reductions that take the time they would take, beside the real step.
#pragma once

#include <cstdlib>
#include <string>

#include "cuda/cuda.h"
#include "nn/distributed/communicator.h"

namespace scaling {

/// The ranks and what connects them. A reduction of `bytes` takes
///   steps * latency + 2 (n - 1) / n * bytes / bandwidth
/// where the algorithm has 2 ceil(log2 n) steps ("tree") or 2 (n - 1) ("ring").
struct Simulation {
  int ranks = 2;
  std::string algorithm = "tree";
  double latency_us = 0;
  double bandwidth = 1e6;  ///< GB/s
  int blocks = 16;         ///< thread blocks that a reduction occupies
};

/// Rank 0 of ranks that all hold the same. As NCCL's, reductions of tensors on the GPU are queued in a stream of their
/// own, behind the current one: a kernel multiplies the values by the number of ranks, and ends when its time is over.
class SimulatedCommunicator final : public voxgrad::distributed::Communicator {
 public:
  SimulatedCommunicator(voxgrad::Device device, const Simulation& simulation);

  /// Broadcasts, all_gather and reduce_scatter take half the steps and the time of the bytes once; of messages zeros
  /// come, after one step. Sums of f32 and bf16 are multiplied, others are rank 0's numbers.
  std::unique_ptr<voxgrad::distributed::Work> start(const voxgrad::distributed::Collective& collective) override;
  void abort(int code) override { std::_Exit(code); }

 private:
  std::unique_ptr<voxgrad::distributed::Work> queue(const voxgrad::Tensor& tensor, double microseconds, double factor);
  double latency_us() const;

  Simulation simulation_;
  voxgrad::cuda::Stream stream_;
};

}  // namespace scaling
