#include "cuda/conv_plan.h"

#include <algorithm>
#include <array>
#include <vector>

namespace voxgrad::cuda {
namespace {

constexpr int kRows = 256;             // results of a block
constexpr int kMaxExtent = 1023;       // voxels of a halo along an axis: packed into 10 bits
constexpr int kMaxHalo = 1063;         // voxels: what shared memory holds of two stages
constexpr int kMaxTaps = 1024, kMaxClasses = 64;
constexpr int kChunkWords = 8;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

/// The widths of boxes that are worth a look: those that divide `count` into n near-equal pieces.
std::vector<int> widths(int count, int most) {
  std::vector<int> result;
  for (int n = 1; n <= count; ++n) {
    const int width = (count + n - 1) / n;
    if (width <= most && (result.empty() || result.back() != width)) result.push_back(width);
    if (width == 1) break;
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
    const auto axis = transposed ? transposed_parts(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a],
                                                    g.dilation[a])
                                 : forward_parts(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a],
                                                 g.dilation[a], a == 2);
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

/// Multiprocessor cycles of a box, roughly; nothing if it does not fit.
std::optional<double> cost(const ConvProblem& p, const GatherPlan& plan, const int (&box)[3]) {
  int halo = 1;
  double blocks = 1;
  for (int a = 0; a < 3; ++a) {
    const AxisParts& axis = plan.axis[a];
    const int extent = (box[a] - 1 + axis.max_span) * axis.fold;
    if (extent > kMaxExtent) return std::nullopt;
    halo *= extent;
    if (halo > kMaxHalo) return std::nullopt;
    blocks *= (axis.count + box[a] - 1) / box[a];
  }
  const bool three = p.dtype == DType::f32 && p.precision == Float32Precision::highest;
  const double taps = static_cast<double>(plan.axis[0].kernel) * plan.axis[1].kernel * plan.axis[2].kernel;
  const double stages = plan.classes;  // of the inputs, or blocks of their own
  // 8 rows that straddle two lines of the box are read at half the rate.
  const double straddling = box[2] % 8 == 0 ? 0 : std::min(1.0, 7.0 / box[2]);
  const double blocks8 = plan.columns / 8;
  const double products = 16 * blocks8 * 1.46 * (three ? 3 : 1);
  const double reads = 4 * 4 * 4 * (1 + 0.5 * straddling) * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
  const double multiply = taps * std::max(products, reads);
  const double stage = stages * (halo * kChunkWords * 0.15 + 100);
  return blocks * (plan.chunks * (multiply + stage) + stages * 800);
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
  const bool three = p.dtype == DType::f32 && p.precision == Float32Precision::highest;
  int best = 8;
  for (const int columns : {8, 16, 24, 32, 48, 64, 128}) {
    if (columns > (three ? 64 : 128)) break;
    const auto computed = [&](int64_t c) { return (p.out_channels + c - 1) / c * (c + 12); };  // 12: what a tile costs by itself
    if (computed(columns) < computed(best)) best = columns;
  }
  return best;
}

}  // namespace

std::optional<GatherPlan> plan_gather(const ConvProblem& p) {
  GatherPlan plan{};
  if (p.dtype == DType::f64 || !choose_axes(p, plan) || plan.classes == 0) return std::nullopt;
  const int elements = p.dtype == DType::f32 ? 1 : 2;
  plan.columns = choose_columns(p);
  plan.column_tiles = static_cast<int>((p.out_channels + plan.columns - 1) / plan.columns);
  plan.chunks = static_cast<int>((p.in_channels + kChunkWords * elements - 1) / (kChunkWords * elements));
  choose_box(p, plan);
  if (plan.cycles < 0) return std::nullopt;
  plan.halo_voxels = 1;
  double blocks = static_cast<double>(p.batch * p.groups * plan.column_tiles);
  for (int a = 0; a < 3; ++a) {
    plan.extent[a] = (plan.box[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold;
    plan.tiles[a] = (plan.axis[a].count + plan.box[a] - 1) / plan.box[a];
    plan.halo_voxels *= plan.extent[a];
    blocks *= plan.tiles[a];
  }
  if (p.direction == ConvDirection::transposed) blocks *= plan.classes;
  if (blocks >= 2147483647.0) return std::nullopt;
  plan.pitch = round_up(plan.halo_voxels + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
  return plan;
}

}  // namespace voxgrad::cuda
