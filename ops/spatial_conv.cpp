// Convolutions of slabs. Most of a result needs this rank's planes alone: it is computed while the planes of the
// neighbours (halos) are on their way. Convolutions are linear: what a halo adds to the planes of the result that read
// it is a convolution of the halo alone, added to what is there. The input is not copied.
#include <algorithm>

#include "core/detail/divide.h"
#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/conv_maps.h"
#include "ops/detail/halo.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

/// The halo of one side, and the planes of the result that read it.
struct Side {
  int64_t halo = 0;               // planes of the neighbour
  int64_t start = 0, planes = 0;  // of the result
  int64_t padding = 0;            // along D of the convolution from the halo to these planes
};

struct Axis {
  int64_t in, out, kernel, stride, padding, dilation;  // along D
};

int64_t ceil_quotient(int64_t a, int64_t b) { return a <= 0 ? 0 : divide_up(a, b); }

// Position i of the volume and o of the strided side meet at tap k where i + padding = o * stride + k * dilation
// (ops/detail/conv_geometry.h). For a halo that begins at plane a, and planes of the result from b on, that is the same
// with another padding.

using Sides = std::array<Side, 2>;  // front and behind

/// The result is the strided side.
Sides forward_sides(const Axis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (a.padding > 0) sides[0] = {a.padding, 0, ceil_quotient(a.padding, a.stride), 0};
  if (const int64_t halo = reach - a.padding - a.stride + 1; halo > 0) {
    const int64_t start = ceil_quotient(a.in + a.padding - reach, a.stride);
    sides[1] = {halo, start, a.out - start, a.in + a.padding - start * a.stride};
  }
  return sides;
}

/// The input is the strided side.
Sides transposed_sides(const Axis& a) {
  const int64_t reach = a.dilation * (a.kernel - 1);
  Sides sides;
  if (const int64_t halo = std::max<int64_t>(reach - a.padding, 0) / a.stride; halo > 0)
    sides[0] = {halo, 0, std::min(a.out, reach - a.padding - a.stride + 1), a.padding + halo * a.stride};
  if (a.padding > 0) {
    const int64_t start = std::max<int64_t>(a.out - a.padding, 0);
    sides[1] = {ceil_quotient(a.padding, a.stride), start, a.out - start, a.padding + start - a.in * a.stride};
  }
  return sides;
}

void check_slab(const char* op, bool transposed, const Axis& a, const Sides& sides) {
  check(transposed ? a.out == a.in * a.stride : a.out * a.stride == a.in, op,
        "where ranks share a volume its depth must ", transposed ? "grow" : "shrink",
        " by the stride alone; a slab of ", a.in, " planes gives ", a.out, " with kernel_size ", a.kernel, ", stride ",
        a.stride, ", padding ", a.padding, ", dilation ", a.dilation, " along D");
  const int64_t halo = std::max(sides[0].halo, sides[1].halo);
  check(halo <= a.in, op, "reads ", halo, " planes of the next slab, which has only ", a.in,
        ": fewer ranks can share this volume");
}

/// A convolution of slabs: the map, and what its halos do.
struct SlabMap {
  bool transposed;
  ConvGeometry geometry;
  Sides sides;
  Triple x_size, size;  // of the input and of the result

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Triple& to, const ConvGeometry& g,
                 Behind behind = {}) const {
    return (transposed ? convolve_transposed : convolve)(x, w, bias, to, g, behind);
  }
  Tensor gradient(const Tensor& grad, const Tensor& w, const Triple& to, const ConvGeometry& g) const {
    return (transposed ? convolve : convolve_transposed)(grad, w, {}, to, g, {});
  }
  Tensor weight_gradient(const Tensor& x, const Tensor& grad, const WeightForm& form, const ConvGeometry& g) const {
    return transposed ? convolve_weight(grad, x, form, g) : convolve_weight(x, grad, form, g);
  }

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

  /// How many planes of a neighbour this rank reads, and how many of its own it gives, in front and behind.
  std::array<int64_t, 2> wanted() const { return {sides[0].halo, sides[1].halo}; }
  std::array<int64_t, 2> given() const { return {sides[1].halo, sides[0].halo}; }

  /// Of the slab, with what the neighbours' results contribute. Halos that are undefined came from nobody.
  Tensor input_gradient(distributed::Communicator& group, const PlaneForm& form, const Tensor& grad, const Tensor& w,
                        const Planes& halos) const {
    Planes of_halos;
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        of_halos[i] = gradient(planes_of(grad, side), w, with_depth(x_size, side.halo), geometry_of(side));
    PlaneExchange exchange(group, form, of_halos, given());
    const Tensor dx = gradient(grad, w, x_size, geometry);
    const Planes& added = exchange.wait();
    for (size_t i = 0; i < 2; ++i)
      if (added[i].defined()) narrow(dx, 2, i == 0 ? 0 : x_size[0] - given()[1], given()[i]).add_(added[i]);
    return dx;
  }
  /// From the slab and its halos.
  Tensor whole_weight_gradient(const Tensor& x, const Planes& halos, const Tensor& grad, const WeightForm& form) const {
    const Tensor dw = weight_gradient(x, grad, form, geometry);
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        dw.add_(weight_gradient(halos[i], planes_of(grad, side), form, geometry_of(side)));
    return dw;
  }
};

}  // namespace

Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     Behind behind) {
  const Axis axis{x.size(2), size[0], weight.size(2), geometry.stride[0], geometry.padding[0], geometry.dilation[0]};
  const SlabMap map{transposed, geometry, transposed ? transposed_sides(axis) : forward_sides(axis), spatial_size(x),
                    size};
  check_slab(op, transposed, axis, map.sides);
  const auto wanted = map.wanted(), given = map.given();
  if (wanted[0] == 0 && wanted[1] == 0) return map.forward(x, weight, bias, size, geometry, behind);

  const PlaneForm form(x);
  Tensor y;
  Planes halos;
  {
    const NoGradGuard no_grad;
    PlaneExchange exchange(group, form,
                           {given[0] > 0 ? narrow(x, 2, 0, given[0]) : Tensor(),
                            given[1] > 0 ? narrow(x, 2, axis.in - given[1], given[1]) : Tensor()},
                           wanted);
    y = map.forward(x, weight, bias, size, geometry);
    halos = exchange.wait();
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = map.sides[i]; halos[i].defined())
        SlabMap::planes_of(y, side).add_(
            map.forward(halos[i], weight, {}, SlabMap::with_depth(size, side.planes), map.geometry_of(side)));
    if (behind.relu) y.copy_(relu(y));
  }
  const bool dx = wants_grad(x), dw = wants_grad(weight), db = behind.bias_recorded && wants_grad(bias);
  // All ranks save as many tensors, so that a recomputation saves them at the same place.
  const auto kept = [&](const Tensor& halo) { return Saved(halo.defined() ? halo : empty({0}, form.options)); };
  return record(op, y, {x, weight, behind.bias_recorded ? bias : Tensor()},
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
