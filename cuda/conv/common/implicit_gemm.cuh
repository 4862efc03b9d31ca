// What both gathers on tensor cores (gather_mma.cuh, gather_wgmma.cuh) are made of: what a kernel is told,
// where a box is, how inputs are staged and results written.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "cuda/conv/instances.h"
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/axis_phases.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// Words of input channels that are staged at a time.
inline constexpr int kChunk = 8;
inline constexpr int kMaxTaps = 1024, kMaxClasses = 64;
/// The offset of a voxel that is not there.
inline constexpr uint32_t kOutside = UINT32_MAX;

/// What the kernel is told. A class is a part of an axis for each axis: of the results (transposed, where a block has
/// one class, or `slots` of them), or of the inputs (forward, where it has them all).
struct GatherMma {
  CUtensorMap packed;    // inputs (wgmma)
  const void* in;        // (mma.sync)
  const uint4* weights;  // packed
  const void* bias;      // or null
  void* out;
  int64_t in_stride[5], out_stride[5], bias_stride;  // in_stride: (mma.sync)
  int64_t batch;
  unsigned* next_box;             // that no block has taken; 0 before (wgmma)
  unsigned boxes;                 // of results, in all phases and tiles of columns unless merged
  Divisor digit[6];               // of a box's number: tile of columns, phase, tile along width, height, depth, group
  int multiprocessors;            // (wgmma)
  int in_channels, out_channels;  // of a group
  int groups, column_tiles, chunks;
  int depth, class_steps;  // chunks of a step; steps of a class: chunks / depth (wgmma)
  bool transposed, relu;
  Divisor box[3], extent[3];  // of results; of the halo
  Divisor line_positions;     // of a line of one residue
  int residue_positions;      // from a residue along the width to the next (wgmma)
  int range;                  // results along depth from a box to the next
  int box_voxels, halo_voxels;
  int staged_voxels, rounds;  // filled up to whole rounds of the threads that stage (mma.sync)
  int line, pitch;            // words from a staged line to the next, and from a word of channels (mma.sync)
  RowTiles rows;              // (wgmma)
  int tiles[3], classes, slots, slide;
  bool merged;  // a block takes all phases and columns of its box; one halo, all of whose chunks are staged at once
  int buffers;  // staged steps
  Divisor buffer_count;
  AxisParts axis[3];
  uint8_t class_part[kMaxClasses][4];  // of the three axes
  int class_begin[kMaxClasses + 1];    // the first of a class's taps, of all chunks of a step
  int stages[kMaxClasses];             // of B, for a box whose first class this is (wgmma)
  int tap_offset[kMaxTaps];            // from the corner of the halo to what the tap reads: bytes, or positions (wgmma)
};

/// Where a box of results is. By mma.sync a block takes one; by wgmma one after the other.
struct GatherPlace {
  int64_t sample;
  int group, column_tile, phase;
  int q[3];  // the box's corner
};

__device__ inline GatherPlace gather_place(const GatherMma& p, unsigned number) {
  GatherPlace place;
  int left = static_cast<int>(number);
  place.column_tile = p.digit[0].take(left);
  place.phase = p.digit[1].take(left) * p.slots;
  for (int a = 2; a >= 0; --a) place.q[a] = p.digit[4 - a].take(left) * (a == 0 ? p.range : p.box[a].value);
  place.group = p.digit[5].take(left);
  place.sample = left;
  return place;
}

__device__ inline void class_parts(const GatherMma& p, int number, int (&part)[3]) {
  for (int a = 0; a < 3; ++a) part[a] = p.class_part[number][a];
}

/// The least position on each axis that a box of a class reads.
__device__ inline void halo_first(const GatherMma& p, const GatherPlace& place, int number, int (&first)[3]) {
  int part[3];
  class_parts(p, number, part);
  for (int a = 0; a < 3; ++a) {
    const AxisPart& at = p.axis[a].part[part[a]];
    first[a] = (place.q[a] + at.low) * p.axis[a].fold * p.axis[a].in_step + at.residue;
  }
}
/// In elements from the first of the sample.
__device__ inline int64_t halo_corner(const GatherMma& p, const GatherPlace& place, int number) {
  int first[3];
  halo_first(p, place, number, first);
  int64_t corner = 0;
  for (int a = 0; a < 3; ++a) corner += first[a] * p.in_stride[a + 2];
  return corner;
}
/// Where the voxels of the halo are: bytes from its corner, or kOutside, of voxel v in offsets[v * kPitch]. By thread
/// `thread` of `threads`.
template <int kPitch>
__device__ void locate_halo(const GatherMma& p, const GatherPlace& place, int number, uint32_t* offsets, int item_size,
                            int thread, int threads) {
  int first[3];
  halo_first(p, place, number, first);
  for (int v = thread; v < p.staged_voxels; v += threads) {
    int index = v, offset = 0;
    bool inside = v < p.halo_voxels;
    for (int a = 2; a >= 0; --a) {
      const int step = p.extent[a].take(index) * p.axis[a].in_step;
      inside &= static_cast<unsigned>(first[a] + step) < static_cast<unsigned>(p.axis[a].in_size);
      offset += step * static_cast<int>(p.in_stride[a + 2]);
    }
    offsets[v * kPitch] = inside ? static_cast<uint32_t>(offset) * item_size : kOutside;
  }
}

/// Whether a box has results: another phase may have more of them.
template <int kSlots>
__device__ bool has_results(const GatherMma& p, const GatherPlace& place) {
  if (!p.transposed) return true;
  bool any = false;
  for (int slot = 0; slot < kSlots; ++slot) {
    int phase[3];
    class_parts(p, place.phase + slot, phase);
    bool inside = true;
    for (int a = 0; a < 3; ++a) inside &= place.q[a] < p.axis[a].part[phase[a]].count;
    any |= inside;
  }
  return any;
}

template <class Tile>
void launch_gather(void (*kernel)(GatherMma), GatherMma p, cudaStream_t stream) {
  ++conv_instance<Tile, false, Tile::kColumns>.launches;
  if constexpr (!Tile::kWgmma) {
    p.rounds = (p.halo_voxels + Tile::kStagers - 1) / Tile::kStagers;
    p.staged_voxels = p.rounds * Tile::kStagers;
  }
  const int phases = p.transposed && !p.merged ? p.classes / p.slots : 1;
  const int digits[] = {p.merged ? 1 : p.column_tiles, phases, p.tiles[2], p.tiles[1], p.tiles[0], p.groups};
  int64_t boxes = p.batch;
  for (int i = 0; i < 6; ++i) {
    p.digit[i] = Divisor(digits[i]);
    boxes *= digits[i];
  }
  p.boxes = static_cast<unsigned>(boxes);
  const int64_t blocks = Tile::kWgmma ? std::min<int64_t>(boxes, p.multiprocessors) : boxes;
  const int shared_bytes = static_cast<int>(Tile::shared_bytes(p));
  launch_with_shared(kernel, static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream, p);
}

/// Queues the kernel for a problem whose packed weights have `columns` columns a tile.
template <class Arithmetic>
void launch_gather_mma(const GatherMma& p, int columns, cudaStream_t stream);
template <class Arithmetic>
void launch_gather_wgmma(const GatherMma& p, int columns, cudaStream_t stream);

}  // namespace voxgrad::cuda
