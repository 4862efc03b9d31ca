// Plans of the channels-last weight gradient by wgmma: the taps, channels and voxels of a CTA.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// A CTA tile. An m64 tile consists of the 64 rows of a wgmma product. If `slide` is more than 1, the tile slides along
/// depth: `slide` taps along the depth are blocks of columns, which are consecutive planes of y.
struct WgradTile {
  int chunk;    ///< input channels of a row of x
  int columns;  ///< output channels of y
  int m_tiles;  ///< m64 tiles of a warpgroup
  int slide = 1;
  constexpr int product_columns() const { return columns * slide; }
  /// Floats from one tap to the next and from one column to the next in SharedSums (sm90/wgrad/epilogue.cuh). Modulo
  /// 32, they are 1 and 4. When 4 x 8 lanes store 8 input channels of 4 pairs of columns, they use 32 different banks.
  constexpr int slot_pitch() const { return chunk + 1; }
  constexpr int pitch() const { return (2 * m_tiles * (64 / chunk) * slot_pitch() + 27) / 32 * 32 + 4; }
  constexpr int sums_bytes() const { return 4 * product_columns() * pitch(); }
};
/// Returns the compiled CTA tiles.
std::span<const WgradTile> wgrad_tiles(ConvArithmetic arithmetic);

/// Taps that read one box of x.
struct WgradBox {
  int part[3];   ///< phase of each axis
  int first[3];  ///< first tap of the phase
  int count[3];  ///< taps
  int chunk;     ///< index of the chunk of input channels in the CTA
  int taps() const { return count[0] * count[1] * count[2]; }
};

/// The plan of a weight gradient.
struct WgradPlan {
  static constexpr int kMaxDirectSplits = 2;  ///< splits that are added in shared memory

  AxisPhases axis[3];
  WgradTile cta{};
  std::vector<std::vector<WgradBox>> sets;  ///< the boxes of each set of taps; a work unit handles one set
  int chunks = 1;                           ///< chunks of input channels of a CTA
  int channel_tiles = 1;                    ///< CTAs along the input channels
  int tile[4] = {};                         ///< voxels of y of a tile: sample, depth, height, width
  int box[4] = {};                          ///< voxels of a box of x
  int depth = 0;                            ///< planes of y (sliding: of x) that the tiles cover
  int splits = 1;                           ///< splits of the tiles of y (split-K)
  bool direct = false;                      ///< the kernel adds up to kMaxDirectSplits splits and stores the results
  int tiles_of_split = 0;                   ///< tiles of y in a split
  int all_tiles = 0;                        ///< tiles of all products
  int stages = 0;                           ///< stages of shared memory
  int64_t units = 0;                        ///< work units
  int64_t samples = 1;                      ///< samples of a launch
  double cycles = 0;                        ///< cost according to the planner's model

  int rows() const { return tile[0] * tile[1] * tile[2] * tile[3]; }
  /// Returns the row of a box of x for the first tap that belongs to a row of y.
  int box_row(int row) const;
  /// Returns whether wgmma can read the boxes of x in steps of 16 voxels: each octet of neighboring rows of y must
  /// belong to neighboring rows of x, and the distance between the two octets of a step must be the same for all steps.
  bool has_regular_octets() const;
  int y_box(int i) const { return tile[i] + (i == 1 ? cta.slide - 1 : 0); }
  int y_rows() const { return y_box(0) * y_box(1) * y_box(2) * y_box(3); }
  int box_rows() const { return box[0] * box[1] * box[2] * box[3]; }
  int box_bytes() const { return (box_rows() * chunk_bytes() + 1023) / 1024 * 1024; }
  int chunk_bytes() const { return 2 * cta.chunk; }
  int most_boxes() const;
  int shared_bytes() const { return std::max(stages * stage_bytes(), direct ? cta.sums_bytes() : 0); }
  int stage_bytes() const { return most_boxes() * box_bytes() + (y_rows() * 2 * cta.columns + 1023) / 1024 * 1024; }
};

/// Plans launches of as many samples as may be copied at a time. Returns nothing for problems that the family does not
/// support: f64, or too many taps or residues.
std::optional<WgradPlan> plan_wgrad(const ConvProblem& problem);
/// Returns the bytes of the partial sums in memory.
int64_t workspace_bytes(const ConvProblem& problem, const WgradPlan& plan);

}  // namespace voxgrad::cuda
