// Plans of convolutions with few channels (fprop_dgrad.cuh, wgrad.cuh). CTAs slide along the depth and load whole lines
// of the volume into shared memory without reordering them.
#pragma once

#include <optional>
#include <vector>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Consumer threads of a CTA of fprop and dgrad.
inline constexpr int kSmallChannelConsumers = 256;
/// Epilogue threads of a CTA of fprop and dgrad.
inline constexpr int kSmallChannelEpilogue = 32;
/// Returns the producer threads of a CTA of fprop and dgrad, for one or two CTAs per SM.
constexpr int small_channel_producers(int blocks) { return (blocks == 2 ? 256 : 512) - kSmallChannelEpilogue; }
/// Compiled columns of fprop and dgrad: channels of the result times phases along the width.
inline constexpr int kSmallChannelColumns[] = {8, 16, 32};
/// Consumer threads of a CTA of wgrad. The number of its producer threads is the same.
inline constexpr int kSmallChannelWgradConsumers = 512;
/// Returns the units (see SmallChannelWgradPlan) of a warp of wgrad, for 8 or 16 channels of y.
constexpr int small_channel_units(int columns) { return columns == 8 ? 14 : 8; }

/// The inputs that a tile of results reads, stored line by line for each channel. Result q of an axis reads positions
/// q * step + low to q * step + low + span - 1. Along the width, residues of the step are stored separately, so that
/// neighboring results read neighboring words.
struct SmallChannelHalo {
  int step[3];
  int low[3];
  int span[3];
  int lines;      ///< lines of a plane
  int positions;  ///< positions of a line
  int run;        ///< words of a residue of a line
  int line;       ///< words of a line
  int channels;
  int pitch;   ///< words from one channel to the next
  int stages;  ///< planes in shared memory
  /// Returns the words of a plane.
  constexpr int plane() const { return channels * pitch; }
  constexpr int voxels() const { return lines * positions; }
  /// Returns the pieces of a plane: voxels times blocks of 8 channels.
  constexpr int pieces(int of_channels) const { return voxels() * (of_channels > 8 ? 2 : 1); }
  /// Returns the bytes of the table of voxels.
  constexpr int table_bytes() const { return voxels() * (step[2] > 1 ? 8 : 4); }
  /// Returns the offset in words of the voxel at (height, width) from the corner of the plane.
  constexpr int offset(int height, int width) const { return height * line + width % step[2] * run + width / step[2]; }
};

/// The plan of fprop or dgrad.
struct SmallChannelPlan {
  AxisPhases axis[3];  ///< fprop folds the residues of each axis into one phase (axis_phases.h)
  SmallChannelHalo halo;
  int tile[3];       ///< results of a phase in a CTA tile, which covers the whole width
  int tiles[3];      ///< CTAs along each axis
  int row_tiles;     ///< blocks of 16 rows of each warp
  int columns;       ///< columns of a product
  int blocks;        ///< maximum CTAs per SM
  int quads;         ///< blocks of 4 channels
  int pairs;         ///< pairs of units (4 channels of a voxel) in a plane, for all phases of the height
  int result_pitch;  ///< elements from the results of one channel to those of the next
  int shared_bytes;
  double cycles;  ///< cost according to the planner's model
};
/// Returns the input positions that result 0 of any phase of the axis reads, in ascending order.
std::vector<int> read_along(const AxisPhases& axis);
/// Returns nothing if the family does not support the problem or other kernels are faster.
std::optional<SmallChannelPlan> plan_small_channel_fprop_dgrad(const ConvProblem& problem);

/// The plan of wgrad. A unit is a tap of 8 channels of x.
struct SmallChannelWgradPlan {
  AxisPhases axis[3];  ///< phases of x
  SmallChannelHalo x;
  SmallChannelHalo y;  ///< lines are padded to multiples of 8 words
  int tile[3];         ///< voxels of y in a CTA tile
  int tiles[3];
  int columns;  ///< channels of y, rounded up to 8 or 16
  int octets;   ///< blocks of 8 channels of x
  int units;
  int splits;      ///< warps among which the units are divided
  int64_t ranges;  ///< CTAs per group
  int shared_bytes;
  double cycles;  ///< cost according to the planner's model
};
/// Returns nothing if the family does not support the problem or other kernels are faster.
std::optional<SmallChannelWgradPlan> plan_small_channel_wgrad(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const SmallChannelWgradPlan& plan);

}  // namespace voxgrad::cuda
