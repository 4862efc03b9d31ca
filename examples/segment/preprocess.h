// Preprocessing: converts a scan to the input of the network.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/task.h"

namespace segment {

/// Preprocesses a case as nnU-Net (Isensee et al. 2021) does: crops to the nonzero voxels, normalizes each channel and
/// resamples. Throws voxgrad::Error if all voxels are 0 or if the case does not have one channel per normalization.
struct Preprocessing {
  std::array<double, 3> spacing{1, 1, 1};        ///< mm along D, H, W
  std::vector<Normalization> normalization;      ///< per channel
  std::vector<nnunet::Intensities> intensities;  ///< per channel; used only for Normalization::ct
  Case operator()(const Case& c) const;
};

/// Properties of the training cases, measured before they are preprocessed.
struct Survey {
  Preprocessing preprocess{};
  std::string cases{};  ///< number of cases and sum of their intensities; identifies the cases of a checkpoint
  std::vector<uint32_t> checksums{};  ///< one per case
};

/// Measures the training cases. Loads the cases one after another. If channels other than the first are CT, loads the
/// cases once more for each of these channels. The preprocessing resamples to `spacing` mm along all axes, or to the
/// median spacing of the cases if `spacing` is 0. `seed` selects the random voxels at which CT channels are measured.
Survey survey(const Task& task, double spacing, uint64_t seed);

}  // namespace segment
