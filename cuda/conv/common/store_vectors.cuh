// Stores the accumulators of tensor core products to channels-last tensors, whose channels are contiguous.
#pragma once

#include "core/detail/divide.h"
#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/plan/limits.h"

namespace voxgrad::cuda {

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

/// Implements store_vectors() for halves. Matrices of 8 x 8 halves are stored in shared memory (on sm_90 and newer
/// with stmatrix), and lanes load vectors of their rows. `staged` has two buffers of 16 rows of 32 columns. The order
/// of the vectors of a row depends on the row, which avoids bank conflicts.
template <int kN8, class T, int kSums, class F>
__device__ void store_halves(uint32_t staged, T* const (&to)[2], const bool (&exists)[2],
                             const Accumulator (&sum)[kSums], const F& finish, int columns) {
  constexpr int kRowBytes = 64;
  static_assert(2 * 16 * kRowBytes == kStagedBytes);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 16, g = lane / 4, column = lane % 4 * 8;
  const uint32_t write = staged + row * kRowBytes + (lane / 16 ^ row / 2 % 4) * 16;
  const uint32_t read = staged + g * kRowBytes + (lane % 4 ^ g / 2 % 4) * 16;
#pragma unroll
  for (int first = 0; first < kN8; first += 4) {
    const uint32_t buffer = first / 4 % 2 * (16 * kRowBytes);
#pragma unroll
    for (int n = first; n < first + 4 && n < kN8; n += 2) {
      uint32_t word[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (const int block = n + i / 2, r = i % 2; block < kN8)
          word[i] = finish.pair(sum[block][2 * r], sum[block][2 * r + 1], block);
      store_matrices((write ^ (n - first) * 16) + buffer, word);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t vector[4];
      load_shared(read + buffer + r * 8 * kRowBytes, vector);
      if (exists[r] && first * 8 < min(columns, kN8 * 8) - column)
        *reinterpret_cast<uint4*>(to[r] + column + first * 8) = {vector[0], vector[1], vector[2], vector[3]};
    }
  }
  __syncwarp();
}

/// Implements store_vectors() for floats. Two neighboring lanes exchange pairs of columns.
template <int kN8, int kSums, class F>
__device__ void store_floats(float* const (&to)[2], const bool (&exists)[2], const Accumulator (&sum)[kSums],
                             const F& finish, int columns) {
  constexpr int kAtOnce = kN8 < 4 ? kN8 : 4;  // steps are interleaved, because a warp would wait for each exchange
  const int lane = static_cast<int>(threadIdx.x) % 4, block = lane % 2;
  float* row[2];  // the lane's vector of step 0
  int left[2];    // columns from its first element to the end of the row
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = (block - r * kN8) * 8 + lane / 2 * 4;
    row[r] = to[r] + column;
    left[r] = exists[r] ? min(columns, kN8 * 8) - column : 0;
  }
#pragma unroll
  for (int first = 0; first < kN8; first += kAtOnce) {
    uint32_t v[kAtOnce][4] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (const int item = (first + j) * 2 + i, r = item / kN8, n = item % kN8; r < 2)
#pragma unroll
          for (int k = 0; k < 2; ++k) v[j][2 * i + k] = __float_as_uint(finish(sum[n][2 * r + k], n, k));
    exchange_pairs(v);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int step = (first + j) * 2;
      const bool second = step >= kN8 || (step + 2 > kN8 && block >= kN8 - step);
      if (step < 2 * kN8 && step * 8 < (second ? left[1] : left[0]))
        *reinterpret_cast<uint4*>((second ? row[1] : row[0]) + step * 8) = {v[j][0], v[j][1], v[j][2], v[j][3]};
    }
  }
}

/// Stores the first `columns` columns of this lane's two rows of C (g and g + 8) as vectors of 16 bytes. The rows begin
/// at to[0] and to[1]. A row consists of kN8 blocks of 8 columns. All lanes of the warp must call it.
/// `staged` is the address of kStagedBytes bytes of shared memory of the warp, a multiple of 128. Only halves need it.
/// finish(sum, block, column) returns the result of a column (0 or 1) of the lane's pair in a block; finish.pair(sum,
/// sum, block) returns both results as halves.
template <int kN8, class T, int kSums, class F>
__device__ void store_vectors(uint32_t staged, T* const (&to)[2], const bool (&exists)[2],
                              const Accumulator (&sum)[kSums], const F& finish, int columns) {
  if constexpr (sizeof(T) == 2)
    store_halves<kN8>(staged, to, exists, sum, finish, columns);
  else
    store_floats<kN8>(to, exists, sum, finish, columns);
}

}  // namespace voxgrad::cuda
