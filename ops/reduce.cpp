#include "ops/reduce.h"

#include "core/autograd.h"
#include "ops/autocast.h"
#include "ops/checks.h"
#include "ops/elementwise.h"
#include "ops/halves.h"
#include "ops/kernels.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

/// x's shape with the reduced axes at size 1.
Shape kept_shape(const char* op, const Tensor& x, const Dims& axes) {
  check_defined(op, "input", x);
  if (axes.empty()) return Dims::filled(x.dim(), 1);
  Shape shape = x.shape();
  bool seen[kMaxRank] = {};
  for (int64_t given : axes) {
    const int64_t axis = normalize_axis(given, x.dim(), op);
    check(!seen[axis], op, "axes ", axes, " name an axis twice");
    seen[axis] = true;
    if (x.dim() > 0) shape[axis] = 1;
  }
  return shape;
}

/// Drops the reduced axes of a result that kept them.
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

Tensor sum_keep(const Tensor& x, const Shape& shape) {
  return record("sum", reduce(ReduceOp::sum, x, shape), {x},
                [from = x.shape()](const Tensor& g) { return Tensors{expand(g, from)}; });
}

/// sum_keep(x, shape) / count, rounded once.
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
    const Tensor share = widened(g);  // halves count no further than their few bits
    const Tensor hit = eq(x(), y.detach()).to(share.dtype());
    return Tensors{(hit * (share / sum_to(hit, kept))).to(g.dtype())};
  });
  return drop_axes(out, axes, keepdim);
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
  return extremum(ReduceOp::amax, "amax", x, axes, keepdim);
}
Tensor amin(const Tensor& x, const Axes& axes, bool keepdim) {
  return extremum(ReduceOp::amin, "amin", x, axes, keepdim);
}

Tensor var(const Tensor& x, const Axes& axes, int64_t correction, bool keepdim) {
  const Shape kept = kept_shape("var", x, axes);
  check_floating("var", x);
  const double count = reduced_count(x, kept);
  check(count > static_cast<double>(correction), "var", "needs more than ", correction, " elements to a group, got ",
        count, " from ", x.shape());
  const Tensor wide = widened(x), centered = wide - mean_keep(wide, kept, count);
  const Tensor squares = sum_keep(centered * centered, kept);
  const Tensor variance = affine(squares, 1 / (count - static_cast<double>(correction)), 0);
  return drop_axes(variance.to(x.dtype()), axes, keepdim);
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

}  // namespace voxgrad
