// Reading volumes at the positions of a grid, and the gradients.
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/grid_position.h"

namespace voxgrad::cpu {
namespace {

/// A position of a grid (N, D, H, W, 3).
struct Place {
  int64_t n, d, h, w;

  int64_t in_grid(const View& grid) const {
    return n * grid.stride[0] + d * grid.stride[1] + h * grid.stride[2] + w * grid.stride[3];
  }
  /// In channel 0 of (N, C, D, H, W).
  int64_t in_volume(const View& y) const { return n * y.stride[0] + voxel_offset(y, {d, h, w}); }
};

/// Calls f(place) for the positions of sample n from `begin` to `end`, in order.
template <class F>
void each_place(const View& grid, int64_t n, int64_t begin, int64_t end, F f) {
  const int64_t height = grid.size[2], width = grid.size[3];
  for (int64_t i = begin; i < end; ++i) f(Place{n, i / width / height, i / width % height, i % width});
}

template <class T, class C = compute_t<T>>
void sample(const View& y, const View& x, const Place& place, const GridCorners<C>& corners) {
  for (int64_t c = 0; c < x.size[1]; ++c) {
    C sum = 0;
    corners.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      sum += weight * static_cast<C>(x.as<const T>()[place.n * x.stride[0] + c * x.stride[1] + voxel_offset(x, voxel)]);
    });
    y.as<T>()[place.in_volume(y) + c * y.stride[1]] = convert<T>(sum);
  }
}

template <class T, class C = compute_t<T>>
void backward_grid(const View& dgrid, const View& dy, const View& x, const Place& place,
                   const GridCorners<C>& corners) {
  C sums[3] = {};
  corners.each([&](const int64_t(&voxel)[3], C, const C(&change)[3]) {
    const T* from = x.as<const T>() + place.n * x.stride[0] + voxel_offset(x, voxel);
    const T* g = dy.as<const T>() + place.in_volume(dy);
    C product = 0;
    for (int64_t c = 0; c < x.size[1]; ++c)
      product += static_cast<C>(from[c * x.stride[1]]) * static_cast<C>(g[c * dy.stride[1]]);
    for (int i = 0; i < 3; ++i) sums[i] += change[i] * product;
  });
  for (int i = 0; i < 3; ++i) dgrid.as<C>()[place.in_grid(dgrid) + i * dgrid.stride[4]] = sums[i];
}

/// Of one channel; `sums` has a place for each voxel.
template <class T, class C = compute_t<T>>
void backward_input(const View& dx, const View& dy, const View& grid, const GridSample& how, int64_t n, int64_t c,
                    std::vector<C>& sums) {
  const int64_t depth = dx.size[2], height = dx.size[3], width = dx.size[4];
  std::fill(sums.begin(), sums.end(), C(0));
  each_place(grid, n, 0, grid.size[1] * grid.size[2] * grid.size[3], [&](const Place& place) {
    const C g = static_cast<C>(dy.as<const T>()[place.in_volume(dy) + c * dy.stride[1]]);
    const GridCorners<C> corners(grid.as<const C>() + place.in_grid(grid), grid.stride[4], dx, how);
    corners.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      sums[static_cast<size_t>((voxel[0] * height + voxel[1]) * width + voxel[2])] += weight * g;
    });
  });
  T* out = dx.as<T>() + n * dx.stride[0] + c * dx.stride[1];
  size_t at = 0;
  for (int64_t d = 0; d < depth; ++d)
    for (int64_t h = 0; h < height; ++h)
      for (int64_t w = 0; w < width; ++w) out[voxel_offset(dx, {d, h, w})] = convert<T>(sums[at++]);
}

/// Calls f(place, corners) for all positions, in parallel.
template <class C, class F>
void for_all_places(const View& grid, const View& x, const GridSample& how, F f) {
  const int64_t places = grid.size[1] * grid.size[2] * grid.size[3];
  for (int64_t n = 0; n < grid.size[0]; ++n)
    parallel_for(places, grain_of(8 * x.size[1]), [&](int64_t begin, int64_t end) {
      each_place(grid, n, begin, end, [&](const Place& place) {
        f(place, GridCorners<C>(grid.as<const C>() + place.in_grid(grid), grid.stride[4], x, how));
      });
    });
}

}  // namespace

void grid_sample(const View& y, const View& x, const View& grid, const GridSample& how) {
  dispatch(Floats(), x.dtype, "grid_sample", "CPU", [&]<class T>() {
    for_all_places<compute_t<T>>(grid, x, how, [&](const Place& place, const GridCorners<compute_t<T>>& corners) {
      sample<T>(y, x, place, corners);
    });
  });
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSample& how) {
  dispatch(Floats(), x.dtype, "grid_sample_backward", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    if (dgrid)
      for_all_places<C>(grid, x, how, [&](const Place& place, const GridCorners<C>& corners) {
        backward_grid<T>(*dgrid, dy, x, place, corners);
      });
    if (!dx) return;
    // Positions may share voxels: a volume belongs to one thread.
    parallel_for(dx->size[0] * dx->size[1], grain_of(8 * grid.numel()), [&](int64_t begin, int64_t end) {
      std::vector<C> sums(static_cast<size_t>(dx->size[2] * dx->size[3] * dx->size[4]));
      for (int64_t i = begin; i < end; ++i)
        backward_input<T>(*dx, dy, grid, how, i / dx->size[1], i % dx->size[1], sums);
    });
  });
}

}  // namespace voxgrad::cpu
