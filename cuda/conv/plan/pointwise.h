// Plans of 1x1x1 convolutions between a tensor with many channels (wide) and a tensor with few channels (narrow), such
// as the last layer of a segmentation network. The kernels (direct/pointwise.cu and direct/pointwise_planes.cu) are
// memory-bound.
#pragma once

#include <optional>

#include "core/detail/divide.h"
#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Returns the maximum number of channels of the narrow tensor (planes: see PointwisePlan). For more channels, other
/// kernels are faster.
constexpr int max_narrow_channels(ConvPass pass, int64_t item_bytes, bool planes) {
  return pass == ConvPass::wgrad && item_bytes < 4 && !planes ? 8 : 16;
}
/// Returns the arithmetic of fprop and dgrad, which memory limits even with the accuracy of float32.
inline ConvArithmetic pointwise_arithmetic(const ConvProblem& p) {
  return p.dtype == DType::f32 ? ConvArithmetic::tf32x3 : arithmetic_of(p);
}
/// Lanes that share a voxel of the wide tensor.
inline constexpr int kPointwiseLanes = 4;
/// Voxels that a warp of fprop and dgrad computes at a time, warps of a CTA, and stages of the ring of a warp.
inline constexpr int kPointwiseVoxels = 32, kPointwiseWarps = 8, kPointwiseStages = 3;
/// Returns the CTAs per SM for which the registers of fprop and dgrad suffice.
constexpr int pointwise_ctas(bool wide_in, int64_t item_bytes, int narrow) {
  return wide_in || narrow * item_bytes > 32 ? 2 : 3;
}
/// Warps of a CTA of wgrad.
inline constexpr int kPointwiseWgradWarps = 16;
/// Returns the voxels that a warp of wgrad computes at a time.
constexpr int pointwise_wgrad_voxels(int narrow) { return narrow <= 4 ? 64 : 32; }

/// Contiguous voxels: vectors of 16 bytes of each channel in a tile of a warp, channels of which a lane has vectors,
/// and steps of 16 channels in a stage of the ring.
constexpr int planes_tile(ConvPass pass) { return pass == ConvPass::wgrad ? 16 : 8; }
inline constexpr int kPlanesVectors = 4, kPlanesSteps = 2;
/// Returns the CTAs per SM for which the registers of fprop and dgrad of contiguous voxels suffice.
constexpr int planes_ctas(bool wide_in, int64_t item_bytes) { return wide_in || item_bytes > 2 ? 2 : 3; }

/// The plan of a convolution.
struct PointwisePlan {
  bool wide_in;             ///< `in` is the wide tensor
  bool planes;              ///< in both tensors, the voxels of each channel are contiguous
  int narrow;               ///< channels of the narrow tensor
  int wide;                 ///< channels of the wide tensor
  int64_t voxels;           ///< in all samples
  int64_t tiles = 0;        ///< planes: tiles of the voxels of a sample
  int64_t blocks = 1;       ///< CTAs along the voxels; in wgrad, each computes partial sums
  int groups = 1;           ///< wgrad: warps among which the wide channels of a voxel are divided
  int grid_rows = 1;        ///< wgrad: rows of the grid, among which the wide channels are divided
  int chunks_of_stage = 1;  ///< narrow result: vectors of each voxel that a lane copies at a time, 1 or 2
  int shared_bytes = 0;     ///< fprop and dgrad
  double cycles = 0;        ///< cost of wgrad according to the planner's model
};
/// Returns nothing unless one tensor is narrow and both tensors have one of two layouts: they are channels-last without
/// gaps, with whole vectors of 16 bytes of wide channels, or the voxels of each channel are contiguous and consist of
/// whole vectors of 16 bytes.
std::optional<PointwisePlan> plan_pointwise(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const PointwisePlan& plan);

}  // namespace voxgrad::cuda
