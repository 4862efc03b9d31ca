// grid_sample and its gradients.
#include <vector>

#include "ops/cpu/loops.h"
#include "ops/detail/grid_position.h"

namespace voxgrad::cpu {
namespace {

/// Returns the number of positions per sample.
int64_t positions_of(const View& grid) { return grid.size[1] * grid.size[2] * grid.size[3]; }

/// Calls f(i, offset in channel 0 of y, corners in x) for the positions i in [begin, end) of all samples.
template <class C, class F>
void for_each_position(const View& y, const View& x, const View& grid, const GridSampleOptions& how, int64_t begin,
                       int64_t end, F f) {
  const int64_t depth = grid.size[1], height = grid.size[2], width = grid.size[3];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = i / width / height / depth, place[] = {i / width / height % depth, i / width % height, i % width};
    const C* at = grid.as<const C>() + n * grid.stride[0];
    for (int axis = 0; axis < 3; ++axis) at += place[axis] * grid.stride[axis + 1];
    f(i, n * y.stride[0] + voxel_offset(y, place), GridCorners<C>(at, grid.stride[4], x, how));
  }
}

/// Calls f for all positions, in parallel.
template <class C, class F>
void for_all_positions(const View& y, const View& x, const View& grid, const GridSampleOptions& how, F f) {
  parallel_for(x.size[0] * positions_of(grid), grain_of(8 * x.size[1]),
               [&](int64_t begin, int64_t end) { for_each_position<C>(y, x, grid, how, begin, end, f); });
}

/// Computes the gradient of x.
template <class T, class C = compute_t<T>>
void backward_input(const View& dx, const View& dy, const View& grid, const GridSampleOptions& how) {
  const int64_t height = dx.size[3], width = dx.size[4], positions = positions_of(grid);
  sum_by_channels<T>(dx, 8 * grid.numel(), [&](std::vector<C>& sums, int64_t i) {
    const int64_t n = i / dx.size[1], c = i % dx.size[1];
    const auto add = [&](int64_t, int64_t in_dy, const auto& at) {
      const C g = static_cast<C>(dy.as<const T>()[in_dy + c * dy.stride[1]]);
      at.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
        sums[static_cast<size_t>((voxel[0] * height + voxel[1]) * width + voxel[2])] += weight * g;
      });
    };
    for_each_position<C>(dy, dx, grid, how, n * positions, (n + 1) * positions, add);
  });
}

}  // namespace

void grid_sample(const View& y, const View& x, const View& grid, const GridSampleOptions& how) {
  dispatch(Floats(), x.dtype, "grid_sample", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    for_all_positions<C>(y, x, grid, how, [&](int64_t i, int64_t in_y, const auto& at) {
      const T* sample = x.as<const T>() + i / positions_of(grid) * x.stride[0];
      for (int64_t c = 0; c < x.size[1]; ++c) {
        C sum = 0;
        at.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
          sum += weight * static_cast<C>(sample[c * x.stride[1] + voxel_offset(x, voxel)]);
        });
        y.as<T>()[in_y + c * y.stride[1]] = convert<T>(sum);
      }
    });
  });
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSampleOptions& how) {
  dispatch(Floats(), x.dtype, "grid_sample_backward", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    if (dgrid)
      for_all_positions<C>(dy, x, grid, how, [&](int64_t i, int64_t in_dy, const auto& at) {
        const T* sample = x.as<const T>() + i / positions_of(grid) * x.stride[0];
        at.gradient(dgrid->as<C>() + 3 * i, x, sample, dy.as<const T>() + in_dy, dy.stride[1]);
      });
    if (dx) backward_input<T>(*dx, dy, grid, how);
  });
}

}  // namespace voxgrad::cpu
