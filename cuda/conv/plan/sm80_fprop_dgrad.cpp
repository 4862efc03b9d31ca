// Plans fprop and dgrad with mma.sync: chooses the CTA tile with the lowest estimated cost.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/sm80.h"

namespace voxgrad::cuda {
namespace {

constexpr int kMaxExtent = 1023;  // voxels of a halo along an axis

/// Returns the bytes of the ring of weights in shared memory.
int ring_bytes(const ConvProblem& p, const MmaSyncPlan& plan) {
  const int tap_words = plan.columns * kMmaSyncKWords * parts(p);
  return kMmaSyncWeightStages * mma_sync_stage_taps(tap_words) * tap_words * 4;
}

/// Returns the words from one line of the halo to the next in shared memory. With this distance, 8 consecutive results
/// read 8 different banks even if they lie on two lines of the tile.
int line_words(int tile, int extent) { return tile % 8 == 0 ? extent : tile + round_up(extent - tile, 8); }

/// Returns the bytes of shared memory of a CTA: the stages of inputs, the tables of the source and the target of each
/// voxel, and the weights.
int64_t shared_bytes(const ConvProblem& p, const MmaSyncPlan& plan, int64_t halo, int64_t words) {
  const int64_t pitch = words + 32, staged = halo + 128;  // upper bounds of the pitch and of the tables
  return plan.input_stages * kMmaSyncKWords * 4 * pitch + 8 * staged + ring_bytes(p, plan);
}

/// Returns the estimated time of all tiles of a sample and a group in clocks of one SM, or nothing if a tile does not
/// fit into shared memory. The factors were fitted to measurements.
std::optional<double> cost(const ConvProblem& p, const MmaSyncPlan& plan, const int (&tile)[3]) {
  int halo = 1, words = 1;
  double blocks = 1;
  for (int a = 0; a < 3; ++a) {
    const AxisPhases& axis = plan.axis[a];
    const int extent = (tile[a] - 1 + axis.max_span) * axis.fold;
    if (extent > kMaxExtent) return std::nullopt;
    halo *= extent;
    words *= a == 2 ? line_words(tile[2], extent) : extent;
    if (shared_bytes(p, plan, halo, words) >
        (plan.merged ? p.shared_limit : std::min<int64_t>(p.shared_limit, kMaxMmaSyncSharedBytes)))
      return std::nullopt;
    blocks *= (axis.count + tile[a] - 1) / tile[a];
  }
  const bool three = three_products(p);
  const double taps = static_cast<double>(plan.axis[0].kernel) * plan.axis[1].kernel * plan.axis[2].kernel;
  const double stages = plan.merged ? 1 : plan.classes;  // number of times that the inputs are staged
  const double blocks8 = plan.columns / 8;
  const double parts = three ? 3 : 1;
  const double products = 16 * blocks8 * 1.46 * parts;
  const double reads = 4 * 4 * 4 * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
  const double multiply = taps * std::max(products, reads);
  const double stage = stages * (halo * kMmaSyncKWords * 0.15 + 100);
  // The traffic between L2 and the SM consists of sectors of 32 bytes, at 40 bytes per clock. A line that starts within
  // a sector needs one more sector. Stores count twice, because two tiles may each write a part of a sector.
  const double bytes = static_cast<double>(item_size(p.dtype)), word_channels = 4 / bytes;
  const auto sectors = [&](double elements) { return elements * bytes / 32 + 1; };
  const double lines = halo / ((tile[2] - 1 + plan.axis[2].max_span) * plan.axis[2].fold);
  const double loaded =
      stages * plan.k_blocks * kMmaSyncKWords * word_channels * lines * sectors(static_cast<double>(halo) / lines);
  const double passes = plan.axis[2].out_step > 1 ? plan.classes : 1;
  const double stored = 2 * passes * plan.columns * tile[0] * tile[1] * sectors(tile[2] * plan.axis[2].out_step);
  const double tiles = plan.column_tiles;
  const double memory = (loaded * (plan.merged ? 1 : tiles) + stored * tiles) * 32 / 40;
  const double work = plan.k_blocks * (multiply * tiles + stage * (plan.merged ? 1 : tiles)) + stages * 800;
  // A CTA that is alone on its SM leaves the SM idle while it waits.
  const bool alone = shared_bytes(p, plan, halo, words) > kMaxMmaSyncSharedBytes;
  return blocks * (std::max(work, memory) + 0.3 * std::min(work, memory)) * (alone ? 1.3 : 1);
}

void choose_tile(const ConvProblem& p, MmaSyncPlan& plan) {
  plan.cycles = -1;
  std::array<std::vector<int>, 3> candidates;
  for (int a = 0; a < 3; ++a) candidates[a] = box_widths(plan.axis[a].count, kMmaSyncRows);
  for (const int w : candidates[2])
    for (const int h : candidates[1]) {
      if (w * h > kMmaSyncRows) continue;
      for (const int d : candidates[0]) {
        if (w * h * d > kMmaSyncRows) continue;
        const int tile[3] = {d, h, w};
        const auto cycles = cost(p, plan, tile);
        if (!cycles || (plan.cycles >= 0 && *cycles >= plan.cycles)) continue;
        plan.cycles = *cycles;
        std::copy_n(tile, 3, plan.tile);
      }
    }
}

/// Sets the members of the plan that follow from the tile. Returns false if the kernels cannot represent them.
bool finish(const ConvProblem& p, MmaSyncPlan& plan) {
  plan.halo_voxels = 1;
  double blocks = static_cast<double>(p.batch * p.groups) * (plan.merged ? 1 : plan.column_tiles);
  if (p.pass == ConvPass::dgrad && !plan.merged) blocks *= plan.classes;
  // Elements from the first to the last element of a halo and of a tile. Offsets in them are 32-bit and not negative.
  double reach = 0, spread = 0;
  for (int a = 0; a < 3; ++a) {
    plan.extent[a] = (plan.tile[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold;
    plan.tiles[a] = divide_up(plan.axis[a].count, plan.tile[a]);
    plan.halo_voxels *= plan.extent[a];
    blocks *= plan.tiles[a];
    if (p.in_stride[a] < 0 || p.out_stride[a] < 0) return false;
    reach += static_cast<double>(p.in_stride[a]) * plan.axis[a].in_step * plan.extent[a];
    spread += static_cast<double>(p.out_stride[a]) * plan.axis[a].out_step * (plan.tile[a] + 1);
  }
  plan.line = line_words(plan.tile[2], plan.extent[2]);
  const int words = plan.extent[0] * plan.extent[1] * plan.line;
  plan.pitch = round_up(words + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
  plan.ctas = blocks;
  return blocks < 2147483647.0 && reach < (1 << 29) && spread < (1 << 30);
}

}  // namespace

std::span<const int> mma_sync_widths(ConvArithmetic arithmetic) {
  static constexpr int kWidths[] = {8, 16, 24, 32, 48, 64};
  // With three products, a thread also holds the sums of one step in registers, so wider tiles do not fit.
  return std::span(kWidths).first(arithmetic == ConvArithmetic::tf32x3 ? 4 : 6);
}

int choose_width(const ConvProblem& p, std::span<const int> widths, int tile_cost) {
  if (std::ranges::find(widths, p.choice.width) != widths.end()) return p.choice.width;
  return std::ranges::min(widths, {},
                          [&](int width) { return divide_up(p.out_channels, width) * (width + tile_cost); });
}

std::optional<MmaSyncPlan> plan_mma_sync_fprop_dgrad(const ConvProblem& p) {
  MmaSyncPlan axes{};
  if (p.dtype == DType::f64) return std::nullopt;
  axes.classes = set_axes(p, axes.axis, false, kMaxMmaSyncTaps, kMaxMmaSyncClasses);
  if (axes.classes == 0) return std::nullopt;
  axes.k_blocks = static_cast<int>(divide_up(p.in_channels, kMmaSyncKWords * elements_of(p)));
  axes.columns = choose_width(p, mma_sync_widths(arithmetic_of(p)), 12);
  axes.column_tiles = static_cast<int>(divide_up(p.out_channels, axes.columns));
  MmaSyncPlan plan = axes;
  plan.input_stages = 2;
  choose_tile(p, plan);
  // All phases read the same inputs. If the channels fit into one k-block, the inputs can be staged once for all
  // phases. With more k-blocks, a CTA would need the shared memory of a whole SM, which was slower (by a third for 8
  // k-blocks).
  if (p.pass == ConvPass::dgrad && plan.classes > 1 && plan.k_blocks == 1) {
    MmaSyncPlan merged = axes;
    merged.merged = true;
    merged.input_stages = 1;
    for (AxisPhases& axis : merged.axis) merge_halos(axis);
    choose_tile(p, merged);
    if (merged.cycles >= 0 && (plan.cycles < 0 || merged.cycles < plan.cycles)) plan = merged;
  }
  if (plan.cycles < 0 || !finish(p, plan)) return std::nullopt;
  plan.cycles *= static_cast<double>(p.batch * p.groups) / std::min<double>(plan.ctas, kMultiprocessors);
  return plan;
}

int64_t workspace_bytes(const ConvProblem& p, const MmaSyncPlan& plan) {
  int64_t words = p.groups * plan.column_tiles * plan.columns * plan.k_blocks * kMmaSyncKWords * parts(p);
  for (const AxisPhases& axis : plan.axis) {
    int64_t taps = 0;
    for (int i = 0; i < axis.phases; ++i) taps += axis.phase[i].taps;
    words *= taps;
  }
  return words * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace voxgrad::cuda
