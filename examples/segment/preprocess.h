// From a scan as it was taken to what the network sees.
#pragma once

#include <array>
#include <cstdint>
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

/// For voxels of `spacing` mm along all axes, or if that is 0 of the training cases' median. `seed`: of the voxels at
/// which CT is measured.
Preprocessing choose_preprocessing(const Task& task, double spacing, uint64_t seed);

}  // namespace segment
