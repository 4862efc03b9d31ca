// The plans of fprop and dgrad by mma.sync: which tile of results a CTA takes.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cuda/conv/plan_common.h"

namespace voxgrad::cuda {
namespace {

constexpr int kRows = 256;               // results of a block
constexpr int kMaxExtent = 1023;         // voxels of a halo along an axis: packed into 10 bits
constexpr int kHalfShared = 112 * 1024;  // bytes of shared memory with which two blocks fit on sm_90
constexpr int kKWords = 8;

/// Of the weights on their way.
int ring_bytes(const ConvProblem& p, const ImplicitGemmPlan& plan) {
  const int tap = plan.columns * kKWords * 4 * parts(p);
  return 3 * (tap <= 1024 ? 8 : 4) * tap;
}

/// Words from a staged line to the next: 8 results that straddle two lines of the tile read 8 neighbouring banks, too.
int line_words(int tile, int extent) { return tile % 8 == 0 ? extent : tile + round_up(extent - tile, 8); }

/// Bytes of shared memory of a block: staged inputs, where each of their voxels comes from and goes to, weights.
int64_t shared_bytes(const ConvProblem& p, const ImplicitGemmPlan& plan, int64_t halo, int64_t words) {
  const int64_t pitch = words + 32, staged = halo + 128;  // at most
  return plan.input_stages * kKWords * 4 * pitch + 8 * staged + ring_bytes(p, plan);
}

/// Multiprocessor cycles of a tile, roughly; nothing if it does not fit.
std::optional<double> cost(const ConvProblem& p, const ImplicitGemmPlan& plan, const int (&tile)[3]) {
  int halo = 1, words = 1;
  double blocks = 1;
  for (int a = 0; a < 3; ++a) {
    const AxisPhases& axis = plan.axis[a];
    const int extent = (tile[a] - 1 + axis.max_span) * axis.fold;
    if (extent > kMaxExtent) return std::nullopt;
    halo *= extent;
    words *= a == 2 ? line_words(tile[2], extent) : extent;
    if (shared_bytes(p, plan, halo, words) >
        (plan.merged ? p.shared_limit : std::min<int64_t>(p.shared_limit, kHalfShared)))
      return std::nullopt;
    blocks *= (axis.count + tile[a] - 1) / tile[a];
  }
  const bool three = three_products(p);
  const double taps = static_cast<double>(plan.axis[0].kernel) * plan.axis[1].kernel * plan.axis[2].kernel;
  const double stages = plan.merged ? 1 : plan.classes;  // of the inputs, or blocks of their own
  const double blocks8 = plan.columns / 8;
  const double parts = three ? 3 : 1;
  const double products = 16 * blocks8 * 1.46 * parts;
  const double reads = 4 * 4 * 4 * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
  const double multiply = taps * std::max(products, reads);
  const double stage = stages * (halo * kKWords * 0.15 + 100);
  // Sectors of 32 bytes between L2 and the multiprocessor: a line of a tile starts anywhere in one. Those that are
  // written in part count twice: they may be written again.
  const double bytes = static_cast<double>(item_size(p.dtype)), word_channels = 4 / bytes;
  const auto sectors = [&](double elements) { return elements * bytes / 32 + 1; };
  const double lines = halo / ((tile[2] - 1 + plan.axis[2].max_span) * plan.axis[2].fold);
  const double loaded =
      stages * plan.k_blocks * kKWords * word_channels * lines * sectors(static_cast<double>(halo) / lines);
  const double passes = plan.axis[2].out_step > 1 ? plan.classes : 1;
  const double stored = 2 * passes * plan.columns * tile[0] * tile[1] * sectors(tile[2] * plan.axis[2].out_step);
  const double tiles = plan.column_tiles;
  const double memory = (loaded * (plan.merged ? 1 : tiles) + stored * tiles) * 32 / 40;
  const double work = plan.k_blocks * (multiply * tiles + stage * (plan.merged ? 1 : tiles)) + stages * 800;
  // A block that fills a multiprocessor by itself has nobody to hide behind.
  const bool alone = shared_bytes(p, plan, halo, words) > kHalfShared;
  return blocks * (std::max(work, memory) + 0.3 * std::min(work, memory)) * (alone ? 1.3 : 1);
}

void choose_tile(const ConvProblem& p, ImplicitGemmPlan& plan) {
  plan.cycles = -1;
  std::array<std::vector<int>, 3> candidates;
  for (int a = 0; a < 3; ++a) candidates[a] = box_widths(plan.axis[a].count, kRows);
  for (const int w : candidates[2])
    for (const int h : candidates[1]) {
      if (w * h > kRows) continue;
      for (const int d : candidates[0]) {
        if (w * h * d > kRows) continue;
        const int tile[3] = {d, h, w};
        const auto cycles = cost(p, plan, tile);
        if (!cycles || (plan.cycles >= 0 && *cycles >= plan.cycles)) continue;
        plan.cycles = *cycles;
        std::copy_n(tile, 3, plan.tile);
      }
    }
}

}  // namespace

std::optional<ImplicitGemmPlan> plan_implicit_gemm_mma_sync(const ConvProblem& p, const ImplicitGemmPlan& axes) {
  ImplicitGemmPlan plan = axes;
  plan.input_stages = 2;
  choose_tile(p, plan);
  // Phases read the same inputs. With one k-block of channels they are staged once for all of them; with more, what a
  // block would have to hold leaves a multiprocessor to it alone, which was slower (by a third for 8 k-blocks).
  if (p.pass == ConvPass::dgrad && plan.classes > 1 && plan.k_blocks == 1) {
    ImplicitGemmPlan merged = axes;
    merged.merged = true;
    merged.input_stages = 1;
    for (AxisPhases& axis : merged.axis) merge_halos(axis);
    choose_tile(p, merged);
    if (merged.cycles >= 0 && (plan.cycles < 0 || merged.cycles < plan.cycles)) plan = merged;
  }
  plan.range = plan.tile[0];
  if (plan.cycles < 0 || !finish(p, plan)) return std::nullopt;
  plan.line = line_words(plan.tile[2], plan.extent[2]);
  const int words = plan.extent[0] * plan.extent[1] * plan.line;
  plan.pitch = round_up(words + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
  return plan;
}

}  // namespace voxgrad::cuda
