// The parameters of the implicit GEMM of channels-last convolutions (kernel.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/detail/divisor.h"

namespace voxgrad::cuda::implicit_gemm {

inline constexpr int kMaxTaps = 512, kMaxPhases = 64, kMaxTiles = 8, kMaxStages = 8;

/// One TMA box of inputs and the taps that read it.
struct Load {
  int16_t offset[3];  // of the box from the CTA tile, in input positions: depth, height, width
  uint16_t first_tap, taps;
};

/// A tap within its box.
struct Tap {
  int16_t shift;    // rows of the box
  uint16_t weight;  // its number in the kernel
};

/// A part of the results that is one implicit GEMM: all of them (fprop), or a stride phase (dgrad).
struct Phase {
  uint16_t first_load, loads;
  int weight_stages;       // of a chunk
  int first_stage;         // of weights that are kept
  int first[3], count[3];  // results of the phase: the first one, and how many
};

/// (sample, depth, height, width).
using Coordinates = int[4];

struct Params {
  // Three products: with as many samples, and taps, behind them, which are the low parts (split.h).
  CUtensorMap input;   // (C, W, H, D, N), boxes of box[] voxels
  CUtensorMap weight;  // (K, N, tap), or (N, K, tap) where the output channels are innermost
  const void* bias;    // or null
  int64_t bias_stride;
  void* out;
  int64_t out_stride[4];   // elements, of Coordinates
  int64_t channel_stride;  // of the results likewise
  float* partial;          // split-K: dense (split, N, D, H, W, C); else null
  int64_t partial_stride;  // from a split to the next
  bool relu;
  bool vectors;      // results lie so that 16 bytes of a voxel's channels can be stored at once
  bool resident;     // all phases of a CTA tile read the same boxes, one a chunk, which are loaded once
  bool cooperative;  // both warpgroups share each CTA tile, m64 tiles in turn; else (ping-pong) they take GEMMs in turn
  bool merged;       // a work unit is all phases of its CTA tile, one after the other
  int samples, phases, chunks;
  Divisor product_chunks;  // three products: chunks of one
  int resident_chunks;     // whose boxes are loaded once: of the low parts and of the high ones
  int taps;                // of the kernel
  int k_group, n_group;    // channels from a group to the next: of the GEMM's K and N as the weight's map counts them
  int in_channels, out_channels;  // of a group
  int chunk_channels, row_bytes;  // of a row of the box: one voxel's channels of a chunk
  int splits, units;
  Divisor columns, split, phase, tiles[4], groups;  // digits of a unit's number, from the least
  int in_step[3], out_step[3];
  Coordinates tile;     // results of a CTA tile
  Coordinates unit;     // of a work unit
  Divisor extent[3];    // of the box: width, height, depth
  int box_rows;         // that TMA brings
  int group_pitch;      // rows of the box from 8 rows of an m64 tile to the next
  int base[kMaxTiles];  // row of the box at which an m64 tile begins
  int input_stages, weight_stages;
  int stage_taps;   // whose weights are one stage
  int kept_taps;    // all weights stay in shared memory, those of so many taps a chunk; or 0
  int run;          // sliding: planes of results of a warpgroup in a work unit
  int slide_step;   // sliding: from a tap's weights to those of the next block of columns
  int input_bytes;  // of a stage: the box, rounded up
  Phase phase_of[kMaxPhases];
  Load load[kMaxTaps];
  Tap tap[kMaxTaps];
};

/// The next kernel of split-K: adds up the partial results in the order of the splits.
struct ReduceParams {
  const float* partial;
  int64_t partial_stride, voxels;
  int splits, channels;
  const void* bias;
  int64_t bias_stride;
  void* out;
  int64_t out_stride[4], channel_stride;
  Divisor size[3];    // width, height, depth
  bool voxels_first;  // neighbouring threads have neighbouring voxels, not channels
  bool relu;
};

}  // namespace voxgrad::cuda::implicit_gemm
