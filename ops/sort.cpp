// Maxima, minima and sorted order along an axis.
#include "ops/sort.h"

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Returns x, or a view with one axis if x has none.
Tensor with_axis(const Tensor& x) { return x.dim() > 0 ? x : unsqueeze(x, 0); }

/// Returns an uninitialized i64 tensor with the shape of x, but with `count` elements along `axis`.
Tensor empty_positions(const Tensor& x, int64_t axis, int64_t count) {
  Shape shape = x.shape();
  shape[axis] = count;
  return empty(shape, {i64, x.device()}, x.suggest_memory_format());
}

/// Returns argmax or argmin along an axis. The result keeps the axis.
Tensor arg_along(const char* op, const Tensor& given, int64_t given_axis, bool largest) {
  check_defined(op, "input", given);
  const int64_t axis = normalize_axis(given_axis, given.dim(), op);
  const Tensor x = with_axis(given);
  check(x.shape()[axis] > 0, op, "no elements along axis ", axis, " of ", x.shape());
  const Tensor index = empty_positions(x, axis, 1);
  kernels(x.device()).argmax(index.view_out(), x.view_in(), static_cast<int>(axis), largest);
  return index;
}

/// Returns argmax or argmin along an axis, or of the flattened tensor.
Tensor arg(const char* op, const Tensor& x, std::optional<int64_t> axis, bool keepdim, bool largest) {
  if (axis) {
    const Tensor index = arg_along(op, x, *axis, largest);
    return keepdim && x.dim() > 0 ? index : squeeze(index, *axis);
  }
  check_defined(op, "input", x);
  check(x.numel() > 0, op, "no elements in ", x.shape());
  return reshape(arg_along(op, reshape(x, {-1}), 0, largest), Dims::filled(keepdim ? x.dim() : 0, 1));
}

/// Returns the maxima or minima along an axis and their positions.
Selection extremum(const char* op, const Tensor& x, int64_t axis, bool keepdim, bool largest) {
  const Tensor index = arg_along(op, x, axis, largest), values = gather(with_axis(x), axis, index);
  if (keepdim && x.dim() > 0) return {values, index};
  return {squeeze(values, axis), squeeze(index, axis)};
}

/// Returns the first `count` elements in sorted order and their positions. A count of -1 means all elements.
Selection ordered(const char* op, const Tensor& given, int64_t axis, int64_t count, bool descending) {
  check_defined(op, "input", given);
  axis = normalize_axis(axis, given.dim(), op);
  const Tensor x = with_axis(given);
  const int64_t size = x.shape()[axis];
  check(count >= -1 && count <= size, op, "k ", count, " is out of range for axis ", axis, " of ", x.shape());
  const Tensor index = empty_positions(x, axis, count < 0 ? size : count);
  kernels(x.device()).sort(index.view_out(), x.view_in(), static_cast<int>(axis), descending);
  const Tensor values = gather(x, axis, index);
  if (given.dim() > 0) return {values, index};
  return {reshape(values, {}), reshape(index, {})};
}

}  // namespace

Tensor argmax(const Tensor& x, std::optional<int64_t> axis, bool keepdim) {
  return arg("argmax", x, axis, keepdim, true);
}
Tensor argmin(const Tensor& x, std::optional<int64_t> axis, bool keepdim) {
  return arg("argmin", x, axis, keepdim, false);
}
Selection max(const Tensor& x, int64_t axis, bool keepdim) { return extremum("max", x, axis, keepdim, true); }
Selection min(const Tensor& x, int64_t axis, bool keepdim) { return extremum("min", x, axis, keepdim, false); }

Selection sort(const Tensor& x, int64_t axis, bool descending) { return ordered("sort", x, axis, -1, descending); }
Selection topk(const Tensor& x, int64_t k, int64_t axis, bool largest) {
  check(k >= 0, "topk", "k must not be negative, got ", k);
  return ordered("topk", x, axis, k, largest);
}

}  // namespace voxgrad
