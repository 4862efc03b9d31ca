#include "cuda/conv/plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

namespace voxgrad::cuda {
namespace {

constexpr int kRows = 256;               // results of a block
constexpr int kMaxExtent = 1023;         // voxels of a halo along an axis: packed into 10 bits
constexpr int kHalfShared = 112 * 1024;  // bytes of shared memory with which two blocks fit on sm_90
constexpr int kMaxTaps = 1024, kMaxClasses = 64;
constexpr int kChunkWords = 8;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

std::atomic<ConvChoice> forced_choice{};

bool three_products(const ConvProblem& p) { return arithmetic_of(p) == ConvArithmetic::tf32x3; }

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

/// Of the weights on their way.
int ring_bytes(const ConvProblem& p, const GatherPlan& plan) {
  const int tap = plan.columns * kChunkWords * 4 * (three_products(p) ? 2 : 1);
  if (plan.wgmma) return 4 * gather_step_taps(plan.columns, three_products(p), plan.slots) * tap;
  return 3 * (tap <= 1024 ? 8 : 4) * tap;
}

/// Results of a block, of a phase.
int gather_rows(const ConvProblem& p, const GatherPlan& plan) {
  return plan.wgmma ? gather_wgmma_rows(plan.columns, three_products(p), plan.slots) / plan.slots : kRows;
}

/// Words from a staged line to the next: 8 results that straddle two lines of the box read 8 neighbouring banks, too.
int line_words(int box, int extent) { return box % 8 == 0 ? extent : box + round_up(extent - box, 8); }

/// Bytes of shared memory of a block: staged inputs, where each of their voxels comes from and goes to, weights.
int64_t gather_shared(const ConvProblem& p, const GatherPlan& plan, int64_t halo, int64_t words) {
  const int64_t pitch = words + 32, staged = halo + 128;  // at most
  return plan.buffers * kChunkWords * 4 * pitch + 8 * staged + ring_bytes(p, plan);
}

/// Multiprocessor cycles of a box, roughly; nothing if it does not fit.
std::optional<double> cost(const ConvProblem& p, const GatherPlan& plan, const int (&box)[3]) {
  int halo = 1, words = 1;
  double blocks = 1;
  for (int a = 0; a < 3; ++a) {
    const AxisParts& axis = plan.axis[a];
    const int extent = (box[a] - 1 + axis.max_span) * axis.fold;
    if (extent > kMaxExtent) return std::nullopt;
    halo *= extent;
    words *= a == 2 ? line_words(box[2], extent) : extent;
    if (gather_shared(p, plan, halo, words) >
        (plan.merged ? p.shared_limit : std::min<int64_t>(p.shared_limit, kHalfShared)))
      return std::nullopt;
    blocks *= (axis.count + box[a] - 1) / box[a];
  }
  const bool three = three_products(p);
  const double taps = static_cast<double>(plan.axis[0].kernel) * plan.axis[1].kernel * plan.axis[2].kernel;
  const double stages = plan.merged ? 1 : plan.classes / plan.slots;  // of the inputs, or blocks of their own
  const double blocks8 = plan.columns / 8;
  const double parts = three ? 3 : 1;
  double multiply = taps;
  if (plan.wgmma) {  // 64 rows at a time: products, and what they and the warps read of shared memory
    const double products = 4 * blocks8 * parts, reads = 16 + 2 * blocks8 * parts;
    const int rows = gather_rows(p, plan), voxels = box[0] * box[1] * box[2];
    multiply *= (plan.slots == 1 && rows > 256 && voxels <= rows / 2 ? rows / 2 : rows) / 64 * plan.slots *
                (std::max(products, reads) + 6);
  } else {
    const double products = 16 * blocks8 * 1.46 * parts;
    const double reads = 4 * 4 * 4 * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
    multiply *= std::max(products, reads);
  }
  const double stage = stages * (halo * kChunkWords * 0.15 + 100);
  // Sectors of 32 bytes between L2 and the multiprocessor: a line of a box starts anywhere in one. Those that are
  // written in part count twice: they may be written again.
  const double bytes = static_cast<double>(item_size(p.dtype)), word_channels = 4 / bytes;
  const auto sectors = [&](double elements) { return elements * bytes / 32 + 1; };
  const double lines = halo / ((box[2] - 1 + plan.axis[2].max_span) * plan.axis[2].fold);
  const double loaded =
      stages * plan.chunks * kChunkWords * word_channels * lines * sectors(static_cast<double>(halo) / lines);
  const double passes = plan.axis[2].out_step > 1 ? plan.classes / (plan.slots > 1 ? 2 : 1) : 1;
  const double stored = 2 * passes * plan.columns * box[0] * box[1] * sectors(box[2] * plan.axis[2].out_step);
  const double tiles = plan.column_tiles;
  const double memory = (loaded * (plan.merged ? 1 : tiles) + stored * tiles) * 32 / 40;
  const double work = plan.chunks * (multiply * tiles + stage * (plan.merged ? 1 : tiles)) + stages * 800;
  // A block that fills a multiprocessor by itself has nobody to hide behind.
  const bool alone = gather_shared(p, plan, halo, words) > kHalfShared;
  return blocks * (std::max(work, memory) + 0.3 * std::min(work, memory)) * (alone ? 1.3 : 1);
}

void choose_box(const ConvProblem& p, GatherPlan& plan) {
  plan.cycles = -1;
  std::array<std::vector<int>, 3> candidates;
  const int rows = gather_rows(p, plan);
  for (int a = 0; a < 3; ++a) candidates[a] = widths(plan.axis[a].count, rows);
  for (const int w : candidates[2])
    for (const int h : candidates[1]) {
      if (w * h > rows) continue;
      for (const int d : candidates[0]) {
        if (w * h * d > rows) continue;
        const int box[3] = {d, h, w};
        const auto cycles = cost(p, plan, box);
        if (!cycles || (plan.cycles >= 0 && *cycles >= plan.cycles)) continue;
        plan.cycles = *cycles;
        std::copy_n(box, 3, plan.box);
      }
    }
}

/// Few columns are no work for wgmma: 64 rows of A are read for each 8 words, however few.
bool gather_by_wgmma(const ConvProblem& p) {
  constexpr int64_t kFew = 16;
  const auto widths = gather_widths(arithmetic_of(p), true);
  return may_use_wgmma(p) && (p.choice.width > 0 ? asked_width(p, widths).has_value() : p.out_channels > kFew);
}

int choose_columns(const ConvProblem& p, bool wgmma) {
  const auto compiled = gather_widths(arithmetic_of(p), wgmma);
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

bool may_use_wgmma(const ConvProblem& p) { return p.wgmma && !p.choice.mma_sync; }

std::optional<int> asked_width(const ConvProblem& p, std::span<const int> widths) {
  const bool compiled = std::find(widths.begin(), widths.end(), p.choice.width) != widths.end();
  return compiled ? std::optional<int>(p.choice.width) : std::nullopt;
}

std::span<const int> gather_widths(ConvArithmetic arithmetic, bool wgmma) {
  static constexpr int kWidths[] = {8, 16, 24, 32, 48, 64, 128};
  // Three products: the sums of a step stand in registers beside the accumulators.
  const bool three = arithmetic == ConvArithmetic::tf32x3;
  const std::span<const int> all(kWidths);
  return wgmma ? all.subspan(2, three ? 2 : 5) : all.first(three ? 4 : 6);
}

std::optional<GatherPlan> plan_gather(const ConvProblem& p) {
  GatherPlan plan{};
  if (p.dtype == DType::f64 || p.choice.plain || !choose_axes(p, plan) || plan.classes == 0) return std::nullopt;
  const int elements = p.dtype == DType::f32 ? 1 : 2;
  plan.wgmma = gather_by_wgmma(p);
  plan.columns = choose_columns(p, plan.wgmma);
  plan.column_tiles = static_cast<int>((p.out_channels + plan.columns - 1) / plan.columns);
  plan.chunks = static_cast<int>((p.in_channels + kChunkWords * elements - 1) / (kChunkWords * elements));
  plan.buffers = 2;
  plan.slots = 1;
  GatherPlan merged = plan;
  choose_box(p, plan);
  // Phases read the same inputs. With one chunk of channels they are staged once for all of them; with more, what a
  // block would have to hold leaves a multiprocessor to it alone, which was slower (by a third for 8 chunks).
  if (p.direction == ConvDirection::transposed && plan.axis[1].parts * plan.axis[2].parts == 4 && plan.wgmma &&
      plan.columns <= 64 && p.choice.slots != 1) {
    GatherPlan slots = plan;
    slots.slots = 4;
    for (const int a : {1, 2}) merge_halos(slots.axis[a]);
    choose_box(p, slots);
    if (slots.cycles >= 0 && (plan.cycles < 0 || slots.cycles < plan.cycles || p.choice.slots == 4)) plan = slots;
  }
  if (p.direction == ConvDirection::transposed && plan.classes > 1 && plan.chunks == 1 && !plan.wgmma) {
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
    blocks *= plan.classes / plan.slots;
  if (blocks >= 2147483647.0 || reach >= (1 << 29)) return std::nullopt;
  plan.line = line_words(plan.box[2], plan.extent[2]);
  const int words = plan.extent[0] * plan.extent[1] * plan.line;
  while (plan.wgmma && plan.buffers < 4) {  // as many steps ahead as there is room for
    ++plan.buffers;
    if (gather_shared(p, plan, plan.halo_voxels, words) <= std::min<int64_t>(p.shared_limit, kHalfShared)) continue;
    --plan.buffers;
    break;
  }
  plan.pitch = round_up(words + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
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

}  // namespace voxgrad::cuda
