// The parameters of the weight gradient of channels-last tensors (kernel.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/conv/wgrad/plan.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda::implicit_wgrad {

inline constexpr int kMaxSteps = 32, kMaxMTiles = 14, kMaxSets = 64, kMaxBoxes = 384, kMaxStages = 6;

/// An m64 tile of (tap, input channel): where the box that it reads begins in a stage, moved by its first tap, and from
/// there to its second tap, in 16 bytes; its taps (kNone: no such).
struct MTile {
  static constexpr uint16_t kNone = UINT16_MAX;
  int32_t start;
  uint16_t apart, tap[2];
  uint16_t chunk;  // of input channels, among those of the work unit
};

/// A TMA box of x: from the tile of y, in positions of x (depth, height, width).
struct Box {
  int16_t offset[3];
  uint16_t chunk;
};

/// The taps (and chunks of input channels) of a work unit.
struct TapSet {
  uint16_t first_box, boxes;
  uint16_t m_tiles[2];  // of each warpgroup
  MTile m_tile[2][kMaxMTiles / 2];
};

/// Which part of x, and of y, a product multiplies: each part is as many samples.
struct Parts {
  int x, y;
};

struct Params {
  CUtensorMap x;  // (C, W, H, D, N)
  CUtensorMap y;
  float* partial;  // (split, group, output channel, tap, input channel)
  void* result;    // in their place: halves in that order of axes; else null
  int64_t split_stride, out_stride;
  int taps;
  int in_channels, out_channels;           // of a group
  int x_pitch_channels, y_pitch_channels;  // channels from a group to the next, as the maps count them
  int chunks;                              // of input channels, of a work unit
  int steps;                               // of 16 voxels in a tile
  int x_pitch;                             // bytes from 8 voxels of a step to the other 8
  int box_bytes, boxes_bytes;              // of a box of x; of those of a stage
  int box_rows, y_rows;
  int y_plane;     // sliding: bytes from a plane of y to the next
  int y_first;     // ... and y's first position for the first one of x
  int plane_taps;  // ... and taps of a plane of the kernel
  int stage_bytes, stages;
  int units;
  int tiles_of_split;                            // of y's tiles, a split takes at most so many
  Divisor sets, columns, channel_tiles, groups;  // digits of a unit's number, from the least; the last: splits
  Divisor tiles[4];                              // of y, along width, height, depth, and samples
  int samples;
  Parts parts[3];  // of the operands, one product after the other
  int all_tiles;
  int tile[4];  // (sample, depth, height, width)
  int in_step[3];
  int32_t step_at[kMaxSteps];  // of a step's first voxel in a box of x, in 16 bytes
  Box box[kMaxBoxes];
  TapSet set[kMaxSets];
};

/// Adds up the splits and brings them into the order of the weights.
struct ReduceParams {
  const float* partial;
  int64_t split_stride;
  int splits, slices;  // of the splits, added up by a warp each
  int taps, taps_of_block, in_channels;
  Divisor out_channels;                 // of a group
  const uint32_t *x_maxima, *y_maxima;  // of scaled channels (operand.h), or null
  void* weight;
  int64_t out_stride, in_stride;
  int kernel[3];
  int64_t tap_stride[3];
  Divisor channel_tiles, tap_tiles;
  bool by_taps;  // taps are closer together than channels
};

/// Queues the kernel of the tile that the plan names; kPromotes: of three products.
template <class Element, bool kPromotes>
void launch_kernel(const Params& p, const WgradTile& tile, int ctas, int shared_bytes, cudaStream_t stream);

}  // namespace voxgrad::cuda::implicit_wgrad
