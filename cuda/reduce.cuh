// Building blocks of reduction kernels: the assignment of outputs and elements to the threads of a CTA, the reduction
// over threads in a fixed order, and the iteration over strided elements.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "cuda/detail/launch.h"
#include "cuda/nest.cuh"

namespace voxgrad::cuda {

/// The type in which sums of T are accumulated.
template <class T>
using SumOf = std::conditional_t<std::is_floating_point_v<compute_t<T>>, double, int64_t>;

/// The arrangement of a CTA's threads: `columns` outputs at a time, each reduced by `reducers` threads.
///
/// If `columns_adjacent`, neighboring threads belong to neighboring columns; otherwise, they are neighboring reducers
/// of one column. Kernels choose the arrangement in which neighboring threads read neighboring addresses. The default
/// is one column, which all kBlock threads reduce. `columns` and `reducers` are powers of two whose product is kBlock.
/// With `columns_adjacent`, any two numbers whose product is at most kBlock are allowed, and threads whose reducer() is
/// not below `reducers` are idle.
struct BlockLayout {
  int columns = 1;
  int reducers = kBlock;
  bool columns_adjacent = false;
  /// Number of consecutive threads with the same outer().
  unsigned neighbors = static_cast<unsigned>(columns_adjacent ? columns : reducers);
  unsigned inverse = 65536 / neighbors + 1;  ///< x * inverse / 65536 is x / neighbors for x < 256

  /// Returns the layout for outputs of `length` elements each.
  static BlockLayout choose(int64_t length, bool columns_adjacent) {
    const int reducers = columns_adjacent || length <= 64 ? 8 : length <= 512 ? 32 : kBlock;
    return {kBlock / reducers, reducers, columns_adjacent};
  }
  /// Returns the column of this thread.
  __device__ int column() const { return columns_adjacent ? inner() : outer(); }
  /// Returns the index of this thread among the reducers of its column.
  __device__ int reducer() const { return columns_adjacent ? outer() : inner(); }

 private:
  /// Returns threadIdx.x / neighbors.
  __device__ int outer() const { return static_cast<int>(threadIdx.x * inverse / 65536); }
  /// Returns threadIdx.x % neighbors.
  __device__ int inner() const { return static_cast<int>(threadIdx.x) - outer() * static_cast<int>(neighbors); }
};

/// Returns `value` of lane `source` of this warp. All lanes of the warp must call this function together.
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

/// Reduces the values of a column's reducers with combine(), in a tree of fixed shape, and returns the result to every
/// thread of the column. `shared` has kBlock elements. All threads of the CTA must call this function together.
template <class V, class Combine>
__device__ V combine_reducers(V value, const BlockLayout& layout, V* shared, Combine combine) {
  constexpr int kWarp = 32;
  const int column = layout.column(), reducer = layout.reducer(), reducers = layout.reducers;
  if (reducers == 1) return value;
  if (!layout.columns_adjacent) {
    // Reduce within warps, then over the warps of the column.
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
      V& own = shared[reducer * layout.columns + column];
      own = combine(own, shared[(reducer + half) * layout.columns + column]);
    }
    __syncthreads();
  }
  return shared[column];
}

/// Returns the sum of `value` over all threads of a CTA of kBlock threads. `shared` has kBlock elements.
template <class V>
__device__ V block_sum(V value, V* shared) {
  return combine_reducers(value, BlockLayout(), shared, [](V a, V b) { return a + b; });
}

/// The offset of an element of a view. advance() moves to a later element and divides only at the end of a row.
class Cursor {
 public:
  __device__ Cursor(const Nest<1>& nest, int64_t index)
      : nest_(nest), length_(nest.rank == 1 ? std::numeric_limits<int64_t>::max() : nest.size[0]), row_(0) {
    advance(index);
  }
  __device__ int64_t offset() const { return offset_; }
  __device__ void advance(int64_t steps) {
    inner_ += steps;
    offset_ += steps * nest_.stride[0][0];
    if (inner_ < length_) return;
    const int64_t rows = quotient(inner_, length_);
    inner_ -= rows * length_;
    row_ += rows;
    offset_ = nest_.offset(row_, 0, 1) + inner_ * nest_.stride[0][0];
  }

 private:
  const Nest<1>& nest_;
  const int64_t length_;  ///< elements of a row; unlimited if there is one row
  int64_t row_;
  int64_t inner_ = 0;  ///< index within the row
  int64_t offset_ = 0;
};

}  // namespace voxgrad::cuda
