// Plans of 1x1x1 convolutions between a tensor with many channels (wide) and a tensor with few channels (narrow), such
// as the last layer of a segmentation network. The kernels (pointwise.cu) run on CUDA cores and are memory-bound.
#pragma once

#include <optional>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Returns the maximum number of channels of the narrow tensor. With more channels of halves, tensor cores are faster.
constexpr int max_narrow_channels(int64_t item_bytes) { return item_bytes == 4 ? 16 : 8; }
/// Returns the rows of weights in shared memory: one per narrow channel and one for the bias, rounded up to an odd
/// number.
constexpr int pointwise_weight_rows(int narrow) { return (narrow + 1) | 1; }
/// Voxels that a warp of fprop and dgrad computes at a time.
inline constexpr int kPointwiseVoxels = 32;
/// Warps of a CTA of fprop and dgrad.
inline constexpr int kPointwiseWarps = 8;
/// Lanes that share a voxel of the wide tensor.
inline constexpr int kPointwiseLanes = 4;
/// Warps of a CTA of wgrad.
inline constexpr int kPointwiseWgradWarps = 16;
/// Returns the voxels that a warp of wgrad computes at a time.
constexpr int pointwise_wgrad_voxels(int narrow) { return narrow <= 4 ? 64 : 32; }

/// Returns the CTAs per SM of fprop and dgrad. A thread holds 4 sums for each narrow channel if the result is narrow,
/// and 4 sums for each channel of a vector if the result is wide.
constexpr int pointwise_blocks(int narrow) { return narrow <= 4 ? 3 : 2; }

/// The plan of a convolution.
struct PointwisePlan {
  bool wide_in;        ///< `in` is the wide tensor
  int narrow;          ///< channels of the narrow tensor
  int wide;            ///< channels of the wide tensor
  int64_t voxels;      ///< in all samples
  int64_t blocks = 1;  ///< CTAs along the voxels; in wgrad, each computes partial sums
  int groups = 1;      ///< wgrad: warps among which the wide channels of a voxel are divided
  int grid_rows = 1;   ///< wgrad: rows of the grid, among which the wide channels are divided
  double cycles = 0;   ///< cost according to the planner's model
};
/// Returns nothing unless both tensors are dense and channels-last, one tensor is narrow, and the channels of the other
/// tensor are whole vectors of 16 bytes.
std::optional<PointwisePlan> plan_pointwise(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const PointwisePlan& plan);

}  // namespace voxgrad::cuda
