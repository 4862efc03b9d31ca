// Plans of the kernels that use mma.sync (fprop_dgrad.cuh, wgrad.cuh).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Returns the compiled widths of tiles: columns for fprop and dgrad, ascending; rows for wgrad, descending.
std::span<const int> mma_sync_widths(ConvArithmetic arithmetic);
std::span<const int> mma_sync_wgrad_widths();
/// Returns the width of ConvChoice if it is one of `widths`, otherwise the first width with the lowest cost of all
/// tiles. The cost of a tile is its width plus the constant `tile_cost`.
int choose_width(const ConvProblem& problem, std::span<const int> widths, int tile_cost);

/// The part of the plan of fprop or dgrad that the kernel needs. A class combines one phase of each axis. In dgrad, a
/// class is a phase of the results, and a CTA tile belongs to one class. In fprop, a class is a residue of the inputs,
/// and a CTA tile sums over all classes.
struct MmaSyncShape {
  AxisPhases axis[3];
  int halo_voxels;   ///< voxels of the halo of a CTA tile in total
  int classes;       ///< number of classes
  int line;          ///< words from one line of the halo in shared memory (a stage) to the next
  int pitch;         ///< words from one word of channels to the next
  int columns;       ///< output channels of a CTA tile
  int column_tiles;  ///< tiles along the output channels
  int k_blocks;      ///< k-blocks of input channels
  bool merged;       ///< a CTA computes all phases and columns of its tile and loads the channels once
  int input_stages;  ///< stages of inputs in shared memory
};

/// The plan of fprop or dgrad.
struct MmaSyncPlan : MmaSyncShape {
  int tile[3];    ///< results of a CTA tile
  int extent[3];  ///< voxels of the halo of a CTA tile
  int tiles[3];   ///< tiles along each axis
  double ctas;    ///< CTAs of the grid
  double cycles;  ///< cost according to the planner's model
};

/// Returns nothing if the family does not support the problem.
std::optional<MmaSyncPlan> plan_mma_sync_fprop_dgrad(const ConvProblem& problem);
/// Returns the bytes of the packed weights.
int64_t workspace_bytes(const ConvProblem& problem, const MmaSyncPlan& plan);

/// The part of the plan of wgrad that the kernel needs. A class combines one phase of each axis: a residue of x.
struct MmaSyncWgradShape {
  AxisPhases axis[3];
  int tiles[3];    ///< k-tiles along each axis
  int run;         ///< words of a line of the halo, for one residue and one shift (sm80/wgrad.cuh)
  int halo_words;  ///< words of the halo per channel
  int pitch;       ///< words in shared memory from one channel of x to the next
  int row_tiles;
  int column_tiles;  ///< in all classes
  int columns;       ///< in all classes, in blocks of 8
  int64_t k_tiles;
  int64_t range;  ///< k-tiles of a CTA
  int stages;     ///< 2: the next k-tile is copied in the background
};

/// The plan of wgrad.
struct MmaSyncWgradPlan : MmaSyncWgradShape {
  /// The columns of one class. A column is one tap of one channel of x.
  struct Class {
    int taps;          ///< taps of the class
    int padded_taps;   ///< taps, rounded up to fill whole tiles
    int tile_columns;  ///< columns of a tile, in blocks of 8
    int tiles;         ///< column tiles of the class
  };
  int k_tile[3];  ///< voxels of y in a k-tile, along each axis
  int extent[3];  ///< halo of x; along the width in words
  int rows;       ///< output channels of a CTA tile
  int blocks8;    ///< blocks of 8 channels of x
  std::vector<Class> classes;
  int64_t ranges;    ///< splits of K
  int shared_bytes;  ///< bytes of a stage
  double cycles;     ///< cost according to the planner's model
};

/// Returns nothing if the family does not support the problem.
std::optional<MmaSyncWgradPlan> plan_mma_sync_wgrad(const ConvProblem& problem);
/// Returns the bytes of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const MmaSyncWgradPlan& plan);

}  // namespace voxgrad::cuda
