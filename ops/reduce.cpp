// Reductions, cumulative sums and softmax.
#include "ops/reduce.h"

#include <cmath>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Returns the shape of x with size 1 for the reduced axes.
Shape kept_shape(const char* op, const Tensor& x, const Dims& axes) {
  check_defined(op, "input", x);
  if (axes.empty()) return Dims::filled(x.dim(), 1);
  Shape shape = x.shape();
  bool seen[kMaxRank] = {};
  for (int64_t given : axes) {
    const int64_t axis = normalize_axis(given, x.dim(), op);
    check(!seen[axis], op, "axes ", axes, " contain an axis twice");
    seen[axis] = true;
    if (x.dim() > 0) shape[axis] = 1;
  }
  return shape;
}

/// Removes the reduced axes, which have size 1 in `out`. Does nothing if `keepdim` is true.
Tensor drop_axes(Tensor out, const Dims& axes, bool keepdim) {
  if (keepdim) return out;
  if (axes.empty()) return reshape(out, {});
  bool reduced[kMaxRank] = {};
  for (int64_t axis : axes) reduced[normalize_axis(axis, out.dim(), "reduce")] = true;
  for (int64_t axis = out.dim() - 1; axis >= 0; --axis)
    if (reduced[axis]) out = select(out, axis, 0);
  return out;
}

Tensor reduce(ReduceOp op, const Tensor& x, const Shape& shape) {
  const bool widened = op == ReduceOp::sum && !is_floating(x.dtype());
  Tensor out = empty(shape, {widened ? i64 : x.dtype(), x.device()});
  kernels(x.device()).reduce(op, out.view_out(), x.view_in());
  return out;
}

/// Returns the sum of x over the axes that have size 1 in `shape`. The result has this shape.
Tensor sum_keep(const Tensor& x, const Shape& shape) {
  return record("sum", reduce(ReduceOp::sum, x, shape), {x},
                [from = x.shape()](const Tensor& g) { return Tensors{expand(g, from)}; });
}

/// Returns sum_keep(x, shape) / count, rounded once.
Tensor mean_keep(const Tensor& x, const Shape& shape, double count) {
  return record("mean", reduce(ReduceOp::mean, x, shape), {x},
                [from = x.shape(), count](const Tensor& g) { return Tensors{expand(affine(g, 1 / count, 0), from)}; });
}

double reduced_count(const Tensor& x, const Shape& kept) {
  const int64_t groups = numel(kept);
  return groups > 0 ? static_cast<double>(x.numel()) / static_cast<double>(groups) : 0;
}

Tensor extremum(ReduceOp op, const char* name, const Tensor& x, const Dims& axes, bool keepdim) {
  const Shape kept = kept_shape(name, x, axes);
  check(x.numel() > 0 || numel(kept) == 0, name, "nothing to reduce in ", x.shape());
  Tensor out = record(name, reduce(op, x, kept), {x}, [x = Saved(x), kept](const Tensor& g, const Tensor& y) {
    const Tensor share = widened(g);  // bf16 and f16 cannot count many ties exactly
    const Tensor hit = eq(x(), y.detach()).to(share.dtype());
    return Tensors{(hit * (share / sum_to(hit, kept))).to(g.dtype())};
  });
  return drop_axes(out, axes, keepdim);
}

/// Returns the variance; the reduced axes keep size 1. For bf16 and f16, the computation and the result are in f32.
Tensor variance(const char* op, const Tensor& x, const Axes& axes, int64_t correction) {
  const Shape kept = kept_shape(op, x, axes);
  check_floating(op, x);
  const double count = reduced_count(x, kept);
  check(count > static_cast<double>(correction), op,
        "the number of reduced elements must exceed correction = ", correction, ", got ", count, " for shape ",
        x.shape());
  const Tensor wide = widened(x), centered = wide - mean_keep(wide, kept, count);
  return affine(sum_keep(centered * centered, kept), 1 / (count - static_cast<double>(correction)), 0);
}

/// Returns x^exponent for x >= 0 and exponent > 0. The gradient is 0 at x = 0.
Tensor power(const Tensor& x, double exponent) {
  const Tensor zero = eq(x, 0.0), safe = where(zero, 1.0, x);
  return where(zero, 0.0, exponent == 0.5 ? sqrt(safe) : pow(safe, exponent));
}

/// Returns the product along an axis, which keeps size 1. Multiplies the first half of the axis by the second half
/// until one element is left. No step divides, so gradients of any order are exact even if factors are 0.
Tensor product_along(Tensor x, int64_t axis) {
  if (x.shape()[axis] == 0) {
    Shape shape = x.shape();
    shape[axis] = 1;
    return affine(sum_keep(x, shape), 1, 1);
  }
  while (x.shape()[axis] > 1) {
    const int64_t length = x.shape()[axis], half = length / 2;
    const Tensor pairs = narrow(x, axis, 0, half) * narrow(x, axis, half, half);
    x = length % 2 ? cat({pairs, narrow(x, axis, length - 1, 1)}, axis) : pairs;
  }
  return x;
}

/// Returns the cumulative sums along an axis, from the last element to the first if `reverse`.
Tensor running_sums(const Tensor& x, int64_t axis, bool reverse) {
  const DType dtype = is_floating(x.dtype()) ? x.dtype() : i64;
  const Tensor out = empty(x.shape(), {dtype, x.device()}, x.suggest_memory_format());
  kernels(x.device()).cumsum(out.view_out(), x.view_in(), static_cast<int>(axis), reverse);
  return record("cumsum", out, {x},
                [axis, reverse](const Tensor& g) { return Tensors{running_sums(g, axis, !reverse)}; });
}

/// Computes log_softmax if `logarithm` is true, otherwise softmax.
Tensor softmax_along(const char* op, const Tensor& input, int64_t axis, bool logarithm) {
  const Tensor x = autocasted(op, input);
  check_floating(op, x);
  axis = normalize_axis(axis, x.dim(), op);
  if (x.dim() == 0) return squeeze(softmax_along(op, unsqueeze(x, 0), 0, logarithm), 0);
  const Tensor y = empty_like(x);
  kernels(x.device()).softmax(y.view_out(), x.view_in(), static_cast<int>(axis), logarithm);
  return record(op, y, {x}, [axis, logarithm](const Tensor& grad, const Tensor& output) {
    const Dims axes{axis};
    const Tensor g = widened(grad), out = widened(output);
    const Tensor dx = logarithm ? g - exp(out) * sum(g, axes, true) : out * (g - sum(g * out, axes, true));
    return Tensors{dx.to(grad.dtype())};
  });
}

}  // namespace

Tensor sum(const Tensor& x, const Axes& axes, bool keepdim) {
  const Shape kept = kept_shape("sum", x, axes);
  return drop_axes(sum_keep(autocasted("sum", x), kept), axes, keepdim);
}

Tensor mean(const Tensor& x, const Axes& axes, bool keepdim) {
  const Shape kept = kept_shape("mean", x, axes);
  check_floating("mean", x);
  return drop_axes(mean_keep(x, kept, reduced_count(x, kept)), axes, keepdim);
}

Tensor amax(const Tensor& x, const Axes& axes, bool keepdim) {
  return extremum(ReduceOp::max, "amax", x, axes, keepdim);
}
Tensor amin(const Tensor& x, const Axes& axes, bool keepdim) {
  return extremum(ReduceOp::min, "amin", x, axes, keepdim);
}

Tensor var(const Tensor& x, const Axes& axes, int64_t correction, bool keepdim) {
  return drop_axes(variance("var", x, axes, correction).to(x.dtype()), axes, keepdim);
}

Tensor std(const Tensor& x, const Axes& axes, int64_t correction, bool keepdim) {
  return drop_axes(power(variance("std", x, axes, correction), 0.5).to(x.dtype()), axes, keepdim);
}

Tensor prod(const Tensor& given, const Axes& axes, bool keepdim) {
  const Tensor x = autocasted("prod", given);
  const Shape kept = kept_shape("prod", x, axes);
  Tensor out = is_floating(x.dtype()) ? widened(x) : x.to(i64);
  for (int64_t axis = 0; axis < x.dim(); ++axis)
    if (kept[axis] != x.shape()[axis]) out = product_along(out, axis);
  return drop_axes(is_floating(x.dtype()) ? out.to(x.dtype()) : out, axes, keepdim);
}

Tensor norm(const Tensor& given, double p, const Axes& axes, bool keepdim) {
  const Tensor x = autocasted("norm", given);
  const Shape kept = kept_shape("norm", x, axes);
  check_floating("norm", x);
  check(p > 0, "norm", "p must be positive, got ", p);
  if (std::isinf(p)) return extremum(ReduceOp::max, "norm", abs(x), axes, keepdim);
  if (p == 1) return sum(abs(x), axes, keepdim);
  const Tensor wide = widened(x), terms = p == 2 ? wide * wide : power(abs(wide), p);
  return drop_axes(power(sum_keep(terms, kept), 1 / p).to(x.dtype()), axes, keepdim);
}

Tensor logsumexp(const Tensor& given, const Axes& axes, bool keepdim) {
  const Tensor x = autocasted("logsumexp", given);
  const Shape kept = kept_shape("logsumexp", x, axes);
  const Tensor wide = is_floating(x.dtype()) ? widened(x) : x.to(f32);
  const Tensor top = x.numel() == 0 ? zeros(kept, wide.options()) : reduce(ReduceOp::max, wide, kept);
  const Tensor shift = where(isfinite(top), top, 0.0);  // an infinite maximum needs no shift
  const Tensor out = log(sum_keep(exp(wide - shift), kept)) + shift;
  return drop_axes(is_half(x.dtype()) ? out.to(x.dtype()) : out, axes, keepdim);
}

Tensor cumsum(const Tensor& given, int64_t axis) {
  const Tensor x = autocasted("cumsum", given);
  check_defined("cumsum", "input", x);
  axis = normalize_axis(axis, x.dim(), "cumsum");
  return x.dim() > 0 ? running_sums(x, axis, false) : select(running_sums(unsqueeze(x, 0), 0, false), 0, 0);
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  check_defined("sum_to", "input", x);
  if (x.shape() == shape) return x;
  check(broadcast_shapes(x.shape(), shape, "sum_to") == x.shape(), "sum_to", "shape ", shape, " does not broadcast to ",
        x.shape());
  Shape kept = Dims::filled(x.dim(), 1);
  const int64_t lead = x.dim() - shape.size();
  for (int64_t i = 0; i < shape.size(); ++i) kept[lead + i] = shape[i];
  return reshape(sum_keep(x, kept), shape);
}

Tensor softmax(const Tensor& x, int64_t axis) { return softmax_along("softmax", x, axis, false); }
Tensor log_softmax(const Tensor& x, int64_t axis) { return softmax_along("log_softmax", x, axis, true); }

}  // namespace voxgrad
