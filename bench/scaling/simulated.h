// Simulation of many ranks on one GPU. Training steps are real. Collectives are simulated: they transfer no data
// between GPUs, but take as long as real collectives would.
#pragma once

#include <cstdlib>
#include <string>

#include "cuda/cuda.h"
#include "nn/distributed/communicator.h"

namespace scaling {

/// The simulated ranks and their network. A reduction of `bytes` over n ranks takes
///   steps * latency + 2 (n - 1) / n * bytes / bandwidth
/// where the algorithm has 2 ceil(log2 n) steps ("tree") or 2 (n - 1) steps ("ring").
struct Simulation {
  int ranks = 2;
  std::string algorithm = "tree";
  double latency_us = 0;   ///< per step of the algorithm
  double bandwidth = 1e6;  ///< GB/s
  int blocks = 16;         ///< CTAs that a reduction occupies
};

/// A communicator that acts as rank 0 of a group in which all ranks hold equal values. As with NCCL, a collective runs
/// on a separate stream, which waits for the current stream. The kernel of a collective runs for the simulated time;
/// for a sum, it multiplies the values by the number of ranks.
class SimulatedCommunicator final : public voxgrad::distributed::Communicator {
 public:
  SimulatedCommunicator(voxgrad::Device device, const Simulation& simulation);

  /// broadcast and all_gather take half the steps of a reduction and transfer the bytes once. send_receive takes one
  /// step and receives zeros. The sum of f32 or bf16 values is this rank's values times the number of ranks; values of
  /// other dtypes are not changed.
  std::unique_ptr<voxgrad::distributed::Work> start(const voxgrad::distributed::Collective& collective) override;
  void abort(int code) override { std::_Exit(code); }

 private:
  std::unique_ptr<voxgrad::distributed::Work> queue(const voxgrad::Tensor& tensor, double microseconds, double factor);
  double latency_us() const;

  Simulation simulation_;
  voxgrad::cuda::Stream stream_;
};

}  // namespace scaling
