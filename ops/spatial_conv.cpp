// Convolutions of a volume that several ranks share in slabs. Each rank convolves its own slab while it receives the
// planes that it needs from its neighbors (halos). Since convolutions are linear, the rank then convolves each halo
// separately and adds the result to the planes that depend on the halo. This avoids a copy of the slab.
#include <algorithm>

#include "core/autograd.h"
#include "core/detail/divide.h"
#include "ops/create.h"
#include "ops/detail/conv_maps.h"
#include "ops/detail/halo.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

/// The halo of one side, and the planes of the result that depend on it.
struct Side {
  int64_t halo = 0;     // number of planes received from the neighbor
  int64_t start = 0;    // first plane of the result that depends on the halo
  int64_t planes = 0;   // number of these planes
  int64_t padding = 0;  // padding along D of the convolution from the halo to these planes
};

/// The convolution of a slab along D.
struct Axis {
  int64_t in;   // planes of the input slab
  int64_t out;  // planes of the result
  int64_t kernel, stride, padding, dilation;
};

// A product combines input plane i, output plane o and tap k if i + padding = o * stride + k * dilation
// (ops/detail/conv_geometry.h). If the planes of a halo are counted from its first plane, and the planes of the result
// from plane `start`, the formula remains valid with another padding. Therefore, the same kernels compute the
// contribution of a halo.

using Sides = std::array<Side, 2>;  // the sides of the previous and of the next rank

/// Returns the halos of a convolution.
Sides forward_sides(const Axis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (a.padding > 0) sides[0] = {a.padding, 0, divide_up(a.padding, a.stride), 0};
  if (const int64_t halo = reach - a.padding - a.stride + 1; halo > 0) {
    const int64_t start = divide_up(std::max<int64_t>(a.in + a.padding - reach, 0), a.stride);
    sides[1] = {halo, start, a.out - start, a.in + a.padding - start * a.stride};
  }
  return sides;
}

/// Returns the halos of a transposed convolution.
Sides transposed_sides(const Axis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (const int64_t halo = std::max<int64_t>(reach - a.padding, 0) / a.stride; halo > 0)
    sides[0] = {halo, 0, std::min(a.out, reach - a.padding - a.stride + 1), a.padding + halo * a.stride};
  if (a.padding > 0) {
    const int64_t start = std::max<int64_t>(a.out - a.padding, 0);
    sides[1] = {divide_up(a.padding, a.stride), start, a.out - start, a.padding + start - a.in * a.stride};
  }
  return sides;
}

void check_slab(const char* op, bool transposed, const Axis& a, const Sides& sides) {
  check(transposed ? a.out == a.in * a.stride : a.out * a.stride == a.in, op,
        "if ranks share a volume, a convolution must ", transposed ? "multiply" : "divide",
        " its depth by exactly the stride; a slab of ", a.in, " planes gives ", a.out, " with kernel_size ", a.kernel,
        ", stride ", a.stride, ", padding ", a.padding, ", dilation ", a.dilation, " along D");
  const int64_t halo = std::max(sides[0].halo, sides[1].halo);
  check(halo <= a.in, op, "reads ", halo, " planes of a neighboring slab, which has only ", a.in,
        "; share the volume among fewer ranks");
}

/// A convolution or transposed convolution of slabs.
struct SlabMap {
  bool transposed;
  ConvGeometry geometry;
  Sides sides;
  Triple x_size;  // spatial size of the input

  /// Returns the geometry of the convolution from a halo to the planes that depend on it.
  ConvGeometry geometry_of(const Side& side) const {
    ConvGeometry g = geometry;
    g.padding[0] = side.padding;
    return g;
  }
  static Triple with_depth(Triple size, int64_t depth) {
    size[0] = depth;
    return size;
  }
  static Tensor planes_of(const Tensor& result, const Side& side) { return narrow(result, 2, side.start, side.planes); }

  /// Returns the number of planes that this rank sends to the previous and the next rank.
  std::array<int64_t, 2> sent() const { return {sides[1].halo, sides[0].halo}; }

  /// Returns the gradient of the input slab, including the contributions of the neighbors' results. `halos`: the planes
  /// received in the forward pass; a halo is undefined if there is no neighbor.
  Tensor input_gradient(distributed::Communicator& group, const PlaneForm& form, const Tensor& grad, const Tensor& w,
                        const Planes& halos) const {
    Planes halo_gradients;
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        halo_gradients[i] =
            convolve(!transposed, planes_of(grad, side), w, {}, with_depth(x_size, side.halo), geometry_of(side));
    PlaneExchange exchange(group, form, halo_gradients, sent());
    const Tensor dx = convolve(!transposed, grad, w, {}, x_size, geometry);
    const Planes& added = exchange.wait();
    for (size_t i = 0; i < 2; ++i)
      if (added[i].defined()) narrow(dx, 2, i == 0 ? 0 : x_size[0] - sent()[1], sent()[i]).add_(added[i]);
    return dx;
  }
  /// Returns this rank's gradient of the weight, from its slab and halos.
  Tensor whole_weight_gradient(const Tensor& x, const Planes& halos, const Tensor& grad, const WeightForm& form) const {
    const Tensor dw = convolve_weight(transposed, x, grad, form, geometry);
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        dw.add_(convolve_weight(transposed, halos[i], planes_of(grad, side), form, geometry_of(side)));
    return dw;
  }
};

}  // namespace

Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     FusedEpilogue epilogue) {
  const Axis axis{x.size(2), size[0], weight.size(2), geometry.stride[0], geometry.padding[0], geometry.dilation[0]};
  const SlabMap map{transposed, geometry, transposed ? transposed_sides(axis) : forward_sides(axis), spatial_size(x)};
  check_slab(op, transposed, axis, map.sides);
  const auto sent = map.sent();
  if (sent[0] == 0 && sent[1] == 0) return convolve(transposed, x, weight, bias, size, geometry, epilogue);

  const PlaneForm form(x);
  Tensor y;
  Planes halos;
  {
    const NoGradGuard no_grad;
    PlaneExchange exchange(group, form,
                           {sent[0] > 0 ? narrow(x, 2, 0, sent[0]) : Tensor(),
                            sent[1] > 0 ? narrow(x, 2, axis.in - sent[1], sent[1]) : Tensor()},
                           {sent[1], sent[0]});
    y = convolve(transposed, x, weight, bias, size, geometry);
    halos = exchange.wait();
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = map.sides[i]; halos[i].defined())
        SlabMap::planes_of(y, side).add_(
            convolve(transposed, halos[i], weight, {}, SlabMap::with_depth(size, side.planes), map.geometry_of(side)));
    if (epilogue.relu) y.copy_(relu(y));
  }
  const bool dx = needs_gradient(x), dw = needs_gradient(weight), db = epilogue.bias_recorded && needs_gradient(bias);
  // A missing halo is saved as an empty tensor, so that all ranks save the same number of tensors.
  const auto kept = [&](const Tensor& halo) { return Saved(halo.defined() ? halo : empty({0}, form.options)); };
  return record(op, y, {x, weight, epilogue.bias_recorded ? bias : Tensor()},
                [=, &group, x_saved = saved_if(dw, x), w_saved = saved_if(dx, weight), front = kept(halos[0]),
                 back = kept(halos[1]), w_form = form_of(weight)](const Tensor& grad) {
                  autograd::once_differentiable(op);
                  Planes kept_halos{front(), back()};
                  for (Tensor& planes : kept_halos)
                    if (planes.dim() == 1) planes = {};
                  Tensors grads(3);
                  if (dx) grads[0] = map.input_gradient(group, form, grad, w_saved(), kept_halos);
                  if (dw) grads[1] = map.whole_weight_gradient(x_saved(), kept_halos, grad, w_form);
                  if (db) grads[2] = sum_over_voxels(grad);
                  return grads;
                });
}

}  // namespace voxgrad
