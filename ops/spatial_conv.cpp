// Convolutions of slabs. Most of a result needs this rank's planes alone: it is computed while the planes of the
// neighbours (halos) are on their way. Convolutions are linear: what a halo adds to the planes of the result that read
// it is a convolution of the halo alone, added to what is there. The input is not copied.
#include <algorithm>

#include "core/autograd.h"
#include "ops/conv_maps.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/halo.h"

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

int64_t ceil_quotient(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// Position i of the volume and o of the strided side meet at tap k where i + padding = o * stride + k * dilation
// (ops/conv_geometry.h). For a halo that begins at plane a, and planes of the result from b on, that is the same with
// another padding.

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
};

}  // namespace

Tensor convolve_slab(const char* op, parallel::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     Behind behind) {
  const Axis axis{x.size(2), size[0], weight.size(2), geometry.stride[0], geometry.padding[0], geometry.dilation[0]};
  const SlabMap map{transposed, geometry, transposed ? transposed_sides(axis) : forward_sides(axis), spatial_size(x),
                    size};
  check_slab(op, transposed, axis, map.sides);
  const std::array<int64_t, 2> wanted{map.sides[0].halo, map.sides[1].halo}, given{wanted[1], wanted[0]};
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
  // All ranks save as many tensors, so that a checkpoint computes them again at the same place.
  const auto kept = [&](const Tensor& halo) { return Saved(halo.defined() ? halo : empty({0}, form.options)); };
  return record(op, y, {x, weight, behind.bias_recorded ? bias : Tensor()},
                [=, &group, x_saved = saved_if(dw, x), w_saved = saved_if(dx, weight), front = kept(halos[0]),
                 back = kept(halos[1]), w_form = form_of(weight)](const Tensor& grad) {
                  autograd::once_differentiable(op);
                  Planes halo{front(), back()}, halo_grads;
                  for (Tensor& planes : halo)
                    if (planes.dim() == 1) planes = {};
                  Tensors grads(3);
                  if (dx) {
                    const Tensor& w = w_saved();
                    for (size_t i = 0; i < 2; ++i)
                      if (const Side& side = map.sides[i]; halo[i].defined())
                        halo_grads[i] = map.gradient(SlabMap::planes_of(grad, side), w,
                                                     SlabMap::with_depth(map.x_size, side.halo), map.geometry_of(side));
                    PlaneExchange exchange(group, form, halo_grads, given);
                    grads[0] = map.gradient(grad, w, map.x_size, map.geometry);
                    const Planes& added = exchange.wait();
                    for (size_t i = 0; i < 2; ++i)
                      if (added[i].defined())
                        narrow(grads[0], 2, i == 0 ? 0 : map.x_size[0] - given[1], given[i]).add_(added[i]);
                  }
                  if (dw) {
                    grads[1] = map.weight_gradient(x_saved(), grad, w_form, map.geometry);
                    for (size_t i = 0; i < 2; ++i)
                      if (const Side& side = map.sides[i]; halo[i].defined())
                        grads[1].add_(map.weight_gradient(halo[i], SlabMap::planes_of(grad, side), w_form,
                                                          map.geometry_of(side)));
                  }
                  if (db) grads[2] = sum_over_voxels(grad);
                  return grads;
                });
}

}  // namespace voxgrad
