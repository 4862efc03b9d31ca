// How the warps that feed those of weight_wgmma.cuh bring planes of x and y to shared memory. y was packed before
// (weight_pack.cu), so that one copy brings a plane, and so was x of halves (pack.cu), of which boxes are copied. x of
// floats: weight_lines.cuh.
#pragma once

#include <cuda.h>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/instances.h"
#include "cuda/conv/common/wgmma.cuh"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// A plane in shared memory is made of core matrices of 128 bytes. Of floats: of quads, 4 words along the width; a quad
/// of lines; a line of rows of 16 bytes: x's channels once for each set, or y's for each version. Of halves: of 8
/// channels, 16 bytes a voxel; of y, lines on end of 8 channels after the other; of x, 8 channels after the other of a
/// line.
struct WeightPlanes {
  int pitch, octet;  // bytes, as in WeightMemory
  int part_bytes, slot_bytes;
  int slots;
};

struct WeightWgmma {
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
  int raw_at, raw_slots, raw_bytes, raw_pitch, chunks;
  int64_t raw_line_at, raw_residue_at;    // bytes from a line of a residue, or a residue, to the next
  int raw_line_to;                        // there
  int copied, copy_shares;                // channels that are copied at a time, and threads that share the lines then
  int finished, shares;                   // that are taken apart, likewise
  int64_t copy_channel_at, copy_line_at;  // of a thread that copies: to its next channel, or line
  int copy_line_to, copy_line_step;       // there; positions along height
  WeightPlanes of_x, of_y;

  const char* y;   // packed: (groups, row tiles, samples, depth, height tiles, width tiles) planes
  int y_channels;  // of a group
  float* partial;  // (ranges, groups, y_channels, width taps, depth taps, height taps, x_octets * 8)
  SlidingAxis depth, height;
  int kernel[3], padding, dilation;  // padding, dilation: along the width
  int x_octets;
  int groups, set_tiles, row_tiles, column_tiles;
  int sets;  // of version tiles, in a block
  int tap_step, shift, versions, row_octets, column_octets;
  int pairs, width_tiles;
  int steps, plane_products;
  bool by_steps, late;
  int samples, pillars, ranges;  // pillars: every `ranges`th is one block's, so that neighbours share what is in L2
  int x_step_at[kMostSteps], y_step_at[kMostSteps];  // 16 bytes: from a slot to the words of a step
};

/// What a block sums.
struct WeightPlace {
  int group, row_tile, first_row, first_column;  // channels of y and x, of the group
  int tap[kMostSets];                            // along the width, the first of each set; kernel[2]: none
  int depth_tap, height_tap;                     // the first ones
  int range;

  WeightPlace() = default;
  __device__ explicit WeightPlace(const WeightWgmma& p) {
    unsigned index = blockIdx.x;
    const int first_set = static_cast<int>(take_digit(index, p.set_tiles)) * p.sets;
    row_tile = static_cast<int>(take_digit(index, p.row_tiles));
    first_row = row_tile * p.row_octets * 8;
    first_column = static_cast<int>(take_digit(index, p.column_tiles)) * p.column_octets * 8;
    height_tap = static_cast<int>(take_digit(index, p.height.pieces)) * p.height.taps;
    depth_tap = static_cast<int>(take_digit(index, p.depth.pieces)) * p.depth.taps;
    group = static_cast<int>(take_digit(index, p.groups));
    range = static_cast<int>(index);
    for (int set = 0; set < kMostSets; ++set) tap[set] = set < p.sets ? first_of(p, first_set + set) : p.kernel[2];
  }

 private:
  /// The first tap of a tile of versions.
  __device__ static int first_of(const WeightWgmma& p, int tile) {
    for (int residue = 0; residue < min(p.tap_step, p.kernel[2]); ++residue) {
      const int taps = (p.kernel[2] - residue + p.tap_step - 1) / p.tap_step;
      const int tiles = (taps + p.versions - 1) / p.versions;
      if (tile < tiles) return residue + tile * p.versions * p.tap_step;
      tile -= tiles;
    }
    return p.kernel[2];
  }
};

/// A box of the lattice, with all of its planes.
struct WeightPillar {
  int sample, height_tile, width_tile;
  int depth, planes, height, width;  // its first voxel

  template <class Arithmetic>
  __device__ static WeightPillar at(const WeightWgmma& p, unsigned index) {
    WeightPillar pillar;
    pillar.width_tile = static_cast<int>(take_digit(index, p.width_tiles));
    pillar.width = pillar.width_tile * p.pairs * 8 * Arithmetic::kElements;
    pillar.height_tile = static_cast<int>(take_digit(index, p.height.tiles));
    pillar.height = pillar.height_tile * p.height.box;
    pillar.depth = static_cast<int>(take_digit(index, p.depth.tiles)) * p.depth.box;
    pillar.planes = min(p.depth.box, p.depth.count - pillar.depth);
    pillar.sample = static_cast<int>(index);
    return pillar;
  }
};

/// Raw planes of x (of floats) that have come, or may be overwritten; slots of x and y that are full; empty ones.
struct WeightBarriers {
  static constexpr int kOf = kMostWeightSlots, kCount = 6 * kOf;
  uint32_t first;
  __device__ uint32_t full_raw(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty_raw(int slot) const { return full_raw(kOf + slot); }
  __device__ uint32_t full_x(int slot) const { return full_raw(2 * kOf + slot); }
  __device__ uint32_t full_y(int slot) const { return full_raw(3 * kOf + slot); }
  __device__ uint32_t empty_x(int slot) const { return full_raw(4 * kOf + slot); }
  __device__ uint32_t empty_y(int slot) const { return full_raw(5 * kOf + slot); }

  /// By threads 0 to kCount.
  template <class Tile>
  __device__ void init(int thread) const {
    constexpr int kMultiply = Tile::kMultipliers / 32, kFinish = kWeightFinishers / 32;
    const int arriving[] = {kWeightCopiers, kFinish, Tile::kHalves ? 1 : kFinish, 1, kMultiply, kMultiply};
    init_barrier(first + 8 * thread, arriving[thread / kOf]);
  }
};

/// Calls with_x(its slot, depth) for each plane of x of the block's pillars, and with_y(its slot, pillar, depth) for
/// each of y, in the order in which they are multiplied. begin(pillar) before. A plane of y comes before those of x
/// with which it is multiplied, to be on its way while they are staged (by whom stages both: of halves). With two slots
/// it would wait for the last but one, and they with it: then it comes behind them.
template <class Tile, class Begin, class X, class Y>
__device__ void for_each_plane(const WeightWgmma& p, const WeightPlace& place, Begin begin, X with_x, Y with_y) {
  Ring of_x, of_y;
  const bool y_first = p.of_y.slots > 2;
  for (int index = place.range; index < p.pillars; index += p.ranges) {
    const WeightPillar pillar = WeightPillar::at<typename Tile::Arithmetic>(p, index);
    begin(pillar);
    int d = pillar.depth * p.depth.in_stride - p.depth.padding + place.depth_tap * p.depth.dilation;
    for (int plane = 0; plane < pillar.planes; ++plane, d += p.depth.in_stride) {
      const auto y_plane = [&] {
        with_y(of_y, pillar, pillar.depth + plane);
        of_y.next(p.of_y.slots);
      };
      if (y_first) y_plane();
      for (int row = p.depth.first_new_row(plane == 0); row < p.depth.span; ++row) {
        with_x(of_x, d + row * p.depth.in_step);
        of_x.next(p.of_x.slots);
      }
      if (!y_first) y_plane();
    }
  }
}

/// Copies a plane of packed y. By one thread.
template <class Tile>
__device__ void copy_y(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers,
                       const Ring& ring, const WeightPillar& pillar, int depth) {
  const int64_t tile = (int64_t{place.group} * p.row_tiles + place.row_tile) * p.samples + pillar.sample;
  const int64_t plane =
      ((tile * p.depth.count + depth) * p.height.tiles + pillar.height_tile) * p.width_tiles + pillar.width_tile;
  if (ring.round > 0) await_round(barriers.empty_y(ring.slot), ring.round - 1);
  copy_bulk(shared + p.of_x.slots * p.of_x.slot_bytes + ring.slot * p.of_y.slot_bytes, p.y + plane * p.of_y.slot_bytes,
            p.of_y.slot_bytes, barriers.full_y(ring.slot));
}

/// Copies all planes of y. By one thread.
template <class Tile>
__device__ void copy_lattice(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers) {
  for_each_plane<Tile>(
      p, place, [](const WeightPillar&) {}, [](const Ring&, int) {},
      [&](const Ring& ring, const WeightPillar& pillar, int depth) {
        copy_y<Tile>(p, place, shared, barriers, ring, pillar, depth);
      });
}

/// Copies all planes of x and y, of halves. By one thread.
template <class Tile>
__device__ void copy_boxes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers) {
  const int first = place.tap[0] * p.dilation - p.padding;  // along the width, of voxel 0
  const int residue = (first % p.x_step + p.x_step) % p.x_step, offset = (first - residue) / p.x_step;
  int width, height, plane;  // of x: the first voxel that is copied; the plane of depth 0
  for_each_plane<Tile>(
      p, place,
      [&](const WeightPillar& pillar) {
        width = pillar.width + offset;
        height = pillar.height * p.height.in_stride - p.height.padding + place.height_tap * p.height.dilation;
        plane = (static_cast<int>(pillar.sample * p.groups + place.group) * p.x_octets_packed * p.x_step + residue) *
                p.x_size[0];
      },
      [&](const Ring& ring, int depth) {
        const bool exists = static_cast<unsigned>(depth) < static_cast<unsigned>(p.x_size[0]);
        if (ring.round > 0) await_round(barriers.empty_x(ring.slot), ring.round - 1);
        expect_bytes(barriers.full_x(ring.slot), p.residues * p.lines * p.line_to);
        for (int i = 0; i < p.residues; ++i)
          copy_box(shared + ring.slot * p.of_x.slot_bytes + i * p.residue_to, p.packed_x, width * 2,
                   place.first_column / 8, height + i * p.residue_at, exists ? plane + depth : -1,
                   barriers.full_x(ring.slot));
      },
      [&](const Ring& ring, const WeightPillar& pillar, int depth) {
        copy_y<Tile>(p, place, shared, barriers, ring, pillar, depth);
      });
}

}  // namespace voxgrad::cuda
