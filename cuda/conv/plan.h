// Which convolution kernel takes which problem, and how: a pure function of the problem, tested on the host.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/precision.h"
#include "core/view.h"
#include "cuda/conv/parts.h"

namespace voxgrad::cuda {

enum class ConvDirection : uint8_t { forward, transposed, weight };

/// How tensor cores multiply (cuda/conv/mma.cuh).
enum class ConvArithmetic : uint8_t { tf32, tf32x3, bf16, f16 };
const char* name(ConvArithmetic arithmetic);

/// What tests ask for in place of what the planner would choose.
struct ConvChoice {
  bool plain = false;     // the plain kernel
  bool mma_sync = false;  // not wgmma
  int8_t slots = 0;       // of the gather by wgmma: 1 or 4; 0: the planner's choice
  int8_t stacks = 0;      // of a tile of the weight gradient by wgmma; 0 likewise
  int width = 0;          // of a tile: columns of the gather, rows of the weight gradient; 0 likewise
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
  bool wgmma = true;                  // the GPU has that instruction, and the program its code: sm_90a
  Triple in_stride{0};
  ConvChoice choice{};
};

/// The problem of these views, with the precision and the choice that are set now. In a weight gradient `in` is x and
/// `out` the lattice y.
ConvProblem conv_problem(ConvDirection direction, const View& in, const View& out, const View& w,
                         const ConvGeometry& geometry);
/// Not for f64.
ConvArithmetic arithmetic_of(const ConvProblem& problem);
/// Whether GPU `device` has wgmma, and this program code for it.
bool has_wgmma(int device);
/// Whether its products may be wgmma's.
bool may_use_wgmma(const ConvProblem& problem);
/// The width that is asked for, if it is one of `widths`.
std::optional<int> asked_width(const ConvProblem& problem, std::span<const int> widths);
/// The widths of tiles for which the kernels are compiled, ascending.
std::span<const int> gather_widths(ConvArithmetic arithmetic, bool wgmma);
std::span<const int> weight_widths(ConvArithmetic arithmetic, bool wgmma);

/// Of the gather by wgmma: rows of a tile, in all its slots, and the taps of a stage of weights. `three`: products.
constexpr int gather_wgmma_rows(int columns, bool three, int slots) {
  const int width = columns * (three ? 2 : 1);  // in registers
  if (width > 64) return 128;
  if (slots > 1) return width <= 32 ? 512 : 256;
  return width <= 24 ? 512 : 256;
}
constexpr int gather_step_taps(int columns, bool three, int slots) {
  const bool narrow = columns * (three ? 2 : 1) <= 32;
  return slots > 1 ? (narrow && !three ? 16 : 8) : narrow ? 8 : columns > 64 ? 2 : 4;
}

/// A tile of the tensor-core gather (gather_mma.cuh, gather_wgmma.cuh).
struct GatherPlan {
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];
  int halo_voxels, classes, taps;  // taps: most of a block
  int line, pitch;                 // words from a staged line to the next, and from a word of channels
  int columns, column_tiles, chunks;
  bool wgmma;
  int slots;      // phases that a block multiplies side by side (wgmma)
  bool merged;    // a block takes all phases and columns of its box, whose channels it stages once
  int buffers;    // chunks of channels in shared memory at a time
  double cycles;  // of all multiprocessors, by the model that chose the box
};

/// Nothing if the plain kernel has to take it.
std::optional<GatherPlan> plan_gather(const ConvProblem& problem);

/// Of the packed weights.
int64_t workspace_bytes(const ConvProblem& problem, const GatherPlan& plan);

/// The weight gradient by wgmma (weight_wgmma.cuh) takes columns of 8 in stacks of 8: the heights of tiles for
/// which it is compiled, and the greatest beside so many rows, whose accumulators leave room for the rest in the
/// registers.
inline constexpr int kWgmmaStacks[] = {1, 2, 3, 4, 5, 6, 7, 10, 14};
constexpr int most_stacks(ConvArithmetic arithmetic, int rows) {
  // Three products are summed beside the sums, halves are staged through registers.
  if (arithmetic == ConvArithmetic::tf32x3) return rows > 48 ? 3 : rows > 32 ? 4 : rows > 16 ? 5 : 7;
  return rows > 48 ? 5 : rows > 32 ? (arithmetic == ConvArithmetic::tf32 ? 7 : 6) : rows > 16 ? 10 : 14;
}
/// Words of shared memory from 4 words of y's channels to the next 4.
constexpr int quad_words(int rows) { return 4 * rows + 4; }

/// A tile of the tensor-core weight gradient (weight_mma.cuh, weight_wgmma.cuh). A class is a part of each
/// axis.
struct WeightPlan {
  struct Class {
    int taps, padded_taps;  // with those that fill up tiles
    int tile_columns;       // columns of 8 of a tile
    int tiles;
  };
  bool wgmma;
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];  // extent: of the halo, in words
  int box_words;                    // that are staged of y
  int run, halo_words, pitch;
  int rows, row_tiles, blocks8;  // blocks of 8 channels of x
  std::vector<Class> classes;
  int column_tiles, columns;     // of all classes; columns of 8
  int64_t boxes, range, ranges;  // range: boxes of a block
  int shared_bytes, buffers;     // of a buffer; 2: the next box is copied in the background
  int table_bytes;               // of shared memory before the buffers
  double cycles;
};

/// Nothing if the plain kernel has to take it.
std::optional<WeightPlan> plan_weight(const ConvProblem& problem);
/// Of the partial sums.
int64_t workspace_bytes(const ConvProblem& problem, const WeightPlan& plan);

/// The plan in words, and the rates of an H200: the arithmetic's (f64: tensor cores'), and memory's.
ConvExplanation explain(const ConvProblem& problem);

}  // namespace voxgrad::cuda
