// Reductions over any axes (none named: all). Deterministic, differentiable any number of times.
#pragma once

#include "core/tensor.h"

namespace voxgrad {

/// Integers and bool sum to i64, which wraps around.
Tensor sum(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Largest and smallest value. The gradient is shared equally among ties. Empty reductions throw.
Tensor amax(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Sum of squared deviations from the mean over (count - correction), in two passes.
Tensor var(const Tensor& x, const Axes& axes = {}, int64_t correction = 1, bool keepdim = false);
/// Sums the axes that broadcasting `shape` to x's shape would have added or stretched.
Tensor sum_to(const Tensor& x, const Shape& shape);

Tensor softmax(const Tensor& x, int64_t axis);
Tensor log_softmax(const Tensor& x, int64_t axis);

}  // namespace voxgrad
