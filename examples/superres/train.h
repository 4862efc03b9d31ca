// Training: patches of a volume, the loop, checkpoints.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include <voxgrad.h>

#include "examples/superres/model.h"

namespace superres {

struct TrainOptions {
  int64_t steps = 1000;
  int64_t batch = 0;   ///< 0: to be chosen for the device
  int64_t patch = 16;  ///< low-resolution voxels a side
  double lr = 3e-3;
  uint64_t seed = 0;
  int64_t workers = -1;               ///< threads that cut patches; main() chooses for -1
  std::string precision = "highest";  ///< as examples::Precision takes it
  std::string profile;                ///< where the trace of some steps goes; empty: nothing is recorded
  SuperResolution::Options model;
  std::string tensorboard;  ///< folder for event files; empty: none
};

struct TrainResult {
  std::shared_ptr<SuperResolution> model;
  std::shared_ptr<voxgrad::SummaryWriter> writer;  ///< in TrainOptions::tensorboard; null without it
  int64_t steps = 0;                               ///< done in all, earlier runs included
  double seconds = 0;                              ///< of training, earlier runs included
  double last_loss = 0;                            ///< mean over the last steps
  bool interrupted = false;                        ///< by Ctrl-C, be it in the last step; the checkpoint was written
};

/// Trains on `head` (D, H, W) and leaves checkpoint.safetensors and losses.csv in `out`. With `resume` it goes on
/// from that checkpoint, to the same bits as a run that was never stopped. Throws voxgrad::Error if there is
/// none, or one of other options; of a run that took all its steps nothing is left to do. On several ranks each calls
/// it with its device, all with the same arguments otherwise: a batch is shared out to them, and rank 0 writes.
TrainResult train(const voxgrad::Tensor& head, const TrainOptions& options, voxgrad::Device device,
                  const std::filesystem::path& out, bool resume, voxgrad::distributed::Communicator* world = nullptr);

}  // namespace superres
