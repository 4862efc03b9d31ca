// From a scan as it was taken to what the network sees.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/task.h"

namespace segment {

/// As nnU-Net does: crops to what is not 0, normalises (by mean and standard deviation, or of CT by the training cases'
/// intensities), resamples (Isensee et al. 2021).
struct Preprocessing {
  std::array<double, 3> spacing{1, 1, 1};            ///< mm along D, H, W
  std::vector<voxgrad::data::Intensities> channels;  ///< of CT
  Case operator()(const Case& of) const;
};

/// What is to be known of the training cases before they are preprocessed.
struct Survey {
  Preprocessing preprocess{};
  int64_t channels = 0;               ///< of each case
  std::string cases{};                ///< how many there are, and the sum of their intensities
  std::vector<uint32_t> checksums{};  ///< of each case
};

/// Loads the training cases one after another, those of CT once for each channel. For voxels of `spacing` mm along all
/// axes, or if that is 0 of the cases' median. `seed`: of the voxels at which CT is measured.
Survey survey(const Task& task, double spacing, uint64_t seed);

}  // namespace segment
