// Training by nnU-Net's recipe, with validation and checkpoints, and prediction.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"
#include "examples/segment/history.h"
#include "examples/segment/task.h"

namespace segment {

/// Options of a training run. In the comments, "default" is the value that settle() selects for the device.
struct TrainOptions {
  int64_t steps = 0;                ///< optimizer steps; 0: default
  int64_t batch = 0;                ///< patches per step; 0: default
  std::string network = "unet";     ///< "unet", "resenc-m", "resenc-l", "mednext-b" or "mednext-l"
  int64_t channels = 0;             ///< channels of the first stage; 0: default
  int64_t kernel_size = 3;          ///< kernel size of MedNeXt's depthwise convolutions: 3 or 5
  std::string upkern;               ///< model folder of a MedNeXt with kernel size 3 to start from; empty: none
  std::string plans;                ///< plans.json of nnU-Net with the network and the preprocessing; empty: none
  voxgrad::Triple patch{0};         ///< voxels, rounded up to a size that the network accepts; 0: default
  double spacing = 0;               ///< voxel spacing of the network's input in mm; 0: default (GPU: median)
  bool recompute = false;           ///< recompute activations in the backward pass
  std::string optimizer = "adamw";  ///< "adamw", or "sgd" with Nesterov momentum 0.99 as in nnU-Net
  double lr = 0;                    ///< initial learning rate; 0: default
  double ema = 0.99;                ///< decay of the moving average of the weights; 0: no average
  int64_t validate_every = 0;       ///< steps between validations; 0: default
  int64_t patience = 0;             ///< stop after this many validations without a better Dice; 0: never
  uint64_t seed = 0;                ///< seed of all random numbers
  int64_t workers = -1;             ///< threads that extract patches; -1: main() selects the number
  bool augment = true;              ///< augment training patches
  std::string precision{};          ///< a value of --precision (examples::Precision); empty: default
  std::string tensorboard;          ///< folder for TensorBoard's event files; empty: none
  std::string profile;              ///< file for a trace of a few steps; empty: none
};
/// Replaces options that have the value for "default" by suitable values for the device. On a GPU, does not replace a
/// spacing of 0; train() then uses the median spacing of the cases.
TrainOptions settle(TrainOptions options, voxgrad::Device device);

/// The result of a training run.
struct TrainResult {
  nnunet::Network network;   ///< with averaged weights, unless TrainOptions::ema is 0
  nnunet::ModelPlan plan{};  ///< preprocessing, patch size and network
  int64_t steps = 0;         ///< completed steps, including earlier runs
  double seconds = 0;        ///< time of training and validation, including earlier runs
  History history{};
  bool interrupted = false;                          ///< true if Ctrl-C stopped the run; a checkpoint was written
  std::shared_ptr<voxgrad::SummaryWriter> writer{};  ///< null if TrainOptions::tensorboard is empty
};

/// Trains on the training cases of a task. Writes checkpoint.safetensors and history.csv to `out`. If task.in_memory is
/// false, writes the preprocessed cases to out/preprocessed (store.h). Throws voxgrad::Error if the loss is not finite.
///
/// With `resume`, continues from the checkpoint in `out`. The result is bitwise equal to that of an uninterrupted run.
/// Throws voxgrad::Error if there is no checkpoint, or if the checkpoint was written with different options.
///
/// To train on several ranks, each rank must call this function with its own device and otherwise equal arguments. The
/// ranks share each batch. Each rank computes the Dice loss of its part of the batch. Only rank 0 writes files.
TrainResult train(const Task& task, const TrainOptions& options, voxgrad::Device device,
                  const std::filesystem::path& out, bool resume, voxgrad::distributed::Communicator* world = nullptr);

/// Seconds per epoch of 250 steps, the length of an epoch in nnU-Net.
struct EpochTimes {
  double total;            ///< with data loading and augmentation
  double without_loading;  ///< all steps use the same batch, without augmentation
};
/// Trains for a few steps and then measures options.steps steps with data loading and augmentation, and the same
/// number of steps without them. Scales both times to 250 steps. Writes preprocessed cases to `out`.
EpochTimes measure_epoch(const Task& task, const TrainOptions& options, voxgrad::Device device,
                         const std::filesystem::path& out);

/// The prediction for a case, on the CPU.
struct Prediction {
  voxgrad::Tensor labels;           ///< (D, H, W), u8 or i32, as labels_of() returns them
  voxgrad::Tensor probabilities{};  ///< (classes, D, H, W) f32, or undefined
};
/// Predicts a case by sliding windows on `device`, without mirroring.
Prediction predict(const TrainResult& trained, const Case& c, const TrainOptions& options, voxgrad::Device device,
                   bool probabilities = false);

}  // namespace segment
