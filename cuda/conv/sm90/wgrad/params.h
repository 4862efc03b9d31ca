// The kernel parameters of the weight gradient of channels-last tensors (kernel.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/conv/common/wgrad_splits.h"
#include "cuda/conv/plan/sm90_wgrad.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda::implicit_wgrad {

/// An m64 tile of (tap, input channel) with up to two taps.
struct MTile {
  static constexpr uint16_t kNone = UINT16_MAX;
  int32_t start;    ///< offset in a stage of the box, shifted by the first tap, in units of 16 bytes
  uint16_t apart;   ///< distance from the first tap to the second, in units of 16 bytes
  uint16_t tap[2];  ///< indices of the taps in the kernel, or kNone
  uint16_t chunk;   ///< index of the chunk of input channels in the work unit
};

/// A TMA box of x.
struct Box {
  int16_t offset[3];  ///< offset from the tile of y, in positions of x: depth, height, width
  uint16_t chunk;     ///< index of the chunk of input channels
};

/// The taps and the chunks of input channels of a work unit.
struct TapSet {
  uint16_t first_box;
  uint16_t boxes;
  uint16_t m_tiles[2];  ///< per warpgroup
  MTile m_tile[2][kMaxWgradMTiles];
};

/// The parts of x and y that one product multiplies (operand.h). Each part of a tensor has `samples` samples.
struct Parts {
  int x;
  int y;
};

/// The parameters of wgrad_kernel.
struct Params {
  CUtensorMap x;  ///< (C, W, H, D, N)
  CUtensorMap y;
  float* partial;            ///< (split, group, output channel, tap, input channel)
  int64_t split_stride;      ///< of `partial`
  WeightLayout weight;       ///< if weight.data is not null, the kernel stores the weight gradient here
  const uint32_t* x_maxima;  ///< null, or the maxima of the scaled channels; the weight gradient is then float32
  const uint32_t* y_maxima;
  Divisor cluster;  ///< splits that a cluster adds: 1 or 2
  int taps;
  int in_channels;       ///< per group
  int out_channels;      ///< per group
  int x_pitch_channels;  ///< channels from one group to the next in the tensor map
  int y_pitch_channels;
  int chunks;       ///< chunks of input channels of a work unit
  int steps;        ///< steps of 16 voxels in a tile
  int x_pitch;      ///< bytes from the first 8 voxels of a step to the last 8
  int box_bytes;    ///< bytes of a box of x
  int boxes_bytes;  ///< bytes of the boxes of a stage
  int box_rows;
  int y_rows;
  int y_plane;     ///< sliding: bytes from one plane of y to the next
  int y_first;     ///< sliding: position along the depth of the first plane of y for plane 0 of x
  int plane_taps;  ///< sliding: taps of a plane of the kernel
  int stage_bytes;
  int stages;
  int units;
  int tiles_of_split;  ///< maximum tiles of y in a split
  Divisor sets;  ///< digits of a unit's number after the rank in the cluster, least significant first; then the split
  Divisor columns;
  Divisor channel_tiles;
  Divisor groups;
  Divisor tiles[4];  ///< tiles of y along width, height, depth and samples
  int samples;
  Parts parts[3];  ///< the operands of each product
  int all_tiles;
  int tile[4];  ///< sample, depth, height, width
  int in_step[3];
  int32_t step_at[kMaxWgradSteps];  ///< offset of the first voxel of a step in a box of x, in units of 16 bytes
  Box box[kMaxWgradBoxes];
  TapSet set[kMaxWgradSets];
};

static_assert(sizeof(Params) <= kMaxParameterBytes);
// Boxes and taps have 16-bit indices. has_short_offsets() checks Box::offset. MTile::apart is in units of 16 bytes.
static_assert(kMaxWgradBoxes <= UINT16_MAX && kMaxWgradTaps <= MTile::kNone && kMaxSharedBytes / 16 <= UINT16_MAX);

/// Launches the kernel of a CTA tile in clusters of `cluster` CTAs. F16 also computes float32 in one product.
template <class Arithmetic>
void launch_tile(const Params& p, const WgradTile& tile, int ctas, int cluster, int shared_bytes, cudaStream_t stream);

}  // namespace voxgrad::cuda::implicit_wgrad
