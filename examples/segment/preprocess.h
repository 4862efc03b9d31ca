// From a scan as it was taken to what the network sees.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/task.h"

namespace segment {

/// As in nnU-Net (Isensee et al. 2021): crops to the voxels other than 0, normalizes each channel and resamples.
struct Preprocessing {
  std::array<double, 3> spacing{1, 1, 1};        ///< mm along D, H, W
  std::vector<Normalization> normalization;      ///< of each channel
  std::vector<nnunet::Intensities> intensities;  ///< of each channel, measured for those of CT
  Case operator()(const Case& of) const;
};

/// What is to be known of the training cases before they are preprocessed.
struct Survey {
  Preprocessing preprocess{};
  std::string cases{};                ///< how many there are, and the sum of their intensities
  std::vector<uint32_t> checksums{};  ///< of each case
};

/// Loads the training cases one after another, once more for each further channel of CT. The network's voxels have
/// `spacing` mm along all axes, or the cases' median if it is 0. `seed` draws the voxels at which CT is measured.
Survey survey(const Task& task, double spacing, uint64_t seed);

}  // namespace segment
