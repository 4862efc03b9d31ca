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
  bool plain : 1 = false;     // the plain kernel
  bool mma_sync : 1 = false;  // not wgmma
  int8_t slots = 0;           // of the gather by wgmma: 1 or 2; 0: the planner's choice
  int8_t samples = 0;         // whose inputs it packs at a time; 0 likewise
  int8_t stacks = 0;          // of a tile of the weight gradient by wgmma; 0 likewise
  int width = 0;              // of a tile: columns of the gather, rows of the weight gradient; 0 likewise
  friend bool operator==(const ConvChoice&, const ConvChoice&) = default;
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
  Triple in_stride{0}, out_stride{0};
  ConvChoice choice{};
  friend bool operator==(const ConvProblem&, const ConvProblem&) = default;
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

/// Of the gather by wgmma: times 64 rows of a block, in all its slots, and the taps of a stage of weights. `three`:
/// products.
constexpr int gather_row_tiles(int columns, bool three, int slots) {
  const int width = columns * (three ? 2 : 1), most = 256 / width / slots;  // accumulators: 128 registers
  return slots * (width <= 32 && most > 4 ? 4 : most);                      // more would only want a larger halo
}
constexpr int gather_step_taps(int columns, bool three) {
  const int width = columns * (three ? 2 : 1);
  return width <= 16 ? 8 : width <= 64 ? 4 : 2;
}

inline constexpr int kGatherStagers = 96;  // threads that copy inputs
inline constexpr int kGatherStages = 4;    // of the ring of weights
inline constexpr int kVoxelBytes = 16;     // of a voxel's words that lie together, for wgmma

/// The rows of a box, as they lie in the halo that is staged for wgmma: tiles of 8 times 8 neighbours. All numbers are
/// positions of that halo, (residue, depth, height, width).
struct RowTiles {
  static constexpr int kMost = 5;
  int group;                    // from 8 neighbours to the next
  int base[kMost], end[kMost];  // of a tile: where it begins; behind which it has no results
  int positions;                // that are staged, or read where there are no results
};
/// Rows for a box whose halo has lines of `line` positions, `lines` to a plane; nothing if `tiles` are too few. Of
/// those that are not needed, all numbers are 0.
std::optional<RowTiles> cover_box(const int (&box)[3], int lines, int line, int tiles);

/// A tile of the tensor-core gather (gather_mma.cuh, gather_wgmma.cuh).
struct GatherPlan {
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];
  int halo_voxels, classes, taps;  // taps: most of a block
  int line, pitch;                 // words from a staged line to the next, and from a word of channels (mma.sync)
  RowTiles rows;                   // (wgmma)
  int columns, column_tiles, chunks;
  bool wgmma;
  int slots;        // phases that a block multiplies side by side (wgmma)
  bool merged;      // a block takes all phases and columns of its box, whose channels it stages once
  int buffers;      // chunks of channels in shared memory at a time
  int64_t samples;  // whose inputs are packed at a time (wgmma)
  double cycles;    // of all multiprocessors, by the model that chose the box
};

/// Nothing if the plain kernel has to take it.
std::optional<GatherPlan> plan_gather(const ConvProblem& problem);

/// The same by one instruction: `axes` is a plan that has axes, columns and chunks.
std::optional<GatherPlan> plan_gather_wgmma(const ConvProblem& problem, const GatherPlan& axes);
std::optional<GatherPlan> plan_gather_mma(const ConvProblem& problem, const GatherPlan& axes);
/// The widths of boxes that are worth a look: those that divide `count` into n near-equal pieces.
std::vector<int> box_widths(int count, int most);
/// Fills in what follows from the box; false if that leaves the range of the kernels.
bool finish(const ConvProblem& problem, GatherPlan& plan);

/// Of the packed weights and inputs.
int64_t workspace_bytes(const ConvProblem& problem, const GatherPlan& plan);
/// Of the packed inputs of a sample.
int64_t input_bytes(const ConvProblem& problem, const GatherPlan& plan);

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
