// Sampling at the positions of a grid. One kernel computes the result, and another kernel computes the gradients. The
// gradients cannot be differentiated again.
#include "ops/grid_sample.h"

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

constexpr const char* kOp = "grid_sample";

/// Computes grid_sample of volumes and records it.
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
    autograd::once_differentiable(kOp);
    const Tensor dx = needs_dx ? empty_volume(input, input.size(1), spatial_size(input), input.dtype()) : Tensor();
    const Tensor dgrid = needs_dgrid ? empty(positions.shape(), positions.options()) : Tensor();
    kernels(dy.device())
        .grid_sample_backward(OptionalView(dx, true), OptionalView(dgrid, true), dy.view_in(), input.view_in(),
                              positions.view_in(), how);
    return Tensors{dx, needs_dgrid ? dgrid : zero};
  });
}

void check_operands(const Tensor& x, const Tensor& grid) {
  check_floating(kOp, x);
  check_defined(kOp, "grid", grid);
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
  check_floating(op, theta, "theta");
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
