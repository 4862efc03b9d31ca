// Which tile a CTA takes by mma.sync (fprop_dgrad.cuh, wgrad.cuh): a pure function of the problem.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// The widths of tiles for which the kernels are compiled, ascending: columns; of wgrad, rows.
std::span<const int> mma_sync_widths(ConvArithmetic arithmetic);
std::span<const int> mma_sync_wgrad_widths();
/// The width that is asked for, if it is one of `widths`.
std::optional<int> asked_width(const ConvProblem& problem, std::span<const int> widths);

/// A class is a phase of the results on each axis (dgrad, where a CTA tile has one class), or a residue of the inputs
/// (fprop, where it has them all).
struct MmaSyncPlan {
  AxisPhases axis[3];
  int tile[3], extent[3], tiles[3];  // results of a CTA tile; voxels of its halo; tiles along each axis
  int halo_voxels, classes;
  int line, pitch;  // words from a staged line to the next, and from a word of channels
  int columns, column_tiles, k_blocks;
  bool merged;       // a CTA takes all phases and columns of its tile, whose channels it stages once
  int input_stages;  // of shared memory
  double cycles;     // of all multiprocessors, by the model that chose the tile
};

/// Nothing if the plain kernel has to take it.
std::optional<MmaSyncPlan> plan_mma_sync_fprop_dgrad(const ConvProblem& problem);
/// Of the packed weights.
int64_t workspace_bytes(const ConvProblem& problem, const MmaSyncPlan& plan);

/// A class is a part of each axis.
struct MmaSyncWgradPlan {
  struct Class {
    int taps, padded_taps;  // with those that fill up tiles
    int tile_columns;       // columns of 8 of a tile
    int tiles;
  };
  AxisPhases axis[3];
  int k_tile[3], extent[3], tiles[3];  // voxels that are staged at a time; extent: of the halo, in words
  int run, halo_words, pitch;
  int rows, row_tiles, blocks8;  // blocks of 8 channels of x
  std::vector<Class> classes;
  int column_tiles, columns;       // of all classes; columns of 8
  int64_t k_tiles, range, ranges;  // range: k-tiles of a CTA
  int shared_bytes, stages;        // of a stage; 2: the next k-tile is copied in the background
  double cycles;
};

/// Nothing if the plain kernel has to take it.
std::optional<MmaSyncWgradPlan> plan_mma_sync_wgrad(const ConvProblem& problem);
/// Of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const MmaSyncWgradPlan& plan);

}  // namespace voxgrad::cuda
