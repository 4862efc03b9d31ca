// Checkpoints: the complete state of a training run in one safetensors file. A resumed run computes the same bits as an
// uninterrupted run.
#pragma once

#include <filesystem>

#include "../core/io/safetensors.h"
#include "../core/random.h"
#include "data/loader.h"
#include "module.h"
#include "optim/ema.h"
#include "optim/grad_scaler.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

namespace voxgrad {

/// The parts of a training run. Null parts are skipped. In the file, the entries of the parts are named "model.*",
/// "optimizer.*", "schedule.*", "loader.*", "generator.*", "scaler.*", "average.*" and "step".
struct CheckpointParts {
  nn::Module* model = nullptr;
  optim::Optimizer* optimizer = nullptr;
  optim::Schedule* schedule = nullptr;
  data::Loader* loader = nullptr;
  Generator* generator = &default_generator();
  optim::GradScaler* scaler = nullptr;
  optim::ExponentialMovingAverage* average = nullptr;
  int64_t* step = nullptr;  ///< a counter of the program, such as steps or epochs
};

/// Saves the state of all parts. Replaces the file atomically: at any time, `path` refers to either the complete old
/// file or the complete new file. The file contains a checksum of all its contents (SaveSafetensorsOptions::checksum).
///
/// Throws Error and keeps the old file if a parameter contains NaN or infinities, or if a buffer contains NaN. A run
/// that has diverged therefore does not overwrite its last good checkpoint. Infinities in buffers are allowed, because
/// attention masks may contain them. save_safetensors saves any state_dict without this check.
void save_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts, const Metadata& metadata = {});

/// Restores all parts from a file, and returns the metadata of the file. Ignores entries of parts that the caller does
/// not pass. Throws Error, before anything is changed, if the checksum is wrong, if a part is missing from the file, or
/// if a part does not accept its state (see the load_state_dict of each part). Also throws if the values of the model
/// in the file fail the check of save_checkpoint. A file without a checksum, for example from another program, is
/// loaded with a warning on stderr.
Metadata load_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts);

}  // namespace voxgrad
