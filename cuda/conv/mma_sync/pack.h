// Packing of weights for fprop and dgrad on mma.sync.
#pragma once

#include "cuda/conv/axis_phases.h"
#include "cuda/conv/plan.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

struct PackWeights {
  const void* weight;
  int64_t group_stride, in_stride, out_stride, tap_stride[3];
  int groups, in_channels, out_channels;      // channels of a group
  int columns, column_tiles, k_blocks, taps;  // columns: output channels of a tile; taps: of all classes
  AxisPhases axis[3];
};

/// packed: workspace_bytes() of the plan.
void pack_weights(const PackWeights& p, ConvArithmetic arithmetic, void* packed, cudaStream_t stream);

}  // namespace voxgrad::cuda
