// Maxima, minima and sorted order along an axis, with their positions. Positions are i64 and count along the axis. NaN
// is larger than any number, but min and argmin also return NaN if there is one.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// Return the position of the first largest or smallest element along `axis`. Without an axis, the position is in the
/// flattened tensor, in row-major order. Throw Error if there are no elements.
Tensor argmax(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
Tensor argmin(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
/// Return the largest or smallest elements along `axis` and their positions. The gradient goes to the element at the
/// position only, whereas amax and amin share it among equal elements.
Selection max(const Tensor& x, int64_t axis, bool keepdim = false);
Selection min(const Tensor& x, int64_t axis, bool keepdim = false);
/// Returns the elements sorted along `axis` and their positions. The sort is stable.
Selection sort(const Tensor& x, int64_t axis = -1, bool descending = false);
/// Returns the k largest or smallest elements along `axis`, in order, and their positions. Equal elements keep their
/// order.
Selection topk(const Tensor& x, int64_t k, int64_t axis = -1, bool largest = true);

}  // namespace voxgrad
