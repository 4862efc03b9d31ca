// Which convolution kernel takes which problem, and how: a pure function of the problem, tested on the host.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/precision.h"
#include "core/view.h"
#include "cuda/conv_parts.h"

namespace voxgrad::cuda {

enum class ConvDirection : uint8_t { forward, transposed, weight };

/// How tensor cores multiply (cuda/mma.cuh).
enum class ConvArithmetic : uint8_t { tf32, tf32x3, bf16, f16 };
const char* name(ConvArithmetic arithmetic);

/// What tests ask for in place of what the planner would choose.
struct ConvChoice {
  bool plain = false;  // the plain kernel
  int width = 0;       // of a tile: columns of the gather, rows of the weight gradient; 0: the planner's choice
};
/// Of the whole program, for the convolutions to come. A width that is not compiled is passed over.
void force_conv_choice(ConvChoice choice);

/// A convolution as its kernels see it: `in` is gathered, `out` (or, for the weight gradient, the lattice y) is even.
struct ConvProblem {
  ConvDirection direction = ConvDirection::forward;
  DType dtype = DType::f32;
  Float32Precision precision = Float32Precision::highest;
  int64_t batch = 1, groups = 1, in_channels = 1, out_channels = 1;  // channels of a group
  Triple in_size{1}, out_size{1}, kernel{1};
  ConvGeometry geometry{};
  int64_t shared_limit = 227 * 1024;  // bytes of shared memory that a block may have: sm_90's
  Triple in_stride{0};
  ConvChoice choice{};
};

/// The problem of these views, with the precision and the choice that are set now. In a weight gradient `in` is x and
/// `out` the lattice y.
ConvProblem conv_problem(ConvDirection direction, const View& in, const View& out, const View& w,
                         const ConvGeometry& geometry);
/// Not for f64.
ConvArithmetic arithmetic_of(const ConvProblem& problem);
/// The widths of tiles for which conv_gather_*.cu and conv_weight_*.cu are compiled, ascending.
std::span<const int> gather_widths(ConvArithmetic arithmetic);
std::span<const int> weight_widths(ConvArithmetic arithmetic);

/// A tile of the tensor-core gather (conv_gather_mma.cuh).
struct GatherPlan {
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];
  int halo_voxels, pitch, classes, taps;  // taps: most of a block
  int columns, column_tiles, chunks;
  bool merged;    // a block takes all phases and columns of its box, whose channels it stages once
  int buffers;    // chunks of channels in shared memory at a time
  double cycles;  // of all multiprocessors, by the model that chose the box
};

/// Nothing if the plain kernel has to take it.
std::optional<GatherPlan> plan_gather(const ConvProblem& problem);

/// Of the packed weights.
int64_t workspace_bytes(const ConvProblem& problem, const GatherPlan& plan);

/// A tile of the tensor-core weight gradient (conv_weight_mma.cuh). A class is a part of each axis.
struct WeightPlan {
  struct Class {
    int taps, padded_taps;  // with those that fill up tiles
    int tile_columns;       // columns of 8 of a tile
    int tiles;
  };
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];  // extent: of the halo, in words
  int run, halo_words, pitch;
  int rows, row_tiles, blocks8;  // blocks of 8 channels of x
  std::vector<Class> classes;
  int column_tiles, columns;     // of all classes; columns of 8
  int64_t boxes, range, ranges;  // range: boxes of a block
  int shared_bytes, buffers;     // 2: the next box is copied in the background
  double cycles;
};

/// Nothing if the plain kernel has to take it.
std::optional<WeightPlan> plan_weight(const ConvProblem& problem);
/// Of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const WeightPlan& plan);

/// The plan in words, and the rates of an H200: the arithmetic's (f64: tensor cores'), and memory's.
ConvExplanation explain(const ConvProblem& problem);

}  // namespace voxgrad::cuda
