// The epilogue of fprop and dgrad: adds the bias, applies ReLU, rounds, and stores the results. The results are stored
// as vectors of a voxel's channels, as single elements at any strides, or as float partial sums (split-K).
#pragma once

#include "cuda/conv/common/store_vectors.cuh"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/conv/sm90/fprop_dgrad/scheduler.cuh"
#include "cuda/conv/sm90/wgmma.cuh"

namespace voxgrad::cuda::implicit_gemm {

/// The result that belongs to a row of an m64 tile.
struct ResultRow {
  static constexpr uint32_t kNone = 0x7f7f7f7f;
  uint32_t place;   ///< sample, depth, height and width, one byte each; kNone if the row has no result
  uint32_t offset;  ///< elements from the first result of the tile
};
static_assert(kMaxFpropDgradSide <= 0x7f);  // the bytes of ResultRow::place are less
/// The rows of all m64 tiles, in shared memory.
template <class Tile>
struct ResultRows {
  ResultRow row[Tile::kConsumers * Tile::kTiles * 64];

  /// Computes the rows. All threads must call it.
  __device__ void list(const Params& p) {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kConsumers * Tile::kTiles * 64; i += Tile::kThreads) {
      const int base = p.base[i / 64], in_tile = i % 64;
      int left = max(base, 0) + in_tile / 8 * p.group_pitch + in_tile % 8;
      const int w = p.extent[0].take_digit(left), h = p.extent[1].take_digit(left), d = p.extent[2].take_digit(left);
      const bool exists = base >= 0 && w < p.tile[3] && h < p.tile[2] && d < p.tile[1] && left < p.tile[0];
      const int64_t offset = left * p.out_stride[0] + d * p.out_stride[1] * p.out_step[0] +
                             h * p.out_stride[2] * p.out_step[1] + w * p.out_stride[3] * p.out_step[2];
      row[i] = {exists ? static_cast<uint32_t>(left | d << 8 | h << 16 | w << 24) : ResultRow::kNone,
                static_cast<uint32_t>(offset)};
    }
  }
};

/// Stores a value if a < b. The assembly keeps nvcc from holding the comparison in a register for the next row.
template <class T>
__device__ void store_if_less(int a, int b, T* to, T value) {
  if constexpr (sizeof(T) == 4)
    asm volatile("{.reg .pred p; setp.lt.s32 p, %0, %1; @p st.global.b32 [%2], %3;}" ::"r"(a), "r"(b), "l"(to),
                 "r"(__float_as_uint(value))
                 : "memory");
  else
    asm volatile("{.reg .pred p; setp.lt.s32 p, %0, %1; @p st.global.b16 [%2], %3;}" ::"r"(a), "r"(b), "l"(to),
                 "h"(value.bits)
                 : "memory");
}

/// Rounds sums. The member functions are those of Finish.
template <class T>
struct Round {
  __device__ float operator()(float sum, int, int) const { return sum; }
  __device__ uint32_t pair(float first, float second, int) const { return round_pair<T>(first, second); }
};

/// Computes max(sum + bias, floor) for the columns that this lane holds. There is no branch, because nvcc would move an
/// accumulator that is changed in a branch to another register.
template <class T, int kN8>
struct Finish {
  float bias[kN8][2];
  float floor;

  __device__ Finish(const Params& p, int channel, int columns) : floor(p.epilogue.floor) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kN8; ++n) bias[n][0] = bias[n][1] = 0;
    if (!p.epilogue.bias || p.partial) return;
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (const int column = n * 8 + first + i; column < columns)
          bias[n][i] =
              static_cast<float>(static_cast<const T*>(p.epilogue.bias)[(channel + column) * p.epilogue.bias_stride]);
  }
  __device__ float operator()(float sum, int n, int i) const { return max_or_nan(sum + bias[n][i], floor); }
  /// Returns a pair of columns as halves.
  __device__ uint32_t pair(float first, float second, int n) const {
    return round_pair<T>(first + bias[n][0], second + bias[n][1], floor);
  }
};

/// Stores the columns of a row one by one, `stride` elements apart. If channels are not innermost, 8 lanes store 8
/// voxels of a channel.
template <int half, int kN8, class T, int kSums, class F>
__device__ void store_columns(T* to, const Accumulator (&sum)[kSums], const F& finish, int columns, bool exists,
                              int64_t stride) {
  const int first = static_cast<int>(threadIdx.x) % 4 * 2, left = exists ? columns - first : 0;
  to += first * stride;
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    store_if_less(n * 8, left, to, T(finish(sum[n][2 * half], n, 0)));
    store_if_less(n * 8 + 1, left, to + stride, T(finish(sum[n][2 * half + 1], n, 1)));
    to += 8 * stride;
  }
}

/// The positions of a warp's rows in the results.
struct ResultPlaces {
  const ResultRow* rows;  // begins with the warp's first row in its first m64 tile
  uint32_t limits;        // results from the corner of the tile to the end of each axis, one byte each
  int64_t corner;         // offset of the first result of the tile

  __device__ ResultPlaces(const Params& p, const WorkUnit& unit, const Phase& phase, const ResultRow* list)
      : rows(list) {
    const auto limit = [](int left) { return static_cast<uint32_t>(max(min(left, kMaxFpropDgradSide), 0)); };
    limits = limit(p.samples - unit.at[0]);
    corner = unit.at[0] * p.out_stride[0];
    for (int a = 0; a < 3; ++a) {
      limits |= limit(phase.count[a] - unit.at[a + 1]) << 8 * (a + 1);
      corner += (phase.first[a] + int64_t{unit.at[a + 1]} * p.out_step[a]) * p.out_stride[a + 1];
    }
  }
  /// Computes the offset of a row's result from the corner. Returns false if the row has no result. Compares all bytes
  /// at once: the subtraction leaves the highest bit of a byte set unless the place is less than the limit.
  __device__ bool find(int row, uint32_t& offset) const {
    constexpr uint32_t kHighest = 0x80808080;
    const ResultRow at = rows[row];
    offset = at.offset;
    return (((at.place | kHighest) - limits) & kHighest) == 0;
  }
};

/// Stores zeros as the partial sums of a split that has no k-blocks.
template <class Tile>
__device__ void store_zeros(const ResultPlaces& places, float* partial, int rows_apart, int columns) {
  const int first = static_cast<int>(threadIdx.x) % 4;
  for (int i = 0; i < 2 * Tile::kTiles; ++i) {
    uint32_t offset;
    if (!places.find(i / 2 * rows_apart + i % 2 * 8, offset)) continue;
    for (int column = first; column < min(columns, Tile::kN); column += 4) partial[offset + column] = 0;
  }
}

/// Stores the results of a work unit. The four warps of a warpgroup must call it. `staged`: see store_vectors().
template <class Tile>
__device__ void store_results(const Params& p, const WorkUnit& unit, const Phase& phase, const ResultRows<Tile>& rows,
                              int warpgroup, uint32_t staged, typename Tile::Sums& sum, bool empty) {
  using T = typename Tile::Element;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int in_group = unit.column * Tile::kN, columns = p.out_channels - in_group;
  const int channel = unit.group * p.out_channels + in_group;
  const int rows_apart = (p.cooperative ? Tile::kConsumers : 1) * 64;
  const ResultPlaces places(p, unit, phase, rows.row + (p.cooperative ? warpgroup * 64 : 0) + warp * 16 + lane / 4);
  float* const partial = p.partial + unit.split * p.partial_stride + channel + places.corner;
  if (empty) {  // fill_bias() has filled results that no tap reaches
    if (p.partial) store_zeros<Tile>(places, partial, rows_apart, columns);
    return;
  }
  const auto each_tile = [&](const auto& store_rows) {
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      uint32_t offset[2];
      bool exists[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) exists[r] = places.find(tile * rows_apart + 8 * r, offset[r]);
      store_rows(offset, exists, sum[tile]);
    }
  };
  const auto store_vector_rows = [&](auto* to, const auto& finish) {
    each_tile([&](const auto& offset, const auto& exists, const auto& row_sums) {
      store_vectors<Tile::kN8>(staged, {to + offset[0], to + offset[1]}, exists, row_sums, finish, columns);
    });
  };
  const auto store = [&](auto* to, const auto& finish) {
    if (p.vectors) return store_vector_rows(to, finish);
    each_tile([&](const auto& offset, const auto& exists, const auto& row_sums) {
      store_columns<0, Tile::kN8>(to + offset[0], row_sums, finish, columns, exists[0], p.channel_stride);
      store_columns<1, Tile::kN8>(to + offset[1], row_sums, finish, columns, exists[1], p.channel_stride);
    });
  };
  T* const out = static_cast<T*>(p.out) + channel * p.channel_stride + places.corner;
  if constexpr (!Tile::kSlides) {  // wgmma would be serialized if a sliding tile's accumulators were read here
    const bool plain = p.partial || (!p.epilogue.bias && p.epilogue.floor < 0);
    if constexpr (sizeof(T) == 4) {
      if (plain) return store(p.partial ? partial : out, Round<T>());
    } else {
      if (p.partial) return store(partial, Round<float>());
      if (plain && p.vectors) return store_vector_rows(out, Round<T>());
    }
  }
  store(out, Finish<T, Tile::kN8>(p, channel, columns));
}

}  // namespace voxgrad::cuda::implicit_gemm
