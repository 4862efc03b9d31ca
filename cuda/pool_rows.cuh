// Max pooling of contiguous rows: a block takes, for whole rows of the input, the maxima over the depth and the height
// of a window, in vectors along the width, into shared memory, and from there the maxima along the width. Private to
// cuda/pool.cu.
#pragma once

#include "core/detail/divide.h"
#include "cuda/pool.cuh"

namespace voxgrad::cuda {

struct PoolRows {
  View out, in, indices;
  Divider channels, depth, height, vectors, out_width;
  int in_size[3], window[3], step[3], padding[3], dilation[3];
  uint32_t rows, tile_rows;
};

constexpr int kPoolTileRows = 64;
constexpr int kPoolSharedBytes = 32 << 10;

template <class T, class Index, int width>
__global__ void __launch_bounds__(kBlock) max_pool_rows(const __grid_constant__ PoolRows p) {
  using C = compute_t<T>;
  using Entry = Best<C, Index>;
  constexpr bool wanted = !std::is_same_v<Index, NoIndex>;
  extern __shared__ uint4 shared[];  // aligned for vectors
  C* const values = reinterpret_cast<C*>(shared);
  const uint32_t length = static_cast<uint32_t>(p.in_size[2]);
  auto* const places = reinterpret_cast<Index*>(values + (p.tile_rows * length + 3) / 4 * 4);
  __shared__ int64_t from[kPoolTileRows], to[kPoolTileRows], to_index[kPoolTileRows];
  __shared__ int2 place[kPoolTileRows];  // the window's first depth and row
  for (uint32_t first = blockIdx.x * p.tile_rows; first < p.rows; first += gridDim.x * p.tile_rows) {
    const uint32_t rows = min(p.tile_rows, p.rows - first);
    __syncthreads();  // the last tile was read
    for (uint32_t r = threadIdx.x; r < rows; r += kBlock) {
      uint32_t n = first + r;
      const int64_t h = p.height.take(n), d = p.depth.take(n), c = p.channels.take(n);
      place[r] = {static_cast<int>(d) * p.step[0] - p.padding[0], static_cast<int>(h) * p.step[1] - p.padding[1]};
      const auto offset = [&](const int64_t(&s)[kMaxRank]) { return n * s[0] + c * s[1] + d * s[2] + h * s[3]; };
      from[r] = n * p.in.stride[0] + c * p.in.stride[1];
      to[r] = offset(p.out.stride);
      to_index[r] = offset(p.indices.stride);
    }
    __syncthreads();
    for (uint32_t item = threadIdx.x; item < rows * p.vectors.divisor; item += kBlock) {
      const uint32_t r = p.vectors.divide(item);
      const int w = static_cast<int>(item - r * p.vectors.divisor) * width;
      Entry best[width];
      const T* in = static_cast<const T*>(p.in.data) + from[r] + w;
      for (int kd = 0; kd < p.window[0]; ++kd) {
        const int d = place[r].x + kd * p.dilation[0];
        if (static_cast<unsigned>(d) >= static_cast<unsigned>(p.in_size[0])) continue;
#pragma unroll 2
        for (int kh = 0; kh < p.window[1]; ++kh) {
          const int h = place[r].y + kh * p.dilation[1];
          if (static_cast<unsigned>(h) >= static_cast<unsigned>(p.in_size[1])) continue;
          const auto loaded = load_vector<T, width>(in + d * p.in.stride[2] + h * p.in.stride[3]);
          const int at = (d * p.in_size[1] + h) * p.in_size[2] + w;
#pragma unroll
          for (int j = 0; j < width; ++j) best[j].offer_next(static_cast<C>(loaded.v[j]), at + j);
        }
      }
      store_best(best, values + r * length + w, places + r * length + w);
    }
    __syncthreads();
    for (uint32_t item = threadIdx.x; item < rows * p.out_width.divisor; item += kBlock) {
      const uint32_t r = p.out_width.divide(item), ow = item - r * p.out_width.divisor;
      const int begin = static_cast<int>(ow) * p.step[2] - p.padding[2];
      Entry best;
      for (int kw = 0; kw < p.window[2]; ++kw) {
        const int w = begin + kw * p.dilation[2];
        if (static_cast<unsigned>(w) >= static_cast<unsigned>(p.in_size[2])) continue;
        const uint32_t column = r * length + w;
        if constexpr (!wanted)
          best.offer(values[column], 0);
        else if (places[column] >= 0)
          best.offer(values[column], places[column]);
      }
      static_cast<T*>(p.out.data)[to[r] + ow * p.out.stride[4]] = convert<T>(best.value);
      if constexpr (wanted) static_cast<Index*>(p.indices.data)[to_index[r] + ow * p.indices.stride[4]] = best.place;
    }
  }
}

/// Launches it where the rows allow: contiguous in x, short enough, and all numbers in 32 bits.
template <class T, class Index>
bool launch_max_pool_rows(const View& y, const View* indices, const View& x, const PoolGeometry& g,
                          cudaStream_t stream) {
  using Entry = Best<compute_t<T>, Index>;
  const int64_t row_bytes = x.size[4] * static_cast<int64_t>(sizeof(Entry)), rounding = 4 * sizeof(Entry);
  double reach = static_cast<double>(x.size[2]) * static_cast<double>(x.size[3]) * static_cast<double>(x.size[4]);
  for (int i = 0; i < 3; ++i)
    reach = std::max(reach, static_cast<double>(y.size[i + 2]) * static_cast<double>(g.stride[i]) +
                                static_cast<double>(g.kernel_size[i]) * static_cast<double>(g.dilation[i]));
  if (x.stride[4] != 1 || row_bytes + rounding > kPoolSharedBytes || reach >= 0x1p30 || y.numel() >= int64_t{1} << 31)
    return false;
  constexpr int width = kVectorWidth<T>;
  const bool vectors = has_vectors(x, 4, width);
  PoolRows p{};
  p.out = y;
  p.in = x;
  if (indices) p.indices = *indices;
  p.channels = Divider(y.size[1]);
  p.depth = Divider(y.size[2]);
  p.height = Divider(y.size[3]);
  p.out_width = Divider(y.size[4]);
  p.vectors = Divider(x.size[4] / (vectors ? width : 1));
  for (int i = 0; i < 3; ++i) {
    p.in_size[i] = static_cast<int>(x.size[i + 2]);
    p.window[i] = static_cast<int>(g.kernel_size[i]);
    p.step[i] = static_cast<int>(g.stride[i]);
    p.padding[i] = static_cast<int>(g.padding[i]);
    p.dilation[i] = static_cast<int>(g.dilation[i]);
  }
  p.rows = static_cast<uint32_t>(y.numel() / y.size[4]);
  const int64_t busy = divide_up(2 * kBlock, p.vectors.divisor);
  p.tile_rows =
      static_cast<uint32_t>(std::min({(kPoolSharedBytes - rounding) / row_bytes, busy, int64_t{kPoolTileRows}}));
  const auto kernel = vectors ? max_pool_rows<T, Index, width> : max_pool_rows<T, Index, 1>;
  kernel<<<grid_size(p.rows, static_cast<int>(p.tile_rows)), kBlock, p.tile_rows* static_cast<size_t>(row_bytes),
           stream>>>(p);
  check_launch("max_pool");
  return true;
}

}  // namespace voxgrad::cuda
