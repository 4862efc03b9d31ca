// Maxima, minima and sorted order along an axis, with their positions. Positions are i64 and count along the axis. NaN
// counts as larger than any number. As an exception, min and argmin also select NaN if there is one.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// Return the position of the first largest or smallest element along `axis`. Without an axis, the position is in the
/// flattened tensor, in row-major order. Throw Error if there are no elements.
Tensor argmax(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
Tensor argmin(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
/// Return the largest or smallest elements along `axis` and their positions. Only the element at the returned position
/// gets the gradient, whereas amax and amin share the gradient among equal elements.
Selection max(const Tensor& x, int64_t axis, bool keepdim = false);
Selection min(const Tensor& x, int64_t axis, bool keepdim = false);
/// Returns the elements sorted along `axis` and their positions. The sort is stable.
Selection sort(const Tensor& x, int64_t axis = -1, bool descending = false);
/// Returns the k largest or smallest elements along `axis`, in order, and their positions. Equal elements keep their
/// order.
Selection topk(const Tensor& x, int64_t k, int64_t axis = -1, bool largest = true);

}  // namespace voxgrad
