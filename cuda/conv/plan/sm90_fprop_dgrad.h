// Plans of fprop and dgrad as implicit GEMMs of channels-last inputs: CTA tile, halo and split-K.
#pragma once

#include <bit>
#include <optional>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// A CTA tile. An m64 tile consists of the 64 rows of a wgmma product. If `slide` is more than 1, the tile slides along
/// depth: `slide` taps along the depth are blocks of columns of one product, and the sums of the blocks belong to
/// neighboring planes of the result.
struct FpropDgradTile {
  int columns;    ///< output channels
  int row_tiles;  ///< m64 tiles of voxels of a warpgroup
  int slide = 1;
  int product_columns() const { return columns * slide; }
  friend constexpr bool operator==(const FpropDgradTile&, const FpropDgradTile&) = default;
};

/// A tile, and the sizes of rows in shared memory for which the tile is compiled. There is a bit set of 32, 64 and 128
/// bytes for each arithmetic. A combination is omitted if the planner chose it for at most 4 of 1,280 layers of real
/// model families. In tf32x3, the sums and the products of a tile must fit into registers together.
struct CompiledFpropDgradTile {
  FpropDgradTile tile;
  int halves;
  int tf32;
  int tf32x3;
  constexpr bool has(int row_bytes, int item, bool three) const {
    return ((three ? tf32x3 : item == 2 ? halves : tf32) & row_bytes) != 0;
  }
};
inline constexpr CompiledFpropDgradTile kFpropDgradTiles[] = {
    {{16, 4}, 32 | 64, 32 | 64, 0},
    {{24, 4}, 32, 32 | 64, 32 | 64},
    {{32, 4}, 32 | 64 | 128, 32 | 64 | 128, 32 | 64 | 128},
    {{48, 4}, 32 | 64 | 128, 32 | 64 | 128, 0},
    {{48, 2}, 64 | 128, 64 | 128, 32 | 64 | 128},
    {{64, 4}, 32 | 64 | 128, 32 | 64 | 128, 0},
    {{64, 2}, 64 | 128, 64 | 128, 32 | 64 | 128},
    {{64, 1}, 64 | 128, 128, 128},
    {{128, 2}, 64 | 128, 64 | 128, 0},
    {{128, 1}, 128, 128, 64 | 128},
    {{16, 4, 3}, 32 | 64, 32 | 64 | 128, 0},
    {{24, 2, 3}, 32 | 64, 32, 0},
    {{32, 2, 3}, 64, 128, 0},
    {{32, 4, 3}, 32 | 64, 32 | 64 | 128, 0},
    {{48, 2, 3}, 32, 0, 0},
};
/// Returns whether a tile supports N-major weights (halves only), whose columns are rows of swizzled boxes.
constexpr bool may_be_n_major(int columns) { return std::has_single_bit(static_cast<unsigned>(columns)); }
/// Returns the maximum number of taps whose weights share a stage.
constexpr int most_stage_taps(int columns) { return columns >= 128 ? 1 : columns > 32 ? 2 : 4; }

/// The part of the plan that the kernel needs.
struct FpropDgradShape {
  int tile[4] = {};                    ///< results of a CTA tile: sample, depth, height, width
  int row_bytes = 0;                   ///< bytes of a voxel in shared memory: the channels of one chunk
  int chunk_channels = 0;              ///< channels of a chunk of K
  int chunks = 0;                      ///< chunks of all products
  int group_pitch = 0;                 ///< rows of the box from one group of 8 rows of an m64 tile to the next
  int base[kMaxFpropDgradTiles] = {};  ///< first row of each m64 tile in the box
  int phases = 1;
  bool resident = false;  ///< all GEMMs of a work unit read the same boxes, one per chunk, which are loaded once
  bool merged = false;    ///< a work unit consists of all phases of its CTA tile, which are computed one after another
  bool cooperative = false;  ///< both warpgroups share each CTA tile, with alternating m64 tiles; otherwise they
                             ///< compute GEMMs in turn (ping-pong)
  int unit_columns = 1;      ///< tiles along the output channels in a work unit: 1, or all of them if `resident`
  int cluster = 1;  ///< CTAs of a cluster (1 or 2): they share the weights and compute different tiles of voxels
  int run = 0;      ///< sliding: planes of results of a warpgroup in a work unit
  int splits = 1;
  int input_stages = 0;
  int weight_stages = 0;
  int stage_taps = 1;  ///< taps whose weights share a stage
};

/// The plan of a convolution.
struct FpropDgradPlan : FpropDgradShape {
  AxisPhases axis[3];
  FpropDgradTile cta{};
  int products = 1;   ///< 1, or 3 for tf32x3
  bool halo[3] = {};  ///< axes whose taps share one box; on other axes each tap has its own box
  int box[4] = {};    ///< voxels of a TMA box
  bool kept = false;  ///< all weights stay in shared memory
  int64_t units = 0;  ///< work units of all clusters
  double cycles = 0;  ///< cost according to the planner's model

  /// Returns the m64 tiles of a CTA tile.
  int m_tiles() const { return cta.row_tiles * (cooperative ? 2 : 1); }
  /// Returns the chunks whose boxes stay in shared memory for all GEMMs of a unit. Two of three products read the same
  /// boxes.
  int resident_chunks() const { return products == 3 ? chunks / 3 * 2 : chunks; }
  int box_rows() const { return box[0] * box[1] * box[2] * box[3]; }
  /// Returns the bytes of a stage of weights.
  int weight_bytes() const { return stage_taps * cta.product_columns() * row_bytes; }
  int all_weight_bytes() const {
    const int taps = axis[0].kernel * axis[1].kernel * axis[2].kernel;
    return kept ? chunks * taps * unit_columns * cta.columns * row_bytes : weight_stages * weight_bytes();
  }
  /// Returns whether the kernel omits boxes that lie outside of the inputs along the depth. All boxes of a tap along
  /// the depth must then follow each other. CTAs of a cluster must load the same weights.
  bool omits_boxes() const {
    return !halo[0] && !resident && !kept && cluster == 1 && cta.slide == 1 &&
           (phases > 1 || axis[0].phases * axis[1].phases * axis[2].phases == 1);
  }
  /// Returns the planes of results of a work unit.
  int unit_depth() const { return cta.slide > 1 ? 2 * run : tile[1]; }
  /// Returns the bytes of a stage of inputs.
  int input_bytes() const { return (box_rows() * row_bytes + 1023) / 1024 * 1024; }
};

/// Returns nothing for problems that this family does not support or does not compute fast: f64, few channels, a copy
/// that does not pay, or too many taps or residues.
std::optional<FpropDgradPlan> plan_fprop_dgrad(const ConvProblem& problem);
/// Returns the bytes of the channels-last copy of all inputs, if they need a copy (two copies for tf32x3).
int64_t copied_bytes(const ConvProblem& problem);
/// Returns the bytes of the partial sums of split-K.
int64_t workspace_bytes(const ConvProblem& problem, const FpropDgradPlan& plan);

}  // namespace voxgrad::cuda
