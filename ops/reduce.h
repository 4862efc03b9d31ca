// Reductions, cumulative sums and softmax.
//
// `axes` lists the axes to reduce; an empty list means all axes. With keepdim, the result has size 1 along reduced
// axes; otherwise, these axes are removed. Results are deterministic, and all functions can be differentiated any
// number of times.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Returns the sum. The sum of integers and bool is i64 and wraps around.
Tensor sum(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Returns the mean. x must have a floating-point dtype.
Tensor mean(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Return the maximum or minimum. If several elements are equal to the result, they share the gradient equally. Throw
/// Error if there are no elements.
Tensor amax(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Returns the variance: the sum of squared deviations from the mean, divided by (count - correction), where count is
/// the number of reduced elements. The computation makes two passes. Throws Error unless count exceeds correction.
Tensor var(const Tensor& x, const Axes& axes = {}, int64_t correction = 1, bool keepdim = false);
/// Returns the standard deviation, the square root of var. The gradient is 0 where the standard deviation is 0.
Tensor std(const Tensor& x, const Axes& axes = {}, int64_t correction = 1, bool keepdim = false);
/// Returns the product. The product of integers and bool is i64 and wraps around. The gradient is exact even if
/// elements are 0.
Tensor prod(const Tensor& x, const Axes& axes = {}, bool keepdim = false);
/// Returns the p-norm sum(|x|^p)^(1/p) for p > 0, including infinity. The gradient is 0 where the norm is 0.
Tensor norm(const Tensor& x, double p = 2, const Axes& axes = {}, bool keepdim = false);
/// Returns log(sum(exp(x))), computed without overflow. Integers are converted to f32.
Tensor logsumexp(const Tensor& x, const Axes& axes, bool keepdim = false);
/// Returns the cumulative sum along `axis`. The sum of integers and bool is i64 and wraps around.
Tensor cumsum(const Tensor& x, int64_t axis);
/// Sums x over the axes along which expand() would repeat a tensor of shape `shape`. The result has shape `shape`. This
/// is the gradient of expand(). Throws Error if `shape` does not broadcast to the shape of x.
Tensor sum_to(const Tensor& x, const Shape& shape);

/// Return exp(x) / sum(exp(x)) along `axis`, or its logarithm. x must have a floating-point dtype.
Tensor softmax(const Tensor& x, int64_t axis);
Tensor log_softmax(const Tensor& x, int64_t axis);

}  // namespace voxgrad
