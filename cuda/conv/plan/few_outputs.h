// Plans of convolutions whose result has few channels, such as the last layer of a network or the data gradient of the
// first one (direct/few_outputs.cu).
#pragma once

#include <optional>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Bytes of the channels of an input that a CTA multiplies at a time.
inline constexpr int kFewOutputsChunk = 64;
/// Bytes of an entry of the list of results.
inline constexpr int kFewOutputsResultBytes = 8;

/// A compiled kernel.
struct FewOutputsInstance {
  int depth;    ///< maximum number of taps along the depth
  int step;     ///< stride along the depth
  int columns;  ///< maximum number of columns: result channels of a CTA times taps along the height and the width
  int warps;    ///< of a CTA
  int m64;      ///< m64 tiles of a warpgroup, whose sums are all in registers
  constexpr int threads() const { return 32 * warps; }
  /// Returns the inputs of a CTA tile.
  constexpr int inputs() const { return warps * 16 * m64; }
  /// Returns the stages of the ring of inputs.
  constexpr int stages() const { return m64 == 2 ? 3 : 4; }
  /// Returns the floats from one column of products in shared memory to the next. Avoids bank conflicts.
  constexpr int pitch() const { return inputs() + 12; }
};
inline constexpr FewOutputsInstance kFewOutputsInstances[] = {
    {3, 1, 16, 16, 2}, {3, 1, 32, 12, 2}, {3, 1, 48, 16, 1}, {5, 1, 32, 16, 1},
    {4, 2, 16, 16, 1}, {4, 2, 32, 16, 1}, {4, 2, 48, 12, 1}, {5, 2, 32, 12, 1},
};

/// The plan of dgrad. Along each axis, result i = q * stride + s - padding with 0 <= s < stride is the sum over j of
/// the products of input q - j and tap s + j * stride. A CTA computes the results of some q along each axis. It
/// processes one plane of inputs after another, along the depth or, if the kernel is larger along the height or has no
/// plan for the depth, along the height.
struct FewOutputsPlan {
  bool exchanged;     ///< depth and height are exchanged in the other members, and in the kernel
  int instance;       ///< index into kFewOutputsInstances
  int inputs[2];      ///< inputs of a CTA tile along height and width
  int reach[3];       ///< maximum j along each axis
  int first[3];       ///< first q along each axis
  int count[3];       ///< number of q along each axis
  int tile[3];        ///< q of a CTA tile along each axis
  int tiles[3];       ///< CTA tiles along each axis, for one sample
  int channels;       ///< result channels of a CTA
  int channel_tiles;  ///< CTAs among which the result channels are divided
  int chunks;         ///< chunks of input channels
  int shared_bytes;
  double cycles;  ///< cost according to the planner's model
};
/// Exchanges depth and height.
ConvProblem exchange_depth_and_height(ConvProblem problem);
/// Returns nothing if the family does not support the problem, or if other kernels are expected to be faster.
std::optional<FewOutputsPlan> plan_few_outputs(const ConvProblem& problem);

}  // namespace voxgrad::cuda
