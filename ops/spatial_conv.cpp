// Convolutions of a volume that several ranks share. Each rank has a slab: consecutive planes of the volume along D. A
// rank convolves its own slab while it receives a halo from each neighboring rank: the planes of the neighbor's slab on
// which the result of the receiving rank depends. Since convolutions are linear, the rank then convolves each halo
// separately and adds the result to the planes that depend on the halo. This avoids a copy of the slab.
#include <algorithm>

#include "core/autograd.h"
#include "core/detail/divide.h"
#include "ops/create.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/conv_maps.h"
#include "ops/detail/halo.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

/// The halo on one side of a slab, and the planes of the result that depend on the halo.
struct Side {
  int64_t halo = 0;     // number of planes received from the neighbor
  int64_t start = 0;    // first plane of the result that depends on the halo
  int64_t planes = 0;   // number of planes of the result that depend on the halo
  int64_t padding = 0;  // padding along D of the convolution that computes these planes from the halo
};

// A product combines input plane i, output plane o and tap k if i + padding = o * stride + k * dilation
// (ops/detail/conv_geometry.h). If the planes of a halo are counted from its first plane, and the planes of the result
// from plane `start`, the formula remains valid with a different padding (Side::padding). Therefore, the same kernels
// compute the contribution of a halo.

using Sides = std::array<Side, 2>;  // the sides of the previous and of the next rank

/// Returns the halos that a convolution along the axis `a` needs.
Sides forward_sides(const ConvAxis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (a.padding > 0) sides[0] = {a.padding, 0, divide_up(a.padding, a.stride), 0};
  if (const int64_t halo = reach - a.padding - a.stride + 1; halo > 0) {
    const int64_t start = divide_up(std::max<int64_t>(a.x_size + a.padding - reach, 0), a.stride);
    sides[1] = {halo, start, a.y_size - start, a.x_size + a.padding - start * a.stride};
  }
  return sides;
}

/// Returns the halos that a transposed convolution along the axis `a` needs.
Sides transposed_sides(const ConvAxis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (const int64_t halo = std::max<int64_t>(reach - a.padding, 0) / a.stride; halo > 0)
    sides[0] = {halo, 0, std::min(a.x_size, reach - a.padding - a.stride + 1), a.padding + halo * a.stride};
  if (a.padding > 0) {
    const int64_t start = std::max<int64_t>(a.x_size - a.padding, 0);
    sides[1] = {divide_up(a.padding, a.stride), start, a.x_size - start, a.padding + start - a.y_size * a.stride};
  }
  return sides;
}

void check_slab(const char* op, bool transposed, const ConvAxis& a, const Sides& sides) {
  const int64_t in = transposed ? a.y_size : a.x_size, out = transposed ? a.x_size : a.y_size;
  check(a.x_size == a.y_size * a.stride, op, "if ranks share a volume, a convolution must ",
        transposed ? "multiply" : "divide", " its depth by exactly the stride; a slab of depth ", in, " gives depth ",
        out, " with kernel_size ", a.kernel, ", stride ", a.stride, ", padding ", a.padding, ", dilation ", a.dilation,
        " along D");
  const int64_t halo = std::max(sides[0].halo, sides[1].halo);
  check(halo <= in, op, "the result depends on a halo of depth ", halo, ", but the neighboring slab has depth ", in,
        "; share the volume among fewer ranks");
}

/// Returns the geometry of the convolution that computes the planes of the result from a halo.
ConvGeometry geometry_of(const Side& side, ConvGeometry geometry) {
  geometry.padding[0] = side.padding;
  return geometry;
}
/// Returns the planes of the result that depend on a halo.
Tensor planes_of(const Tensor& result, const Side& side) { return narrow(result, 2, side.start, side.planes); }

}  // namespace

Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     FusedEpilogue epilogue) {
  ConvAxis axis{x.size(2), size[0], weight.size(2), geometry.stride[0], geometry.padding[0], geometry.dilation[0]};
  if (transposed) std::swap(axis.x_size, axis.y_size);
  const Sides sides = transposed ? transposed_sides(axis) : forward_sides(axis);
  check_slab(op, transposed, axis, sides);
  const int64_t front = sides[0].halo, back = sides[1].halo;  // planes received from the previous and the next rank
  if (front == 0 && back == 0) return convolve(transposed, x, weight, bias, size, geometry, epilogue);

  const PlaneForm form(x);
  Tensor y;
  Planes halos;
  {
    const NoGradGuard no_grad;
    PlaneExchange exchange(
        group, form,
        {back > 0 ? narrow(x, 2, 0, back) : Tensor(), front > 0 ? narrow(x, 2, x.size(2) - front, front) : Tensor()},
        {front, back});
    y = convolve(transposed, x, weight, bias, size, geometry);
    halos = exchange.wait();
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        planes_of(y, side).add_(
            convolve(transposed, halos[i], weight, {}, {side.planes, size[1], size[2]}, geometry_of(side, geometry)));
    if (epilogue.relu) y.copy_(relu(y));
  }
  const bool dx = needs_gradient(x), dw = needs_gradient(weight), db = epilogue.bias_recorded && needs_gradient(bias);
  // A missing halo is saved as an empty tensor, so that all ranks save the same number of tensors.
  const auto kept = [&](const Tensor& halo) { return Saved(halo.defined() ? halo : empty({0}, form.options)); };
  return record(op, y, {x, weight, epilogue.bias_recorded ? bias : Tensor()},
                [=, &group, x_saved = saved_if(dw, x), w_saved = saved_if(dx, weight), front_saved = kept(halos[0]),
                 back_saved = kept(halos[1]), x_size = spatial_size(x), w_form = form_of(weight)](const Tensor& grad) {
                  autograd::once_differentiable(op);
                  const Planes planes{front_saved(), back_saved()};
                  Tensors grads(3);
                  // The gradient of the input is a convolution in the other direction, which exchanges planes of
                  // `grad`.
                  if (dx) grads[0] = convolve_slab(op, group, !transposed, grad, w_saved(), {}, x_size, geometry, {});
                  if (dw) grads[1] = convolve_weight(transposed, x_saved(), grad, w_form, geometry);
                  for (size_t i = 0; i < 2; ++i)
                    if (const Side& side = sides[i]; dw && planes[i].dim() == 5)
                      grads[1].add_(convolve_weight(transposed, planes[i], planes_of(grad, side), w_form,
                                                    geometry_of(side, geometry)));
                  if (db) grads[2] = sum_over_voxels(grad);
                  return grads;
                });
}

}  // namespace voxgrad
