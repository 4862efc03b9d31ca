// Properties of the training cases that determine the preprocessing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"
#include "examples/segment/task.h"

namespace segment {

/// Properties of the training cases, measured before they are preprocessed.
struct Survey {
  /// Complete if survey() is called with `plans`; otherwise without the patch size and the network.
  nnunet::ModelPlan plan{};
  std::string cases{};                ///< number of cases and sum of their intensities; --resume requires the same text
  std::vector<uint32_t> checksums{};  ///< one per case
};

/// Measures the training cases. Loads the cases one after another. Each CT channel except channel 0 needs one more pass
/// over all cases. The returned plan resamples to `spacing` mm along all axes or, if `spacing` is 0, to the median
/// spacing of the cases. CT channels are measured at random voxels, which `seed` selects.
///
/// If `plans` is not empty, it is the path of a plans.json of nnU-Net. The returned plan is then the configuration
/// 3d_fullres of this file, including the patch size and the network. The function computes only the sums and the
/// checksums of the cases. Throws voxgrad::Error if the task has no dataset.json, or if nnunet::check_savable()
/// rejects the plan. The plan is checked before the cases are loaded.
Survey survey(const Task& task, double spacing, uint64_t seed, const std::filesystem::path& plans = {});

}  // namespace segment
