// Sampling at the positions of a grid. One kernel computes the result and one the gradients. If the gradients are
// differentiated again, they are computed from a composition of differentiable operators instead.
#include "ops/grid_sample.h"

#include <algorithm>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/checks.h"
#include "ops/detail/halo.h"
#include "ops/detail/halves.h"
#include "ops/detail/volume.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

constexpr const char* kOp = "grid_sample";

/// Converts grid coordinates to positions on an axis with n voxels, like grid_position() in ops/detail/grid_position.h.
Tensor composed_position(const Tensor& g, int64_t n, const GridSampleOptions& how) {
  const auto size = static_cast<double>(n), last = size - 1;
  Tensor at = how.align_corners ? affine(g, last / 2, last / 2) : affine(g, size / 2, last / 2);
  if (how.padding_mode == GridSampleOptions::Padding::reflection) {
    const double low = how.align_corners ? 0 : -0.5, span = how.align_corners ? last : size;
    if (span > 0) {
      at = abs(at - low);
      const Tensor periods = affine(at.detach(), 0.5 / span, 0).to(i64);
      at = affine(abs(at - periods.to(at.dtype()) * (2 * span) - span), -1, span) + low;
    }
  }
  if (how.padding_mode != GridSampleOptions::Padding::zeros) at = clamp(at, 0, last);
  return clamp(at, -2, size + 1);
}

/// One of the two neighboring voxels of each position along an axis.
struct ComposedEnd {
  Tensor index;   // index of the voxel, clamped to the axis
  Tensor weight;  // weight of the voxel, 0 if it is outside of the axis
};

/// Returns the lower (end = 0) or upper (end = 1) neighbors of the positions `at`, or the nearest voxels if not linear.
ComposedEnd composed_end(const Tensor& at, int64_t n, bool linear, int end) {
  constexpr double kRound = 0x1.8p52;  // x + kRound - kRound rounds a double x to the nearest integer, ties to even
  const Tensor below = linear ? affine(at.detach(), 1, 2).to(i64) - 2 : (at.detach().to(f64) + kRound - kRound).to(i64);
  const Tensor index = below + end, fraction = at - below.to(at.dtype());
  const Tensor weight = !linear ? ones_like(at) : end ? fraction : affine(fraction, -1, 1);
  const Tensor inside = ge(index, 0) * lt(index, n);
  return {clamp(index, 0, static_cast<double>(n - 1)), weight * inside.to(at.dtype())};
}

/// Computes grid_sample of volumes with operators that can be differentiated any number of times.
Tensor composed_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& how) {
  const Triple size = spatial_size(x);
  const int ends = !how.nearest ? 2 : 1;
  const int64_t positions = grid.size(1) * grid.size(2) * grid.size(3);
  ComposedEnd along[3][2];
  for (int i = 0; i < 3; ++i)
    for (int end = 0; end < ends; ++end) {
      const Tensor g = reshape(select(grid, 4, 2 - i), {x.size(0), 1, positions});
      along[i][end] = composed_end(composed_position(g, size[i], how), size[i], !how.nearest, end);
    }
  Tensor sum;
  for (int corner = 0; corner < 8; ++corner) {
    const int d = corner / 4, h = corner / 2 % 2, w = corner % 2;
    if (std::max({d, h, w}) >= ends) continue;
    const ComposedEnd &ed = along[0][d], &eh = along[1][h], &ew = along[2][w];
    const Tensor index = (ed.index * size[1] + eh.index) * size[2] + ew.index;
    const Tensor read = gather(flatten(x, 2), 2, expand(index, {x.size(0), x.size(1), positions}));
    const Tensor term = read.to(grid.dtype()) * (ed.weight * eh.weight * ew.weight);
    sum = sum.defined() ? sum + term : term;
  }
  return reshape(sum.to(x.dtype()), {x.size(0), x.size(1), grid.size(1), grid.size(2), grid.size(3)});
}

/// Computes grid_sample of volumes with kernels, and records it.
Tensor sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& how) {
  const Tensor y = empty_volume(x, x.size(1), {grid.size(1), grid.size(2), grid.size(3)}, x.dtype());
  kernels(x.device()).grid_sample(y.view_out(), x.view_in(), grid.view_in(), how);
  const bool needs_dx = needs_gradient(x);
  const bool needs_dgrid = needs_gradient(grid) && !how.nearest;
  const bool is_constant = needs_gradient(grid) && how.nearest;
  return record(kOp, y, {x, grid}, [=, x_saved = Saved(x), grid_saved = Saved(grid)](const Tensor& dy) {
    const Tensor &input = x_saved(), &positions = grid_saved();
    // With nearest sampling, the gradient of the grid is 0, because a small step does not change the nearest voxel.
    const Tensor zero = is_constant ? zeros_like(positions) : Tensor();
    if (!needs_dx && !needs_dgrid) return Tensors{Tensor(), zero};
    if (grad_enabled()) {
      // Differentiate with respect to aliases: if one operand was computed from the other, grad() with the operands
      // themselves would also follow that dependence.
      const auto alias = [](const Tensor& t) {
        return record("alias", t.detach(), {t}, [](const Tensor& g) { return Tensors{g}; });
      };
      const Tensor input_alias = alias(input), positions_alias = alias(positions);
      Tensors leaves;
      if (needs_dx) leaves.push_back(input_alias);
      if (needs_dgrid) leaves.push_back(positions_alias);
      const Tensor composed = composed_sample(input_alias, positions_alias, how);
      const Tensors grads = grad({composed}, leaves, {dy}, false, true, true);
      return Tensors{needs_dx ? grads.front() : Tensor(), needs_dgrid ? grads.back() : zero};
    }
    const Tensor dx = needs_dx ? empty_volume(input, input.size(1), spatial_size(input), input.dtype()) : Tensor();
    const Tensor dgrid = needs_dgrid ? empty(positions.shape(), positions.options()) : Tensor();
    const auto dx_view = dx.defined() ? std::optional(dx.view_out()) : std::nullopt;
    const auto dgrid_view = dgrid.defined() ? std::optional(dgrid.view_out()) : std::nullopt;
    kernels(dy.device())
        .grid_sample_backward(pointer(dx_view), pointer(dgrid_view), dy.view_in(), input.view_in(), positions.view_in(),
                              how);
    return Tensors{dx, needs_dgrid ? dgrid : zero};
  });
}

void check_operands(const Tensor& x, const Tensor& grid) {
  check_defined(kOp, "input", x);
  check_defined(kOp, "grid", grid);
  check_floating(kOp, x);
  const Operand input{"input", x}, positions{"grid", grid};
  check((x.dim() == 4 || x.dim() == 5) && grid.dim() == x.dim(), kOp,
        "requires input (N, C, D, H, W) and grid (N, D', H', W', 3), or (N, C, H, W) and (N, H', W', 2), got ", input,
        " and ", positions);
  check(grid.size(0) == x.size(0) && grid.size(-1) == x.dim() - 2, kOp, "grid must be (", x.size(0), ", ..., ",
        x.dim() - 2, ") for ", input, ", got ", positions);
  check_same_device(kOp, input, positions);
  check(grid.dtype() == x.dtype() || (x.dtype() != f64 && grid.dtype() != f64 && is_floating(grid.dtype())), kOp,
        "dtypes differ: ", input, " and ", positions);
  for (int64_t i = 1; i < x.dim(); ++i)
    check(x.size(i) > 0, kOp, "input has an empty axis other than the batch: ", x.shape());
}

}  // namespace

Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options) {
  check_operands(x, grid);
  Tensor positions = widened(grid);
  check_within_slab(kOp, x.dim() == 4);
  if (x.dim() == 5) return sample(x, positions, options);
  // Treat an image as a volume of depth 1, and sample it at z = 0.
  positions = unsqueeze(positions, 1);
  Shape plane = positions.shape();
  plane[4] = 1;
  return squeeze(sample(unsqueeze(x, 2), cat({positions, zeros(plane, positions.options())}, 4), options), 2);
}

Tensor affine_grid(const Tensor& theta, const Shape& size, bool align_corners) {
  constexpr const char* op = "affine_grid";
  check_defined(op, "theta", theta);
  check_floating(op, theta);
  const int64_t axes = size.size() - 2;
  check((axes == 2 || axes == 3) && theta.shape() == Shape{size[0], axes, axes + 1}, op,
        "requires theta (N, 3, 4) and size (N, C, D, H, W), or (N, 2, 3) and (N, C, H, W), got ", describe(theta),
        " and ", size);
  for (int64_t i = 1; i < size.size(); ++i)
    check(size[i] > 0, op, "size has an empty axis other than the batch: ", size);
  const TensorOptions kind{widened(theta.dtype()), theta.device()};
  // Returns column i of theta in a shape that broadcasts over the grid.
  const auto column = [&](int64_t i) {
    Shape shape = Dims::filled(axes + 2, 1);
    shape[0] = size[0];
    shape[axes + 1] = axes;
    return reshape(select(theta.to(kind.dtype), 2, i), shape);
  };
  Tensor grid = column(axes);
  for (int64_t i = 0; i < axes; ++i) {  // in the order x, y, z, so that the first sums are small tensors
    const int64_t n = size[size.size() - 1 - i];
    const double end = align_corners ? n > 1 : 1 - 1 / static_cast<double>(n);
    Shape shape = Dims::filled(axes + 2, 1);
    shape[axes - i] = n;
    const Tensor along = n > 1 ? linspace(-end, end, n, kind) : zeros({1}, kind);
    grid = grid + column(i) * reshape(along, shape);
  }
  return grid.to(theta.dtype());
}

}  // namespace voxgrad
