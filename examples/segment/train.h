// Training by nnU-Net's recipe: the loop, validation, checkpoints.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include <voxgrad.h>

#include "examples/segment/history.h"
#include "examples/segment/preprocess.h"
#include "examples/segment/task.h"

namespace segment {

struct TrainOptions {
  int64_t steps = 0;         ///< 0, here and below: to be chosen for the device (settle)
  int64_t batch = 0;         ///< patches a step
  int64_t channels = 0;      ///< of the first stage
  voxgrad::Triple patch{0};  ///< voxels, enlarged to what the network takes
  double spacing = 0;        ///< mm between voxels that the network sees; 0: the cases' median
  bool residual = false;     ///< nnU-Net's residual encoder
  bool recompute = false;
  std::string optimizer = "adamw";  ///< or "sgd": with Nesterov momentum 0.99, as nnU-Net's
  double lr = 0;
  double ema = 0.99;           ///< decay of the weights' moving average, which is what is kept; 0: none
  int64_t validate_every = 0;  ///< steps
  int64_t patience = 0;        ///< validations without a better Dice, after which training ends; 0: never
  uint64_t seed = 0;
  int64_t workers = -1;  ///< threads that cut patches; main() chooses for -1
  bool augment = true;
  std::string precision{};           ///< as examples::Precision takes it; empty: to be chosen for the device
  std::string tensorboard, profile;  ///< a folder for event files; a file for the trace of some steps; or empty
};
/// Fills in what depends on the device.
TrainOptions settle(TrainOptions options, voxgrad::Device device);

struct TrainResult {
  std::shared_ptr<voxgrad::nn::UNet> model;  ///< with the averaged weights
  voxgrad::Triple window{0};                 ///< voxels of a patch
  Preprocessing preprocess{};
  int64_t steps = 0;   ///< done in all, earlier runs included
  double seconds = 0;  ///< of training and validations, earlier runs included
  History history{};
  bool interrupted = false;                          ///< by Ctrl-C; the checkpoint was written
  std::shared_ptr<voxgrad::SummaryWriter> writer{};  ///< in TrainOptions::tensorboard; null without it
};

/// Trains on the task's training cases and leaves checkpoint.safetensors and history.csv in `out`; unless the cases are
/// to be in memory, also preprocessed/ with files from which it reads patches (store.h). With `resume` it continues
/// from that checkpoint and gives the same bits as an uninterrupted run. Throws voxgrad::Error if there is no
/// checkpoint or if it was made with other options. On several ranks, each rank calls it with its device and otherwise
/// the same arguments: the ranks share each batch (the Dice loss is that of each rank's part), and rank 0 writes.
TrainResult train(const Task& task, const TrainOptions& options, voxgrad::Device device,
                  const std::filesystem::path& out, bool resume, voxgrad::distributed::Communicator* world = nullptr);

/// The model's probabilities of a case (classes, D, H, W), in the geometry of its files: by sliding window, on the CPU.
voxgrad::NiftiImage predict(const TrainResult& trained, const Case& of, const TrainOptions& options,
                            voxgrad::Device device);
/// Of these, the class that is likeliest: u8 (D, H, W).
voxgrad::Tensor labels_of(const voxgrad::NiftiImage& probabilities);

}  // namespace segment
