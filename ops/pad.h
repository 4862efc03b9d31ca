// Padding with what the tensor holds.
#pragma once

#include <ostream>
#include <vector>

#include "../core/tensor.h"

namespace voxgrad {

/// What stands in front of an axis 0 1 2 3: a value, 2 1, 0 0, 2 3 (of two elements).
enum class PadMode : uint8_t { constant, reflect, replicate, circular, zeros = constant };

std::ostream& operator<<(std::ostream& out, PadMode mode);

/// PyTorch's pad. amounts = {before the last axis, after it, before the second last, ...}; negative ones crop. constant
/// pads any axes with `value`, as pad(x, amounts, value) of ops/shape.h. The other modes pad the last one to three
/// axes, all spatial ones, of x (N, C, spatial...) or (C, spatial...), of a floating dtype: reflect by less than the
/// size of an axis, circular by at most that. Throws Error otherwise, and for a result without elements.
Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, PadMode mode, double value = 0);

}  // namespace voxgrad
