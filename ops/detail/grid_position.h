// The voxels and weights that grid_sample reads for one position of the grid. Used by the CPU and CUDA kernels.
#pragma once

#include <cmath>

#include "../grid_sample.h"
#include "kernels.h"

namespace voxgrad {

/// A position along one axis, between the voxels `index` and index + 1.
template <class C>
struct GridPosition {
  int64_t index;
  C fraction;  // distance from voxel `index`, in [0, 1); 0 for nearest sampling
  C slope;     // derivative of the position with respect to the grid coordinate
};

/// Reflects a position at both ends of the interval [low, low + span] until it is inside. Adjusts the sign of `slope`.
template <class C>
VG_HOST_DEVICE C reflect(C at, C low, C span, C& slope) {
  if (span <= 0) {
    slope = 0;
    return low > 0 ? low : 0;
  }
  at -= low;
  if (at < 0) {
    at = -at;
    slope = -slope;
  }
  at -= 2 * span * std::floor(at / (2 * span));
  if (at <= span) return at + low;
  slope = -slope;
  return 2 * span - at + low;
}

/// Converts the grid coordinate `g` to a position on an axis with `n` voxels. With align_corners, -1 and 1 are the
/// centers of the outermost voxels; otherwise, they are the outer edges of these voxels.
template <class C>
VG_HOST_DEVICE GridPosition<C> grid_position(C g, int64_t n, const GridSampleOptions& how) {
  const C size = static_cast<C>(n), last = size - 1;
  C slope = how.align_corners ? last / 2 : size / 2;
  C at = how.align_corners ? (g + 1) * slope : ((g + 1) * size - 1) / 2;
  if (how.padding_mode == GridSampleOptions::Padding::reflection)
    at = how.align_corners ? reflect(at, C(0), last, slope) : reflect(at, C(-0.5), size, slope);
  if (how.padding_mode != GridSampleOptions::Padding::zeros) {
    if (!(at > 0 && at < last)) slope = 0;
    at = at > 0 ? at : 0;  // NaN becomes 0
    at = at < last ? at : last;
  }
  // Clamp to positions just outside of the axis, where all voxels count as zero, so that the index does not overflow.
  // NaN also becomes a position outside of the axis.
  at = at > -2 ? at : -2;
  at = at < size + 1 ? at : size + 1;
  if (how.nearest) return {static_cast<int64_t>(std::nearbyint(at)), 0, 0};
  const C below = std::floor(at);
  return {static_cast<int64_t>(below), at - below, slope};
}

/// Returns the offset of a voxel from the first voxel of its channel.
VG_HOST_DEVICE inline int64_t voxel_offset(const View& x, const int64_t (&voxel)[3]) {
  return voxel[0] * x.stride[2] + voxel[1] * x.stride[3] + voxel[2] * x.stride[4];
}

/// The voxels, at most eight, that are read for one position (x, y, z) of the grid.
template <class C>
struct GridCorners {
  GridPosition<C> axis[3];  // depth, height, width
  int64_t size[3];
  bool linear;

  VG_HOST_DEVICE GridCorners(const C* grid, int64_t step, const View& x, const GridSampleOptions& how)
      : linear(!how.nearest) {
    for (int i = 0; i < 3; ++i) {
      size[i] = x.size[i + 2];
      axis[i] = grid_position(grid[(2 - i) * step], size[i], how);
    }
  }
  /// Calls f(voxel, weight, change) for each voxel inside of the volume. change[i] is the derivative of the weight with
  /// respect to grid coordinate i.
  template <class F>
  VG_HOST_DEVICE void each(F f) const {
    const int ends = linear ? 2 : 1;
    for (int d = 0; d < ends; ++d)
      for (int h = 0; h < ends; ++h)
        for (int w = 0; w < ends; ++w) {
          const int end[3] = {d, h, w};
          int64_t voxel[3];
          C part[3];
          bool inside = true;
          for (int i = 0; i < 3; ++i) {
            voxel[i] = axis[i].index + end[i];
            inside = inside && voxel[i] >= 0 && voxel[i] < size[i];
            part[i] = end[i] ? axis[i].fraction : 1 - axis[i].fraction;
          }
          if (!inside) continue;
          const C change[3] = {part[0] * part[1] * (w ? axis[2].slope : -axis[2].slope),
                               part[0] * part[2] * (h ? axis[1].slope : -axis[1].slope),
                               part[1] * part[2] * (d ? axis[0].slope : -axis[0].slope)};
          f(voxel, part[0] * part[1] * part[2], change);
        }
  }
  /// Computes the gradient of the position (x, y, z) from the gradients dy[0], dy[step], ... of all channels of the
  /// result. `sample` points to the first voxel of the sample in x.
  template <class T>
  VG_HOST_DEVICE void gradient(C* out, const View& x, const T* sample, const T* dy, int64_t step) const {
    C sum[3] = {};
    each([&](const int64_t(&voxel)[3], C, const C(&change)[3]) {
      const T* from = sample + voxel_offset(x, voxel);
      C product = 0;
      for (int64_t c = 0; c < x.size[1]; ++c)
        product += static_cast<C>(from[c * x.stride[1]]) * static_cast<C>(dy[c * step]);
      for (int i = 0; i < 3; ++i) sum[i] += change[i] * product;
    });
    for (int i = 0; i < 3; ++i) out[i] = sum[i];
  }
};

}  // namespace voxgrad
