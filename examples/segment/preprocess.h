// Preprocessing: converts a scan to the input of the network.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/task.h"

namespace segment {

/// Preprocesses a case as nnU-Net (Isensee et al. 2021) does: crops the case to the nonzero voxels, normalizes each
/// channel and resamples the case to `spacing`. Throws voxgrad::Error if all voxels are 0 or if the number of channels
/// is not that of `normalization`.
struct Preprocessing {
  std::array<double, 3> spacing{1, 1, 1};        ///< mm along D, H, W
  std::vector<Normalization> normalization;      ///< per channel
  std::vector<nnunet::Intensities> intensities;  ///< per channel; used only for Normalization::ct
  Case operator()(const Case& c) const;
};

/// Properties of the training cases, measured before they are preprocessed.
struct Survey {
  Preprocessing preprocess{};
  std::string cases{};                ///< number of cases and sum of their intensities, which --resume compares
  std::vector<uint32_t> checksums{};  ///< one per case
};

/// Measures the training cases. Loads the cases one after another, and once more for each CT channel except the first
/// channel. The returned preprocessing resamples to `spacing` mm along all axes or, if `spacing` is 0, to the median
/// spacing of the cases. CT channels are measured at random voxels, which `seed` selects.
Survey survey(const Task& task, double spacing, uint64_t seed);

}  // namespace segment
