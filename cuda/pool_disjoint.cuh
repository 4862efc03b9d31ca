// Max pooling with windows that do not overlap, and its gradient, with 32-bit offsets. A thread handles windows in a
// few consecutive rows. In each row, the thread handles either several windows along the width (if 2 x 2 windows tile
// the rows) or one vector of channels. Private to cuda/pool.cu.
#pragma once

#include "core/detail/divide.h"
#include "cuda/pool.cuh"

namespace voxgrad::cuda {

/// Number of windows along the height that a thread handles, called a run. In each row, the thread handles `width`
/// windows along the width or `width` channels.
template <int width>
inline constexpr int kRun = std::clamp(8 / width, 1, 4);

/// Returns the offset of position `at` in a view whose offsets fit into 32 bits.
inline __device__ int offset_in(const View& view, const int64_t (&at)[5]) {
  int offset = 0;
#pragma unroll
  for (int axis = 0; axis < 5; ++axis) offset += static_cast<int>(at[axis]) * static_cast<int>(view.stride[axis]);
  return offset;
}

/// Computes max pooling with windows of 2 x 2 x 2 or 1 x 2 x 2 that are inside the input and tile its contiguous rows.
/// A thread handles `width` windows along the width and kRun along the height; p.size[3] is the number of runs. Launch:
/// one thread per item, `count` in all, in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, class Index, int width>
__global__ void __launch_bounds__(kBlock) max_pool_pairs(const __grid_constant__ PoolProblem p, uint32_t count) {
  wait_for_previous_kernels();
  constexpr int run = kRun<width>;
  const PoolGeometry& g = p.geometry;
  const int plane = static_cast<int>(g.kernel_size.values[0] - 1) * static_cast<int>(p.in.stride[2]);
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at, 4);
    at[3] *= run;
    const int d = static_cast<int>(at[2] * g.stride.values[0]), w = static_cast<int>(at[4]) * 2;
    const T* in = static_cast<const T*>(p.in.data) + offset_in(p.in, {at[0], at[1], d, 0, w});
    Vector<T, 2 * width> loaded[run][4];
    int h[run];
#pragma unroll
    for (int r = 0; r < run; ++r) {
      h[r] = static_cast<int>(min(at[3] + r, p.out.size[3] - 1) * g.stride.values[1]);
#pragma unroll
      for (int k = 0; k < 4; ++k)  // 1 x 2 x 2 windows read their plane twice, which does not change the maximum
        loaded[r][k] =
            load_vector<T, 2 * width>(in + k / 2 * plane + (h[r] + k % 2) * static_cast<int>(p.in.stride[3]));
    }
    const int out = offset_in(p.out, at), index = offset_in(p.indices, at);
#pragma unroll
    for (int r = 0; r < run; ++r) {
      if (at[3] + r >= p.out.size[3]) break;
      Best<compute_t<T>, Index> best[width];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = (d + k / 2) * static_cast<int>(p.in.size[3]) + h[r] + k % 2;
#pragma unroll
        for (int j = 0; j < 2 * width; ++j)
          best[j / 2].offer(static_cast<compute_t<T>>(loaded[r][k].v[j]), row * static_cast<int>(p.in.size[4]) + w + j);
      }
      store_best(best, static_cast<T*>(p.out.data) + out + r * static_cast<int>(p.out.stride[3]),
                 static_cast<Index*>(p.indices.data) + index + r * static_cast<int>(p.indices.stride[3]));
    }
  }
}

/// Computes the gradient of max pooling with windows that do not overlap. Each voxel belongs to the cell of one window;
/// a cell has the size of the stride. A thread fills the cells of `width` windows along `axis` and of kRun windows
/// along the height. `axis` is the channels (1), or the width (4) if the cells are 2 wide and tile the width. p.size is
/// the number of items along each axis. Launch: one thread per item, `count` in all, in a 1-D grid-stride loop, kBlock
/// threads per CTA. No shared memory.
template <class T, class Index, int width, int axis>
__global__ void __launch_bounds__(kBlock)
    max_pool_backward_cells(const __grid_constant__ PoolProblem p, uint32_t count) {
  wait_for_previous_kernels();
  constexpr int step = axis == 4 ? 2 : 1, write = width * step, run = kRun<width>;
  const auto stride = [&](int i) { return static_cast<int>(p.geometry.stride.values[i]); };
  const auto begin = [&](int i, int64_t o) {
    return static_cast<int>(o) * stride(i) - static_cast<int>(p.geometry.padding.values[i]);
  };
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at, axis);
    at[3] *= run;
    const int in = offset_in(p.in, at), index = offset_in(p.indices, at);
    Index maximum[run][width];  // positions of the maxima
    T gradient[run][width] = {};
#pragma unroll
    for (int r = 0; r < run; ++r) {
#pragma unroll
      for (Index& position : maximum[r]) position = -1;
      // The voxels of cells after the last window have gradient 0.
      if (at[2] >= p.in.size[2] || at[3] + r >= p.in.size[3] || at[4] >= p.in.size[4]) continue;
      load_values<width>(static_cast<const Index*>(p.indices.data) + index + r * static_cast<int>(p.indices.stride[3]),
                         maximum[r]);
      load_values<width>(static_cast<const T*>(p.in.data) + in + r * static_cast<int>(p.in.stride[3]), gradient[r]);
    }
    const int d0 = begin(0, at[2]), d1 = min(d0 + stride(0), static_cast<int>(p.out.size[2]));
    const int w0 = begin(2, at[4]), w1 = min(w0 + stride(2), static_cast<int>(p.out.size[4]));
#pragma unroll
    for (int r = 0; r < run; ++r) {
      const int h0 = begin(1, at[3] + r), h1 = min(h0 + stride(1), static_cast<int>(p.out.size[3]));
#pragma unroll 1
      for (int d = max(d0, 0); d < d1; ++d)
#pragma unroll 1
        for (int h = max(h0, 0); h < h1; ++h) {
          int w = max(w0, 0);
          T* to = static_cast<T*>(p.out.data) + offset_in(p.out, {at[0], at[1], d, h, w});
          const int row = (d * static_cast<int>(p.out.size[3]) + h) * static_cast<int>(p.out.size[4]);
#pragma unroll 1
          do {
            T values[write];
#pragma unroll
            for (int j = 0; j < write; ++j)
              values[j] = maximum[r][j / step] == row + w + (axis == 4 ? j : 0) ? gradient[r][j / step] : T();
            store_values<write>(to, values);
            to += p.out.stride[4];
          } while (axis == 1 && ++w < w1);
        }
    }
  }
}

/// Returns whether all offsets in the view fit into 32 bits.
inline bool has_32bit_offsets(const View& view) {
  double span = 0;
  for (int axis = 0; axis < 5; ++axis)
    span += static_cast<double>(view.size[axis]) * std::abs(static_cast<double>(view.stride[axis]));
  return span < 0x1p31;
}

/// Returns whether windows of 2 along the width tile the rows of `large`, the volume before pooling, and whether
/// `width` neighboring windows are aligned vectors in all views. `small` is the volume after pooling.
inline bool has_pairs(const View& large, const View& small, const PoolViews& v, int width) {
  return v.geometry.stride[2] == 2 && v.geometry.padding[2] == 0 && large.size[4] == 2 * small.size[4] &&
         has_vectors(large, 4, 2 * width) && has_vectors(small, 4, width) &&
         (!v.indices.data || has_vectors(v.indices, 4, width));
}

/// If max_pool_pairs supports the call, launches this kernel and returns true; otherwise returns false.
template <class T, class Index>
bool launch_pairs(const PoolViews& v, cudaStream_t stream) {
  const PoolGeometry& g = v.geometry;
  bool pairs =
      has_32bit_offsets(v.out) && has_32bit_offsets(v.in) && has_32bit_offsets(v.indices) && g.kernel_size[0] <= 2;
  for (int i = 0; i < 3; ++i) {
    pairs &= (i == 0 || g.kernel_size[i] == 2) && g.dilation[i] == 1 && g.padding[i] == 0;
    pairs &= (v.out.size[i + 2] - 1) * g.stride[i] + g.kernel_size[i] <= v.in.size[i + 2];
  }
  if (!pairs) return false;
  const auto fits = [&](int n) { return has_pairs(v.in, v.out, v, n); };
  return with_widest<kVectorWidth<T> / 2>(fits, [&]<int width>() {
    PoolProblem p(v, width, 4);
    p.size[3] = Divisor(divide_up(v.out.size[3], kRun<width>));
    const auto count = static_cast<uint32_t>(v.out.numel() / v.out.size[3] / width * p.size[3].value());
    launch_kernel("max_pool", max_pool_pairs<T, Index, width>, grid_size(count), kBlock, 0, stream, p, count);
  });
}

/// If windows do not overlap and offsets fit into 32 bits, launches max_pool_backward_cells and returns true; otherwise
/// returns false.
template <class T, class Index>
bool launch_cells(const PoolViews& v, cudaStream_t stream) {
  const PoolGeometry& g = v.geometry;
  if (!has_32bit_offsets(v.out) || !has_32bit_offsets(v.in) || !has_32bit_offsets(v.indices)) return false;
  View cells = v.out;
  for (int i = 0; i < 3; ++i) {
    if (g.stride[i] < (g.kernel_size[i] - 1) * g.dilation[i] + 1) return false;
    if (g.stride[i] >= int64_t{1} << 28 || v.out.size[i + 2] >= int64_t{1} << 30) return false;
    cells.size[i + 2] = divide_up(v.out.size[i + 2] + g.padding[i], g.stride[i]);
  }
  const auto launch = [&]<int width, int axis>() {
    PoolProblem p(v, width, axis);
    for (int i = 2; i < 5; ++i) {
      const int side = i == axis ? width : i == 3 ? kRun<width> : 1;
      p.size[i] = Divisor(divide_up(cells.size[i], side));
    }
    int64_t count = v.out.size[0];
    for (int i = 1; i < 5; ++i) count *= p.size[i].value();
    launch_kernel("max_pool_backward", max_pool_backward_cells<T, Index, width, axis>, grid_size(count), kBlock, 0,
                  stream, p, static_cast<uint32_t>(count));
  };
  constexpr int width = kVectorWidth<T>;
  if (has_vectors(v.out, 1, width) && has_vectors(v.in, 1, width) && has_vectors(v.indices, 1, width))
    launch.template operator()<width, 1>();
  else if (!with_widest<width / 2>([&](int n) { return has_pairs(v.out, v.in, v, n); },
                                   [&]<int windows>() { launch.template operator()<windows, 4>(); }))
    launch.template operator()<1, 1>();
  return true;
}

}  // namespace voxgrad::cuda
