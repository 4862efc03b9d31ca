// Packing of weights for fprop and dgrad with mma.sync.
#pragma once

#include "cuda/conv/plan/axis_phases.h"
#include "cuda/conv/plan/problem.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// The weights to pack, and the tiles to pack them for.
struct PackWeights {
  const void* weight;
  int64_t group_stride;  ///< elements
  int64_t in_stride;
  int64_t out_stride;
  int64_t tap_stride[3];
  int groups;
  int in_channels;   ///< per group
  int out_channels;  ///< per group
  int columns;       ///< output channels of a tile
  int column_tiles;
  int k_blocks;
  int taps;  ///< in all classes
  AxisPhases axis[3];
};

/// Packs the weights in the order in which the kernel reads them. `packed` has workspace_bytes() of the plan.
void pack_weights(const PackWeights& p, ConvArithmetic arithmetic, void* packed, cudaStream_t stream);

}  // namespace voxgrad::cuda
