// Plans of the convolutions of few channels (fprop_dgrad.cuh, wgrad.cuh): CTAs that slide along depth, with whole lines
// of the volume, staged as they lie in memory.
#pragma once

#include <optional>
#include <vector>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// Threads of fprop and dgrad: consumers; epilogue; producers, where a multiprocessor has two blocks, or one.
inline constexpr int kSmallChannelConsumers = 256, kSmallChannelEpilogue = 32;
constexpr int small_channel_producers(int blocks) { return (blocks == 2 ? 256 : 512) - kSmallChannelEpilogue; }
/// Channels of a group that these kernels take, of either side; pairs of units in a plane; planes in shared memory, at
/// most.
inline constexpr int kSmallChannels = 16, kSmallChannelPairs = 512, kSmallChannelStages = 8;
/// Columns of fprop and dgrad: channels of results times phases along the width.
inline constexpr int kSmallChannelColumns[] = {8, 16, 32};
/// Of wgrad: consumers, and as many producers; units of a warp, by 8 or 16 channels of the
/// lattice.
inline constexpr int kSmallChannelWgradConsumers = 512;
constexpr int small_channel_units(int columns) { return columns == 8 ? 14 : 8; }

/// The inputs that a tile of results needs, a line of a channel after the other: result q of an axis reads positions
/// q * step + low to q * step + low + span - 1. Along the width residues of the step lie apart, so that neighbouring
/// results read neighbouring words.
struct SmallChannelHalo {
  int step[3], low[3], span[3];
  int lines, positions;                                     // of a plane; of a line
  int run, line;                                            // words of a residue, of a line
  int channels, pitch;                                      // pitch: words from a channel to the next
  int stages;                                               // planes in shared memory
  constexpr int plane() const { return channels * pitch; }  // words
  constexpr int voxels() const { return lines * positions; }
  /// Of voxels, 8 channels each.
  constexpr int pieces(int of_channels) const { return voxels() * (of_channels > 8 ? 2 : 1); }
  /// Of the table of voxels.
  constexpr int table_bytes() const { return voxels() * (step[2] > 1 ? 8 : 4); }
  /// Words from the corner to what lies so far behind it along height and width.
  constexpr int offset(int height, int width) const { return height * line + width % step[2] * run + width / step[2]; }
};

struct SmallChannelPlan {
  AxisPhases axis[3];  // forward: with all residues folded, so that there is one part
  SmallChannelHalo halo;
  int tile[3], tiles[3];   // results of a part: of a block, the whole width of them; blocks
  int row_tiles, columns;  // 16 rows of each warp; columns of a product
  int blocks;              // of a multiprocessor, at most
  int quads, pairs;        // of 4 channels; of units (4 channels of a voxel), in a plane, for all phases of the height
  int result_pitch;        // elements from a channel's results to the next's
  int shared_bytes;
  double cycles;
};
/// What results of some phase of the axis read, from the one that they are counted by; ascending.
std::vector<int> read_along(const AxisPhases& axis);
/// Nothing if the other kernels have to take it.
std::optional<SmallChannelPlan> plan_small_channel_fprop_dgrad(const ConvProblem& problem);

/// A unit is a tap of 8 channels of x.
struct SmallChannelWgradPlan {
  AxisPhases axis[3];                  // of x
  SmallChannelHalo x, y;               // y: a line is filled up to a multiple of 8 words
  int tile[3], tiles[3];               // of y
  int columns, octets, units, splits;  // of 8 channels of x; warps that share the units
  int64_t ranges;                      // blocks of a group
  int shared_bytes;
  double cycles;
};
std::optional<SmallChannelWgradPlan> plan_small_channel_wgrad(const ConvProblem& problem);
/// Of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const SmallChannelWgradPlan& plan);

}  // namespace voxgrad::cuda
