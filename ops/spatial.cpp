// Volumes that several ranks share: sums over the ranks, the functions of SpatialParallel, and convolutions.
//
// Each rank has a slab: consecutive planes of the volume along D. For a convolution, a rank convolves its own slab
// while it receives a halo from each neighboring rank: the planes of the neighbor's slab on which the result of the
// receiving rank depends. Since convolutions are linear, the rank then convolves each halo separately and adds the
// result to the planes that depend on the halo. This avoids a copy of the slab.
#include "ops/spatial.h"

#include <algorithm>
#include <array>

#include "core/detail/divide.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/unrecorded.h"

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

using Sides = std::array<Side, 2>;     // the sides of the previous and of the next rank
using Planes = std::array<Tensor, 2>;  // planes (N, C, planes, H, W) of the previous and of the next rank

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

/// Starts to send planes of the slab x to the neighboring ranks, and to receive their halos. Sets `halos`; the halo of
/// a rank that does not exist or sends no planes stays undefined.
std::unique_ptr<distributed::Work> exchange_halos(distributed::Communicator& group, const Tensor& x, const Sides& sides,
                                                  Planes& halos) {
  const MemoryFormat format = x.suggest_memory_format();
  std::vector<distributed::Message> sends, receives;
  for (size_t i = 0; i < 2; ++i) {
    const int peer = group.rank() + (i == 0 ? -1 : 1);
    if (peer < 0 || peer >= group.size()) continue;
    const int64_t sent = sides[1 - i].halo, received = sides[i].halo;
    if (sent > 0) {
      const Tensor planes = narrow(x, 2, i == 0 ? 0 : x.size(2) - sent, sent);
      sends.push_back({planes.detach().contiguous(format), peer});
    }
    if (received == 0) continue;
    Shape shape = x.shape();
    shape[2] = received;
    halos[i] = empty(shape, x.options(), format);
    receives.push_back({halos[i], peer});
  }
  return group.send_receive_async(sends, receives, x.shape());
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
  if (sides[0].halo == 0 && sides[1].halo == 0) return convolve(transposed, x, weight, bias, size, geometry, epilogue);

  Tensor y;
  Planes halos;
  {
    const NoGradGuard no_grad;
    const auto exchange = exchange_halos(group, x, sides, halos);
    y = convolve(transposed, x, weight, bias, size, geometry);
    exchange->wait();
    for (size_t i = 0; i < 2; ++i)
      if (const Side& side = sides[i]; halos[i].defined())
        planes_of(y, side).add_(
            convolve(transposed, halos[i], weight, {}, {side.planes, size[1], size[2]}, geometry_of(side, geometry)));
    if (epilogue.relu) y.copy_(relu(y));
  }
  const bool dx = needs_gradient(x), dw = needs_gradient(weight), db = epilogue.bias_recorded && needs_gradient(bias);
  // A missing halo is saved as an empty tensor, so that all ranks save the same number of tensors.
  const auto kept = [&](const Tensor& halo) { return Saved(halo.defined() ? halo : empty({0}, x.options())); };
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
                  if (db) grads[2] = sum(grad, all_but_channels(grad));
                  return grads;
                });
}

Tensor sum_over_ranks(const Tensor& t, distributed::Communicator& group) {
  const Tensor total = t.detach().clone();
  group.all_reduce(total);
  return record("all_reduce", total, {t},
                [&group](const Tensor& grad) { return Tensors{sum_over_ranks(grad, group)}; });
}

namespace distributed {

Tensor SpatialParallel::slab(const Tensor& whole) const {
  constexpr const char* kOp = "SpatialParallel::slab";
  check(whole.defined() && whole.dim() >= 3, kOp, "the volume must be (..., D, H, W)");
  const int64_t axis = whole.dim() - 3, depth = whole.size(axis), ranks = group_.size();
  check(depth % ranks == 0, kOp, "the ", depth, depth == 1 ? " plane of " : " planes of ", describe(whole),
        " cannot be divided equally among ", ranks, " ranks");
  return narrow(whole, axis, group_.rank() * depth / ranks, depth / ranks).contiguous(whole.suggest_memory_format());
}

Tensor SpatialParallel::gather(const Tensor& slab) const {
  constexpr const char* kOp = "SpatialParallel::gather";
  check(slab.defined() && slab.dim() >= 3, kOp, "the slab must be (..., D, H, W)");
  const NoGradGuard no_grad;
  const Tensor all = group_.all_gather(slab);
  Tensors slabs;
  for (int64_t rank = 0; rank < group_.size(); ++rank) slabs.push_back(select(all, 0, rank));
  return cat(slabs, slab.dim() - 3).contiguous(slab.suggest_memory_format());
}

}  // namespace distributed
}  // namespace voxgrad
