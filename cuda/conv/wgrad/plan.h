// Which taps, channels and voxels a CTA of the channels-last weight gradient takes: a pure function of the problem.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// The compiled CTA tiles: input channels of a row of x, output channels of y, m64 tiles of a warpgroup. Or it slides
/// along depth: `slide` taps along it are as many blocks of columns, planes of y one behind the other.
struct WgradTile {
  int chunk, columns, m_tiles, slide = 1;
  int product_columns() const { return columns * slide; }
};
std::span<const WgradTile> wgrad_tiles(ConvArithmetic arithmetic);

/// Taps that read one box of x.
struct WgradBox {
  int part[3];             // of the axes
  int first[3], count[3];  // taps of the part
  int chunk;               // of input channels, among those of a CTA
  int taps() const { return count[0] * count[1] * count[2]; }
};

struct WgradPlan {
  AxisPhases axis[3];
  WgradTile cta{};
  std::vector<std::vector<WgradBox>> sets;                        // of each work unit
  int chunks = 1, channel_tiles = 1;                              // chunks of a CTA; CTAs along input channels
  int tile[4] = {}, box[4] = {};                                  // (sample, depth, height, width): of y; of x
  int depth = 0;                                                  // positions that tiles cover: of y; sliding: of x
  int splits = 1, tiles_of_split = 0, all_tiles = 0, stages = 0;  // tiles: of all products
  int64_t units = 0, samples = 1;                                 // samples: of a launch
  double cycles = 0;

  int rows() const { return tile[0] * tile[1] * tile[2] * tile[3]; }
  int y_box(int i) const { return tile[i] + (i == 1 ? cta.slide - 1 : 0); }
  int y_rows() const { return y_box(0) * y_box(1) * y_box(2) * y_box(3); }
  int box_rows() const { return box[0] * box[1] * box[2] * box[3]; }
  int box_bytes() const { return (box_rows() * chunk_bytes() + 1023) / 1024 * 1024; }
  int chunk_bytes() const { return 2 * cta.chunk; }
  int most_boxes() const;
  int stage_bytes() const { return most_boxes() * box_bytes() + (y_rows() * 2 * cta.columns + 1023) / 1024 * 1024; }
};

/// Of as many samples at a time as may be copied. Nothing if the problem is not its own (f64, too many taps or
/// residues).
std::optional<WgradPlan> plan_wgrad(const ConvProblem& problem);
/// Partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const WgradPlan& plan);

}  // namespace voxgrad::cuda
