// What is largest or smallest along an axis, and where. Positions are i64 and count along the axis; NaN is larger than
// any number, except that argmin and min find it first too.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// The first position of the largest, or smallest, element along `axis`; without an axis, in the whole tensor in
/// row-major order. Throws where there is nothing to choose from.
Tensor argmax(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
Tensor argmin(const Tensor& x, std::optional<int64_t> axis = {}, bool keepdim = false);
/// The same with the elements there, to which alone gradients go; amax and amin share them among ties.
Selection max(const Tensor& x, int64_t axis, bool keepdim = false);
Selection min(const Tensor& x, int64_t axis, bool keepdim = false);
/// All elements in order; those that are equal stay in theirs.
Selection sort(const Tensor& x, int64_t axis = -1, bool descending = false);
/// The k largest, or smallest, elements in order, the first of ties first.
Selection topk(const Tensor& x, int64_t k, int64_t axis = -1, bool largest = true);

}  // namespace voxgrad
