// Plans wgrad with mma.sync. A CTA tile has rows (channels of y) and columns (taps and channels of x). The planner
// chooses the CTA tile and the k-tile of voxels with the lowest estimated cost of products and staging.
#include <algorithm>
#include <cmath>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/sm80.h"

namespace voxgrad::cuda {
namespace {

int wgrad_shared(const ConvProblem& p) {
  return static_cast<int>(std::min<int64_t>(kMaxMmaSyncSharedBytes, p.shared_limit));
}

/// Returns the number of taps of each class.
std::vector<int> class_taps(const MmaSyncWgradPlan& plan) {
  std::vector<int> result;
  for (int number = 0; number < plan.axis[0].phases * plan.axis[1].phases * plan.axis[2].phases; ++number) {
    int phase[3];
    split_class(plan.axis, number, phase);
    result.push_back(1);
    for (int a = 0; a < 3; ++a) result.back() *= plan.axis[a].phase[phase[a]].taps;
  }
  return result;
}

/// Sets the members of the plan that follow from the k-tile. Returns false if the k-tile is too large.
bool extend_k_tile(const ConvProblem& p, MmaSyncWgradPlan& plan) {
  const int elements = elements_of(p);
  plan.halo_words = 1;
  plan.k_tiles = p.batch;
  for (int a = 0; a < 3; ++a) {
    const AxisPhases& axis = plan.axis[a];
    plan.extent[a] = plan.k_tile[a] - 1 + axis.max_span;
    if (a == 2) {
      plan.run = elements == 1 ? plan.extent[a] : plan.extent[a] / 2 + 1;
      plan.extent[a] = axis.fold * elements * plan.run;
    }
    if (plan.extent[a] > 4096) return false;
    plan.halo_words *= plan.extent[a];
    if (plan.halo_words > 4096) return false;
    plan.tiles[a] = (axis.count + plan.k_tile[a] - 1) / plan.k_tile[a];
    plan.k_tiles *= plan.tiles[a];
  }
  plan.pitch = round_up(std::max(plan.halo_words - 4, 0), 32) + 4;
  return true;
}

/// Adds a class. Returns false if the plan then has too many taps.
bool add_class(MmaSyncWgradPlan& plan, const MmaSyncWgradPlan::Class& c) {
  plan.column_tiles += c.tiles;
  plan.columns += plan.blocks8 * c.padded_taps;
  plan.classes.push_back(c);
  int taps = 0;
  for (const MmaSyncWgradPlan::Class& each : plan.classes) taps += each.padded_taps;
  return taps <= kMaxMmaSyncTaps;
}

/// Divides the columns of a class into CTA tiles of at most `most` blocks of 8 columns. `room` is the shared memory for
/// x in bytes.
MmaSyncWgradPlan::Class tile_class(int taps, int blocks8, int most, int pitch, int room) {
  const int fitting = std::max(1, room / (8 * pitch * 4));  // blocks of 8 channels that can be staged
  MmaSyncWgradPlan::Class c{taps, taps, 0, 0};
  if (taps <= most) {
    c.tile_columns = std::min({most / taps, fitting, blocks8}) * taps;
  } else {
    const int pieces = divide_up(taps, most);
    c.tile_columns = divide_up(taps, pieces);
    c.padded_taps = c.tile_columns * pieces;
  }
  c.tiles = divide_up(blocks8 * c.padded_taps, c.tile_columns);
  return c;
}

/// Sets the CTA tiles and their estimated cost. Returns false if a tile does not fit into shared memory.
bool tile_weight(const ConvProblem& p, MmaSyncWgradPlan& plan) {
  const int room = wgrad_shared(p) - plan.rows * kMmaSyncKTilePitch * 4;
  const int most = mma_sync_wgrad_columns(plan.rows, three_products(p));
  plan.classes.clear();
  plan.column_tiles = plan.columns = plan.shared_bytes = 0;
  double staged = 0;
  for (const int taps : class_taps(plan)) {
    const MmaSyncWgradPlan::Class c = tile_class(taps, plan.blocks8, most, plan.pitch, room);
    const int blocks = std::max(1, c.tile_columns / c.padded_taps);
    const int bytes = (plan.rows * kMmaSyncKTilePitch + blocks * 8 * plan.pitch) * 4;
    if (bytes > kMaxMmaSyncSharedBytes || !add_class(plan, c)) return false;
    plan.shared_bytes = std::max(plan.shared_bytes, bytes);
    staged += static_cast<double>(c.tiles) * (plan.rows * kMmaSyncKTileWords + blocks * 8 * plan.halo_words);
  }
  // Halves are packed in registers, so the next k-tile cannot be copied in the background.
  plan.stages = elements_of(p) == 1 && 2 * plan.shared_bytes <= wgrad_shared(p) ? 2 : 1;
  const double products = 16.0 * (plan.rows / 16) * most * 1.46 * (three_products(p) ? 3 : 1);
  const double of_k_tile = plan.column_tiles * (products + 400) + staged * (plan.stages == 2 ? 0.15 : 0.3);
  plan.cycles = of_k_tile * static_cast<double>(plan.k_tiles) * plan.row_tiles * static_cast<double>(p.groups) /
                static_cast<double>(kMultiprocessors);
  return true;
}

void choose_range(const ConvProblem& p, MmaSyncWgradPlan& plan) {
  constexpr int64_t kBlocks = 1600;  // several times the CTAs that the largest GPUs run at once
  const int64_t tiles = static_cast<int64_t>(plan.column_tiles) * plan.row_tiles * p.groups;
  // Accumulators truncate. Bound the k-tiles of a range, so that this error is small compared with the rounding of the
  // inputs.
  const int64_t most = three_products(p) ? 32 : 128;
  const int64_t bytes = p.groups * p.out_channels * plan.columns * 8 * static_cast<int64_t>(sizeof(float));
  int64_t ranges = std::max(divide_up(kBlocks, tiles), divide_up(plan.k_tiles, most));
  ranges = std::clamp<int64_t>(std::min(ranges, kMaxSums / std::max<int64_t>(bytes, 1)), 1,
                               std::max<int64_t>(plan.k_tiles, 1));
  plan.range = std::max<int64_t>(1, divide_up(plan.k_tiles, ranges));
  plan.ranges = divide_up(plan.k_tiles, plan.range);
}

/// Returns the plan with the lowest estimated cost of all k-tiles, or nothing if none fits.
std::optional<MmaSyncWgradPlan> best_weight(const ConvProblem& p, MmaSyncWgradPlan plan) {
  MmaSyncWgradPlan best{};
  best.cycles = -1;
  const int elements = elements_of(p);
  plan.rows = choose_width(p, mma_sync_wgrad_widths(), 8);
  plan.row_tiles = divide_up(p.out_channels, plan.rows);
  plan.blocks8 = divide_up(p.in_channels, 8);
  for (int w = 8 * elements; w <= kMmaSyncKTileWords * elements; w += 8 * elements)
    for (int h = 1; w * h <= kMmaSyncKTileWords * elements; ++h) {
      plan.k_tile[0] = kMmaSyncKTileWords * elements / (w * h);
      plan.k_tile[1] = h;
      plan.k_tile[2] = w;
      if (extend_k_tile(p, plan) && tile_weight(p, plan) && (best.cycles < 0 || plan.cycles < best.cycles)) best = plan;
    }
  if (best.cycles < 0) return std::nullopt;
  choose_range(p, best);
  const double blocks = static_cast<double>(best.ranges) * best.column_tiles * best.row_tiles * p.groups;
  if (blocks >= 2147483647.0) return std::nullopt;
  return best;
}

}  // namespace

std::span<const int> mma_sync_wgrad_widths() {
  static constexpr int kWidths[] = {64, 48, 32, 16};
  return kWidths;
}

std::optional<MmaSyncWgradPlan> plan_mma_sync_wgrad(const ConvProblem& p) {
  MmaSyncWgradPlan plan{};
  if (p.dtype == DType::f64 || p.batch == 0) return std::nullopt;
  if (set_axes(p, plan.axis, false, kMaxMmaSyncTaps, kMaxMmaSyncClasses) == 0) return std::nullopt;
  return best_weight(p, plan);
}

int64_t workspace_bytes(const ConvProblem& p, const MmaSyncWgradPlan& plan) {
  return plan.ranges * p.groups * p.out_channels * plan.columns * 8 * static_cast<int64_t>(sizeof(float));
}

}  // namespace voxgrad::cuda
