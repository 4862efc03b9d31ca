// Training on random patches of a volume, with checkpoints.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include <voxgrad.h>

#include "examples/superres/model.h"

namespace superres {

/// Options of a training run.
struct TrainOptions {
  int64_t steps = 1000;               ///< optimizer steps
  int64_t batch = 0;                  ///< patches per step; 0: main() selects the number for the device
  int64_t patch = 16;                 ///< low-resolution voxels per side of a patch
  double lr = 3e-3;                   ///< maximum learning rate
  uint64_t seed = 0;                  ///< seed of all random numbers
  int64_t workers = -1;               ///< threads that extract patches; -1: main() selects the number
  std::string precision = "highest";  ///< a value of --precision (examples::Precision)
  std::string profile;                ///< file for a trace of a few steps; empty: none
  SuperResolution::Options model;
  std::string tensorboard;  ///< folder for TensorBoard's event files; empty: none
};

/// The result of a training run.
struct TrainResult {
  std::shared_ptr<SuperResolution> model;
  std::shared_ptr<voxgrad::SummaryWriter> writer;  ///< null if TrainOptions::tensorboard is empty
  int64_t steps = 0;                               ///< completed steps, including earlier runs
  double seconds = 0;                              ///< training time, including earlier runs
  double last_loss = 0;                            ///< mean loss of the last 20 steps
  bool interrupted = false;                        ///< true if Ctrl-C stopped the run; a checkpoint was written
};

/// Trains on patches of `head` (D, H, W). Writes checkpoint.safetensors and losses.csv to `out`. Throws voxgrad::Error
/// if the loss is not finite.
///
/// With `resume`, continues from the checkpoint in `out`. The result is bitwise equal to that of an uninterrupted run.
/// If the checkpoint already has all steps, does not train. Throws voxgrad::Error if there is no checkpoint, or if the
/// checkpoint was written with different options.
///
/// To train on several ranks, each rank must call this function with its own device and otherwise equal arguments. The
/// ranks share each batch. Only rank 0 writes files.
TrainResult train(const voxgrad::Tensor& head, const TrainOptions& options, voxgrad::Device device,
                  const std::filesystem::path& out, bool resume, voxgrad::distributed::Communicator* world = nullptr);

}  // namespace superres
