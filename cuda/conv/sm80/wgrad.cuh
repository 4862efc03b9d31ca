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
#include "cuda/conv/common/concepts.h"
#include "cuda/conv/plan/instances.h"
#include "cuda/conv/plan/sm80.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// The offset of an element outside of the volume. Its value is zero.
inline constexpr int64_t kNowhere = INT64_MIN;

/// The taps that read the same residue of x. Columns are counted in blocks of 8, which are one tap of 8 channels.
struct TapClass {
  int taps;          // number of taps, padded to fill whole tiles
  int real_taps;     // number of taps without the padding
  int tap_begin;     // index of the first tap in MmaSyncWgradParams::tap_offset
  int columns;       // columns of the class
  int column_begin;  // index of the first column in the partial sums
  int tile_columns;  // columns of a tile
  int tile_begin;    // index of the first tile of the class
};

/// The parameters of wgrad_mma_sync.
struct MmaSyncWgradParams : MmaSyncWgradShape {
  const void* x;
  const void* y;
  float* partial;  // (ranges, groups, out_channels, columns, 8)
  int64_t x_stride[5];
  int64_t y_stride[5];
  int in_channels;   // channels of x per group
  int out_channels;  // channels of y per group
  int groups;
  int classes;
  Divisor k_tile[3];  // voxels of a k-tile along each axis
  Divisor extent[3];  // halo of x along each axis; along the width in words
  int stage_words;    // words of a stage
  TapClass of_class[kMaxMmaSyncClasses];
  int k_block_offset[kMmaSyncKTileWords / 8];  // bytes in the halo from the first word of the k-tile to a k-block
  int tap_offset[kMaxMmaSyncTaps];             // bytes in the halo from the first word to that of a tap
};

static_assert(sizeof(MmaSyncWgradParams) <= kMaxParameterBytes);

/// A CTA tile of kM16 blocks of 16 rows. Each warp computes all rows of kN8 blocks of 8 columns.
template <class Arithmetic_, int kM16_, int kN8_>
struct MmaSyncWgradTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kM16 = kM16_, kN8 = kN8_, kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kM16, kColumns = kN8 * kWarps;  // kColumns: blocks of 8
  static constexpr int kYWords = kRows * kMmaSyncKTilePitch;        // words of y in a stage; the words of x follow
  static_assert(kThreads == kMmaSyncKTileWords, "each thread stages one word of y per channel");
};

/// Rounds a word in shared memory to TF32.
__device__ inline void round_word(uint32_t at) { store_shared(at, round_tf32(__uint_as_float(load_shared(at)))); }

/// The part of the result that a CTA computes.
template <class Tile>
struct WgradCtaTile {
  int first_row;  // first channel of y in its group
  int group;
  int64_t range;
  int number;        // class
  int first_column;  // in the class
  int column_count;
  int first_block;  // first block of 8 channels of x
  int channels;     // channels of x that are staged

  /// Column tiles vary fastest in the 1-D grid, followed by row tiles, groups and ranges.
  __device__ explicit WgradCtaTile(const MmaSyncWgradParams& p) {
    unsigned index = blockIdx.x;
    const int tile = static_cast<int>(index % p.column_tiles);
    index /= p.column_tiles;
    first_row = static_cast<int>(index % p.row_tiles) * Tile::kRows;
    index /= p.row_tiles;
    group = static_cast<int>(index % p.groups);
    range = index / p.groups;
    number = 0;
    while (number + 1 < p.classes && tile >= p.of_class[number + 1].tile_begin) ++number;
    const TapClass& c = p.of_class[number];
    first_column = (tile - c.tile_begin) * c.tile_columns;
    column_count = min(c.tile_columns, c.columns - first_column);
    first_block = first_column / c.taps;
    channels = ((first_column + column_count - 1) / c.taps - first_block + 1) * 8;
  }

  __device__ int x_channels(const MmaSyncWgradParams& p) const {
    return min(channels, p.in_channels - first_block * 8);
  }
  __device__ int y_channels(const MmaSyncWgradParams& p) const { return min(Tile::kRows, p.out_channels - first_row); }
};

/// Stages k-tiles: copies voxels of y and the halo of x to shared memory.
template <class Tile>
struct WgradProducer {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  static constexpr int kElements = Arithmetic::kElements, kThreads = Tile::kThreads;
  static constexpr int kBatch = 8;  // words that are loaded before the first is stored
  using Offsets = int64_t[kElements];

  const MmaSyncWgradParams& p;
  const int thread = static_cast<int>(threadIdx.x);
  const Element* x;
  const Element* y;
  int channels;    // channels of x that are staged
  int x_channels;  // channels of x that exist; the others are staged as zeros
  int y_channels;  // channels of y that exist; the others are staged as zeros
  int part[3];     // phase along each axis

  __device__ WgradProducer(const MmaSyncWgradParams& params, const WgradCtaTile<Tile>& tile)
      : p(params),
        x(static_cast<const Element*>(p.x) +
          (int64_t{tile.group} * p.in_channels + tile.first_block * 8) * p.x_stride[1]),
        y(static_cast<const Element*>(p.y) + (int64_t{tile.group} * p.out_channels + tile.first_row) * p.y_stride[1]),
        channels(tile.channels),
        x_channels(tile.x_channels(p)),
        y_channels(tile.y_channels(p)) {
    split_class(p.axis, tile.number, part);
  }

  /// Stages the words of this thread: one word of y per channel, and several words of the halo of x.
  __device__ void stage(int64_t k_tile, uint32_t at) const {
    int64_t sample = k_tile;
    int first[3];  // first voxel of y
    for (int a = 2; a >= 0; --a) {
      first[a] = static_cast<int>(sample % p.tiles[a]) * p.k_tile[a].value();
      sample /= p.tiles[a];
    }
    Offsets offset;
    locate_y(first, offset);
    stage_word(at + thread * 4, kMmaSyncKTilePitch, y + sample * p.y_stride[0], p.y_stride[1], Tile::kRows, y_channels,
               offset);
    for (int v = thread; v < p.halo_words; v += kThreads) {
      locate_x(first, v, offset);
      stage_word(at + (Tile::kYWords + v) * 4, p.pitch, x + sample * p.x_stride[0], p.x_stride[1], channels, x_channels,
                 offset);
    }
  }

  /// Rounds the words that this thread staged.
  __device__ void round(uint32_t stage_at) const {
    if constexpr (Arithmetic::kRounds) {
#pragma unroll 16
      for (int i = 0; i < Tile::kRows; ++i) round_word(stage_at + (thread + i * kMmaSyncKTilePitch) * 4);
      for (int v = thread; v < p.halo_words; v += kThreads) {
        uint32_t at = stage_at + (Tile::kYWords + v) * 4;
#pragma unroll 8
        for (int i = 0; i < channels; ++i, at += p.pitch * 4) round_word(at);
      }
    }
  }

 private:
  /// Locates the elements of this thread's word of y.
  __device__ void locate_y(const int (&first)[3], Offsets& offset) const {
    int word = thread * kElements;
    const int w = first[2] + p.k_tile[2].take_digit(word), h = first[1] + p.k_tile[1].take_digit(word),
              d = first[0] + word;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const bool inside =
          word < p.k_tile[0].value() && d < p.axis[0].count && h < p.axis[1].count && w + e < p.axis[2].count;
      offset[e] = inside ? d * p.y_stride[2] + h * p.y_stride[3] + (w + e) * p.y_stride[4] : kNowhere;
    }
  }

  /// Locates the elements of a word of the halo of x.
  __device__ void locate_x(const int (&first)[3], int word, Offsets& offset) const {
    int w = p.extent[2].take_digit(word);
    const int h = p.extent[1].take_digit(word), d = word;
    const int fold = p.axis[2].fold;
    const int row = w / p.run;  // residue and shift
    w = (w - row * p.run) * kElements + row % kElements;
    const int position[3] = {
        (first[0] + p.axis[0].phase[part[0]].low + d) * p.axis[0].in_step + p.axis[0].phase[part[0]].residue,
        (first[1] + p.axis[1].phase[part[1]].low + h) * p.axis[1].in_step + p.axis[1].phase[part[1]].residue,
        (first[2] + p.axis[2].phase[part[2]].low + w) * fold + row / kElements};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int last = position[2] + e * fold;
      const bool inside = static_cast<unsigned>(position[0]) < static_cast<unsigned>(p.axis[0].in_size) &&
                          static_cast<unsigned>(position[1]) < static_cast<unsigned>(p.axis[1].in_size) &&
                          static_cast<unsigned>(last) < static_cast<unsigned>(p.axis[2].in_size);
      offset[e] = inside ? position[0] * p.x_stride[2] + position[1] * p.x_stride[3] + last * p.x_stride[4] : kNowhere;
    }
  }

  /// Stages one word for each of `count` channels; channels from `real` on are zero. `offset` locates the elements of
  /// the word. Words of float are copied asynchronously. Halves are packed in registers.
  __device__ static void stage_word(uint32_t to, int pitch, const Element* from, int64_t stride, int count, int real,
                                    const Offsets& offset) {
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
  }
};

/// Multiplies a k-tile. `rows` and `columns` are the offsets in bytes of this lane's first words: of A from the
/// beginning of a stage, and of each block of 8 columns of B.
template <class Tile>
__device__ void multiply_k_tile(const MmaSyncWgradParams& p, uint32_t stage_at, uint32_t rows,
                                const uint32_t (&columns)[Tile::kN8], Accumulator (&sum)[Tile::kM16][Tile::kN8]) {
  using Arithmetic = typename Tile::Arithmetic;
  constexpr int kUnroll = Arithmetic::kParts == 1 && Arithmetic::kElements == 1 ? 2 : 1;
#pragma unroll kUnroll
  for (int k_block = 0; k_block < kMmaSyncKTileWords / 8; ++k_block) {
    uint32_t a[Tile::kM16][4], b[Tile::kN8][2];
    const uint32_t offset = p.k_block_offset[k_block] + stage_at;
#pragma unroll
    for (int m = 0; m < Tile::kM16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] =
            load_shared(rows + (stage_at + k_block * 32) + ((m * 16 + i % 2 * 8) * kMmaSyncKTilePitch + i / 2 * 4) * 4);
#pragma unroll
    for (int n = 0; n < Tile::kN8; ++n) {
      b[n][0] = load_shared(columns[n] + offset);
      b[n][1] = load_shared(columns[n] + offset + 16);
    }
    Arithmetic::multiply_words(sum, a, b);
  }
}

/// Stores the partial sums of a CTA.
template <class Tile>
__device__ void store_sums(const MmaSyncWgradParams& p, const WgradCtaTile<Tile>& tile,
                           const Accumulator (&sum)[Tile::kM16][Tile::kN8]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, y_channels = tile.y_channels(p);
  float* const out =
      p.partial + ((tile.range * p.groups + tile.group) * p.out_channels + tile.first_row) * p.columns * 8;
  const int first_column = p.of_class[tile.number].column_begin + tile.first_column;
#pragma unroll
  for (int m = 0; m < Tile::kM16; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m * 16 + i * 8 + g;
      if (row >= y_channels) continue;
#pragma unroll
      for (int n = 0; n < Tile::kN8; ++n) {
        if (warp * Tile::kN8 + n >= tile.column_count) continue;
        const int64_t column = first_column + warp * Tile::kN8 + n;
        *reinterpret_cast<float2*>(out + (row * int64_t{p.columns} + column) * 8 + 2 * t) =
            make_float2(sum[m][n][2 * i], sum[m][n][2 * i + 1]);
      }
    }
}

/// The parts of wgrad_mma_sync().
template <class Tile>
concept WgradMmaSyncTile = KernelTile<Tile> && StageProducer<WgradProducer<Tile>>;

/// Computes partial sums of the weight gradient. Launch: one CTA per WgradCtaTile in a 1-D grid. Dynamic shared memory:
/// one or two stages, each with a k-tile of y and its halo of x.
template <WgradMmaSyncTile Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) wgrad_mma_sync(const __grid_constant__ MmaSyncWgradParams p) {
  wait_for_previous_kernels();
  extern __shared__ uint4 dynamic_shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const WgradCtaTile<Tile> tile(p);
  const WgradProducer<Tile> producer(p, tile);
  const TapClass& c = p.of_class[tile.number];

  uint32_t columns[Tile::kN8];
#pragma unroll
  for (int n = 0; n < Tile::kN8; ++n) {
    const int column = tile.first_column + (warp * Tile::kN8 + n < tile.column_count ? warp * Tile::kN8 + n : 0);
    const int block = column / c.taps, tap = column - block * c.taps;
    columns[n] =
        (Tile::kYWords + ((block - tile.first_block) * 8 + g) * p.pitch + t) * 4 + p.tap_offset[c.tap_begin + tap];
  }
  const uint32_t shared = shared_address(dynamic_shared), rows = (g * kMmaSyncKTilePitch + t) * 4;

  Accumulator sum[Tile::kM16][Tile::kN8] = {};
  const int64_t first_k_tile = tile.range * p.range, last_k_tile = min(first_k_tile + p.range, p.k_tiles);
  uint32_t stage_at = shared;
  if (p.stages == 2) {
    producer.stage(first_k_tile, stage_at);
    cp_async_commit();
  }
  for (int64_t k_tile = first_k_tile; k_tile < last_k_tile; ++k_tile) {
    const uint32_t other = p.stages == 2 && stage_at == shared ? shared + p.stage_words * 4 : shared;
    if (p.stages == 1)
      producer.stage(k_tile, stage_at);
    else if (k_tile + 1 < last_k_tile)
      producer.stage(k_tile + 1, other);
    cp_async_commit();
    if (p.stages == 1)
      cp_async_wait<0>();
    else
      cp_async_wait<1>();
    producer.round(stage_at);
    __syncthreads();
    multiply_k_tile<Tile>(p, stage_at, rows, columns, sum);
    __syncthreads();
    stage_at = other;
  }
  store_sums(p, tile, sum);
}

/// Launches the kernel. `rows` is the number of rows of a CTA tile: 16, 32, 48 or 64. `blocks` is the number of CTAs.
template <class Arithmetic>
void launch_wgrad_mma_sync(const MmaSyncWgradParams& p, int rows, int64_t blocks, int shared_bytes,
                           cudaStream_t stream);

}  // namespace voxgrad::cuda
