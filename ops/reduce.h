// Reductions over any axes (none named: all). Deterministic, differentiable any number of times.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Integers and bool sum to i64, which wraps around.
Tensor sum(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Largest and smallest value. The gradient is shared equally among ties. Empty reductions throw.
Tensor amax(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Sum of squared deviations from the mean over (count - correction), in two passes.
Tensor var(const Tensor& x, const Axes& axes = {}, int64_t correction = 1, bool keepdim = false);
/// The root of var; the gradient is 0 where it is 0.
Tensor std(const Tensor& x, const Axes& axes = {}, int64_t correction = 1, bool keepdim = false);
/// Integers and bool multiply to i64, which wraps around. The gradient is right also where factors are 0.
Tensor prod(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// The p-norm, for p > 0, infinity included: sum(|x|^p)^(1/p). The gradient is 0 where the norm is 0.
Tensor norm(const Tensor& x, double p = 2, const Axes& axes = {}, bool keepdim = false);
/// log(sum(exp(x))), without overflow; of integers in f32.
Tensor logsumexp(const Tensor& x, const Axes& axes, bool keepdim = false);
/// Sums along `axis` of all elements up to each. Integers and bool give i64, which wraps around.
Tensor cumsum(const Tensor& x, int64_t axis);
/// Sums the axes that broadcasting `shape` to x's shape would have added or stretched.
Tensor sum_to(const Tensor& x, const Shape& shape);

Tensor softmax(const Tensor& x, int64_t axis);
Tensor log_softmax(const Tensor& x, int64_t axis);

}  // namespace voxgrad
