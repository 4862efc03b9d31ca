// What kernels that reduce have in common: how the threads of a block share outputs and the elements that each
// takes, a sum over threads in a fixed order, and axes merged into as few as possible.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// The type that sums of T are made in.
template <class T>
using SumOf = std::conditional_t<std::is_floating_point_v<compute_t<T>>, double, int64_t>;

/// A block works on `columns` outputs at a time, each with `reducers` threads; both are powers of two and their
/// product is kBlock, or less and any numbers if `columns_adjacent`: threads whose reducer() is beyond are idle.
/// Neighbouring threads are neighbouring columns if `columns_adjacent`, else reducers: whichever are neighbours in
/// memory.
struct BlockLayout {
  int columns = 1, reducers = kBlock;
  bool columns_adjacent = false;
  unsigned neighbours = static_cast<unsigned>(columns_adjacent ? columns : reducers);
  unsigned inverse = 65536 / neighbours + 1;  // whose products with numbers below 256 give exact quotients

  /// For `length` elements an output.
  static BlockLayout choose(int64_t length, bool columns_adjacent) {
    const int reducers = columns_adjacent || length <= 64 ? 8 : length <= 512 ? 32 : kBlock;
    return {kBlock / reducers, reducers, columns_adjacent};
  }
#ifdef __CUDACC__
  __device__ int column() const { return columns_adjacent ? neighbour() : other(); }
  __device__ int reducer() const { return columns_adjacent ? other() : neighbour(); }

 private:
  __device__ int other() const { return static_cast<int>(threadIdx.x * inverse / 65536); }
  __device__ int neighbour() const { return static_cast<int>(threadIdx.x) - other() * static_cast<int>(neighbours); }
#endif
};

#ifdef __CUDACC__
/// `value` of lane `source` of this warp; all lanes call together.
template <class V>
__device__ V from_lane(const V& value, int source) {
  static_assert(sizeof(V) % sizeof(uint32_t) == 0);
  struct Words {
    uint32_t word[sizeof(V) / sizeof(uint32_t)];
  };
  Words words = std::bit_cast<Words>(value);
  for (uint32_t& word : words.word) word = __shfl_sync(~0u, word, source);
  return std::bit_cast<V>(words);
}

/// combine() over the values of a column's reducers, as a tree of fixed shape; every thread of the column gets it.
/// `shared` has kBlock places. All threads of a block call together.
template <class V, class Combine>
__device__ V combine_reducers(V value, const BlockLayout& layout, V* shared, Combine combine) {
  constexpr int kWarp = 32;
  const int column = layout.column(), reducer = layout.reducer(), reducers = layout.reducers;
  if (reducers == 1) return value;
  if (!layout.columns_adjacent) {
    // Within warps, then over the warps of the column.
    const int lane = static_cast<int>(threadIdx.x % kWarp), lanes = min(reducers, kWarp);
    for (int half = lanes / 2; half > 0; half /= 2) value = combine(value, from_lane(value, (lane + half) % kWarp));
    if (reducers <= kWarp) return from_lane(value, lane & -lanes);
    __syncthreads();
    if (lane == 0) shared[threadIdx.x / kWarp] = value;
    __syncthreads();
    const int warps = reducers / kWarp;
    value = shared[column * warps];
    for (int warp = 1; warp < warps; ++warp) value = combine(value, shared[column * warps + warp]);
    return value;
  }
  __syncthreads();
  shared[reducer * layout.columns + column] = value;
  __syncthreads();
  for (int left = reducers, half; left > 1; left = half) {
    half = (left + 1) / 2;
    if (reducer + half < left) {
      V& mine = shared[reducer * layout.columns + column];
      mine = combine(mine, shared[(reducer + half) * layout.columns + column]);
    }
    __syncthreads();
  }
  return shared[column];
}
#endif

/// numerator / denominator, both >= 0; the 32-bit division, several times quicker, where it does.
VG_HOST_DEVICE inline int64_t quotient(int64_t numerator, int64_t denominator) {
  if ((numerator | denominator) >> 32) return numerator / denominator;
  return static_cast<uint32_t>(numerator) / static_cast<uint32_t>(denominator);
}

/// Some axes of a pair of views, the one with the smallest stride first; a has strides in the first, b in the second.
struct Axes {
  int rank = 0;
  int64_t size[kMaxRank] = {}, a[kMaxRank] = {}, b[kMaxRank] = {};

  /// Adds an axis; call finish() after the last.
  void add(int64_t axis_size, int64_t stride_a, int64_t stride_b) {
    if (axis_size == 1) return;
    int place = rank++;
    for (; place > 0 && std::abs(a[place - 1]) > std::abs(stride_a); --place) move(place - 1, place);
    size[place] = axis_size;
    a[place] = stride_a;
    b[place] = stride_b;
  }
  /// Merges axes that both views step through evenly; leaves at least one.
  void finish() {
    int last = 0;
    for (int axis = 1; axis < rank; ++axis) {
      if (a[axis] == a[last] * size[last] && b[axis] == b[last] * size[last])
        size[last] *= size[axis];
      else
        move(axis, ++last);
    }
    if (rank == 0) size[0] = 1;
    rank = last + 1;
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= size[axis];
    return count;
  }
#ifdef __CUDACC__
  /// Offset of element `index` in the view whose strides are given, looking at axes from `first` on.
  __device__ int64_t offset(int64_t index, const int64_t (&stride)[kMaxRank], int first = 0) const {
    int64_t result = 0;
#pragma unroll 1
    for (int axis = first; axis < rank; ++axis) {
      const int64_t rest = axis + 1 < rank ? quotient(index, size[axis]) : 0;
      result += (index - rest * size[axis]) * stride[axis];
      index = rest;
    }
    return result;
  }
#endif

 private:
  void move(int from, int to) {
    size[to] = size[from];
    a[to] = a[from];
    b[to] = b[from];
  }
};

#ifdef __CUDACC__
/// Walks through Axes in even steps; divides only when it leaves a row.
class Cursor {
 public:
  __device__ Cursor(const Axes& axes, int64_t index)
      : axes_(axes), length_(axes.rank == 1 ? std::numeric_limits<int64_t>::max() : axes.size[0]), row_(0) {
    advance(index);
  }
  __device__ int64_t offset() const { return offset_; }
  __device__ void advance(int64_t steps) {
    inner_ += steps;
    offset_ += steps * axes_.a[0];
    if (inner_ < length_) return;
    const int64_t rows = quotient(inner_, length_);
    inner_ -= rows * length_;
    row_ += rows;
    offset_ = axes_.offset(row_, axes_.a, 1) + inner_ * axes_.a[0];
  }

 private:
  const Axes& axes_;
  const int64_t length_;  // of a row
  int64_t row_, inner_ = 0, offset_ = 0;
};
#endif

}  // namespace voxgrad::cuda
