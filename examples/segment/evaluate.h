// Measures of the agreement of two label maps.
#pragma once

#include <vector>

#include <voxgrad.h>

namespace segment {

/// Returns the Dice coefficient of each class, 2 |A and B| / (|A| + |B|), where A and B are the voxels of the class in
/// `labels` and in `truth`. Excludes voxels where `truth` is `ignore_index`. The coefficient is NaN for a class that
/// occurs in neither tensor. Both tensors are (D, H, W) and hold numbers from 0 to 255.
std::vector<double> dice(const voxgrad::Tensor& labels, const voxgrad::Tensor& truth, int64_t classes,
                         int64_t ignore_index);

/// Returns the mean Dice of the classes in `scored`. Skips classes whose Dice is NaN. Returns NaN if all classes are
/// skipped.
double mean_dice(const std::vector<double>& dice, const std::vector<int64_t>& scored);

}  // namespace segment
