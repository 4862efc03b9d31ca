// Padding with a constant or with elements of the tensor.
#pragma once

#include <ostream>
#include <vector>

#include "../core/tensor.h"

namespace voxgrad {

/// Padding modes of PyTorch. For example, padding the axis 0 1 2 3 by two elements in front adds value value
/// (constant), 2 1 (reflect), 0 0 (replicate) or 2 3 (circular). `zeros` is another name for constant.
enum class PadMode : uint8_t { constant, reflect, replicate, circular, zeros = constant };

/// Prints "constant", "reflect", "replicate" or "circular".
std::ostream& operator<<(std::ostream& out, PadMode mode);

/// Pads x as in PyTorch. amounts = {before the last axis, after the last axis, before the second-to-last axis, ...};
/// negative amounts crop. Mode constant pads any axes with `value`, like pad(x, amounts, value) in ops/shape.h. The
/// other modes require x (N, C, spatial...) or (C, spatial...) with a floating-point dtype, and amounts for all of its
/// one to three spatial axes. For reflect, an amount must be less than the size of the axis. For circular, an amount
/// must be at most this size. Throws Error if an amount violates these limits, or if the result has no elements.
Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, PadMode mode, double value = 0);

}  // namespace voxgrad
