#include "cuda/conv_plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

namespace voxgrad::cuda {
namespace {

constexpr int kRows = 256;                  // results of a block
constexpr int kMaxExtent = 1023;            // voxels of a halo along an axis: packed into 10 bits
constexpr int kMaxHalo = 1100;              // voxels: what shared memory holds of two stages
constexpr int kHalfShared = 113 * 1024;     // bytes of shared memory with which two blocks fit on sm_90
constexpr int kGatherOverhead = 34 * 1024;  // bytes of shared memory beside the staged inputs, at most
constexpr int kMaxTaps = 1024, kMaxClasses = 64;
constexpr int kChunkWords = 8;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

std::atomic<ConvChoice> forced_choice{};

bool three_products(const ConvProblem& p) { return arithmetic_of(p) == ConvArithmetic::tf32x3; }

/// The width that is asked for, if it is one of `widths`.
std::optional<int> asked_width(const ConvProblem& p, std::span<const int> widths) {
  const bool compiled = std::find(widths.begin(), widths.end(), p.choice.width) != widths.end();
  return compiled ? std::optional<int>(p.choice.width) : std::nullopt;
}

/// The widths of boxes that are worth a look: those that divide `count` into n near-equal pieces.
std::vector<int> widths(int count, int most) {
  std::vector<int> result;
  for (int width = std::min(count, most); width > 0; --width) {
    const int pieces = (count + width - 1) / width;
    width = (count + pieces - 1) / pieces;
    result.push_back(width);
  }
  return result;
}

bool choose_axes(const ConvProblem& p, GatherPlan& plan) {
  const bool transposed = p.direction == ConvDirection::transposed;
  plan.classes = 1;
  plan.taps = 1;
  int all_taps = 1;
  for (int a = 0; a < 3; ++a) {
    const ConvGeometry& g = p.geometry;
    const auto axis =
        transposed
            ? transposed_parts(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a])
            : forward_parts(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a], a == 2);
    if (!axis || axis->kernel > kMaxTaps) return false;
    plan.axis[a] = *axis;
    plan.classes *= axis->parts;
    plan.taps *= axis->max_taps;
    all_taps *= axis->kernel;
    if (all_taps > kMaxTaps) return false;
  }
  if (!transposed) plan.taps = all_taps;
  return plan.classes <= kMaxClasses;
}

/// One halo for all parts.
void merge_halos(AxisParts& axis) {
  int low = axis.part[0].low, high = low + axis.part[0].span;
  for (int i = 1; i < axis.parts; ++i) {
    low = std::min(low, axis.part[i].low);
    high = std::max(high, axis.part[i].low + axis.part[i].span);
  }
  for (int i = 0; i < axis.parts; ++i) {
    axis.part[i].low = low;
    axis.part[i].span = high - low;
  }
  axis.max_span = high - low;
}

/// Voxels of a halo all of whose chunks stay in shared memory.
int64_t merged_halo(const ConvProblem& p, const GatherPlan& plan) {
  return (p.shared_limit - kGatherOverhead) / (plan.chunks * kChunkWords * 4 + 8) - 160;  // 8: where a voxel is
}

/// Multiprocessor cycles of a box, roughly; nothing if it does not fit.
std::optional<double> cost(const ConvProblem& p, const GatherPlan& plan, const int (&box)[3]) {
  int halo = 1;
  double blocks = 1;
  for (int a = 0; a < 3; ++a) {
    const AxisParts& axis = plan.axis[a];
    const int extent = (box[a] - 1 + axis.max_span) * axis.fold;
    if (extent > kMaxExtent) return std::nullopt;
    halo *= extent;
    if (halo > (plan.merged ? merged_halo(p, plan) : kMaxHalo)) return std::nullopt;
    blocks *= (axis.count + box[a] - 1) / box[a];
  }
  const bool three = three_products(p);
  const double taps = static_cast<double>(plan.axis[0].kernel) * plan.axis[1].kernel * plan.axis[2].kernel;
  const double stages = plan.merged ? 1 : plan.classes;  // of the inputs, or blocks of their own
  // 8 rows that straddle two lines of the box are read at half the rate.
  const double straddling = box[2] % 8 == 0 ? 0 : std::min(1.0, 7.0 / box[2]);
  const double blocks8 = plan.columns / 8;
  const double products = 16 * blocks8 * 1.46 * (three ? 3 : 1);
  const double reads =
      4 * 4 * 4 * (1 + 0.5 * straddling) * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
  const double multiply = taps * std::max(products, reads);
  const double stage = stages * (halo * kChunkWords * 0.15 + 100);
  // Sectors of 32 bytes between L2 and the multiprocessor: a line of a box starts anywhere in one. Those that are
  // written in part count twice: they may be written again.
  const double bytes = static_cast<double>(item_size(p.dtype)), word_channels = 4 / bytes;
  const auto sectors = [&](double elements) { return elements * bytes / 32 + 1; };
  const double lines = halo / ((box[2] - 1 + plan.axis[2].max_span) * plan.axis[2].fold);
  const double loaded =
      stages * plan.chunks * kChunkWords * word_channels * lines * sectors(static_cast<double>(halo) / lines);
  const double passes = plan.axis[2].out_step > 1 ? plan.classes : 1;
  const double stored = 2 * passes * plan.columns * box[0] * box[1] * sectors(box[2] * plan.axis[2].out_step);
  const double tiles = plan.column_tiles;
  const double memory = (loaded * (plan.merged ? 1 : tiles) + stored * tiles) * 32 / 40;
  const double work = plan.chunks * (multiply * tiles + stage * (plan.merged ? 1 : tiles)) + stages * 800;
  // A block that fills a multiprocessor by itself has nobody to hide behind.
  const bool alone = plan.buffers * kChunkWords * 4 * halo + kGatherOverhead > kHalfShared;
  return blocks * (std::max(work, memory) + 0.3 * std::min(work, memory)) * (alone ? 1.3 : 1);
}

void choose_box(const ConvProblem& p, GatherPlan& plan) {
  plan.cycles = -1;
  std::array<std::vector<int>, 3> candidates;
  for (int a = 0; a < 3; ++a) candidates[a] = widths(plan.axis[a].count, kRows);
  for (const int w : candidates[2])
    for (const int h : candidates[1]) {
      if (w * h > kRows) continue;
      for (const int d : candidates[0]) {
        if (w * h * d > kRows) continue;
        const int box[3] = {d, h, w};
        const auto cycles = cost(p, plan, box);
        if (!cycles || (plan.cycles >= 0 && *cycles >= plan.cycles)) continue;
        plan.cycles = *cycles;
        std::copy_n(box, 3, plan.box);
      }
    }
}

int choose_columns(const ConvProblem& p) {
  const auto compiled = gather_widths(arithmetic_of(p));
  if (const auto asked = asked_width(p, compiled)) return *asked;
  int best = compiled.front();
  for (const int columns : compiled) {
    const auto computed = [&](int64_t c) {
      return (p.out_channels + c - 1) / c * (c + 12);
    };  // 12: what a tile costs by itself
    if (computed(columns) < computed(best)) best = columns;
  }
  return best;
}

// ---- weight gradient

constexpr int kBoxWords = 128, kWeightShared = 112 * 1024;
constexpr int64_t kWorkspace = int64_t{256} << 20;

/// Columns of 8 that a block of 4 warps takes beside so many rows (weight_columns()).
int most_columns(const ConvProblem& p, int rows) { return 4 * (rows > 32 || three_products(p) ? 7 : 14); }

int choose_rows(const ConvProblem& p) {
  const auto compiled = weight_widths(arithmetic_of(p));
  if (const auto asked = asked_width(p, compiled)) return *asked;
  int best = compiled.front();
  for (const int rows : compiled) {
    const auto computed = [&](int64_t r) { return (p.out_channels + r - 1) / r * (r + 8); };
    if (computed(rows) <= computed(best)) best = rows;
  }
  return best;
}

int weight_shared(const ConvProblem& p) { return static_cast<int>(std::min<int64_t>(kWeightShared, p.shared_limit)); }

/// The tiles of a class, and shared memory that one of them takes for x.
WeightPlan::Class tile_class(int taps, int blocks8, int most, int pitch, int room) {
  const int fitting = std::max(1, room / (8 * pitch * 4));  // blocks of 8 channels that can be staged
  WeightPlan::Class c{taps, taps, 0, 0};
  if (taps <= most) {
    c.tile_columns = std::min({most / taps, fitting, blocks8}) * taps;
  } else {
    const int pieces = (taps + most - 1) / most;
    c.tile_columns = (taps + pieces - 1) / pieces;
    c.padded_taps = c.tile_columns * pieces;
  }
  c.tiles = (blocks8 * c.padded_taps + c.tile_columns - 1) / c.tile_columns;
  return c;
}

/// Fills in what follows from the box; false if it does not fit.
bool tile_weight(const ConvProblem& p, WeightPlan& plan) {
  const int elements = p.dtype == DType::f32 ? 1 : 2;
  plan.halo_words = 1;
  plan.boxes = p.batch;
  for (int a = 0; a < 3; ++a) {
    const AxisParts& axis = plan.axis[a];
    plan.extent[a] = plan.box[a] - 1 + axis.max_span;
    if (a == 2) {
      plan.run = elements == 1 ? plan.extent[a] : plan.extent[a] / 2 + 1;
      plan.extent[a] = axis.fold * elements * plan.run;
    }
    if (plan.extent[a] > 4096) return false;
    plan.halo_words *= plan.extent[a];
    if (plan.halo_words > 4096) return false;
    plan.tiles[a] = (axis.count + plan.box[a] - 1) / plan.box[a];
    plan.boxes *= plan.tiles[a];
  }
  plan.pitch = round_up(std::max(plan.halo_words - 4, 0), 32) + 4;
  const int room = weight_shared(p) - plan.rows * (kBoxWords + 4) * 4;
  const int most = most_columns(p, plan.rows);
  plan.classes.clear();
  plan.column_tiles = plan.columns = 0;
  plan.shared_bytes = 0;
  double staged = 0;
  int padded_taps = 0;
  for (int number = 0;; ++number) {
    int rest = number, taps = 1;
    for (int a = 2; a >= 0; --a) {
      taps *= plan.axis[a].part[rest % plan.axis[a].parts].taps;
      rest /= plan.axis[a].parts;
    }
    if (rest > 0) break;
    const WeightPlan::Class c = tile_class(taps, plan.blocks8, most, plan.pitch, room);
    const int blocks = std::max(1, c.tile_columns / c.padded_taps);
    const int bytes = (plan.rows * (kBoxWords + 4) + blocks * 8 * plan.pitch) * 4;
    padded_taps += c.padded_taps;
    if (bytes > kWeightShared || padded_taps > kMaxTaps) return false;
    plan.shared_bytes = std::max(plan.shared_bytes, bytes);
    plan.column_tiles += c.tiles;
    plan.columns += plan.blocks8 * c.padded_taps;
    staged += static_cast<double>(c.tiles) * (plan.rows * kBoxWords + blocks * 8 * plan.halo_words);
    plan.classes.push_back(c);
  }
  // Halves go through registers.
  plan.buffers = elements == 1 && 2 * plan.shared_bytes <= weight_shared(p) ? 2 : 1;
  const double products = 16.0 * (plan.rows / 16) * most * 1.46 * (three_products(p) ? 3 : 1);
  const double of_box = plan.column_tiles * (products + 400) + staged * (plan.buffers == 2 ? 0.15 : 0.3);
  plan.cycles = of_box * static_cast<double>(plan.boxes) * plan.row_tiles * static_cast<double>(p.groups);
  return true;
}

void choose_range(const ConvProblem& p, WeightPlan& plan) {
  constexpr int64_t kBlocks = 1600;  // a few for every place on the largest GPUs
  const int64_t tiles = static_cast<int64_t>(plan.column_tiles) * plan.row_tiles * p.groups;
  // Accumulators truncate: a range is short enough for that not to be seen beside the rounding of the inputs.
  const int64_t most = three_products(p) ? 32 : 128;
  const int64_t bytes = p.groups * p.out_channels * plan.columns * 8 * static_cast<int64_t>(sizeof(float));
  int64_t ranges = std::max((kBlocks + tiles - 1) / tiles, (plan.boxes + most - 1) / most);
  ranges = std::clamp<int64_t>(std::min(ranges, kWorkspace / std::max<int64_t>(bytes, 1)), 1,
                               std::max<int64_t>(plan.boxes, 1));
  plan.range = std::max<int64_t>(1, (plan.boxes + ranges - 1) / ranges);
  plan.ranges = (plan.boxes + plan.range - 1) / plan.range;
}

}  // namespace

const char* name(ConvArithmetic arithmetic) {
  constexpr const char* kNames[] = {"TF32", "3xTF32", "bf16", "f16"};
  return kNames[static_cast<int>(arithmetic)];
}

void force_conv_choice(ConvChoice choice) { forced_choice.store(choice); }

ConvProblem conv_problem(ConvDirection direction, const View& in, const View& out, const View& w,
                         const ConvGeometry& geometry) {
  ConvProblem problem{.direction = direction,
                      .dtype = w.dtype,
                      .precision = float32_precision(),
                      .batch = in.size[0],
                      .groups = geometry.groups,
                      .in_channels = in.size[1] / geometry.groups,
                      .out_channels = out.size[1] / geometry.groups,
                      .geometry = geometry,
                      .choice = forced_choice.load()};
  for (int a = 0; a < 3; ++a) {
    problem.in_size[a] = in.size[a + 2];
    problem.out_size[a] = out.size[a + 2];
    problem.kernel[a] = w.size[a + 2];
    problem.in_stride[a] = in.stride[a + 2];
  }
  return problem;
}

ConvArithmetic arithmetic_of(const ConvProblem& p) {
  if (p.dtype == DType::bf16) return ConvArithmetic::bf16;
  if (p.dtype == DType::f16) return ConvArithmetic::f16;
  return p.precision == Float32Precision::highest ? ConvArithmetic::tf32x3 : ConvArithmetic::tf32;
}

std::span<const int> gather_widths(ConvArithmetic arithmetic) {
  static constexpr int kWidths[] = {8, 16, 24, 32, 48, 64};
  // Three products: the sum of a step stands in registers beside the accumulators.
  return std::span(kWidths).first(arithmetic == ConvArithmetic::tf32x3 ? 4 : 6);
}

std::span<const int> weight_widths(ConvArithmetic) {
  static constexpr int kWidths[] = {16, 32, 48, 64};
  return kWidths;
}

std::optional<WeightPlan> plan_weight(const ConvProblem& p) {
  WeightPlan best{};
  best.cycles = -1;
  WeightPlan plan{};
  if (p.dtype == DType::f64 || p.batch == 0 || p.choice.plain) return std::nullopt;
  int64_t taps = 1, classes = 1;
  for (int a = 0; a < 3; ++a) {
    const ConvGeometry& g = p.geometry;
    const auto axis =
        forward_parts(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a], a == 2);
    if (!axis) return std::nullopt;
    plan.axis[a] = *axis;
    taps *= axis->kernel;
    classes *= axis->parts;
    if (taps > kMaxTaps || classes > kMaxClasses) return std::nullopt;
  }
  const int elements = p.dtype == DType::f32 ? 1 : 2;
  plan.rows = choose_rows(p);
  plan.row_tiles = static_cast<int>((p.out_channels + plan.rows - 1) / plan.rows);
  plan.blocks8 = static_cast<int>((p.in_channels + 7) / 8);
  for (int w = 8 * elements; w <= kBoxWords * elements; w += 8 * elements)
    for (int h = 1; w * h <= kBoxWords * elements; ++h) {
      plan.box[0] = kBoxWords * elements / (w * h);
      plan.box[1] = h;
      plan.box[2] = w;
      if (tile_weight(p, plan) && (best.cycles < 0 || plan.cycles < best.cycles)) best = plan;
    }
  if (best.cycles < 0) return std::nullopt;
  choose_range(p, best);
  const double blocks = static_cast<double>(best.ranges) * best.column_tiles * best.row_tiles * p.groups;
  if (blocks >= 2147483647.0) return std::nullopt;
  return best;
}

std::optional<GatherPlan> plan_gather(const ConvProblem& p) {
  GatherPlan plan{};
  if (p.dtype == DType::f64 || p.choice.plain || !choose_axes(p, plan) || plan.classes == 0) return std::nullopt;
  const int elements = p.dtype == DType::f32 ? 1 : 2;
  plan.columns = choose_columns(p);
  plan.column_tiles = static_cast<int>((p.out_channels + plan.columns - 1) / plan.columns);
  plan.chunks = static_cast<int>((p.in_channels + kChunkWords * elements - 1) / (kChunkWords * elements));
  plan.buffers = 2;
  GatherPlan merged = plan;
  choose_box(p, plan);
  // Phases read the same inputs. With one chunk of channels they are staged once for all of them; with more, what a
  // block would have to hold leaves a multiprocessor to it alone, which was slower (by a third for 8 chunks).
  if (p.direction == ConvDirection::transposed && plan.classes > 1 && plan.chunks == 1) {
    merged.merged = true;
    merged.buffers = plan.chunks;
    for (AxisParts& axis : merged.axis) merge_halos(axis);
    choose_box(p, merged);
    if (merged.cycles >= 0 && (plan.cycles < 0 || merged.cycles < plan.cycles)) plan = merged;
  }
  if (plan.cycles < 0) return std::nullopt;
  plan.halo_voxels = 1;
  double blocks = static_cast<double>(p.batch * p.groups * plan.column_tiles);
  double reach = 0;  // of a halo, in elements: offsets in it are 32-bit and not negative
  for (int a = 0; a < 3; ++a) {
    plan.extent[a] = (plan.box[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold;
    plan.tiles[a] = (plan.axis[a].count + plan.box[a] - 1) / plan.box[a];
    plan.halo_voxels *= plan.extent[a];
    blocks *= plan.tiles[a];
    if (p.in_stride[a] < 0) return std::nullopt;
    reach += static_cast<double>(p.in_stride[a]) * plan.axis[a].in_step * plan.extent[a];
  }
  if (plan.merged)
    blocks /= plan.column_tiles;
  else if (p.direction == ConvDirection::transposed)
    blocks *= plan.classes;
  if (blocks >= 2147483647.0 || reach >= (1 << 29)) return std::nullopt;
  plan.pitch = round_up(plan.halo_voxels + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
  return plan;
}

int64_t workspace_bytes(const ConvProblem& p, const GatherPlan& plan) {
  int64_t words = p.groups * plan.column_tiles * plan.columns * plan.chunks * kChunkWords;
  for (const AxisParts& axis : plan.axis) {
    int64_t taps = 0;
    for (int i = 0; i < axis.parts; ++i) taps += axis.part[i].taps;
    words *= taps;
  }
  return words * (three_products(p) ? 2 : 1) * static_cast<int64_t>(sizeof(uint32_t));
}

int64_t workspace_bytes(const ConvProblem& p, const WeightPlan& plan) {
  return plan.ranges * p.groups * p.out_channels * plan.columns * 8 * static_cast<int64_t>(sizeof(float));
}

}  // namespace voxgrad::cuda
