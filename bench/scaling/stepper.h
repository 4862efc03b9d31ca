// The step that is measured: nnU-Net's standard network on one of the ranks.
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

/// Steps are on `x` (N, 1, D, H, W) from now on, with labels that follow from it.
void set_volumes(voxgrad::UNetTraining& training, const voxgrad::Tensor& x);

/// Equal parameters and data of its own on each rank.
struct Stepper {
  /// scheme: "ddp", "zero" (with DataParallel, too) or "none", each rank by itself.
  Stepper(const Bench& bench, voxgrad::distributed::Communicator& world, const std::string& mode,
          const std::string& scheme);
  /// `reduce` false: the gradients stay on each rank.
  void step(bool reduce = true);
  int64_t parameters() const;
  /// Of the parameters' bits.
  uint64_t checksum() const;

  std::unique_ptr<voxgrad::UNetTraining> training;
  std::optional<voxgrad::nn::DataParallel> parallel;
  std::optional<voxgrad::nn::ZeroRedundancy> zero;
};

/// A step that was warmed up, to be called: itself, or replays of what was captured.
class Execution {
 public:
  Execution(const Bench& bench, bool graph, std::function<void()> step);
  void operator()() { graph_ ? graph_->replay() : step_(); }

 private:
  std::function<void()> step_;
  std::optional<voxgrad::cuda::CUDAGraph> graph_;
};

/// f(false) for eager steps and, with --graph, f(true).
void each_execution(const Bench& bench, const std::function<void(bool graph)>& f);

}  // namespace scaling
