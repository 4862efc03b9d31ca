// How well labels agree.
#pragma once

#include <vector>

#include <voxgrad.h>

namespace segment {

/// Dice's coefficient of each class, 2 |A and B| / (|A| + |B|): NaN of classes that neither has. Both (D, H, W), u8.
std::vector<double> dice(const voxgrad::Tensor& labels, const voxgrad::Tensor& truth, int64_t classes);

/// The mean over those of `scored` that are not NaN.
double mean_dice(const std::vector<double>& dice, const std::vector<int64_t>& scored);

}  // namespace segment
