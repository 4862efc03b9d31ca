// Training steps of nnU-Net's standard network on one rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bench/scaling/bench.h"
#include "bench/unet_training.h"
#include "cuda/cuda.h"
#include "nn/distributed/data_parallel.h"
#include "nn/distributed/zero.h"

namespace scaling {

/// Sets the input of later steps to `x` (N, 1, D, H, W) and computes the labels from `x`.
void set_volumes(voxgrad::UNetTraining& training, const voxgrad::Tensor& x);

/// A training run with the same initial parameters and different data on each rank.
struct Stepper {
  /// mode: "bf16" (autocast), "high" (TF32) or "highest" (float32). scheme: "ddp" (DataParallel), "zero" (DataParallel
  /// with ZeroRedundancy) or "none" (independent ranks).
  Stepper(const Bench& bench, voxgrad::distributed::Communicator& world, const std::string& mode,
          const std::string& scheme);
  /// Runs a step. If `reduce` is false, does not reduce the gradients.
  void step(bool reduce = true);
  /// Returns the number of parameters.
  int64_t parameters() const;
  /// Returns a hash of the bits of the parameters.
  uint64_t checksum() const;

  std::unique_ptr<voxgrad::UNetTraining> training;
  std::optional<voxgrad::nn::DataParallel> parallel;
  std::optional<voxgrad::nn::ZeroRedundancy> zero;
};

/// A training step. The constructor runs the step a few times as a warm-up. Afterwards, a call runs the step eagerly
/// or, if `graph` is true, replays a CUDA graph of the step.
class Execution {
 public:
  Execution(const Bench& bench, bool graph, std::function<void()> step);
  void operator()() { graph_ ? graph_->replay() : step_(); }

 private:
  std::function<void()> step_;
  std::optional<voxgrad::cuda::CUDAGraph> graph_;
};

/// Calls f(false) for eager steps and, with --graph, f(true) for a CUDA graph.
void each_execution(const Bench& bench, const std::function<void(bool graph)>& f);

}  // namespace scaling
