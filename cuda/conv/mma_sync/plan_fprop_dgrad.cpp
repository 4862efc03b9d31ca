// The gather by mma.sync: which box of results a block takes.
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
constexpr int kChunkWords = 8;

/// Of the weights on their way.
int ring_bytes(const ConvProblem& p, const GatherPlan& plan) {
  const int tap = plan.columns * kChunkWords * 4 * parts(p);
  return 3 * (tap <= 1024 ? 8 : 4) * tap;
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
  const double stages = plan.merged ? 1 : plan.classes;  // of the inputs, or blocks of their own
  const double blocks8 = plan.columns / 8;
  const double parts = three ? 3 : 1;
  const double products = 16 * blocks8 * 1.46 * parts;
  const double reads = 4 * 4 * 4 * std::max(1.0, blocks8 / 8) + 4 * blocks8 * 2 * (three ? 2 : 1);
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
  const bool alone = gather_shared(p, plan, halo, words) > kHalfShared;
  return blocks * (std::max(work, memory) + 0.3 * std::min(work, memory)) * (alone ? 1.3 : 1);
}

void choose_box(const ConvProblem& p, GatherPlan& plan) {
  plan.cycles = -1;
  std::array<std::vector<int>, 3> candidates;
  for (int a = 0; a < 3; ++a) candidates[a] = box_widths(plan.axis[a].count, kRows);
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

}  // namespace

std::optional<GatherPlan> plan_gather_mma(const ConvProblem& p, const GatherPlan& axes) {
  GatherPlan plan = axes;
  plan.buffers = 2;
  choose_box(p, plan);
  // Phases read the same inputs. With one chunk of channels they are staged once for all of them; with more, what a
  // block would have to hold leaves a multiprocessor to it alone, which was slower (by a third for 8 chunks).
  if (p.direction == ConvDirection::transposed && plan.classes > 1 && plan.chunks == 1) {
    GatherPlan merged = axes;
    merged.merged = true;
    merged.buffers = 1;
    for (AxisParts& axis : merged.axis) merge_halos(axis);
    choose_box(p, merged);
    if (merged.cycles >= 0 && (plan.cycles < 0 || merged.cycles < plan.cycles)) plan = merged;
  }
  plan.range = plan.box[0];
  if (plan.cycles < 0 || !finish(p, plan)) return std::nullopt;
  plan.line = line_words(plan.box[2], plan.extent[2]);
  const int words = plan.extent[0] * plan.extent[1] * plan.line;
  plan.pitch = round_up(words + 1 - 8, 32) + 8;  // 8 modulo the 32 banks
  return plan;
}

}  // namespace voxgrad::cuda
