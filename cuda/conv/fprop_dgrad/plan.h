// Which CTA tile, halo and split an implicit GEMM of channels-last inputs takes: a pure function of the problem.
#pragma once

#include <bit>
#include <optional>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// A CTA tile: output channels, and m64 tiles of voxels of a warpgroup. Or it slides along depth: `slide` taps along it
/// are as many blocks of columns of one product, whose sums belong to neighbouring planes of results.
struct FpropDgradTile {
  int columns, row_tiles, slide = 1;
  int product_columns() const { return columns * slide; }
  friend constexpr bool operator==(const FpropDgradTile&, const FpropDgradTile&) = default;
};

/// A tile, and the rows of shared memory it is compiled for: bytes of 32, 64 and 128, or-ed, for each arithmetic. Left out
/// is what the planner chose for at most 4 of 1,280 layers of real models' families. Of three products, sums and products
/// have to fit into registers.
struct CompiledFpropDgradTile {
  FpropDgradTile tile;
  int halves, tf32, tf32x3;
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
/// Whether its columns are rows of swizzled boxes, too (halves, whose weights may be N-major).
constexpr bool may_be_n_major(int columns) { return std::has_single_bit(static_cast<unsigned>(columns)); }
/// Taps whose weights are one stage, at most.
constexpr int most_stage_taps(int columns) { return columns >= 128 ? 1 : columns > 32 ? 2 : 4; }

struct FpropDgradPlan {
  AxisPhases axis[3];
  FpropDgradTile cta{};
  int row_bytes = 0, chunk_channels = 0, chunks = 0;  // of a voxel in shared memory; of K, and how many there are
  int products = 1;                                   // or 3, each of which has its chunks
  bool halo[3] = {};                  // axes whose taps read one box; of the others each tap has its own
  int tile[4] = {}, box[4] = {};      // (sample, depth, height, width): of results; of a TMA box
  int group_pitch = 0, base[8] = {};  // Params of params.h
  int phases = 1;
  bool resident = false, merged = false, cooperative = false;
  bool kept = false;  // weights, all of which have a stage
  int run = 0;        // sliding: planes of results that a warpgroup comes by
  int splits = 1, input_stages = 0, weight_stages = 0, stage_taps = 1;
  int64_t units = 0;
  double cycles = 0;  // by the model that chose

  int m_tiles() const { return cta.row_tiles * (cooperative ? 2 : 1); }
  /// Boxes that stay for all phases: of three products, two read the same.
  int resident_chunks() const { return products == 3 ? chunks / 3 * 2 : chunks; }
  int box_rows() const { return box[0] * box[1] * box[2] * box[3]; }
  int weight_bytes() const { return stage_taps * cta.product_columns() * row_bytes; }  // of a stage
  int all_weight_bytes() const {
    const int taps = axis[0].kernel * axis[1].kernel * axis[2].kernel;
    return kept ? chunks * taps * cta.columns * row_bytes : weight_stages * weight_bytes();
  }
  int unit_depth() const { return cta.slide > 1 ? 2 * run : tile[1]; }  // results of a work unit
  int input_bytes() const { return (box_rows() * row_bytes + 1023) / 1024 * 1024; }
};

/// Nothing if the problem is not its own (f64, few channels, a copy that does not pay, too many taps or residues).
std::optional<FpropDgradPlan> plan_fprop_dgrad(const ConvProblem& problem);
/// Of a channels-last copy of the inputs of all samples, if they need one (two for three products).
int64_t copied_bytes(const ConvProblem& problem);
/// Partial sums of split-K.
int64_t workspace_bytes(const ConvProblem& problem, const FpropDgradPlan& plan);

}  // namespace voxgrad::cuda
