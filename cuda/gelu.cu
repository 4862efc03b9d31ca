// The backward pass of GELU, which also computes GELU again and sums the gradient over each channel, in one pass over
// memory.
#include "core/detail/divide.h"
#include "cuda/detail/kernels.h"
#include "cuda/normal.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda {
namespace {

/// The tensors as matrices: a row per voxel, with the channels as columns. A tile is layout.columns vectors of
/// channels.
struct GeluProblem {
  const void* x;
  const void* dy;
  void* y;
  void* dx;
  double* partial;  ///< sums of dx, [range][channel]
  int64_t rows;
  int64_t range;  ///< rows of a CTA
  int vectors;    ///< vectors of a row
  int tiles;
  BlockLayout layout;
};

/// Computes y = gelu(x) and the gradient of x.
template <class T>
__device__ void gelu_and_gradient(compute_t<T> x, compute_t<T> dy, compute_t<T>& y, compute_t<T>& dx) {
  if constexpr (sizeof(T) == 2) {
    const Normal normal(x);
    y = x * normal.distribution;
    dx = dy * (normal.distribution + x * static_cast<float>(kInvSqrtTwoPi) * normal.exponential);
  } else {
    y = apply<UnaryOp::gelu>(x, compute_t<T>(0), compute_t<T>(0));
    dx = apply<BinaryOp::gelu_grad>(dy, x, compute_t<T>(0), compute_t<T>(0));
  }
}

/// Launch: one CTA per (range, tile) in a 1-D grid, kBlock threads per CTA. Static shared memory: a vector of sums per
/// thread.
template <class T>
__global__ void __launch_bounds__(kBlock, 2) gelu_backward_kernel(const __grid_constant__ GeluProblem p) {
  wait_for_previous_kernels();
  constexpr int kWidth = kVectorWidth<T>, kUnroll = 4;
  using Sums = Vector<double, kWidth>;
  __shared__ Sums shared[kBlock];
  const int tile = static_cast<int>(blockIdx.x) % p.tiles, range = static_cast<int>(blockIdx.x) / p.tiles;
  const int column = tile * p.layout.columns + p.layout.column(), step = p.layout.reducers;
  Sums total{};
  if (column < p.vectors && p.layout.reducer() < step) {
    const int64_t end = min((range + 1) * p.range, p.rows);
    for (int64_t row = range * p.range + p.layout.reducer(); row < end; row += kUnroll * step) {
      PackedVector<T, kWidth> x[kUnroll], dy[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = ((row + u * step) * p.vectors + column) * kWidth;
        x[u] = {static_cast<const T*>(p.x) + at, row + u * step < end, T()};
        dy[u] = {static_cast<const T*>(p.dy) + at, row + u * step < end, T()};
      }
      compute_t<T> sum[kWidth] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        Vector<T, kWidth> y, dx;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          compute_t<T> value, gradient;
          gelu_and_gradient<T>(convert<compute_t<T>>(x[u].get().v[j]), convert<compute_t<T>>(dy[u].get().v[j]), value,
                               gradient);
          y.v[j] = convert<T>(value);
          dx.v[j] = convert<T>(gradient);
          sum[j] += convert<compute_t<T>>(dx.v[j]);
        }
        if (row + u * step >= end) continue;
        const int64_t at = ((row + u * step) * p.vectors + column) * kWidth;
        store_vector(static_cast<T*>(p.y) + at, y);
        store_vector(static_cast<T*>(p.dx) + at, dx);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total.v[j] += static_cast<double>(sum[j]);
    }
  }
  total = combine_reducers(total, p.layout, shared, [](Sums a, const Sums& b) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) a.v[j] += b.v[j];
    return a;
  });
  if (column >= p.vectors || p.layout.reducer() > 0) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) p.partial[(int64_t{range} * p.vectors + column) * kWidth + j] = total.v[j];
}

/// Adds the partial sums of a channel. Launch: one CTA per channel, kBlock threads per CTA. Static shared memory:
/// kBlock sums.
template <class T>
__global__ void __launch_bounds__(kBlock) add_ranges(const double* partial, int64_t ranges, T* sums, int64_t stride) {
  wait_for_previous_kernels();
  __shared__ double shared[kBlock];
  double sum = 0;
  for (int64_t range = threadIdx.x; range < ranges; range += kBlock) sum += partial[range * gridDim.x + blockIdx.x];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x * stride] = convert<T>(sum);
}

/// Returns whether a view (N, C, L) is a matrix of whole vectors with a row per voxel.
bool has_vector_rows(const View& v) {
  const int64_t channels = v.size[1];
  return v.stride[1] == 1 && v.stride[2] == channels && (v.size[0] == 1 || v.stride[0] == channels * v.size[2]) &&
         channels * static_cast<int64_t>(item_size(v.dtype)) % 16 == 0 && reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
}

template <class T>
void backward(const View& y, const View& dx, const View& sums, const View& dy, const View& x) {
  const Launch launch(x);
  const int64_t channels = x.size[1];
  GeluProblem p{};
  p.x = x.data;
  p.dy = dy.data;
  p.y = y.data;
  p.dx = dx.data;
  p.rows = x.size[0] * x.size[2];
  p.vectors = static_cast<int>(channels / kVectorWidth<T>);
  const int columns = divide_up(p.vectors, divide_up(p.vectors, 64));
  p.layout = {columns, kBlock / columns, true};
  p.tiles = divide_up(p.vectors, columns);
  // A thread computes at least eight rows. Two CTAs run on an SM; twice as many for all 132 SMs of an H200.
  const int64_t ranges =
      std::clamp<int64_t>(divide_up(p.rows, int64_t{8} * p.layout.reducers), 1, std::max(528 / p.tiles, 1));
  p.range = divide_up(p.rows, ranges);
  const int64_t used = divide_up(p.rows, p.range);
  const Workspace partial(launch, static_cast<size_t>(used * channels) * sizeof(double));
  p.partial = partial.as<double>();
  launch_kernel("gelu_backward", gelu_backward_kernel<T>, static_cast<unsigned>(used * p.tiles), kBlock, 0,
                launch.stream, p);
  launch_kernel("gelu_backward", add_ranges<T>, static_cast<unsigned>(channels), kBlock, 0, launch.stream, p.partial,
                used, sums.as<T>(), sums.stride[0]);
}

}  // namespace

namespace kernel {

void gelu_backward(const View& y, const View& dx, const View& sums, const View& dy, const View& x) {
  const bool vectors = x.numel() > 0 && has_vector_rows(y) && has_vector_rows(dx) && has_vector_rows(dy) &&
                       has_vector_rows(x) && x.size[1] <= INT32_MAX;
  if (vectors && x.dtype != f64)
    return dispatch_cuda(Types<float, BFloat16, Float16>(), x.dtype, "gelu_backward",
                         [&]<class T>() { backward<T>(y, dx, sums, dy, x); });
  unary(UnaryOp::gelu, y, x, 0, 0);
  binary(BinaryOp::gelu_grad, dx, dy, x, 0, 0);
  View row = dx;  // the sums as (1, C, 1)
  row.data = sums.data;
  row.size[0] = row.size[2] = 1;
  row.stride[1] = sums.stride[0];
  reduce(ReduceOp::sum, row, dx);
}

}  // namespace kernel
}  // namespace voxgrad::cuda
