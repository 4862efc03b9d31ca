// Reading volumes at the positions of a grid, and the gradients: a thread takes one position, and 16 bytes of channels
// where they are innermost in memory. Positions may share voxels: the gradient in the input is added up in 64-bit
// integers, units of a power of two that leaves room for the largest sum, so that the order does not matter.
#include <numeric>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "ops/detail/grid_position.h"

namespace voxgrad::cuda {
namespace {

/// y = x at the positions grid; y and x may be gradients. A thread takes one position and `channels` of them.
struct GridProblem {
  View y, x, grid, dgrid;
  GridSampleOptions how;
  int64_t channels;
};

/// How many channels a thread takes that has no vectors of them: a divisor of their number.
int64_t some_channels(int64_t count) { return count <= 4 ? count : std::gcd(count, 4); }

/// Where threads begin: in y, in x (in front of the channels), in the grid and in its gradient.
struct GridItems {
  uint32_t count;
  std::array<int64_t, 4> base;
  Offsets<4> offsets;
};

/// Calls f(blocks, items) for all threads' work.
template <class F>
void for_each_items(const GridProblem& p, const F& f) {
  View shares = p.y;
  shares.size[1] /= p.channels;
  std::array<View, 4> views{shares, shares, shares, shares};
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
    check_launch("grid_sample");
  });
}

/// Calls f(where it begins, corners) for the items of this thread.
template <class C, class F>
__device__ void each_item(const GridProblem& p, const GridItems& items, const F& f) {
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < items.count; i += gridDim.x * kBlock) {
    int64_t at[4];
    items.offsets.at(i, at);
#pragma unroll
    for (int k = 0; k < 4; ++k) at[k] += items.base[k];
    f(at, GridCorners<C>(static_cast<const C*>(p.grid.data) + at[2], p.grid.stride[4], p.x, p.how));
  }
}

/// `width` channels are an aligned vector.
template <class T, int width>
__global__ void __launch_bounds__(kBlock)
    grid_sample_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items) {
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

template <class T>
__global__ void __launch_bounds__(kBlock)
    grid_gradient_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items) {
  using C = compute_t<T>;
  each_item<C>(p, items, [&](const int64_t(&at)[4], const GridCorners<C>& corners) {
    corners.gradient(static_cast<C*>(p.dgrid.data) + at[3], p.x, static_cast<const T*>(p.x.data) + at[1],
                     static_cast<const T*>(p.y.data) + at[0], p.y.stride[1]);
  });
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
template <class T, int width>
__global__ void __launch_bounds__(kBlock)
    add_gradients(const __grid_constant__ GridProblem p, const __grid_constant__ GridItems items, Units<T> units) {
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
void input_gradient(const Launch& launch, const View& dx, const View& dy, const View& grid,
                    const GridSampleOptions& how) {
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
  const bool vectors = has_vectors(dy, 1, width);
  const GridProblem problem{dy, sums, grid, grid, how, vectors ? width : some_channels(dx.size[1])};
  const auto run = vectors ? add_gradients<T, width> : add_gradients<T, 1>;
  for_each_items(problem, [&](unsigned blocks, const GridItems& items) {
    run<<<blocks, kBlock, 0, launch.stream>>>(problem, items, units);
  });
  map<T, int64_t>("grid_sample_backward", units, dx, sums);
}

}  // namespace

namespace kernel {

void grid_sample(const View& y, const View& x, const View& grid, const GridSampleOptions& how) {
  if (y.numel() == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), x.dtype, "grid_sample", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    const bool vectors = has_vectors(x, 1, width) && has_vectors(y, 1, width);
    const GridProblem problem{y, x, grid, grid, how, vectors ? width : some_channels(x.size[1])};
    const auto run = vectors ? grid_sample_kernel<T, width> : grid_sample_kernel<T, 1>;
    for_each_items(problem, [&](unsigned blocks, const GridItems& items) {
      run<<<blocks, kBlock, 0, launch.stream>>>(problem, items);
    });
  });
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSampleOptions& how) {
  const Launch launch(dy);
  dispatch_cuda(Floats(), x.dtype, "grid_sample_backward", [&]<class T>() {
    if (dx && dx->numel() > 0) input_gradient<T>(launch, *dx, dy, grid, how);
    if (!dgrid || dgrid->numel() == 0) return;
    const GridProblem problem{dy, x, grid, *dgrid, how, x.size[1]};
    for_each_items(problem, [&](unsigned blocks, const GridItems& items) {
      grid_gradient_kernel<T><<<blocks, kBlock, 0, launch.stream>>>(problem, items);
    });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
