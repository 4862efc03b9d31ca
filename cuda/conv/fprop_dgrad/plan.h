// Which CTA tile, halo and split an implicit GEMM of channels-last inputs takes: a pure function of the problem.
#pragma once

#include <bit>
#include <optional>
#include <span>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// The compiled CTA tiles: output channels, and m64 tiles of voxels of a warpgroup. Or it slides along depth: `slide`
/// taps along it are as many blocks of columns of one product, whose sums belong to neighbouring planes of results.
struct FpropDgradTile {
  int columns, row_tiles, slide = 1;
  int product_columns() const { return columns * slide; }
  friend constexpr bool operator==(const FpropDgradTile&, const FpropDgradTile&) = default;
};
std::span<const FpropDgradTile> fprop_dgrad_tiles();
/// Whether a tile is compiled with rows of so many bytes, of elements of `item` bytes. By the planner's model no problem
/// is quicker for a slide with more than 32 channels a row, or for 128 bytes with up to 24 columns. Of three products,
/// sums and products have to fit into registers.
constexpr bool is_compiled(int columns, int row_tiles, int slide, int row_bytes, int item, bool three) {
  if (slide > 1) return !three && row_bytes <= 32 * item;
  if (row_bytes > 64 && columns < 32) return false;
  return (row_bytes > 32 || (columns <= 64 && row_tiles >= (three ? 2 : 4))) && (!three || columns * row_tiles <= 128);
}
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
