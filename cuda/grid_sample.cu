// grid_sample and its gradients. A thread handles a few channels, or all channels, at one position of the grid. If the
// channels are innermost in memory, sampling and the gradient of the input read the channels in vectors of 16 bytes.
//
// Several positions may read the same voxel, so the gradient of the input is summed with atomic additions. The sums are
// 64-bit integers, so that the result does not depend on the order of the additions. The unit of the integers is a
// power of two that leaves room for the largest sum.
#include <numeric>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "ops/detail/grid_position.h"

namespace voxgrad::cuda {
namespace {

/// The arguments of the kernels: y = x at the positions of the grid. In backward kernels, y is the gradient dy, and x
/// may be the integer sums of the gradient dx.
struct GridProblem {
  View y;      ///< (N, C, D', H', W')
  View x;      ///< (N, C, D, H, W)
  View grid;   ///< (N, D', H', W', 3)
  View dgrid;  ///< gradient of the grid, in the shape of the grid
  GridSampleOptions options;
  int64_t channels;  ///< channels of an item (GridItems)
};

/// Returns the number of channels of an item (GridItems) for kernels that read channels one by one: a divisor of
/// `count` that is at most 4.
int64_t channels_of_item(int64_t count) { return count <= 4 ? count : std::gcd(count, 4); }

/// A set of items. An item is GridProblem::channels channels at one position of the grid. A kernel launch processes one
/// set, which has fewer than 2^31 items.
struct GridItems {
  uint32_t count;
  std::array<int64_t, 4> base;  ///< offset of the set in each view
  Offsets<4> offsets;  ///< offsets of items in y, in x (sample and channel only), in the grid and in its gradient
};

/// Calls f(number of CTAs, items) for sets of items that together cover the whole problem.
template <class F>
void for_each_item_set(const GridProblem& p, const F& f) {
  View item_shape = p.y;
  item_shape.size[1] /= p.channels;
  std::array<View, 4> views{item_shape, item_shape, item_shape, item_shape};
  views[0].stride[1] *= p.channels;
  const auto set = [&](size_t k, const std::array<int64_t, 5>& stride) {
    std::copy(stride.begin(), stride.end(), views[k].stride);
  };
  const auto &x = p.x.stride, &grid = p.grid.stride, &dgrid = p.dgrid.stride;
  set(1, {x[0], x[1] * p.channels, 0, 0, 0});
  set(2, {grid[0], 0, grid[1], grid[2], grid[3]});
  set(3, {dgrid[0], 0, dgrid[1], dgrid[2], dgrid[3]});
  for_each_part(make_nest<4>(views), [&](const Nest<4>& part, const std::array<int64_t, 4>& base) {
    const auto count = static_cast<uint32_t>(part.numel());
    f(grid_size(count), GridItems{count, base, Offsets<4>(part)});
  });
}

/// Calls f(offsets, corners) for the items of this thread. `corners` are the voxels around the position of the item.
template <class C, class F>
__device__ void each_item(const GridProblem& p, const GridItems& items, const F& f) {
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < items.count; i += gridDim.x * kBlock) {
    int64_t at[4];
    items.offsets.at(i, at);
#pragma unroll
    for (int k = 0; k < 4; ++k) at[k] += items.base[k];
    f(at, GridCorners<C>(static_cast<const C*>(p.grid.data) + at[2], p.grid.stride[4], p.x, p.options));
  }
}

/// Computes y from x and the grid, in aligned vectors of `width` channels. Launch: one thread per item in a 1-D
/// grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, int width>
__global__ void __launch_bounds__(kBlock)
    grid_sample_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  each_item<C>(p, items, [&](const int64_t(&at)[4], const GridCorners<C>& corners) {
    for (int64_t c = 0; c < p.channels; c += width) {
      const T* x = static_cast<const T*>(p.x.data) + at[1] + c * p.x.stride[1];
      C sum[width] = {};
      corners.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
        const auto read = load_vector<T, width>(x + voxel_offset(p.x, voxel));
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] += weight * static_cast<C>(read.v[j]);
      });
      Vector<T, width> result;
#pragma unroll
      for (int j = 0; j < width; ++j) result.v[j] = convert<T>(sum[j]);
      store_vector(static_cast<T*>(p.y.data) + at[0] + c * p.y.stride[1], result);
    }
  });
}

/// Computes dgrid from dy, x and the grid. An item contains all channels of its position. Launch: one thread per item
/// in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock)
    grid_gradient_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  each_item<C>(p, items, [&](const int64_t(&at)[4], const GridCorners<C>& corners) {
    corners.gradient(static_cast<C*>(p.dgrid.data) + at[3], p.x, static_cast<const T*>(p.x.data) + at[1],
                     static_cast<const T*>(p.y.data) + at[0], p.y.stride[1]);
  });
}

/// The unit of integer sums, 2^-exponent(). With this unit, the sum of a voxel stays below 2^62 even if every position
/// adds the largest gradient to the same voxel.
template <class T>
struct Units {
  const T* extremes;  ///< the largest and the smallest gradient; NaN if any gradient is NaN
  int64_t positions;  ///< positions of a sample

  /// Returns the largest magnitude of a gradient.
  __device__ double largest() const {
    const double high = static_cast<compute_t<T>>(extremes[0]), low = static_cast<compute_t<T>>(extremes[1]);
    return high > -low ? high : -low;
  }
  __device__ int exponent() const {
    const double magnitude = largest();
    return magnitude > 0 && isfinite(magnitude) ? 61 - (64 - __clzll(positions)) - (ilogb(magnitude) + 1) : 0;
  }
  /// Returns the gradient that an integer sum represents.
  __device__ T operator()(int64_t sum) const {
    const double value = isfinite(largest()) ? scalbn(static_cast<double>(sum), -exponent()) : nan("");
    return convert<T>(static_cast<compute_t<T>>(value));
  }
};

/// Adds the gradients dy to the integer sums p.x with atomic operations. Launch: one thread per item in a 1-D
/// grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, int width>
__global__ void __launch_bounds__(kBlock)
    add_gradients(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items, Units<T> units) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  const int exponent = units.exponent();
  each_item<C>(p, items, [&](const int64_t(&at)[4], const GridCorners<C>& corners) {
    for (int64_t c = 0; c < p.channels; c += width) {
      const auto dy = load_vector<T, width>(static_cast<const T*>(p.y.data) + at[0] + c * p.y.stride[1]);
      auto* sums = static_cast<unsigned long long*>(p.x.data) + at[1] + c * p.x.stride[1];
      corners.each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const double term = static_cast<double>(weight) * static_cast<double>(static_cast<C>(dy.v[j]));
          atomicAdd(sums + voxel_offset(p.x, voxel) + j * p.x.stride[1],
                    static_cast<unsigned long long>(__double2ll_rn(scalbn(term, exponent))));
        }
      });
    }
  });
}

/// Returns a dense i64 view of `data` with the shape of `like` (N, C, D, H, W): channels_last if the channels of `like`
/// are innermost, otherwise contiguous.
View sums_like(const View& like, void* data) {
  constexpr int kOrders[2][5] = {{4, 3, 2, 1, 0}, {1, 4, 3, 2, 0}};
  View sums = dense_like(like, data, i64);
  int64_t step = 1;
  for (const int axis : kOrders[std::abs(like.stride[1]) < std::abs(like.stride[4])]) {
    sums.stride[axis] = step;
    step *= like.size[axis];
  }
  return sums;
}

/// Computes dx from dy and the grid.
template <class T>
void input_gradient(const Launch& launch, const View& dx, const View& dy, const View& grid,
                    const GridSampleOptions& options) {
  constexpr int width = kVectorWidth<T>;
  if (dy.numel() == 0) return kernel::fill(dx, 0);
  const Workspace extremes(launch, 2 * sizeof(T)), memory(launch, static_cast<size_t>(dx.numel()) * sizeof(int64_t));
  View extreme = dy;
  std::fill_n(extreme.size, 5, 1);
  kernel::reduce(ReduceOp::max, dense_like(extreme, extremes.as<T>(), dy.dtype), dy);
  kernel::reduce(ReduceOp::min, dense_like(extreme, extremes.as<T>() + 1, dy.dtype), dy);
  const Units<T> units{extremes.as<T>(), grid.size[1] * grid.size[2] * grid.size[3]};

  const View sums = sums_like(dx, memory.as<void>());
  kernel::fill(sums, 0);
  const bool vectors = has_vectors(dy, 1, width);
  const GridProblem problem{dy, sums, grid, grid, options, vectors ? width : channels_of_item(dx.size[1])};
  const auto run = vectors ? add_gradients<T, width> : add_gradients<T, 1>;
  for_each_item_set(problem, [&](unsigned blocks, const GridItems& items) {
    launch_kernel("grid_sample", run, blocks, kBlock, 0, launch.stream, problem, items, units);
  });
  map<T, int64_t>("grid_sample_backward", units, dx, sums);
}

}  // namespace

namespace kernel {

void grid_sample(const View& y, const View& x, const View& grid, const GridSampleOptions& options) {
  if (y.numel() == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), x.dtype, "grid_sample", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    const bool vectors = has_vectors(x, 1, width) && has_vectors(y, 1, width);
    const GridProblem problem{y, x, grid, grid, options, vectors ? width : channels_of_item(x.size[1])};
    const auto run = vectors ? grid_sample_kernel<T, width> : grid_sample_kernel<T, 1>;
    for_each_item_set(problem, [&](unsigned blocks, const GridItems& items) {
      launch_kernel("grid_sample", run, blocks, kBlock, 0, launch.stream, problem, items);
    });
  });
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSampleOptions& options) {
  const Launch launch(dy);
  dispatch_cuda(Floats(), x.dtype, "grid_sample_backward", [&]<class T>() {
    if (dx && dx->numel() > 0) input_gradient<T>(launch, *dx, dy, grid, options);
    if (!dgrid || dgrid->numel() == 0) return;
    const GridProblem problem{dy, x, grid, *dgrid, options, x.size[1]};
    for_each_item_set(problem, [&](unsigned blocks, const GridItems& items) {
      launch_kernel("grid_sample", grid_gradient_kernel<T>, blocks, kBlock, 0, launch.stream, problem, items);
    });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
