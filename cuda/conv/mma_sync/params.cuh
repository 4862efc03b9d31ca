// The parameters of the mma.sync kernel for fprop and dgrad (fprop_dgrad.cuh), and the coordinates of a CTA tile.
#pragma once

#include "cuda/conv/axis_phases.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// Words of input channels of a k-block.
inline constexpr int kKWords = 8;
inline constexpr int kMaxTaps = 1024, kMaxClasses = 64;
/// Of a CTA.
inline constexpr int kMmaSyncThreads = 128;

/// Classes as in plan.h.
struct MmaSyncParams {
  const void* in;
  const uint4* weights;  // packed
  const void* bias;      // or null
  void* out;
  int64_t in_stride[5], out_stride[5], bias_stride;
  Divisor digit[6];               // of a tile's number: tile of columns, phase, tile along width, height, depth, group
  int in_channels, out_channels;  // of a group
  int column_tiles, k_blocks;
  bool transposed, relu;
  Divisor tile[3], extent[3];  // of results; of the halo
  int tile_voxels, halo_voxels;
  int rounds;       // of the threads that stage the halo
  int line, pitch;  // words from a staged line to the next, and from a word of channels
  int classes;
  bool merged;  // a CTA takes all phases and columns of its tile; one halo, all of whose k-blocks are staged at once
  int input_stages;
  AxisPhases axis[3];
  uint8_t class_phase[kMaxClasses][4];  // of the three axes
  int class_begin[kMaxClasses + 1];     // the first of a class's taps
  int tap_offset[kMaxTaps];             // bytes from the corner of the halo to what the tap reads
};

/// Where a CTA tile is.
struct TileCoord {
  int64_t sample;
  int group, column_tile, phase;
  int q[3];  // the tile's corner
};

__device__ inline TileCoord tile_coord(const MmaSyncParams& p, unsigned number) {
  TileCoord place;
  int left = static_cast<int>(number);
  place.column_tile = p.digit[0].take_digit(left);
  place.phase = p.digit[1].take_digit(left);
  for (int a = 2; a >= 0; --a) place.q[a] = p.digit[4 - a].take_digit(left) * p.tile[a].value();
  place.group = p.digit[5].take_digit(left);
  place.sample = left;
  return place;
}

__device__ inline void class_phases(const MmaSyncParams& p, int number, int (&part)[3]) {
  for (int a = 0; a < 3; ++a) part[a] = p.class_phase[number][a];
}

/// Whether a tile has results: another phase may have more of them.
__device__ inline bool has_results(const MmaSyncParams& p, const TileCoord& place) {
  if (!p.transposed) return true;
  int phase[3];
  class_phases(p, place.phase, phase);
  bool inside = true;
  for (int a = 0; a < 3; ++a) inside &= place.q[a] < p.axis[a].phase[phase[a]].count;
  return inside;
}

/// Queues the kernel for a problem whose packed weights have `columns` columns a tile.
template <class Arithmetic>
void launch_fprop_dgrad_mma_sync(const MmaSyncParams& p, int columns, int64_t blocks, cudaStream_t stream);

}  // namespace voxgrad::cuda
