// What the fprop and dgrad implicit GEMMs on packed weights (mma_sync/fprop_dgrad.cuh, packed/fprop_dgrad.cuh) share:
// the kernels' parameters, where a CTA tile and its halo are, the launch.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "cuda/conv/axis_phases.h"
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/instances.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// Words of input channels of a k-block.
inline constexpr int kKWords = 8;
inline constexpr int kMaxTaps = 1024, kMaxClasses = 64;

/// A class is a phase of the results on each axis (dgrad, where a CTA tile has one class, or `tile_phases` of them), or
/// a residue of the inputs (fprop, where it has them all).
struct ImplicitGemmParams {
  CUtensorMap packed;    // inputs (wgmma)
  const void* in;        // (mma.sync)
  const uint4* weights;  // packed
  const void* bias;      // or null
  void* out;
  int64_t in_stride[5], out_stride[5], bias_stride;  // in_stride: (mma.sync)
  int64_t batch;
  unsigned* next_tile;            // of the dynamic scheduler: that no CTA has taken; 0 before (wgmma)
  unsigned work_tiles;            // CTA tiles, in all phases and tiles of columns unless merged
  Divisor digit[6];               // of a tile's number: tile of columns, phase, tile along width, height, depth, group
  int multiprocessors;            // (wgmma)
  int in_channels, out_channels;  // of a group
  int groups, column_tiles, k_blocks;
  int stage_k_blocks, class_stages;  // k-blocks of an input stage; stages of a class (wgmma)
  bool transposed, relu;
  Divisor tile[3], extent[3];  // of results; of the halo
  Divisor line_positions;      // of a line of one residue
  int residue_positions;       // from a residue along the width to the next (wgmma)
  int range;                   // results along depth from a tile to the next
  int tile_voxels, halo_voxels;
  int staged_voxels, rounds;  // filled up to whole rounds of the threads that stage (mma.sync)
  int line, pitch;            // words from a staged line to the next, and from a word of channels (mma.sync)
  RowTiles rows;              // (wgmma)
  int tiles[3], classes, tile_phases, slide;
  bool merged;  // a CTA takes all phases and columns of its tile; one halo, all of whose k-blocks are staged at once
  int input_stages;
  Divisor input_stage_count;
  AxisPhases axis[3];
  uint8_t class_phase[kMaxClasses][4];  // of the three axes
  int class_begin[kMaxClasses + 1];     // the first of a class's taps, of all k-blocks of a stage
  int weight_stages[kMaxClasses];       // of B, for a tile whose first class this is (wgmma)
  int tap_offset[kMaxTaps];  // from the corner of the halo to what the tap reads: bytes, or positions (wgmma)
};

/// Where a CTA tile is. By mma.sync a CTA takes one; by wgmma one after the other.
struct TileCoord {
  int64_t sample;
  int group, column_tile, phase;
  int q[3];  // the tile's corner
};

__device__ inline TileCoord tile_coord(const ImplicitGemmParams& p, unsigned number) {
  TileCoord place;
  int left = static_cast<int>(number);
  place.column_tile = p.digit[0].take(left);
  place.phase = p.digit[1].take(left) * p.tile_phases;
  for (int a = 2; a >= 0; --a) place.q[a] = p.digit[4 - a].take(left) * (a == 0 ? p.range : p.tile[a].value);
  place.group = p.digit[5].take(left);
  place.sample = left;
  return place;
}

__device__ inline void class_phases(const ImplicitGemmParams& p, int number, int (&part)[3]) {
  for (int a = 0; a < 3; ++a) part[a] = p.class_phase[number][a];
}

/// Whether a tile has results: another phase may have more of them.
template <int kTilePhases>
__device__ bool has_results(const ImplicitGemmParams& p, const TileCoord& place) {
  if (!p.transposed) return true;
  bool any = false;
  for (int tile_phase = 0; tile_phase < kTilePhases; ++tile_phase) {
    int phase[3];
    class_phases(p, place.phase + tile_phase, phase);
    bool inside = true;
    for (int a = 0; a < 3; ++a) inside &= place.q[a] < p.axis[a].phase[phase[a]].count;
    any |= inside;
  }
  return any;
}

template <class Tile>
void launch_implicit_gemm(void (*kernel)(ImplicitGemmParams), ImplicitGemmParams p, cudaStream_t stream) {
  ++conv_instance<Tile, ConvPass::fprop, Tile::kColumns>.launches;
  if constexpr (!Tile::kWgmma) {
    p.rounds = (p.halo_voxels + Tile::kProducers - 1) / Tile::kProducers;
    p.staged_voxels = p.rounds * Tile::kProducers;
  }
  const int phases = p.transposed && !p.merged ? p.classes / p.tile_phases : 1;
  const int digits[] = {p.merged ? 1 : p.column_tiles, phases, p.tiles[2], p.tiles[1], p.tiles[0], p.groups};
  int64_t tiles = p.batch;
  for (int i = 0; i < 6; ++i) {
    p.digit[i] = Divisor(digits[i]);
    tiles *= digits[i];
  }
  p.work_tiles = static_cast<unsigned>(tiles);
  const int64_t blocks = Tile::kWgmma ? std::min<int64_t>(tiles, p.multiprocessors) : tiles;
  const int shared_bytes = static_cast<int>(Tile::shared_bytes(p));
  launch_with_shared(kernel, static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream, p);
}

/// Queues the kernel for a problem whose packed weights have `columns` columns a tile.
template <class Arithmetic>
void launch_fprop_dgrad_mma_sync(const ImplicitGemmParams& p, int columns, cudaStream_t stream);
template <class Arithmetic>
void launch_fprop_dgrad_wgmma(const ImplicitGemmParams& p, int columns, cudaStream_t stream);

}  // namespace voxgrad::cuda
