// Which convolution kernel takes which problem, and how: a pure function of the problem, tested on the host.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/precision.h"
#include "core/view.h"
#include "cuda/conv/axis_phases.h"

namespace voxgrad::cuda {

/// How tensor cores multiply (cuda/conv/common/mma.cuh).
enum class ConvArithmetic : uint8_t { tf32, tf32x3, bf16, f16 };
const char* name(ConvArithmetic arithmetic);

/// The families of kernels on tensor cores, by their folders; mma_sync, wgmma: the implicit GEMMs on packed weights.
enum class ConvKernel : uint8_t { mma_sync, wgmma, small_channel, fprop_dgrad, wgrad };

/// What tests ask for in place of what the planner would choose. Aligned to its size: else Clang calls a library for an
/// atomic of it.
struct alignas(8) ConvChoice {
  bool plain : 1 = false;          // the plain kernel
  bool mma_sync : 1 = false;       // not wgmma
  bool small_channel : 1 = false;  // kernels of few channels wherever they can be
  bool packed : 1 = false;         // not those that read channels-last tensors or copies (fprop_dgrad, wgrad)
  uint8_t slide : 2 = 0;           // of fprop and dgrad by wgmma: 1: never, 2: wherever it can; 0: the planner's choice
  uint8_t x_shifts : 2 = 0;        // of the weight gradient by wgmma, of floats; 0 likewise
  int8_t tile_phases = 0;          // phases of a tile, likewise: 1 or 2; 0 likewise
  int8_t k_blocks = 0;  // of it too: k-blocks of an input stage, if it divides them; of fprop_dgrad, row bytes / 32
  int8_t samples = 0;   // of which it, or the weight gradient, packs inputs at a time; 0 likewise
  int8_t m_tiles = 0;   // products of wgrad by wgmma; m64 tiles of fprop_dgrad, wgrad; 0 likewise
  int8_t pairs = 0;     // of it too; 0 likewise
  int16_t width = 0;    // of a tile: columns, or rows (weight by mma.sync; small channels); 0 likewise
  friend bool operator==(const ConvChoice&, const ConvChoice&) = default;
};
/// Of the whole program, for the convolutions to come. A width that is not compiled is passed over.
void force_conv_choice(ConvChoice choice);

/// A convolution as its kernels see it: `in` is read at taps, `out` (or, for the weight gradient, the lattice y) is
/// even.
struct ConvProblem {
  ConvPass pass = ConvPass::fprop;
  DType dtype = DType::f32;
  Float32Precision precision = Float32Precision::highest;
  int64_t batch = 1, groups = 1, in_channels = 1, out_channels = 1;  // channels of a group
  Triple in_size{1}, out_size{1}, kernel{1};
  ConvGeometry geometry{};
  int64_t shared_limit = 227 * 1024;  // bytes of shared memory that a block may have: sm_90's
  int multiprocessors = 132;          // an H200's
  bool wgmma = true;                  // the GPU has that instruction, and the program its code: sm_90a
  Triple in_stride{0}, out_stride{0};
  bool in_channels_last = false, out_channels_last = false;  // a voxel's channels are contiguous
  bool weight_channels_last = false;  // so are, of the weights' second axis, those of the taps along the width
  ConvChoice choice{};
  friend bool operator==(const ConvProblem&, const ConvProblem&) = default;
};

/// The problem of these views, with the precision and the choice that are set now. In a weight gradient `in` is x and
/// `out` the lattice y.
ConvProblem conv_problem(ConvPass pass, const View& in, const View& out, const View& w, const ConvGeometry& geometry);
/// Not for f64.
ConvArithmetic arithmetic_of(const ConvProblem& problem);
/// Whether GPU `device` has wgmma, and this program code for it.
bool has_wgmma(int device);
/// Whether its products may be wgmma's.
bool may_use_wgmma(const ConvProblem& problem);
/// The width that is asked for, if it is one of `widths`.
std::optional<int> asked_width(const ConvProblem& problem, std::span<const int> widths);
/// The widths of tiles for which the kernels are compiled, ascending.
std::span<const int> implicit_gemm_widths(ConvArithmetic arithmetic, bool wgmma);
std::span<const int> wgrad_widths(ConvArithmetic arithmetic, bool wgmma);

/// The taps along depth whose products fprop by wgmma may take side by side, sliding along depth
/// (ImplicitGemmPlan::slide).
inline constexpr int kSlidingTaps = 3;
constexpr bool may_slide(int columns, bool three) { return !three && columns >= 16 && columns <= 32; }

/// Of fprop and dgrad by wgmma: m64 tiles of a CTA tile, in all its phases, and the taps of a stage of weights.
/// `columns`: of a product; `three`: three products.
constexpr int m64_tiles(int columns, bool three, int phases, int slide) {
  if (slide > 1) return columns <= 48 ? 4 : columns <= 72 ? 3 : 2;  // and sums of other planes: 160 to 180 registers
  const int width = columns * (three ? 2 : 1), most = 256 / width / phases;  // accumulators: 128 registers
  return phases * (width <= 32 && most > 4 ? 4 : most);                      // more would only want a larger halo
}
constexpr int weight_stage_taps(int columns, bool three, int slide) {
  const int width = columns * (three ? 2 : 1);
  return width <= 64 || slide > 1 ? 8 : 4;
}

/// Stages of weights, which have 64 KiB at most, or 72 where tiles slide.
constexpr int weight_stages(int columns, bool three, int slide) {
  if (slide > 1) return columns <= 48 ? 5 : 3;
  const int width = columns * (three ? 2 : 1), most = 2048 / (width * weight_stage_taps(columns, three, slide));
  return most < 8 ? most : 8;
}

/// Columns and words of a buffer through which an m64 tile in two phases is written (packed/epilogue.cuh):
/// columns in lines that keep clear of each other's banks, for 4 pairs of columns times 8 rows, and for 16 rows in two
/// phases.
constexpr int epilogue_buffer_columns(int columns) { return columns % 32 == 0 ? 32 : columns == 48 ? 24 : columns; }
inline constexpr int kEpiloguePhasePitch = 80;
constexpr int epilogue_buffer_words(int columns, int phases) {
  return phases == 1 ? 0 : epilogue_buffer_columns(columns) * (2 * kEpiloguePhasePitch + 4);
}

inline constexpr int kMostInputStages = 8;
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kVoxelBytes = 16;  // of a voxel's words that lie together, for wgmma

/// The rows of a CTA tile, as they lie in the halo that is staged for wgmma: tiles of 8 times 8 neighbours. All numbers
/// are positions of that halo, (residue, depth, height, width).
struct RowTiles {
  static constexpr int kMost = 5;
  int group;                    // from 8 neighbours to the next
  int base[kMost], end[kMost];  // of a tile: where it begins; behind which it has no results
  int tiles;                    // that are needed
  int positions;                // that are staged, or read where there are no results
};
/// Rows for a tile whose halo has lines of `line` positions, `lines` to a plane; nothing if `tiles` are too few. Of
/// those that are not needed, all numbers are 0.
std::optional<RowTiles> cover_tile(const int (&tile)[3], int lines, int line, int tiles);

/// A CTA tile of the implicit GEMMs on packed weights (mma_sync/fprop_dgrad.cuh, packed/fprop_dgrad.cuh).
struct ImplicitGemmPlan {
  AxisPhases axis[3];
  int tile[3], extent[3], tiles[3];  // results of a CTA tile; voxels of its halo; tiles along each axis
  int halo_voxels, classes;
  int line, pitch;        // words from a staged line to the next, and from a word of channels (mma.sync)
  RowTiles rows;          // (wgmma)
  int residue_positions;  // of the halo: from a residue along the width to the next (wgmma)
  int columns, column_tiles, k_blocks;
  bool wgmma;
  int tile_phases;  // stride phases of a tile that are multiplied side by side (wgmma)
  int slide;        // taps along depth that are columns of one product, of a tile that slides along depth; or 1 (wgmma)
  int range;        // results along depth that it comes by; without, those of a tile
  int stage_k_blocks;  // k-blocks of an input stage; divides them (wgmma)
  bool merged;         // a CTA takes all phases and columns of its tile, whose channels it stages once
  int input_stages;    // of shared memory
  int64_t samples;     // whose inputs are packed at a time (wgmma)
  double cycles;       // of all multiprocessors, by the model that chose the tile
};

/// Nothing if the plain kernel has to take it.
std::optional<ImplicitGemmPlan> plan_implicit_gemm(const ConvProblem& problem);

/// The same by one instruction: `axes` is a plan that has axes, columns and k-blocks.
std::optional<ImplicitGemmPlan> plan_implicit_gemm_wgmma(const ConvProblem& problem, const ImplicitGemmPlan& axes);
std::optional<ImplicitGemmPlan> plan_implicit_gemm_mma_sync(const ConvProblem& problem, const ImplicitGemmPlan& axes);
/// The widths of tiles that are worth a look: those that divide `count` into n near-equal pieces.
std::vector<int> box_widths(int count, int most);
/// Fills in what follows from the tile; false if that leaves the range of the kernels.
bool finish(const ConvProblem& problem, ImplicitGemmPlan& plan);

/// Inputs as they are packed for wgmma: positions from one that a result's tap reads to the next result's; positions of
/// an axis, up to the last that is read.
int64_t read_step(const ConvProblem& problem, int axis);
int64_t read_size(const ConvProblem& problem, int axis);
/// Of a plane, in all parts, of which a kernel packs at most so many; bytes of a sample.
int64_t packed_voxels(const ConvProblem& problem);
inline constexpr int64_t kMostPackedVoxels = (int64_t{1} << 29) - 1;
int64_t input_bytes(const ConvProblem& problem);
/// Residues along the width that may be packed apart.
inline constexpr int kMostSplits = 32;
/// Of TMA: positions of a box's axis; from one that is copied to the next.
inline constexpr int kMostBox = 256, kMostStep = 8;
/// Of the packed weights and inputs.
int64_t workspace_bytes(const ConvProblem& problem, const ImplicitGemmPlan& plan);

/// A tile of the weight gradient by mma.sync (mma_sync/wgrad.cuh). A class is a part of each axis.
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

/// How the CTAs of packed/wgrad.cuh slide along depth, or read lines of a tile along height: voxel q of y and tap t of
/// the block read staged row t * tap_step of the `span` rows that begin at row q * advance.
struct SlidingAxis {
  int count, tile, tiles;  // of y: voxels; of them, in a tile; tiles
  int taps, pieces;        // of a block; blocks that share the kernel's
  int in_stride, dilation, padding;
  int in_step;        // positions of x from a staged row to the next
  int tap_step;       // staged rows from a tap to the next
  int span, advance;  // rows that a voxel's taps span; rows of them that the voxel before did not have
  /// Rows that are staged for `voxels` consecutive voxels.
  constexpr int rows(int voxels) const { return (voxels - 1) * advance + span; }
  /// The first of its rows that the voxel before did not have, if there is one.
  constexpr int first_new_row(bool first_voxel) const { return first_voxel ? 0 : span - advance; }
};

/// A tile of the weight gradient by wgmma.
struct PackedWgradPlan {
  SlidingAxis depth, height;
  // Along the width, taps that read the same residue of x are `tap_step` apart, and do so `shift` voxels later.
  int tap_step, shift;
  int y_shifts, y_shift_tiles;           // of those taps, as many as rows of A hold; tiles of them, of all taps
  int x_shifts, x_shift_tiles;           // of those tiles, in a block (of floats): x stands there once for each; blocks
  int row_octets, row_tiles;             // of 8 channels of y, in a version; tiles of them
  int column_octets, column_tiles;       // of x likewise
  int pairs, width_tiles;                // of 4 words along the width, in a tile; tiles
  int line_words;                        // of x of floats, that a CTA reads for all its x shifts, at most
  int columns, products;                 // of a product; products of a group of warps beside one another
  int plane_products;                    // that hold (tap along height, x shift, channel of x)
  bool by_k_blocks;                      // groups of warps share the steps of a plane, not the products
  int64_t samples;                       // that are packed at a time
  int x_stages, y_stages, raw_stages;    // planes in shared memory; raw: of x of floats, as they are copied
  bool late;                             // a plane is given back when the next is being multiplied
  int64_t sliding_tiles, range, ranges;  // that slide along depth; of them, in a range at most; ranges
  double cycles;
};
/// Producer threads, of floats: that copy x; that split it; and 32, of which one copies y.
inline constexpr int kCopyThreads = 160, kSplitThreads = 192;
/// K-blocks of 8 words in a tile at most; stages of x; x shifts.
inline constexpr int kMostKBlocks = 16, kMostWgradStages = 12, kMostXShifts = 3;
/// How many products stand beside one another in a group of warps, at most: as many as there are registers for, and no
/// more than pays: of 6633 problems, none had its best plan with more.
constexpr int most_products(ConvArithmetic arithmetic, int columns) {
  const bool three = arithmetic == ConvArithmetic::tf32x3;  // one is summed beside the sums
  const int room = (arithmetic == ConvArithmetic::tf32 ? 256 : 288) / columns - three, pays = columns <= 32 ? 3 : 5;
  return room < pays ? room : pays;
}
/// Whether a plane may be given back when the next is being multiplied.
constexpr bool may_be_late(ConvArithmetic arithmetic) { return arithmetic != ConvArithmetic::tf32x3; }
/// Bytes of shared memory, of x and y: from 16 bytes of a channel (floats), or 8 voxels (halves), to the next along the
/// width; from 8 channels to the next; of a stage, of all stages and what is read behind them.
struct WgradSharedMemory {
  int x_lines, x_pitch, x_octet, y_pitch, y_octet, x_stage, y_stage, total;
  int raw_pitch, raw_stage;  // from a channel of a line to the next; of a plane of floats, as it is copied
};
WgradSharedMemory memory_of(const ConvProblem& problem, const PackedWgradPlan& plan);
/// Of y of so many samples, packed; of x of one, packed (halves), or if its lines do not lie along the width (floats).
int64_t packed_y_bytes(const ConvProblem& problem, const PackedWgradPlan& plan);
int64_t input_bytes(const ConvProblem& problem, const PackedWgradPlan& plan);

/// Nothing if mma.sync, or the plain kernel, has to take it.
std::optional<PackedWgradPlan> plan_packed_wgrad(const ConvProblem& problem);
int64_t workspace_bytes(const ConvProblem& problem, const PackedWgradPlan& plan);
int64_t blocks_of(const ConvProblem& problem, const PackedWgradPlan& plan);

/// The plan in words, and the rates of an H200: the arithmetic's (f64: tensor cores'), and memory's.
ConvExplanation explain(const ConvProblem& problem);

}  // namespace voxgrad::cuda
