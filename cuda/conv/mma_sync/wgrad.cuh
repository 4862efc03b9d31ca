// The weight gradient of convolutions on tensor cores: an implicit matrix product over voxels,
//
//   w[cy][cx][tap] = sum over samples n and lattice voxels o of  y[n][cy][o] * x[n][cx][o * stride + tap * dil - pad]
//
//   A: 16 * kM16 channels of y x 8 words of voxels,
//   B: 8 words of voxels x columns; 8 columns are one tap of 8 channels of x.
//
// A block takes one box of the lattice after another and stages y's box and the halo of x that all its taps need,
// both as [channel][voxel], which is how contiguous tensors lie in memory anyway; a tap is an offset in the halo.
// Channels lie 4 banks apart, so that the 8 channels and 4 words that a warp reads at once do not collide. The
// next box is copied in the background where both fit, and two blocks a multiprocessor hide what is left. As in
// gather_mma.cuh, residues of strided inputs are classes of their own, folded on the innermost axis. Two halves
// are a word along voxels, and an odd tap would straddle words: for them x is staged twice, the second time shifted by
// one.
//
// Voxels are summed in fixed ranges of boxes (from the shape alone) into a workspace, which weight_sum() adds up in
// order.
#pragma once

#include "cuda/conv/instances.h"
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/axis_phases.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// The offset of what lies outside of a volume: zero.
inline constexpr int64_t kNowhere = INT64_MIN;

inline constexpr int kWeightTaps = 1024, kWeightClasses = 64;
/// Words of y that a box has a channel, and where a channel's begin: 4 banks apart.
inline constexpr int kBoxWords = 128, kBoxPitch = kBoxWords + 4;

/// Taps that read the same residues of x, and their columns of 8.
struct WeightClass {
  int taps, tap_begin;           // in the table of taps; padded with idle ones to whole tiles
  int columns, column_begin;     // taps times blocks of 8 channels; in the partial sums
  int tile_columns, tile_begin;  // columns of a tile; its first tile
};

struct WeightMma {
  const void* x;
  const void* y;
  float* partial;  // (ranges, groups, out_channels, columns, 8)
  int64_t x_stride[5], y_stride[5];
  int in_channels, out_channels;  // of a group: x's and y's
  int groups, row_tiles, column_tiles, classes;
  int columns;                // of 8, of all classes
  Divisor box[3], extent[3];  // the last in words
  int run;                    // words of a residue's (and shift's) row of the halo
  int halo_words, pitch;      // pitch: words between staged channels of x
  int buffers, buffer_words;  // 2: the next box is copied while this one is multiplied
  int tiles[3];
  int64_t boxes, range;  // in all; of a range
  AxisParts axis[3];
  WeightClass of_class[kWeightClasses];
  int step_offset[kBoxWords / 8];  // bytes in the halo from the box's first word to the 8 words of a step
  int tap_offset[kWeightTaps];     // bytes
};

template <class Arithmetic_, int kM16_, int kN8_>
struct WeightTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = false;
  static constexpr int kM16 = kM16_, kN8 = kN8_, kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kM16, kColumns = kN8 * kWarps;  // columns of 8
  static_assert(kThreads == kBoxWords, "a thread stages one word of y's box");
};

__device__ inline void round_word(uint32_t at) { store_shared(at, round_tf32(__uint_as_float(load_shared(at)))); }

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) weight_mma(const __grid_constant__ WeightMma p) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kElements = Arithmetic::kElements, kThreads = Tile::kThreads;
  constexpr int kBatch = 8;  // words on their way
  constexpr int kUnroll = Arithmetic::kParts == 1 && kElements == 1 ? 2 : 1;
  extern __shared__ uint4 dynamic_shared[];
  constexpr int kYWords = Tile::kRows * kBoxPitch;  // of a buffer; x's follow
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
  const WeightClass& c = p.of_class[number];
  int part[3], rest = number;
  for (int a = 2; a >= 0; --a) {
    part[a] = rest % p.axis[a].parts;
    rest /= p.axis[a].parts;
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

  // `count` channels, zero from `real` on, of the words whose elements lie at `offset`: in the background if they can
  // be copied as they are, else through registers
  const auto stage = [&](uint32_t to, int pitch, const Element* from, int64_t stride, int count, int real,
                         const int64_t(&offset)[kElements]) {
    if constexpr (kElements == 1) {
      const bool inside = offset[0] != kNowhere;
      const Element* at = inside ? from + offset[0] : from;
#pragma unroll 8
      for (int i = 0; i < count; ++i, to += pitch * 4) {
        copy_word_async(to, at, inside && i < real);
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
  const auto stage_box = [&](int64_t box, uint32_t buffer) {
    int64_t sample = box;
    int q[3];
    for (int a = 2; a >= 0; --a) {
      q[a] = static_cast<int>(sample % p.tiles[a]) * p.box[a].value;
      sample /= p.tiles[a];
    }
    int64_t offset[kElements];
    {
      int word = thread * kElements;
      const int w = q[2] + p.box[2].take(word), h = q[1] + p.box[1].take(word), d = q[0] + word;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const bool inside =
            word < p.box[0].value && d < p.axis[0].count && h < p.axis[1].count && w + e < p.axis[2].count;
        offset[e] = inside ? d * p.y_stride[2] + h * p.y_stride[3] + (w + e) * p.y_stride[4] : kNowhere;
      }
      stage(buffer + thread * 4, kBoxPitch, y + sample * p.y_stride[0], p.y_stride[1], Tile::kRows, y_channels, offset);
    }
    for (int v = thread; v < p.halo_words; v += kThreads) {
      int word = v;
      int w = p.extent[2].take(word);
      const int h = p.extent[1].take(word), d = word;
      const int fold = p.axis[2].fold;
      const int row = w / p.run;  // (residue, shift)
      w = (w - row * p.run) * kElements + row % kElements;
      const int position[3] = {
          (q[0] + p.axis[0].part[part[0]].low + d) * p.axis[0].in_step + p.axis[0].part[part[0]].residue,
          (q[1] + p.axis[1].part[part[1]].low + h) * p.axis[1].in_step + p.axis[1].part[part[1]].residue,
          (q[2] + p.axis[2].part[part[2]].low + w) * fold + row / kElements};
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int last = position[2] + e * fold;
        const bool inside = static_cast<unsigned>(position[0]) < static_cast<unsigned>(p.axis[0].in_size) &&
                            static_cast<unsigned>(position[1]) < static_cast<unsigned>(p.axis[1].in_size) &&
                            static_cast<unsigned>(last) < static_cast<unsigned>(p.axis[2].in_size);
        offset[e] =
            inside ? position[0] * p.x_stride[2] + position[1] * p.x_stride[3] + last * p.x_stride[4] : kNowhere;
      }
      stage(buffer + (kYWords + v) * 4, p.pitch, x + sample * p.x_stride[0], p.x_stride[1], channels, x_channels,
            offset);
    }
  };
  const auto round_box = [&](uint32_t buffer) {  // what this thread copied
    if constexpr (Arithmetic::kRounds) {
#pragma unroll 16
      for (int i = 0; i < Tile::kRows; ++i) round_word(buffer + (thread + i * kBoxPitch) * 4);
      for (int v = thread; v < p.halo_words; v += kThreads) {
        uint32_t at = buffer + (kYWords + v) * 4;
#pragma unroll 8
        for (int i = 0; i < channels; ++i, at += p.pitch * 4) round_word(at);
      }
    }
  };

  uint32_t columns[kN8];  // bytes to this lane's first word of B in each of its columns of 8
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    const int column = warp * kN8 + n < column_count ? first_column + warp * kN8 + n : first_column;
    const int block = column / c.taps, tap = column - block * c.taps;
    columns[n] = (kYWords + ((block - first_block) * 8 + g) * p.pitch + t) * 4 + p.tap_offset[c.tap_begin + tap];
  }
  const uint32_t shared = shared_address(dynamic_shared), rows = (g * kBoxPitch + t) * 4;

  Accumulator sum[kM16][kN8] = {};
  const int64_t first_box = range * p.range, last_box = min(first_box + p.range, p.boxes);
  uint32_t buffer = shared;
  if (p.buffers == 2) {
    stage_box(first_box, buffer);
    commit_copies();
  }
  for (int64_t box = first_box; box < last_box; ++box) {
    const uint32_t other = p.buffers == 2 && buffer == shared ? shared + p.buffer_words * 4 : shared;
    if (p.buffers == 1)
      stage_box(box, buffer);
    else if (box + 1 < last_box)
      stage_box(box + 1, other);
    commit_copies();
    if (p.buffers == 1)
      await_copies<0>();
    else
      await_copies<1>();
    round_box(buffer);
    __syncthreads();
#pragma unroll kUnroll
    for (int step = 0; step < kBoxWords / 8; ++step) {
      uint32_t a[kM16][4], b[kN8][2];
      const uint32_t offset = p.step_offset[step] + buffer;
#pragma unroll
      for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = load_shared(rows + (buffer + step * 32) + ((m * 16 + i % 2 * 8) * kBoxPitch + i / 2 * 4) * 4);
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        b[n][0] = load_shared(columns[n] + offset);
        b[n][1] = load_shared(columns[n] + offset + 16);
      }
      Arithmetic::multiply_words(sum, a, b);
    }
    __syncthreads();
    buffer = other;
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

/// Columns of 8 of a tile that has so many rows.
template <class Arithmetic>
constexpr int weight_columns(int rows) {
  return 4 * (rows > 32 ? 7 : Arithmetic::kParts == 1 ? 14 : 7);
}

/// Queues the kernel; rows: of a tile, 16 to 64.
template <class Arithmetic>
void launch_weight_mma(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream);

}  // namespace voxgrad::cuda
