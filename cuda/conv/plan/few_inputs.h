// Plans of convolutions whose input has few channels, such as the first layer of a network or a patch embedding
// (direct/few_inputs.cu, direct/few_inputs_wgrad.cu).
#pragma once

#include <optional>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Warps of a CTA.
inline constexpr int kFewInputsWarps = 8;
/// Threads of a CTA.
inline constexpr int kFewInputsThreads = 32 * kFewInputsWarps;
/// Returns the m16 tiles of a warp of fprop, for a CTA tile of 32 or 64 channels of y.
constexpr int few_inputs_m16(int channels) { return channels == 32 ? 4 : 2; }
/// Voxels of y in a CTA tile of wgrad.
inline constexpr int kFewInputsWgradVoxels = 256;
/// Bytes of an entry of the list of voxels.
inline constexpr int kFewInputsVoxelBytes = 16;
/// Bytes of an entry of the list of lines of a box.
inline constexpr int kFewInputsRowBytes = 8;

/// The plan of fprop or wgrad. A CTA tile is a box of results. The CTA copies the box of inputs that they read to
/// shared memory, as words: a word of halves holds two inputs of a line. A "pair" is an input channel and a tap.
struct FewInputsPlan {
  int tile[3];            ///< results of a CTA tile along each axis
  int tiles[3];           ///< CTA tiles along each axis, for one sample
  int box[3];             ///< inputs of a CTA tile along each axis
  int rows;               ///< lines of all channels in a box
  int half_distance = 0;  ///< inputs from the first to the second half of a word
  int steps;              ///< fprop: k-steps of 8 words
  int taps;               ///< pairs
  int columns;            ///< wgrad: pairs that a warp computes
  int sets = 1;           ///< wgrad: warps among which pairs are divided; the other warps compute other voxels
  int set_tiles = 1;      ///< wgrad: CTAs among which pairs are divided
  int channels;           ///< channels of y in a CTA tile
  int channel_tiles;      ///< CTAs among which the channels of y are divided
  int64_t ranges;         ///< CTAs among which the CTA tiles are divided
  int shared_bytes;
  double cycles;  ///< cost according to the planner's model
};
/// Returns nothing if the family does not support the problem, or if other kernels are expected to be faster.
std::optional<FewInputsPlan> plan_few_inputs(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const FewInputsPlan& plan);

}  // namespace voxgrad::cuda
