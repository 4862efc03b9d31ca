// Reading volumes at the positions of a grid, and the gradients: a thread takes one position, and 16 bytes of channels
// where they are innermost in memory. Positions may share voxels: the gradient in the input is added up in 64-bit
// integers, units of a power of two that leaves room for the largest sum, so that the order does not matter.
#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/grid_position.h"

namespace voxgrad::cuda {
namespace {

/// y = x at the positions grid; y and x may be gradients.
struct GridProblem {
  View y, x, grid;
  GridSample how;

  template <class C>
  __device__ GridCorners<C> corners(int64_t at) const {
    return {static_cast<const C*>(grid.data) + at, grid.stride[4], x, how};
  }
};

/// Threads' shares of a problem: a position each, and `width` channels. Of each, where its place is in y, in x (that
/// of its channels), in the grid, and in a fourth view.
struct GridItems {
  uint32_t count;
  std::array<int64_t, 4> base;
  Offsets<4> offsets;

  __device__ void at(uint32_t item, int64_t (&place)[4]) const {
    offsets.at(item, place);
#pragma unroll
    for (int k = 0; k < 4; ++k) place[k] += base[k];
  }
};

/// Calls f(blocks, items) for all of them. `fourth`: strides of the fourth view.
template <class F>
void for_each_items(const GridProblem& p, int64_t width, const int64_t (&fourth)[5], const F& f) {
  const View &y = p.y, &x = p.x, &grid = p.grid;
  View shares = y;
  shares.size[1] = (y.size[1] + width - 1) / width;
  std::array<View, 4> views{shares, shares, shares, shares};
  const int64_t step = width * y.stride[1],
                own[3][5] = {{y.stride[0], step, y.stride[2], y.stride[3], y.stride[4]},
                             {x.stride[0], width * x.stride[1], 0, 0, 0},
                             {grid.stride[0], 0, grid.stride[1], grid.stride[2], grid.stride[3]}};
  for (size_t k = 0; k < 4; ++k) std::copy_n(k < 3 ? own[k] : fourth, 5, views[k].stride);
  for_each_part(make_nest<4>(views), [&](const Nest<4>& part, const std::array<int64_t, 4>& base) {
    const auto count = static_cast<uint32_t>(part.numel());
    f(grid_size(count), GridItems{count, base, Offsets<4>(part)});
    check_launch("grid_sample");
  });
}

/// `vectors`: `width` channels are one aligned vector, and innermost. Else there may be fewer `left`.
template <class T, int width, bool vectors>
__device__ Vector<T, width> load_channels(const T* from, int64_t step, int64_t left) {
  Vector<T, width> loaded;
  if constexpr (vectors) {
    loaded = load_vector<T, width>(from);
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) loaded.v[j] = j < left ? from[j * step] : convert<T>(0.0f);
  }
  return loaded;
}

/// The fourth place of an item is its first channel.
template <class T, int width, bool vectors>
__global__ void __launch_bounds__(kBlock)
    grid_sample_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items) {
  using C = compute_t<T>;
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < items.count; i += gridDim.x * kBlock) {
    int64_t at[4];
    items.at(i, at);
    const int64_t left = p.x.size[1] - at[3];
    const T* x = static_cast<const T*>(p.x.data) + at[1];
    C sum[width] = {};
    p.corners<C>(at[2]).each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      const auto read = load_channels<T, width, vectors>(x + voxel_offset(p.x, voxel), p.x.stride[1], left);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += weight * static_cast<C>(read.v[j]);
    });
    T* y = static_cast<T*>(p.y.data) + at[0];
    Vector<T, width> result;
#pragma unroll
    for (int j = 0; j < width; ++j) result.v[j] = convert<T>(sum[j]);
    if constexpr (vectors) {
      store_vector(y, result);
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j)
        if (j < left) y[j * p.y.stride[1]] = result.v[j];
    }
  }
}

/// Items hold all channels; their fourth place is that in dgrid.
template <class T>
__global__ void __launch_bounds__(kBlock)
    grid_gradient_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items,
                         compute_t<T>* dgrid) {
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < items.count; i += gridDim.x * kBlock) {
    int64_t at[4];
    items.at(i, at);
    p.corners<compute_t<T>>(at[2]).gradient(dgrid + at[3], p.x, static_cast<const T*>(p.x.data) + at[1],
                                            static_cast<const T*>(p.y.data) + at[0], p.y.stride[1]);
  }
}

/// The unit of the sums: 2^-exponent. A voxel takes at most `positions` times the largest gradient: that stays below
/// 2^62.
template <class T>
struct Units {
  const T* extremes;  // the largest and the smallest gradient; NaN if one is
  int64_t positions;

  __device__ double largest() const {
    const double high = static_cast<compute_t<T>>(extremes[0]), low = static_cast<compute_t<T>>(extremes[1]);
    return high > -low ? high : -low;
  }
  __device__ int exponent() const {
    const double most = largest();
    return most > 0 && isfinite(most) ? 61 - (64 - __clzll(positions)) - (ilogb(most) + 1) : 0;
  }
  /// The gradient that a sum means.
  __device__ T operator()(int64_t sum) const {
    const double value = isfinite(largest()) ? scalbn(static_cast<double>(sum), -exponent()) : nan("");
    return convert<T>(static_cast<compute_t<T>>(value));
  }
};

/// To the sums, which are the problem's x.
template <class T, int width, bool vectors>
__global__ void __launch_bounds__(kBlock)
    add_gradients(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items, Units<T> units) {
  using C = compute_t<T>;
  const int exponent = units.exponent();
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < items.count; i += gridDim.x * kBlock) {
    int64_t at[4];
    items.at(i, at);
    const int64_t left = p.x.size[1] - at[3];
    const auto dy = load_channels<T, width, vectors>(static_cast<const T*>(p.y.data) + at[0], p.y.stride[1], left);
    p.corners<C>(at[2]).each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      auto* to = static_cast<unsigned long long*>(p.x.data) + at[1] + voxel_offset(p.x, voxel);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const double term = static_cast<double>(weight) * static_cast<double>(static_cast<C>(dy.v[j]));
        if (j < left)
          atomicAdd(to + j * p.x.stride[1], static_cast<unsigned long long>(__double2ll_rn(scalbn(term, exponent))));
      }
    });
  }
}

/// Memory at `data` as (N, C, D, H, W) of i64, in the order in which `like` lies in memory.
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

template <class T>
void input_gradient(const Launch& launch, const View& dx, const View& dy, const View& grid, const GridSample& how) {
  constexpr int width = kVectorWidth<T>;
  if (dy.numel() == 0) return kernel::fill(dx, 0);
  const Workspace extremes(launch, 2 * sizeof(T)), memory(launch, static_cast<size_t>(dx.numel()) * sizeof(int64_t));
  View extreme = dy;
  std::fill_n(extreme.size, 5, 1);
  kernel::reduce(ReduceOp::amax, dense_like(extreme, extremes.as<T>(), dy.dtype), dy);
  kernel::reduce(ReduceOp::amin, dense_like(extreme, extremes.as<T>() + 1, dy.dtype), dy);
  const Units<T> units{extremes.as<T>(), grid.size[1] * grid.size[2] * grid.size[3]};

  const View sums = sums_like(dx, memory.as<void>());
  kernel::fill(sums, 0);
  const GridProblem problem{dy, sums, grid, how};
  const bool vectors = sums.stride[1] == 1 && has_vectors(dy, 1, width);
  const auto run = vectors ? add_gradients<T, width, true> : add_gradients<T, width, false>;
  for_each_items(problem, width, {0, width, 0, 0, 0}, [&](unsigned blocks, const GridItems& items) {
    run<<<blocks, kBlock, 0, launch.stream>>>(problem, items, units);
  });
  map<T, int64_t>("grid_sample_backward", units, dx, sums);
}

}  // namespace

namespace kernel {

void grid_sample(const View& y, const View& x, const View& grid, const GridSample& how) {
  if (y.numel() == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), x.dtype, "grid_sample", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    const GridProblem problem{y, x, grid, how};
    const bool vectors = has_vectors(x, 1, width) && has_vectors(y, 1, width);
    const auto run = vectors ? grid_sample_kernel<T, width, true> : grid_sample_kernel<T, width, false>;
    for_each_items(problem, width, {0, width, 0, 0, 0}, [&](unsigned blocks, const GridItems& items) {
      run<<<blocks, kBlock, 0, launch.stream>>>(problem, items);
    });
  });
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSample& how) {
  const Launch launch(dy);
  dispatch_cuda(Floats(), x.dtype, "grid_sample_backward", [&]<class T>() {
    if (dx && dx->numel() > 0) input_gradient<T>(launch, *dx, dy, grid, how);
    if (!dgrid || dgrid->numel() == 0) return;
    const GridProblem problem{dy, x, grid, how};
    const int64_t(&step)[kMaxRank] = dgrid->stride;
    for_each_items(
        problem, x.size[1], {step[0], 0, step[1], step[2], step[3]}, [&](unsigned blocks, const GridItems& items) {
          grid_gradient_kernel<T><<<blocks, kBlock, 0, launch.stream>>>(problem, items, dgrid->as<compute_t<T>>());
        });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
