// Wgrad with mma.sync: a multistage implicit GEMM over voxels with split-K,
//
//   w[cy][cx][tap] = sum over samples n and voxels o of  y[n][cy][o] * x[n][cx][o * stride + tap * dilation - padding]
//
//   A: 16 * kM16 channels of y x 8 words of voxels (a k-block)
//   B: a k-block x columns; 8 columns are one tap of 8 channels of x
//
// A CTA processes one k-tile (a box of voxels of y) after another. It stages the voxels of y and the halo of x that its
// taps read. Both are stored as [channel][voxel], which is also the layout of contiguous tensors. A tap is an offset
// into the halo. Channels are stored 4 banks apart, so that a warp reads 8 channels of 4 words without bank conflicts.
// If two k-tiles fit into shared memory, the next k-tile is copied in the background. Two CTAs per SM hide the
// remaining latency. As in fprop_dgrad.cuh, each residue of strided inputs is a separate class, except that residues
// along the innermost axis are staged together (axis_phases.h). For halves, a word holds two voxels. The two voxels of
// an odd tap would lie in different words, so x is staged twice, the second time shifted by one voxel.
//
// Split-K: the ranges of k-tiles depend on the shape alone. reduce_ranges() adds their sums in a fixed order.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/plan/axis_phases.h"
#include "cuda/conv/plan/instances.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// The offset of an element outside of the volume. Its value is zero.
inline constexpr int64_t kNowhere = INT64_MIN;

inline constexpr int kWgradTaps = 1024, kWgradClasses = 64;
/// Words of y per channel in a k-tile, and words from one channel to the next in shared memory.
inline constexpr int kKTileWords = 128, kKTilePitch = kKTileWords + 4;

/// The taps that read the same residue of x. Columns are counted in blocks of 8, which are one tap of 8 channels.
struct TapClass {
  int taps, tap_begin;           // taps, padded to fill whole tiles, and the first one in the table of taps
  int columns, column_begin;     // columns of the class, and the first one in the partial sums
  int tile_columns, tile_begin;  // columns of a tile, and the first tile of the class
};

struct MmaSyncWgradParams {
  const void* x;
  const void* y;
  float* partial;  // (ranges, groups, out_channels, columns, 8)
  int64_t x_stride[5], y_stride[5];
  int in_channels, out_channels;  // channels of x and of y per group
  int groups, row_tiles, column_tiles, classes;
  int columns;                   // blocks of 8 columns in all classes
  Divisor k_tile[3], extent[3];  // voxels of a k-tile, and the halo of x, whose width is in words
  int run;                       // words of a line of the halo, for one residue and one shift
  int halo_words, pitch;         // words of the halo per channel, and words from one staged channel of x to the next
  int stages, stage_words;       // with 2 stages, the next k-tile is copied in the background
  int tiles[3];
  int64_t k_tiles, range;  // k-tiles in total, and per CTA
  AxisPhases axis[3];
  TapClass of_class[kWgradClasses];
  int k_block_offset[kKTileWords / 8];  // bytes in the halo from the first word of the k-tile to that of a k-block
  int tap_offset[kWgradTaps];           // bytes in the halo from the first word to that of a tap
};

template <class Arithmetic_, int kM16_, int kN8_>
struct MmaSyncWgradTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kM16 = kM16_, kN8 = kN8_, kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kM16, kColumns = kN8 * kWarps;  // kColumns: blocks of 8
  static_assert(kThreads == kKTileWords, "each thread stages one word of y per channel");
};

/// Rounds a word in shared memory to TF32.
__device__ inline void round_word(uint32_t at) { store_shared(at, round_tf32(__uint_as_float(load_shared(at)))); }

/// Launch: one CTA per (range, group, row tile, column tile) in a 1-D grid, the column tile varying fastest. Dynamic
/// shared memory: one or two stages, each with a k-tile of y and its halo of x.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) wgrad_mma_sync(const __grid_constant__ MmaSyncWgradParams p) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kElements = Arithmetic::kElements, kThreads = Tile::kThreads;
  constexpr int kBatch = 8;  // words that are loaded before the first is stored
  constexpr int kUnroll = Arithmetic::kParts == 1 && kElements == 1 ? 2 : 1;
  extern __shared__ uint4 dynamic_shared[];
  constexpr int kYWords = Tile::kRows * kKTilePitch;  // words of y in a stage; the words of x follow
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;

  unsigned index = blockIdx.x;
  const int tile = static_cast<int>(index % p.column_tiles);
  index /= p.column_tiles;
  const int first_row = static_cast<int>(index % p.row_tiles) * Tile::kRows;
  index /= p.row_tiles;
  const int group = static_cast<int>(index % p.groups);
  const int64_t range = index / p.groups;
  int number = 0;
  while (number + 1 < p.classes && tile >= p.of_class[number + 1].tile_begin) ++number;
  const TapClass& c = p.of_class[number];
  int part[3], rest = number;
  for (int a = 2; a >= 0; --a) {
    part[a] = rest % p.axis[a].phases;
    rest /= p.axis[a].phases;
  }
  const int first_column = (tile - c.tile_begin) * c.tile_columns;
  const int column_count = min(c.tile_columns, c.columns - first_column);
  const int first_block = first_column / c.taps;
  const int channels = ((first_column + column_count - 1) / c.taps - first_block + 1) * 8;

  const Element* const x =
      static_cast<const Element*>(p.x) + (int64_t{group} * p.in_channels + first_block * 8) * p.x_stride[1];
  const Element* const y =
      static_cast<const Element*>(p.y) + (int64_t{group} * p.out_channels + first_row) * p.y_stride[1];
  const int x_channels = min(channels, p.in_channels - first_block * 8);
  const int y_channels = min(Tile::kRows, p.out_channels - first_row);

  // Stages one word for each of `count` channels; channels from `real` on are zero. `offset` locates the elements of
  // the word. Words of float are copied asynchronously. Halves are packed in registers.
  const auto stage = [&](uint32_t to, int pitch, const Element* from, int64_t stride, int count, int real,
                         const int64_t(&offset)[kElements]) {
    if constexpr (kElements == 1) {
      const bool inside = offset[0] != kNowhere;
      const Element* at = inside ? from + offset[0] : from;
#pragma unroll 8
      for (int i = 0; i < count; ++i, to += pitch * 4) {
        cp_async_word(to, at, inside && i < real);
        if (i + 1 < real) at += stride;
      }
    } else {
      for (int first = 0; first < count; first += kBatch) {
        Element value[kBatch][kElements];
#pragma unroll
        for (int i = 0; i < kBatch; ++i, from += stride)
#pragma unroll
          for (int e = 0; e < kElements; ++e)
            value[i][e] = first + i < real && offset[e] != kNowhere ? from[offset[e]] : Element(0.0f);
#pragma unroll
        for (int i = 0; i < kBatch; ++i, to += pitch * 4) store_shared(to, Arithmetic::word(value[i]));
      }
    }
  };
  // Stages the words of this thread: one word of y per channel, and several words of the halo of x.
  const auto stage_k_tile = [&](int64_t k_tile, uint32_t stage_at) {
    int64_t sample = k_tile;
    int q[3];
    for (int a = 2; a >= 0; --a) {
      q[a] = static_cast<int>(sample % p.tiles[a]) * p.k_tile[a].value();
      sample /= p.tiles[a];
    }
    int64_t offset[kElements];
    {
      int word = thread * kElements;
      const int w = q[2] + p.k_tile[2].take_digit(word), h = q[1] + p.k_tile[1].take_digit(word), d = q[0] + word;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const bool inside =
            word < p.k_tile[0].value() && d < p.axis[0].count && h < p.axis[1].count && w + e < p.axis[2].count;
        offset[e] = inside ? d * p.y_stride[2] + h * p.y_stride[3] + (w + e) * p.y_stride[4] : kNowhere;
      }
      stage(stage_at + thread * 4, kKTilePitch, y + sample * p.y_stride[0], p.y_stride[1], Tile::kRows, y_channels,
            offset);
    }
    for (int v = thread; v < p.halo_words; v += kThreads) {
      int word = v;
      int w = p.extent[2].take_digit(word);
      const int h = p.extent[1].take_digit(word), d = word;
      const int fold = p.axis[2].fold;
      const int row = w / p.run;  // residue and shift
      w = (w - row * p.run) * kElements + row % kElements;
      const int position[3] = {
          (q[0] + p.axis[0].phase[part[0]].low + d) * p.axis[0].in_step + p.axis[0].phase[part[0]].residue,
          (q[1] + p.axis[1].phase[part[1]].low + h) * p.axis[1].in_step + p.axis[1].phase[part[1]].residue,
          (q[2] + p.axis[2].phase[part[2]].low + w) * fold + row / kElements};
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int last = position[2] + e * fold;
        const bool inside = static_cast<unsigned>(position[0]) < static_cast<unsigned>(p.axis[0].in_size) &&
                            static_cast<unsigned>(position[1]) < static_cast<unsigned>(p.axis[1].in_size) &&
                            static_cast<unsigned>(last) < static_cast<unsigned>(p.axis[2].in_size);
        offset[e] =
            inside ? position[0] * p.x_stride[2] + position[1] * p.x_stride[3] + last * p.x_stride[4] : kNowhere;
      }
      stage(stage_at + (kYWords + v) * 4, p.pitch, x + sample * p.x_stride[0], p.x_stride[1], channels, x_channels,
            offset);
    }
  };
  // Rounds the words that this thread copied.
  const auto round_k_tile = [&](uint32_t stage_at) {
    if constexpr (Arithmetic::kRounds) {
#pragma unroll 16
      for (int i = 0; i < Tile::kRows; ++i) round_word(stage_at + (thread + i * kKTilePitch) * 4);
      for (int v = thread; v < p.halo_words; v += kThreads) {
        uint32_t at = stage_at + (kYWords + v) * 4;
#pragma unroll 8
        for (int i = 0; i < channels; ++i, at += p.pitch * 4) round_word(at);
      }
    }
  };

  uint32_t columns[kN8];  // bytes in a stage to this lane's first word of each block of 8 columns of B
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    const int column = warp * kN8 + n < column_count ? first_column + warp * kN8 + n : first_column;
    const int block = column / c.taps, tap = column - block * c.taps;
    columns[n] = (kYWords + ((block - first_block) * 8 + g) * p.pitch + t) * 4 + p.tap_offset[c.tap_begin + tap];
  }
  const uint32_t shared = shared_address(dynamic_shared), rows = (g * kKTilePitch + t) * 4;

  Accumulator sum[kM16][kN8] = {};
  const int64_t first_k_tile = range * p.range, last_k_tile = min(first_k_tile + p.range, p.k_tiles);
  uint32_t stage_at = shared;
  if (p.stages == 2) {
    stage_k_tile(first_k_tile, stage_at);
    cp_async_commit();
  }
  for (int64_t k_tile = first_k_tile; k_tile < last_k_tile; ++k_tile) {
    const uint32_t other = p.stages == 2 && stage_at == shared ? shared + p.stage_words * 4 : shared;
    if (p.stages == 1)
      stage_k_tile(k_tile, stage_at);
    else if (k_tile + 1 < last_k_tile)
      stage_k_tile(k_tile + 1, other);
    cp_async_commit();
    if (p.stages == 1)
      cp_async_wait<0>();
    else
      cp_async_wait<1>();
    round_k_tile(stage_at);
    __syncthreads();
#pragma unroll kUnroll
    for (int k_block = 0; k_block < kKTileWords / 8; ++k_block) {
      uint32_t a[kM16][4], b[kN8][2];
      const uint32_t offset = p.k_block_offset[k_block] + stage_at;
#pragma unroll
      for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] =
              load_shared(rows + (stage_at + k_block * 32) + ((m * 16 + i % 2 * 8) * kKTilePitch + i / 2 * 4) * 4);
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        b[n][0] = load_shared(columns[n] + offset);
        b[n][1] = load_shared(columns[n] + offset + 16);
      }
      Arithmetic::multiply_words(sum, a, b);
    }
    __syncthreads();
    stage_at = other;
  }

  float* const out = p.partial + ((range * p.groups + group) * p.out_channels + first_row) * p.columns * 8;
#pragma unroll
  for (int m = 0; m < kM16; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m * 16 + i * 8 + g;
      if (row >= y_channels) continue;
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        if (warp * kN8 + n >= column_count) continue;
        const int64_t column = c.column_begin + first_column + warp * kN8 + n;
        *reinterpret_cast<float2*>(out + (row * int64_t{p.columns} + column) * 8 + 2 * t) =
            make_float2(sum[m][n][2 * i], sum[m][n][2 * i + 1]);
      }
    }
}

/// Returns the blocks of 8 columns of a CTA tile with this number of rows.
template <class Arithmetic>
constexpr int tile_columns8(int rows) {
  return 4 * (rows > 32 ? 7 : Arithmetic::kParts == 1 ? 14 : 7);
}

/// Launches the kernel. `rows` is the number of rows of a CTA tile: 16, 32, 48 or 64. `blocks` is the number of CTAs.
template <class Arithmetic>
void launch_wgrad_mma_sync(const MmaSyncWgradParams& p, int rows, int64_t blocks, int shared_bytes,
                           cudaStream_t stream);

}  // namespace voxgrad::cuda
