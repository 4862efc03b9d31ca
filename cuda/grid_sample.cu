// Reading volumes at the positions of a grid, and the gradients: a thread takes one position, and 16 bytes of channels
// where they are innermost in memory. Positions may share voxels: the gradient in the input is added up in 64-bit
// integers, units of a power of two that leaves room for the largest sum, so that the order does not matter.
#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/grid_position.h"

namespace voxgrad::cuda {
namespace {

struct GridProblem {
  View x, y, grid;  // x and y may be gradients
  GridSample how;
  int64_t positions;  // of a sample
  int groups;         // of channels, one for a thread

  GridProblem(const View& input, const View& output, const View& at, const GridSample& options, int width)
      : x(input),
        y(output),
        grid(at),
        how(options),
        positions(at.size[1] * at.size[2] * at.size[3]),
        groups(static_cast<int>((input.size[1] + width - 1) / width)) {}
  int64_t items() const { return x.size[0] * groups * positions; }
};

/// The position and the channels of thread item `number`.
struct GridItem {
  int64_t n, channel, in_y, in_grid;

  __device__ GridItem(const GridProblem& p, int64_t number, int width, bool channels_inner) {
    int64_t rest = number;
    const auto take = [&rest](int64_t size) {
      const int64_t outer = quotient(rest, size), digit = rest - outer * size;
      rest = outer;
      return digit;
    };
    channel = channels_inner ? take(p.groups) * width : 0;
    const int64_t w = take(p.y.size[4]), h = take(p.y.size[3]), d = take(p.y.size[2]);
    if (!channels_inner) channel = take(p.groups) * width;
    n = rest;
    in_y = n * p.y.stride[0] + d * p.y.stride[2] + h * p.y.stride[3] + w * p.y.stride[4] + channel * p.y.stride[1];
    in_grid = n * p.grid.stride[0] + d * p.grid.stride[1] + h * p.grid.stride[2] + w * p.grid.stride[3];
  }
};

template <class C>
__device__ GridCorners<C> corners_of(const GridProblem& p, const GridItem& item) {
  return {static_cast<const C*>(p.grid.data) + item.in_grid, p.grid.stride[4], p.x, p.how};
}

/// `vectors`: `width` channels are one aligned vector, and innermost.
template <class T, int width, bool vectors>
__device__ Vector<T, width> load_channels(const T* from, int64_t step, int64_t left) {
  if constexpr (vectors) {
    return load_vector<T, width>(from);
  } else {
    Vector<T, width> loaded;
#pragma unroll
    for (int j = 0; j < width; ++j) loaded.v[j] = j < left ? from[j * step] : convert<T>(0.0f);
    return loaded;
  }
}

template <class T, int width, bool vectors>
__global__ void __launch_bounds__(kBlock) grid_sample_kernel(const __grid_constant__ GridProblem p, int64_t items) {
  using C = compute_t<T>;
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const GridItem item(p, i, width, vectors);
    const int64_t left = p.x.size[1] - item.channel;
    const T* x = static_cast<const T*>(p.x.data) + item.n * p.x.stride[0] + item.channel * p.x.stride[1];
    C sum[width] = {};
    corners_of<C>(p, item).each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      const auto read = load_channels<T, width, vectors>(x + voxel_offset(p.x, voxel), p.x.stride[1], left);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += weight * static_cast<C>(read.v[j]);
    });
    T* y = static_cast<T*>(p.y.data) + item.in_y;
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

/// A thread sums over all channels.
template <class T>
__global__ void __launch_bounds__(kBlock)
    grid_gradient_kernel(const __grid_constant__ GridProblem p, const __grid_constant__ View dgrid, int64_t items) {
  using C = compute_t<T>;
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const GridItem item(p, i, 1, false);
    const T* x = static_cast<const T*>(p.x.data) + item.n * p.x.stride[0];
    const T* dy = static_cast<const T*>(p.y.data) + item.in_y;
    C sum[3] = {};
    corners_of<C>(p, item).each([&](const int64_t(&voxel)[3], C, const C(&change)[3]) {
      const T* from = x + voxel_offset(p.x, voxel);
      C product = 0;
      for (int64_t c = 0; c < p.x.size[1]; ++c)
        product += static_cast<C>(from[c * p.x.stride[1]]) * static_cast<C>(dy[c * p.y.stride[1]]);
#pragma unroll
      for (int k = 0; k < 3; ++k) sum[k] += change[k] * product;
    });
    C* out = static_cast<C*>(dgrid.data) + i * 3;
#pragma unroll
    for (int k = 0; k < 3; ++k) out[k] = sum[k];
  }
}

/// The bits of |value| as a number that grows with it; of NaN, more than those of infinity.
__device__ unsigned long long magnitude(double value) {
  return static_cast<unsigned long long>(__double_as_longlong(fabs(value)));
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    largest_gradient(const __grid_constant__ GridProblem p, int64_t items, unsigned long long* largest) {
  unsigned long long mine = 0;
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const GridItem item(p, i, 1, false);
    mine = max(mine,
               magnitude(static_cast<double>(static_cast<compute_t<T>>(static_cast<const T*>(p.y.data)[item.in_y]))));
  }
  for (int half = 16; half > 0; half /= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, half));
  if (threadIdx.x % 32 == 0) atomicMax(largest, mine);
}

/// The exponent of the power of two by which gradients are multiplied. A voxel takes at most `positions` times the
/// largest: that stays below 2^62.
__device__ int unit_exponent(unsigned long long largest, int64_t positions) {
  const double most = __longlong_as_double(static_cast<long long>(largest));
  if (!(most > 0) || !isfinite(most)) return 0;
  const int above = ilogb(most) + 1;
  return 61 - (64 - __clzll(positions)) - above;
}

/// Where voxel `voxel` of a channel lies among the sums: dense, in the order of dx's memory.
struct SumStrides {
  int64_t n, c, d, h, w;
  __device__ int64_t at(int64_t sample, int64_t channel, const int64_t (&voxel)[3]) const {
    return sample * n + channel * c + voxel[0] * d + voxel[1] * h + voxel[2] * w;
  }
};

template <class T, int width, bool vectors>
__global__ void __launch_bounds__(kBlock)
    add_gradients(const __grid_constant__ GridProblem p, int64_t items, SumStrides strides,
                  const unsigned long long* largest, unsigned long long* sums) {
  using C = compute_t<T>;
  const int exponent = unit_exponent(*largest, p.positions);
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const GridItem item(p, i, width, vectors);
    const int64_t left = p.x.size[1] - item.channel;
    const auto dy = load_channels<T, width, vectors>(static_cast<const T*>(p.y.data) + item.in_y, p.y.stride[1], left);
    corners_of<C>(p, item).each([&](const int64_t(&voxel)[3], C weight, const C(&)[3]) {
      unsigned long long* to = sums + strides.at(item.n, item.channel, voxel);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const double term = static_cast<double>(weight) * static_cast<double>(static_cast<C>(dy.v[j]));
        if (j < left)
          atomicAdd(to + j * strides.c, static_cast<unsigned long long>(__double2ll_rn(scalbn(term, exponent))));
      }
    });
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    convert_sums(const __grid_constant__ View dx, int64_t items, SumStrides strides, int64_t positions,
                 const unsigned long long* largest, const unsigned long long* sums) {
  const double most = __longlong_as_double(static_cast<long long>(*largest));
  const int exponent = unit_exponent(*largest, positions);
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    int64_t rest = i;
    const auto take = [&rest](int64_t size) {
      const int64_t outer = quotient(rest, size), digit = rest - outer * size;
      rest = outer;
      return digit;
    };
    const bool inner = strides.c == 1;
    int64_t channel = inner ? take(dx.size[1]) : 0;
    const int64_t w = take(dx.size[4]), h = take(dx.size[3]), d = take(dx.size[2]);
    if (!inner) channel = take(dx.size[1]);
    const auto sum = static_cast<double>(static_cast<long long>(sums[i]));
    const double value = isfinite(most) ? scalbn(sum, -exponent) : nan("");
    static_cast<T*>(dx.data)[rest * dx.stride[0] + channel * dx.stride[1] + voxel_offset(dx, {d, h, w})] =
        convert<T>(static_cast<compute_t<T>>(value));
  }
}

template <class T>
void input_gradient(const Launch& launch, const View& dx, const View& dy, const View& grid, const GridSample& how) {
  constexpr int width = kVectorWidth<T>;
  const int64_t count = dx.numel(), volume = dx.size[2] * dx.size[3] * dx.size[4], channels = dx.size[1];
  const bool inner = channels > 1 && std::abs(dx.stride[1]) < std::abs(dx.stride[4]);
  const int64_t c = inner ? 1 : volume, w = inner ? channels : 1;
  const SumStrides strides{channels * volume, c, w * dx.size[4] * dx.size[3], w * dx.size[4], w};
  const size_t bytes = (static_cast<size_t>(count) + 1) * sizeof(unsigned long long);
  const Workspace workspace(launch, bytes);
  auto* sums = workspace.as<unsigned long long>();
  check_cuda(cudaMemsetAsync(sums, 0, bytes, launch.stream), "grid_sample_backward");
  if (dy.numel() > 0) {
    const GridProblem single(dx, dy, grid, how, 1);
    largest_gradient<T><<<std::min(grid_size(single.items()), 4096u), kBlock, 0, launch.stream>>>(
        single, single.items(), sums + count);
    const bool vectors = inner && has_vectors(dy, 1, width);
    const GridProblem problem(dx, dy, grid, how, width);
    const auto kernel = vectors ? add_gradients<T, width, true> : add_gradients<T, width, false>;
    kernel<<<grid_size(problem.items()), kBlock, 0, launch.stream>>>(problem, problem.items(), strides, sums + count,
                                                                     sums);
  }
  const int64_t positions = std::max<int64_t>(grid.size[1] * grid.size[2] * grid.size[3], 1);
  convert_sums<T><<<grid_size(count), kBlock, 0, launch.stream>>>(dx, count, strides, positions, sums + count, sums);
  check_launch("grid_sample_backward");
}

}  // namespace

namespace kernel {

void grid_sample(const View& y, const View& x, const View& grid, const GridSample& how) {
  if (y.numel() == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), x.dtype, "grid_sample", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    const GridProblem problem(x, y, grid, how, width);
    const bool vectors = has_vectors(x, 1, width) && has_vectors(y, 1, width);
    const auto run = vectors ? grid_sample_kernel<T, width, true> : grid_sample_kernel<T, width, false>;
    run<<<grid_size(problem.items()), kBlock, 0, launch.stream>>>(problem, problem.items());
  });
  check_launch("grid_sample");
}

void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSample& how) {
  const Launch launch(dy);
  dispatch_cuda(Floats(), x.dtype, "grid_sample_backward", [&]<class T>() {
    if (dx && dx->numel() > 0) input_gradient<T>(launch, *dx, dy, grid, how);
    if (!dgrid || dgrid->numel() == 0) return;
    GridProblem problem(x, dy, grid, how, 1);
    problem.groups = 1;
    grid_gradient_kernel<T><<<grid_size(problem.items()), kBlock, 0, launch.stream>>>(problem, *dgrid, problem.items());
    check_launch("grid_sample_backward");
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
