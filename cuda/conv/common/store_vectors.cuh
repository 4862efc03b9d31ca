// Stores the accumulators of tensor core products to channels-last tensors, whose channels are contiguous.
#pragma once

#include "core/detail/divide.h"
#include "cuda/conv/common/mma.cuh"

namespace voxgrad::cuda {

/// Transposes 4 x 4 matrices that four neighboring lanes hold: element i of lane j becomes element j of lane i.
template <int kCount>
__device__ void transpose_quads(uint32_t (&v)[kCount][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const int other = 3 - bit;  // 2 or 1
    const bool upper = lane & bit;
    uint32_t first[kCount], second[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      first[i] = __shfl_xor_sync(0xffffffff, upper ? v[i][0] : v[i][bit], bit);
      second[i] = __shfl_xor_sync(0xffffffff, upper ? v[i][other] : v[i][3], bit);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i][0] = upper ? first[i] : v[i][0];
      v[i][bit] = upper ? v[i][bit] : first[i];
      v[i][other] = upper ? second[i] : v[i][other];
      v[i][3] = upper ? v[i][3] : second[i];
    }
  }
}

/// Exchanges pairs of words between two neighboring lanes, for kCount vectors. Each lane has a pair of two vectors of
/// four elements: the even lane the first halves, the odd lane the second halves. Afterwards, the even lane has the
/// first vector and the odd lane the second one.
template <int kCount>
__device__ void exchange_pairs(uint32_t (&v)[kCount][4]) {
  const bool odd = threadIdx.x % 2;
  uint32_t other[kCount][2];
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i)
    other[i / 2][i % 2] = __shfl_xor_sync(0xffffffff, odd ? v[i / 2][i % 2] : v[i / 2][i % 2 + 2], 1);
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) {
    uint32_t &low = v[i / 2][i % 2], &high = v[i / 2][i % 2 + 2];
    low = odd ? other[i / 2][i % 2] : low;
    high = odd ? high : other[i / 2][i % 2];
  }
}

/// Stores the first `columns` columns of this lane's two rows of C (g and g + 8) as vectors of 16 bytes. The rows begin
/// at to[0] and to[1]. Four neighboring lanes hold both rows. A row consists of kN8 blocks of 8 columns; the blocks of
/// the second row follow those of the first. In each step, the lanes exchange elements of kLanes blocks, so that each
/// lane has elements of one block. Steps are interleaved, because a warp would otherwise wait for each exchange.
/// finish(sum, block, column) returns the result of a column (0 or 1) of the lane's pair in a block;
/// finish.pair(sum, sum, block) returns both results as halves.
template <int kN8, class T, int kSums, class F>
__device__ void store_vectors(T* const (&to)[2], const bool (&exists)[2], const Accumulator (&sum)[kSums],
                              const F& finish, int columns) {
  constexpr bool kHalves = sizeof(T) == 2;
  constexpr int kLanes = kHalves ? 4 : 2, kSteps = divide_up(2 * kN8, kLanes), kAtOnce = kSteps < 4 ? kSteps : 4;
  const int lane = static_cast<int>(threadIdx.x) % 4, block = lane % kLanes;
  T* row[2];    // the lane's vector of step 0
  int left[2];  // columns from its first element to the end of the row
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = (block - r * kN8) * 8 + lane / kLanes * 4;
    row[r] = to[r] + column;
    left[r] = exists[r] ? min(columns, kN8 * 8) - column : 0;
  }
#pragma unroll
  for (int first = 0; first < kSteps; first += kAtOnce) {
    uint32_t v[kAtOnce][4] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (const int item = (first + j) * kLanes + i, r = item / kN8, n = item % kN8; r < 2) {
          if constexpr (kHalves)
            v[j][i] = finish.pair(sum[n][2 * r], sum[n][2 * r + 1], n);
          else
#pragma unroll
            for (int k = 0; k < 2; ++k) v[j][2 * i + k] = __float_as_uint(finish(sum[n][2 * r + k], n, k));
        }
    if constexpr (kHalves)
      transpose_quads(v);
    else
      exchange_pairs(v);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int step = (first + j) * kLanes;
      const bool second = step >= kN8 || (step + kLanes > kN8 && block >= kN8 - step);
      if (step < 2 * kN8 && step * 8 < (second ? left[1] : left[0]))
        *reinterpret_cast<uint4*>((second ? row[1] : row[0]) + step * 8) = {v[j][0], v[j][1], v[j][2], v[j][3]};
    }
  }
}

}  // namespace voxgrad::cuda
