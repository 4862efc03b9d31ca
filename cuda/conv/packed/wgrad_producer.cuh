// Parameters of packed/wgrad.cuh, what a CTA sums, and its producers: how planes of x and y come to shared memory. y
// was packed before (wgrad_pack.cu), so that one copy brings a plane, and so was x of halves (pack.cu), of which TMA
// copies boxes. x of floats: wgrad_producer_f32.cuh.
#pragma once

#include <cuda.h>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/common/wgmma.cuh"
#include "cuda/conv/instances.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// A plane in shared memory is made of core matrices of 128 bytes. Of floats: of quads, 4 words along the width; a quad
/// of lines; a line of rows of 16 bytes: x's channels once for each x shift, or y's for each y shift. Of halves: of 8
/// channels, 16 bytes a voxel; of y, consecutive lines of 8 channels after the other; of x, 8 channels after the other
/// of a line.
struct StagedPlanes {
  int pitch, octet;  // bytes, as in WgradSharedMemory
  int part_bytes, stage_bytes;
  int stages;
};

struct PackedWgradParams {
  CUtensorMap packed_x;  // of halves: width, (channels / 8), height, (sample, group, channels / 8, residue, depth)
  int x_octets_packed;   // of a sample and group; likewise
  const char* x;
  int64_t x_stride[5];  // bytes
  int x_size[3];        // outside of which it is zero
  int x_channels;       // of a group
  int x_step;           // positions along the width from a voxel of the lattice to the next
  // Lines: i of residue r is position r * residue_at + i * line_at, and stands at byte r * residue_to + i * line_to.
  int lines, residues;  // lines: of residue 0
  int full_residues;    // that have as many lines; the others have one less
  int residue_at, line_at, residue_to, line_to;
  // Raw planes: where they stand, how many, bytes of one, bytes from a channel of a line to the next (and 16 bytes).
  int raw_at, raw_stages, raw_bytes, raw_pitch, chunks;
  int64_t raw_line_at, raw_residue_at;    // bytes from a line of a residue, or a residue, to the next
  int raw_line_to;                        // there
  int copied, copy_shares;                // channels that are copied at a time, and threads that share the lines then
  int split_channels, shares;             // that are split, likewise
  int64_t copy_channel_at, copy_line_at;  // of a thread that copies: to its next channel, or line
  int copy_line_to, copy_line_step;       // there; positions along height
  StagedPlanes of_x, of_y;

  const char* y;   // packed: (groups, row tiles, samples, depth, height tiles, width tiles) planes
  int y_channels;  // of a group
  float* partial;  // (ranges, groups, y_channels, width taps, depth taps, height taps, x_octets * 8)
  SlidingAxis depth, height;
  int kernel[3], padding, dilation;  // padding, dilation: along the width
  int x_octets;
  int groups, x_shift_tiles, row_tiles, column_tiles;
  int x_shifts;  // of y shift tiles, in a CTA
  int tap_step, shift, y_shifts, row_octets, column_octets;
  int pairs, width_tiles;
  int k_blocks, plane_products;
  bool by_k_blocks, late;
  int samples, sliding_tiles, ranges;  // every `ranges`th sliding tile is one CTA's: neighbours share what is in L2
  int x_k_block_at[kMostKBlocks], y_k_block_at[kMostKBlocks];  // 16 bytes: from a stage to the words of a k-block
};

/// What a CTA sums.
struct WgradCoord {
  int group, row_tile, first_row, first_column;  // channels of y and x, of the group
  int tap[kMostXShifts];                         // along the width, the first of each x shift; kernel[2]: none
  int depth_tap, height_tap;                     // the first ones
  int range;

  WgradCoord() = default;
  __device__ explicit WgradCoord(const PackedWgradParams& p) {
    unsigned index = blockIdx.x;
    const int first_x_shift = static_cast<int>(take_digit(index, p.x_shift_tiles)) * p.x_shifts;
    row_tile = static_cast<int>(take_digit(index, p.row_tiles));
    first_row = row_tile * p.row_octets * 8;
    first_column = static_cast<int>(take_digit(index, p.column_tiles)) * p.column_octets * 8;
    height_tap = static_cast<int>(take_digit(index, p.height.pieces)) * p.height.taps;
    depth_tap = static_cast<int>(take_digit(index, p.depth.pieces)) * p.depth.taps;
    group = static_cast<int>(take_digit(index, p.groups));
    range = static_cast<int>(index);
    for (int x_shift = 0; x_shift < kMostXShifts; ++x_shift)
      tap[x_shift] = x_shift < p.x_shifts ? first_of(p, first_x_shift + x_shift) : p.kernel[2];
  }

 private:
  /// The first tap of a tile of y shifts.
  __device__ static int first_of(const PackedWgradParams& p, int tile) {
    for (int residue = 0; residue < min(p.tap_step, p.kernel[2]); ++residue) {
      const int taps = (p.kernel[2] - residue + p.tap_step - 1) / p.tap_step;
      const int tiles = (taps + p.y_shifts - 1) / p.y_shifts;
      if (tile < tiles) return residue + tile * p.y_shifts * p.tap_step;
      tile -= tiles;
    }
    return p.kernel[2];
  }
};

/// A tile of the lattice, with all of its planes.
struct SlidingTile {
  int sample, height_tile, width_tile;
  int depth, planes, height, width;  // its first voxel

  template <class Arithmetic>
  __device__ static SlidingTile at(const PackedWgradParams& p, unsigned index) {
    SlidingTile sliding_tile;
    sliding_tile.width_tile = static_cast<int>(take_digit(index, p.width_tiles));
    sliding_tile.width = sliding_tile.width_tile * p.pairs * 8 * Arithmetic::kElements;
    sliding_tile.height_tile = static_cast<int>(take_digit(index, p.height.tiles));
    sliding_tile.height = sliding_tile.height_tile * p.height.tile;
    sliding_tile.depth = static_cast<int>(take_digit(index, p.depth.tiles)) * p.depth.tile;
    sliding_tile.planes = min(p.depth.tile, p.depth.count - sliding_tile.depth);
    sliding_tile.sample = static_cast<int>(index);
    return sliding_tile;
  }
};

/// Raw planes of x (of floats) that have come, or may be overwritten; stages of x and y that are full; empty ones.
struct WgradBarriers {
  static constexpr int kOf = kMostWgradStages, kCount = 6 * kOf;
  uint32_t first;
  __device__ uint32_t full_raw(int stage) const { return first + 8 * stage; }
  __device__ uint32_t empty_raw(int stage) const { return full_raw(kOf + stage); }
  __device__ uint32_t full_x(int stage) const { return full_raw(2 * kOf + stage); }
  __device__ uint32_t full_y(int stage) const { return full_raw(3 * kOf + stage); }
  __device__ uint32_t empty_x(int stage) const { return full_raw(4 * kOf + stage); }
  __device__ uint32_t empty_y(int stage) const { return full_raw(5 * kOf + stage); }

  /// By threads 0 to kCount.
  template <class Tile>
  __device__ void init(int thread) const {
    constexpr int kMultiply = Tile::kConsumers / 32, kFinish = kSplitThreads / 32;
    const int arriving[] = {kCopyThreads, kFinish, Tile::kHalves ? 1 : kFinish, 1, kMultiply, kMultiply};
    init_barrier(first + 8 * thread, arriving[thread / kOf]);
  }
};

/// Calls with_x(its stage, depth) for each plane of x of the CTA's sliding tiles, and with_y(its stage, tile, depth)
/// for each of y, in the order in which they are multiplied. begin(tile) before. A plane of y comes before those of x
/// with which it is multiplied, to be on its way while they are staged (by whom stages both: of halves). With two
/// stages it would wait for the last but one, and they with it: then it comes behind them.
template <class Tile, class Begin, class X, class Y>
__device__ void for_each_plane(const PackedWgradParams& p, const WgradCoord& place, Begin begin, X with_x, Y with_y) {
  PipelineState of_x, of_y;
  const bool y_first = p.of_y.stages > 2;
  for (int index = place.range; index < p.sliding_tiles; index += p.ranges) {
    const SlidingTile sliding_tile = SlidingTile::at<typename Tile::Arithmetic>(p, index);
    begin(sliding_tile);
    int d = sliding_tile.depth * p.depth.in_stride - p.depth.padding + place.depth_tap * p.depth.dilation;
    for (int plane = 0; plane < sliding_tile.planes; ++plane, d += p.depth.in_stride) {
      const auto y_plane = [&] {
        with_y(of_y, sliding_tile, sliding_tile.depth + plane);
        of_y.next(p.of_y.stages);
      };
      if (y_first) y_plane();
      for (int row = p.depth.first_new_row(plane == 0); row < p.depth.span; ++row) {
        with_x(of_x, d + row * p.depth.in_step);
        of_x.next(p.of_x.stages);
      }
      if (!y_first) y_plane();
    }
  }
}

/// Copies a plane of packed y. By one thread.
template <class Tile>
__device__ void copy_y(const PackedWgradParams& p, const WgradCoord& place, uint32_t shared, WgradBarriers barriers,
                       const PipelineState& ring, const SlidingTile& sliding_tile, int depth) {
  const int64_t tile = (int64_t{place.group} * p.row_tiles + place.row_tile) * p.samples + sliding_tile.sample;
  const int64_t plane = ((tile * p.depth.count + depth) * p.height.tiles + sliding_tile.height_tile) * p.width_tiles +
                        sliding_tile.width_tile;
  if (ring.round > 0) wait_barrier(barriers.empty_y(ring.stage), ring.round - 1);
  bulk_load(shared + p.of_x.stages * p.of_x.stage_bytes + ring.stage * p.of_y.stage_bytes,
            p.y + plane * p.of_y.stage_bytes, p.of_y.stage_bytes, barriers.full_y(ring.stage));
}

/// Copies all planes of y. By one thread.
template <class Tile>
__device__ void copy_all_y(const PackedWgradParams& p, const WgradCoord& place, uint32_t shared,
                           WgradBarriers barriers) {
  for_each_plane<Tile>(
      p, place, [](const SlidingTile&) {}, [](const PipelineState&, int) {},
      [&](const PipelineState& ring, const SlidingTile& sliding_tile, int depth) {
        copy_y<Tile>(p, place, shared, barriers, ring, sliding_tile, depth);
      });
}

/// Copies all planes of x and y, of halves. By one thread.
template <class Tile>
__device__ void produce_planes(const PackedWgradParams& p, const WgradCoord& place, uint32_t shared,
                               WgradBarriers barriers) {
  const int first = place.tap[0] * p.dilation - p.padding;  // along the width, of voxel 0
  const int residue = (first % p.x_step + p.x_step) % p.x_step, offset = (first - residue) / p.x_step;
  int width, height, plane;  // of x: the first voxel that is copied; the plane of depth 0
  for_each_plane<Tile>(
      p, place,
      [&](const SlidingTile& sliding_tile) {
        width = sliding_tile.width + offset;
        height = sliding_tile.height * p.height.in_stride - p.height.padding + place.height_tap * p.height.dilation;
        plane =
            (static_cast<int>(sliding_tile.sample * p.groups + place.group) * p.x_octets_packed * p.x_step + residue) *
            p.x_size[0];
      },
      [&](const PipelineState& ring, int depth) {
        const bool exists = static_cast<unsigned>(depth) < static_cast<unsigned>(p.x_size[0]);
        if (ring.round > 0) wait_barrier(barriers.empty_x(ring.stage), ring.round - 1);
        expect_bytes(barriers.full_x(ring.stage), p.residues * p.lines * p.line_to);
        for (int i = 0; i < p.residues; ++i)
          tma_load(shared + ring.stage * p.of_x.stage_bytes + i * p.residue_to, p.packed_x, width * 2,
                   place.first_column / 8, height + i * p.residue_at, exists ? plane + depth : -1,
                   barriers.full_x(ring.stage));
      },
      [&](const PipelineState& ring, const SlidingTile& sliding_tile, int depth) {
        copy_y<Tile>(p, place, shared, barriers, ring, sliding_tile, depth);
      });
}

}  // namespace voxgrad::cuda
