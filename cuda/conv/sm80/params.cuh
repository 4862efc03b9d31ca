// The parameters of the mma.sync kernel for fprop and dgrad (fprop_dgrad.cuh), and the coordinates of a CTA tile.
#pragma once

#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/plan/sm80.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// Threads of a CTA.
inline constexpr int kMmaSyncThreads = 128;

/// The parameters of fprop_dgrad_mma_sync.
struct MmaSyncParams : MmaSyncShape {
  const void* in;
  const uint4* weights;  // packed
  EpilogueParams epilogue;
  void* out;
  int64_t in_stride[5];
  int64_t out_stride[5];
  // The digits of a tile's number, least significant first: column tile, phase, tile along width, height and depth,
  // group. The sample is the rest.
  Divisor digit[6];
  int in_channels;                             // per group
  int out_channels;                            // per group
  bool transposed;                             // dgrad
  Divisor tile[3];                             // results of a tile along each axis
  Divisor extent[3];                           // voxels of the halo of a tile along each axis
  int tile_voxels;                             // results of a tile in total
  int rounds;                                  // voxels of the halo that each thread stages
  uint8_t class_phase[kMaxMmaSyncClasses][4];  // phase of each axis
  int class_begin[kMaxMmaSyncClasses + 1];     // first tap of each class
  int tap_offset[kMaxMmaSyncTaps];             // bytes in a stage from the first voxel of the halo to that of a tap
};

static_assert(sizeof(MmaSyncParams) <= kMaxParameterBytes);
static_assert(kMaxAxisPhases - 1 <= UINT8_MAX);  // class_phase

/// The position of a CTA tile.
struct TileCoord {
  int64_t sample;
  int group;
  int column_tile;
  int phase;
  int q[3];  // first result of the tile along each axis, in results of the phase
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

/// Returns false if the tile lies outside of the results of its phase. Phases may have different sizes.
__device__ inline bool has_results(const MmaSyncParams& p, const TileCoord& place) {
  if (!p.transposed) return true;
  int phase[3];
  class_phases(p, place.phase, phase);
  bool inside = true;
  for (int a = 0; a < 3; ++a) inside &= place.q[a] < p.axis[a].phase[phase[a]].count;
  return inside;
}

/// Launches the kernel. `columns` is the number of columns of a CTA tile; `blocks` is the number of CTAs.
template <class Arithmetic>
void launch_fprop_dgrad_mma_sync(const MmaSyncParams& p, int columns, int64_t blocks, cudaStream_t stream);

}  // namespace voxgrad::cuda
