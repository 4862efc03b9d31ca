// How well labels agree.
#pragma once

#include <vector>

#include <voxgrad.h>

namespace segment {

/// Dice's coefficient of each class, 2 |A and B| / (|A| + |B|), over the voxels whose truth is not `ignore_index`; NaN
/// for a class that neither has there. Both tensors are (D, H, W), u8.
std::vector<double> dice(const voxgrad::Tensor& labels, const voxgrad::Tensor& truth, int64_t classes,
                         int64_t ignore_index);

/// The mean over the classes of `scored` whose Dice is not NaN; NaN if there is none.
double mean_dice(const std::vector<double>& dice, const std::vector<int64_t>& scored);

}  // namespace segment
