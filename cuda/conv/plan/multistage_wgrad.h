// Plans the weight gradient of channels-last float32 tensors without copies of the operands
// (sm80/multistage_wgrad.cu).
#pragma once

#include <optional>
#include <span>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// A CTA tile of the weight gradient.
struct MultistageWgradTile {
  int rows;     ///< output channels
  int columns;  ///< pairs of a tap and an input channel
  friend constexpr bool operator==(const MultistageWgradTile&, const MultistageWgradTile&) = default;
};
/// Returns the number of CTAs of a tile that run on one SM of sm_90 at a time. `three` is true for tf32x3.
constexpr int ctas_per_sm(const MultistageWgradTile& tile, bool three) {
  return tile.rows * tile.columns > 64 * 64 ? 2 : three ? 3 : 4;
}
/// Returns the compiled tiles of an arithmetic; none for halves.
std::span<const MultistageWgradTile> multistage_wgrad_tiles(ConvArithmetic arithmetic);

/// The plan of a weight gradient.
struct MultistageWgradPlan {
  static constexpr int kStages = 3;   ///< stages of shared memory
  static constexpr int kVoxels = 32;  ///< voxels of y in a stage
  /// Words of padding between the rows of a stage, which avoid bank conflicts.
  static constexpr int kPadding = 8;

  MultistageWgradTile cta{};
  int row_tiles = 0;
  int column_tiles = 0;
  int ranges = 0;           ///< splits of the voxels of y
  int voxels_of_range = 0;  ///< a multiple of kVoxels
  int64_t voxels = 0;       ///< voxels of y in all samples
  double cycles = 0;        ///< cost according to the planner's model

  int shared_bytes() const { return kStages * kVoxels * (cta.rows + cta.columns + 2 * kPadding) * 4; }
};

/// Returns nothing if the family does not support the problem: dtypes other than f32, tensors that are not
/// channels-last or whose channels are not multiples of 4, more than 2^31 voxels, or large distances between taps.
std::optional<MultistageWgradPlan> plan_multistage_wgrad(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const MultistageWgradPlan& plan);

}  // namespace voxgrad::cuda
