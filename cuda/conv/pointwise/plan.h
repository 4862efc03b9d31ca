// Plans of the 1x1x1 convolutions between many channels and few (pointwise.cu), as at the end of a segmentation
// network: bound by memory, on CUDA cores.
#pragma once

#include <optional>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// Of the narrow tensor: with more, halves are quicker on tensor cores.
constexpr int most_narrow_channels(int64_t item_bytes) { return item_bytes == 4 ? 16 : 8; }
/// Floats in shared memory: weights, a bias, and what keeps vectors in different banks.
inline constexpr int kMaxPointwiseWeights = 7168;
constexpr int pointwise_weight_rows(int narrow) { return (narrow + 1) | 1; }
/// Voxels of a warp at a time; warps of a block. Lanes of a voxel, of the wide tensor.
inline constexpr int kPointwiseVoxels = 32, kPointwiseWarps = 8, kPointwiseLanes = 4;
inline constexpr int kPointwiseWgradWarps = 16;
constexpr int pointwise_wgrad_voxels(int narrow) { return narrow <= 4 ? 64 : 32; }

/// Blocks of a multiprocessor: fprop and dgrad hold 4 sums a thread for each narrow channel, or channel of a vector.
constexpr int pointwise_blocks(int narrow) { return narrow <= 4 ? 3 : 2; }
struct PointwisePlan {
  bool wide_in;  // the tensor of more channels is `in`
  int narrow, wide;
  int64_t voxels;      // of all samples
  int64_t blocks = 1;  // wgrad: ranges of voxels, whose sums are added up by another kernel
  int groups = 1;      // wgrad: warps that share the wide channels of a voxel, and rows of the grid that do
  int grid_rows = 1;
};
/// Nothing unless both tensors are dense in channels-last order, one has few channels, and the other's are vectors of
/// 16 bytes.
std::optional<PointwisePlan> plan_pointwise(const ConvProblem& problem);
/// Of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const PointwisePlan& plan);

}  // namespace voxgrad::cuda
