// How the warps that feed those of weight_wgmma.cuh bring planes of x and y to shared memory. y was packed before
// (weight_pack.cu), so that one copy brings a plane, and so was x of halves (pack.cu), of which boxes are copied.
// Floats of x may begin anywhere, with voxels at any distance: they come by copies of 4 bytes in the background, and
// are rounded where they lie by two warps of their own.
#pragma once

#include <cuda.h>

#include "cuda/conv/bulk_copy.cuh"
#include "cuda/conv/instances.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// A plane in shared memory is made of core matrices of 128 bytes. Of floats: of quads, 4 words along the width; a quad
/// of lines; a line of rows of 16 bytes: x's channels, or y's, these once for each version. Of halves: of 8 channels,
/// 16 bytes a voxel; of y, lines on end of 8 channels after the other; of x, 8 channels after the other of a line.
struct WeightPlanes {
  int pitch, octet;  // bytes, as in WeightMemory
  int part_bytes, slot_bytes;
  int slots;
};

inline constexpr int kLeastCopies = 4, kMostCopies = 10;

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
  Divisor shares;      // warps that share channels, each with its lines
  int units, many;     // of a residue; channels of a unit
  int unit_step;       // warps that take units in turn
  int unit_channels;   // from a unit to the next of a warp
  int64_t unit_bytes;  // likewise
  int lines_at_once;   // of floats, that are copied together
  int64_t line_bytes;  // from a line to the next of its share; likewise
  int line_step, line_slot;
  WeightPlanes of_x, of_y;

  const char* y;   // packed: (groups, row tiles, samples, depth, height tiles, width tiles) planes
  int y_channels;  // of a group
  float* partial;  // (ranges, groups, y_channels, width taps, depth taps, height taps, x_octets * 8)
  SlidingAxis depth, height;
  int kernel[3], padding, dilation;  // padding, dilation: along the width
  int x_octets;
  int groups, version_tiles, row_tiles, column_tiles;
  int tap_step, versions, row_octets, column_octets;
  int pairs, width_tiles;
  int steps, plane_products;
  bool by_steps, late;
  int64_t samples, pillars, range;
  int x_step_at[kMostSteps], y_step_at[kMostSteps];  // 16 bytes: from a slot to the words of a step
};

/// What a block sums.
struct WeightPlace {
  int group, row_tile, first_row, first_column;  // channels of y and x, of the group
  int first_tap, versions;                       // along the width
  int depth_tap, height_tap;                     // the first ones
  int64_t range;

  WeightPlace() = default;
  __device__ explicit WeightPlace(const WeightWgmma& p) {
    unsigned index = blockIdx.x;
    int tile = static_cast<int>(take_digit(index, p.version_tiles));
    row_tile = static_cast<int>(take_digit(index, p.row_tiles));
    first_row = row_tile * p.row_octets * 8;
    first_column = static_cast<int>(take_digit(index, p.column_tiles)) * p.column_octets * 8;
    height_tap = static_cast<int>(take_digit(index, p.height.pieces)) * p.height.taps;
    depth_tap = static_cast<int>(take_digit(index, p.depth.pieces)) * p.depth.taps;
    group = static_cast<int>(take_digit(index, p.groups));
    range = index;
    for (int residue = 0;; ++residue) {
      const int taps = (p.kernel[2] - residue + p.tap_step - 1) / p.tap_step;
      const int tiles = (taps + p.versions - 1) / p.versions;
      if (tile < tiles) {
        first_tap = residue + tile * p.versions * p.tap_step;
        versions = min(p.versions, taps - tile * p.versions);
        return;
      }
      tile -= tiles;
    }
  }
};

/// A box of the lattice, with all of its planes.
struct WeightPillar {
  int64_t sample;
  int height_tile, width_tile;
  int depth, planes, height, width;  // its first voxel

  template <class Arithmetic>
  __device__ static WeightPillar at(const WeightWgmma& p, int64_t index) {
    WeightPillar pillar;
    pillar.width_tile = static_cast<int>(take_digit(index, p.width_tiles));
    pillar.width = pillar.width_tile * p.pairs * 8 * Arithmetic::kElements;
    pillar.height_tile = static_cast<int>(take_digit(index, p.height.tiles));
    pillar.height = pillar.height_tile * p.height.box;
    pillar.depth = static_cast<int>(take_digit(index, p.depth.tiles)) * p.depth.box;
    pillar.planes = min(p.depth.box, p.depth.count - pillar.depth);
    pillar.sample = index;
    return pillar;
  }
};

/// Slots of x whose copies have come (of floats); that are full; slots of y that are full; empty slots of x, of y.
struct WeightBarriers {
  static constexpr int kOf = kMostWeightSlots, kCount = 5 * kOf;
  uint32_t first;
  __device__ uint32_t landed_x(int slot) const { return first + 8 * slot; }
  __device__ uint32_t full_x(int slot) const { return landed_x(kOf + slot); }
  __device__ uint32_t full_y(int slot) const { return landed_x(2 * kOf + slot); }
  __device__ uint32_t empty_x(int slot) const { return landed_x(3 * kOf + slot); }
  __device__ uint32_t empty_y(int slot) const { return landed_x(4 * kOf + slot); }

  /// By threads 0 to kCount.
  template <class Tile>
  __device__ void init(int thread) const {
    const int arriving[] = {Tile::kCopiers, Tile::kHalves ? 1 : Tile::kFinishers / 32, 1, Tile::kMultipliers / 32,
                            Tile::kMultipliers / 32};
    init_barrier(first + 8 * thread, arriving[thread / kOf]);
  }
};

/// Calls with_x(its slot, depth) for each plane of x of the block's pillars, and with_y(its slot, pillar, depth) for
/// each of y, in the order in which they are multiplied. begin(pillar) before. A plane of y comes before those of x
/// with which it is multiplied, to be on its way while they are staged. With two slots it would wait for the last but
/// one, and they with it: then it comes behind them.
template <class Tile, class Begin, class X, class Y>
__device__ void for_each_plane(const WeightWgmma& p, const WeightPlace& place, Begin begin, X with_x, Y with_y) {
  Ring of_x, of_y;
  const bool y_first = p.of_y.slots > 2;
  const int64_t end = min((place.range + 1) * p.range, p.pillars);
  for (int64_t index = place.range * p.range; index < end; ++index) {
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

/// What a lane copies of the lines of x: 32 words of a channel, or 16 of two, or 8 of four, as wide as the box is.
template <class Tile>
struct WeightCopies {
  const WeightWgmma& p;
  const WeightPlace& place;
  int share, first_unit;  // of this warp
  int word, channel;      // of this lane, in the first unit
  const char* from;       // its word of the first line, at depth 0
  int at;                 // the first line
  bool inside;            // along the width

  __device__ WeightCopies(const WeightWgmma& problem, const WeightPlace& at_place, int thread)
      : p(problem), place(at_place), first_unit(thread / 32) {
    share = p.shares.take(first_unit);
    word = thread % 32 & (8 * p.pairs - 1);
    channel = thread % 32 / (8 * p.pairs) + first_unit * p.many;
  }
  __device__ void begin(const WeightPillar& pillar) {
    const int w = (pillar.width + word) * p.x_step - p.padding + place.first_tap * p.dilation;
    at = pillar.height * p.height.in_stride - p.height.padding + place.height_tap * p.height.dilation;
    from = p.x + pillar.sample * p.x_stride[0] +
           (int64_t{place.group} * p.x_channels + place.first_column + channel) * p.x_stride[1] + at * p.x_stride[3] +
           w * p.x_stride[4];
    inside = static_cast<unsigned>(w) < static_cast<unsigned>(p.x_size[2]);
  }
  __device__ void plane(int depth, uint32_t slot) const {
    const bool in_volume = static_cast<unsigned>(depth) < static_cast<unsigned>(p.x_size[0]);
    const int channels = in_volume ? p.x_channels - place.first_column - channel : 0;  // from this lane's on
    const char* const plane = from + depth * p.x_stride[2];
    slot += word / 4 * p.of_x.pitch + channel * 16 + word % 4 * 4;
    for (int residue = 0; residue < p.residues; ++residue) {
      const int line = residue * p.residue_at + share * p.line_at;
      int lines = p.lines - (residue >= p.full_residues) - share + p.shares.value - 1;  // of this share
      p.shares.take(lines);
      copy_units(plane + line * p.x_stride[3], slot + residue * p.residue_to + share * p.line_to, at + line, lines,
                 channels);
    }
  }

 private:
  /// Lines from `at` on; `channels` there are, from this lane's first on.
  __device__ void copy_units(const char* from, uint32_t to, int at, int lines, int channels) const {
    const auto each = [&](auto copy_lines) {
#pragma unroll 1
      for (int unit = first_unit; unit < p.units; unit += p.unit_step) {
        copy_lines(from, to, channels > 0);
        from += p.unit_bytes;
        to += p.unit_channels * 16;
        channels -= p.unit_channels;
      }
    };
    const int begin = inside ? at : INT_MIN;  // what is outside along another axis is so in all lines
    with_batch<kMostCopies>([&]<int kMany>() {
      each([&](const char* f, uint32_t t, bool exists) { copy_words<kMany>(f, t, exists ? begin : INT_MIN, lines); });
    });
  }
  /// The number of lines that are copied together, as the compiler wants it.
  template <int kMany, class Copy>
  __device__ void with_batch(Copy copy) const {
    if constexpr (kMany > kLeastCopies)
      if (p.lines_at_once != kMany) return with_batch<kMany - 1>(copy);
    copy.template operator()<kMany>();
  }
  /// So many lines at a time, with addresses in registers of their own: a copy holds its address for long.
  template <int kMany>
  __device__ void copy_words(const char* from, uint32_t to, int at, int lines) const {
    const auto height = static_cast<unsigned>(p.x_size[1]);
#pragma unroll 1
    for (; lines >= kMany; lines -= kMany) {
      const char* each[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i, from += p.line_bytes) {
        each[i] = from;
        asm volatile("" : "+l"(each[i]));
      }
#pragma unroll
      for (int i = 0; i < kMany; ++i, to += p.line_slot, at += p.line_step)
        copy_word_async(to, each[i], static_cast<unsigned>(at) < height);
    }
#pragma unroll 1
    for (; lines > 0; --lines, from += p.line_bytes, to += p.line_slot, at += p.line_step)
      copy_word_async(to, from, static_cast<unsigned>(at) < height);
  }
};

/// Copies all planes of x, of floats. By warps 0 to Tile::kCopiers / 32.
template <class Tile>
__device__ void copy_planes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers,
                            int thread) {
  WeightCopies<Tile> copies(p, place, thread);
  for_each_plane<Tile>(
      p, place, [&](const WeightPillar& pillar) { copies.begin(pillar); },
      [&](const Ring& ring, int depth) {
        if (ring.round > 0) await_round(barriers.empty_x(ring.slot), ring.round - 1);
        copies.plane(depth, shared + ring.slot * p.of_x.slot_bytes);
        arrive_with_copies(barriers.landed_x(ring.slot));
      },
      [](const Ring&, const WeightPillar&, int) {});
}

/// Copies all planes of x and y, of halves. By one thread.
template <class Tile>
__device__ void copy_boxes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers) {
  const int first = place.first_tap * p.dilation - p.padding;  // along the width, of voxel 0
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

/// Rounds what has come of x, of floats, where it lies, or takes it apart, and copies y. By warps 0 to
/// Tile::kFinishers / 32.
template <class Tile>
__device__ void finish_planes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, WeightBarriers barriers,
                              int thread) {
  const auto finish = [&](uint32_t slot) {
    constexpr int kMany = Tile::kThree ? 4 : 8, kStep = Tile::kFinishers * 16;
#pragma unroll 1
    for (int first = thread * 16; first < p.of_x.part_bytes; first += kMany * kStep) {
      uint32_t word[kMany][4];
#pragma unroll
      for (int i = 0; i < kMany; ++i)
        if (first + i * kStep < p.of_x.part_bytes) load_shared(slot + first + i * kStep, word[i]);
#pragma unroll
      for (int i = 0; i < kMany; ++i) {
        const uint32_t at = slot + first + i * kStep;
        if (first + i * kStep >= p.of_x.part_bytes) break;
        uint32_t low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (Tile::kThree)
            Tf32x3::split(word[i][j], word[i][j], low[j]);
          else if (fabsf(__uint_as_float(word[i][j])) < INFINITY)
            word[i][j] += 0x1000u;  // the nearest, once the hardware has truncated
        }
        store_shared(at, word[i]);
        if constexpr (Tile::kThree) store_shared(at + p.of_x.part_bytes, low);
      }
    }
  };
  for_each_plane<Tile>(
      p, place, [](const WeightPillar&) {},
      [&](const Ring& ring, int) {
        await_round(barriers.landed_x(ring.slot), ring.round);
        finish(shared + ring.slot * p.of_x.slot_bytes);
        publish_to_engines();
        __syncwarp();
        if (thread % 32 == 0) arrive(barriers.full_x(ring.slot));
      },
      [&](const Ring& ring, const WeightPillar& pillar, int depth) {
        if (thread == 0) copy_y<Tile>(p, place, shared, barriers, ring, pillar, depth);
      });
}

}  // namespace voxgrad::cuda
