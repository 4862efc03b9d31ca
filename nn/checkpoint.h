// Checkpoints: everything that a training run needs to go on with the same bits, in one safetensors file.
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

/// The parts of a training run; null ones are left out. In the file: "model.*", "optimizer.*", "schedule.*",
/// "loader.*", "generator.*", "scaler.*", "average.*", "step".
struct CheckpointParts {
  nn::Module* model = nullptr;
  optim::Optimizer* optimizer = nullptr;
  optim::Schedule* schedule = nullptr;
  data::Loader* loader = nullptr;
  Generator* generator = &default_generator();
  optim::GradScaler* scaler = nullptr;
  optim::ExponentialMovingAverage* average = nullptr;
  int64_t* step = nullptr;  ///< the program's own count of steps or epochs, not negative
};

/// Writes the state of all parts, atomically: at `path` there is always a whole file, the old one or the new one. The
/// file carries a checksum of all its contents (SaveSafetensorsOptions::checksum).
///
/// Throws, and leaves the old file alone, for a state that load_checkpoint would refuse: a run that has diverged does
/// not replace its last good checkpoint. Among these are NaN and infinities in parameters, and NaN in buffers;
/// infinities there may be meant, as in masks of attention. (save_safetensors saves any state_dict.)
void save_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts, const Metadata& metadata = {});

/// Puts all parts back to the state in the file, and returns its metadata. Parts that the file has and the caller
/// does not ask for are passed over. Throws, before anything is changed, if the file's contents do not have its
/// checksum, and if a part is missing in the file, does not fit or holds numbers from which no run can continue: see
/// save_checkpoint and the parts' load_state_dict. (Every seed and offset is a state of a generator.) A file without a
/// checksum, as others write them, is loaded with a warning on stderr.
Metadata load_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts);

}  // namespace voxgrad
