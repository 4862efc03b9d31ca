// The plans of fprop and dgrad by wgmma of packed inputs: how many columns and which CTA tile of results, and how the
// rows of m64 tiles cover it.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cuda/conv/plan_common.h"

namespace voxgrad::cuda {
namespace {

constexpr int kMaxLine = kMostBox / 2;       // voxels of a residue, of a halo
constexpr int kAligned = 128 / kVoxelBytes;  // positions: where it copies to
constexpr int kStatic = 1024;                // bytes of shared memory that the kernel has beside
constexpr int kKWords = 8, kMostDepth = 8, kMaxTaps = 1024;

/// Whose inputs are packed at a time: as many in each launch, as far as that goes.
int64_t samples_at_once(const ConvProblem& p, int64_t of_sample) {
  if (p.batch <= 1) return 1;
  const int64_t most = p.choice.samples > 0 ? p.choice.samples : kMostPacked / std::max<int64_t>(1, of_sample);
  return divide_up(p.batch, divide_up(p.batch, std::clamp<int64_t>(most, 1, p.batch)));
}

/// Columns of a product.
int product_columns(const ImplicitGemmPlan& plan) { return plan.columns * plan.slide; }

int row_tiles(const ConvProblem& p, const ImplicitGemmPlan& plan) {
  return m64_tiles(product_columns(plan), three_products(p), plan.tile_phases, plan.slide) / plan.tile_phases;
}

/// Bytes of the buffers through which results are written.
int epilogue_bytes(const ImplicitGemmPlan& plan) {
  return kConsumerWarpgroups * epilogue_buffer_words(plan.columns, plan.tile_phases) * 4;
}

/// Bytes of shared memory: stages of weights, `input_stages` halos, buffers, and where the rows of results go.
int64_t shared_bytes(const ConvProblem& p, const ImplicitGemmPlan& plan, int input_stages) {
  const int columns = product_columns(plan), tap = columns * kKWords * 4 * parts(p);
  return int64_t{weight_stages(columns, three_products(p), plan.slide)} *
             weight_stage_taps(columns, three_products(p), plan.slide) * tap +
         int64_t{input_stages} * plan.stage_k_blocks * parts(p) * 2 * kVoxelBytes * plan.rows.positions +
         epilogue_bytes(plan) + int64_t{8} * 64 * row_tiles(p, plan);
}

/// Halo, rows and memory of plan.tile; false if they do not fit.
bool lay_out(const ConvProblem& p, ImplicitGemmPlan& plan) {
  int positions = 1;  // below 2^31, as extents and splits are limited
  for (int a = 0; a < 3; ++a) {
    const AxisPhases& axis = plan.axis[a];
    plan.extent[a] = (plan.tile[a] - 1 + axis.max_span) * axis.fold;
    if (a == 2 ? plan.extent[a] > kMaxLine * axis.fold : (plan.extent[a] - 1) * axis.in_step >= kMostBox) return false;
    if (plan.extent[a] > p.shared_limit / (2 * kVoxelBytes) / positions) return false;
    positions *= plan.extent[a];
  }
  plan.halo_voxels = positions;
  const int line = plan.extent[2] / plan.axis[2].fold, lines = plan.extent[1];
  const auto rows = cover_tile(plan.tile, lines, line, row_tiles(p, plan));
  if (!rows) return false;
  plan.rows = *rows;
  plan.residue_positions = round_up(positions / plan.axis[2].fold, kAligned);
  positions = plan.axis[2].fold * plan.residue_positions;
  int reach = positions - plan.residue_positions;  // the most that a tap adds
  for (int a = 0; a < 3; ++a) reach += (plan.axis[a].max_span - 1) * (a == 0 ? lines * line : a == 1 ? line : 1);
  for (const int base : rows->base) positions = std::max(positions, base + 7 * rows->group + 8 + reach);
  plan.rows.positions = round_up(positions, kAligned);
  plan.input_stages = kMostInputStages;
  while (plan.input_stages > 1 && shared_bytes(p, plan, plan.input_stages) > p.shared_limit - kStatic)
    --plan.input_stages;
  return plan.input_stages > (plan.stage_k_blocks > 1 ? 2 : 1);
}

/// What an input stage has to be multiplied with, in the mean.
struct StageWork {
  double taps = 0, stages = 0;  // of all k-blocks
};
StageWork mean_stage(const ConvProblem& p, const ImplicitGemmPlan& plan) {
  const int step_taps = weight_stage_taps(product_columns(plan), three_products(p), plan.slide);
  StageWork work;
  for (int c = 0; c < plan.classes; ++c) {
    int taps = plan.stage_k_blocks;
    for (int a = 2, number = c; a >= 0; number /= plan.axis[a--].phases)
      taps *= plan.axis[a].phase[number % plan.axis[a].phases].taps;
    work.taps += taps;
    work.stages += divide_up(taps, step_taps);
  }
  const double stages = plan.classes / plan.tile_phases;
  return {work.taps / stages, work.stages / stages};
}

/// Whether two phases lie side by side in the result, and read almost the same.
bool may_pair(const ConvProblem& p, const ImplicitGemmPlan& axes) {
  return p.pass == ConvPass::dgrad && axes.axis[2].phases % 2 == 0;
}

/// Whether a tile may slide along depth: neighbouring results read neighbouring planes, by kSlidingTaps taps, and each
/// has one to read.
bool can_slide(const AxisPhases& depth) {
  const AxisPhase& part = depth.phase[0];
  return depth.phases == 1 && depth.in_step == 1 && depth.out_step == 1 && part.taps == kSlidingTaps &&
         std::abs(part.step) == 1 && part.low + part.span > 0 && part.low + part.count <= depth.in_size;
}
/// Leaves one tap: that of the last plane which a result reads. The taps of those before it follow by tap_step.
void slide_along(AxisPhases& depth) {
  AxisPhase& part = depth.phase[0];
  if (part.step < 0) {
    part.tap_first += (part.taps - 1) * part.tap_step;
    part.tap_step = -part.tap_step;
  }
  part.low += part.span - 1;
  part.start = part.low;
  part.taps = part.span = depth.max_taps = depth.max_span = 1;
}
/// Planes of inputs that a tile of `range` results multiplies, in the mean.
double planes_of(const AxisPhases& depth, int range) {
  int planes = 0, tiles = 0;
  for (int q = 0; q < depth.count; q += range, ++tiles) {
    const int last = depth.phase[0].low + std::min(q + range, depth.count);  // behind it
    const int first = depth.phase[0].low + q - (kSlidingTaps - 1);
    planes += std::max(0, std::min(last, static_cast<int>(depth.in_size)) - std::max(first, 0));
  }
  return static_cast<double>(planes) / tiles;
}

/// Clocks of a multiprocessor for all that the problem has of such tiles. A stage takes what its tensor cores, its
/// shared memory, TMA, the threads that queue products and the way to L2 need at least; a tile the sum of
/// its steps, or what is left of them while results are written: two groups of warps take turns; one that slides that
/// for each of its `planes`. Rough: it only has to order tiles.
double cost(const ConvProblem& p, const ImplicitGemmPlan& plan, const StageWork& stage_of, double planes) {
  const double products = three_products(p) ? 3 : 1, columns = product_columns(plan), taps = stage_of.taps;
  const double positions = static_cast<double>(plan.halo_voxels) * plan.stage_k_blocks;  // of a stage
  const double phases = p.pass == ConvPass::dgrad ? plan.classes / plan.tile_phases : 1;
  const double halos = p.pass == ConvPass::dgrad ? 1 : plan.classes;  // of a tile
  double tiles = phases * static_cast<double>(plan.samples * p.groups) * plan.column_tiles, results = 1;
  for (int a = 0; a < 3; ++a) {
    tiles *= divide_up(plan.axis[a].count, a == 0 ? plan.range : plan.tile[a]);
    results *= plan.tile[a];
  }
  const double product_tiles = taps * row_tiles(p, plan) * products;
  const double multiply = product_tiles * columns / 2;
  const double staged = (positions + taps * columns) * parts(p) * 0.25;  // 128 bytes a clock
  const double shared = product_tiles * (16 + columns / 4) + staged;
  const double copy = positions * parts(p) * 1.4;
  const double latency = 1400.0 / (plan.input_stages - 1);
  const double from_l2 = (taps * columns + positions) * 32 * parts(p) / 45;
  const double queue = product_tiles * 16 + stage_of.stages * 200;
  const double step = std::max({multiply, shared, copy, latency, from_l2, queue}) + 60;
  const double bytes = static_cast<double>(item_size(p.dtype));
  // Results that lie together, and what is between them: short runs are dear to write, by all runs measured; so are
  // parts of lines of two phases, where lines do not begin with sectors (not in three products, which take longer).
  const double spread = static_cast<double>(plan.axis[2].out_step) / plan.tile_phases;
  const double run = bytes * spread * plan.tile_phases * plan.tile[2];
  const bool buffered = plan.tile_phases == 2 && !three_products(p);
  const bool in_parts = may_pair(p, plan) && !three_products(p) && p.out_size[2] * item_size(p.dtype) % 32 != 0 &&
                        (plan.tile_phases == 1 || plan.tile[2] < plan.axis[2].count);
  const double written =
      results * plan.tile_phases * plan.columns * bytes * spread / 18 * (1 + 128 / run) * (in_parts ? 2 : 1);
  const double main = halos * (plan.k_blocks / plan.stage_k_blocks) * step + 200;
  const double rows = buffered ? results / 64 : row_tiles(p, plan);  // tiles of them; buffers leave others out
  const double written_by = rows * plan.tile_phases * plan.columns;  // one group of warps
  // A plane is taken from the queue, its turn awaited and its sums passed on: fitted to L1-58, L1-61 and L1-70.
  const double tail = plan.slide > 1 ? written_by * 70 + 2500 : written_by * 20 + 1500;
  const double at_once = p.multiprocessors;
  double tile = std::max({main, (main + tail) / 2, written, halos * 300.0});
  if (plan.slide > 1) tile = planes * (tiles <= at_once ? main + tail : tile) + tail;
  const bool few = tiles < 8 * at_once || plan.slide > 1;
  const double waves = few ? std::ceil(tiles / at_once) * at_once / tiles : 1;
  return (tiles * tile * waves + at_once * tail) * static_cast<double>(divide_up(p.batch, plan.samples));
}

void choose_tile(const ConvProblem& p, ImplicitGemmPlan& plan) {
  const StageWork stage = mean_stage(p, plan);
  ImplicitGemmPlan trial = plan;
  const int most = 64 * row_tiles(p, plan);
  std::array<std::vector<int>, 3> candidates;
  const auto ranges = plan.slide > 1 ? box_widths(plan.axis[0].count, plan.axis[0].count) : std::vector{1};
  std::vector<double> planes;
  for (const int range : ranges) planes.push_back(plan.slide > 1 ? planes_of(plan.axis[0], range) : 1);
  for (int a = 0; a < 3; ++a) {
    if (a == 0 && plan.slide > 1) {
      candidates[0] = {1};
      continue;
    }
    candidates[a] = box_widths(plan.axis[a].count, most);
    for (int width = 8; a > 0 && width < std::min(plan.axis[a].count, most); width *= 2) candidates[a].push_back(width);
  }
  plan.cycles = -1;
  for (const int w : candidates[2])
    for (const int h : candidates[1]) {
      if (w * h > most) continue;
      for (const int d : candidates[0]) {
        if (w * h * d > most) continue;
        const int tile[3] = {d, h, w};
        std::copy_n(tile, 3, trial.tile);
        if (!lay_out(p, trial)) continue;
        for (size_t i = 0; i < ranges.size(); ++i) {
          trial.range = plan.slide > 1 ? ranges[i] : d;
          trial.cycles = cost(p, trial, stage, planes[i]);
          if (plan.cycles < 0 || trial.cycles < plan.cycles) plan = trial;
        }
      }
    }
}

}  // namespace

std::optional<RowTiles> cover_tile(const int (&tile)[3], int lines, int line, int most) {
  const int plane = lines * line, of_plane = (tile[1] - 1) * line + tile[2];
  RowTiles best{};
  int best_tiles = std::min(most, RowTiles::kMost) + 1;
  const auto offer = [&](int tiles, int group, const auto& place) {
    if (tiles >= best_tiles) return;
    best = {};
    best_tiles = tiles;
    best.group = group;
    best.tiles = tiles;
    for (int i = 0; i < tiles; ++i) place(i, best.base[i], best.end[i]);
  };
  constexpr int kNoEnd = 1 << 20;
  // Line after line, of all planes or plane by plane.
  offer(divide_up((tile[0] - 1) * plane + of_plane, 64), 8, [&](int i, int& base, int& end) {
    base = i * 64;
    end = kNoEnd;
  });
  const int tiles = divide_up(of_plane, 64);
  offer(tile[0] * tiles, 8, [&](int i, int& base, int& end) {
    base = i / tiles * plane + i % tiles * 64;
    end = (i / tiles + 1) * plane;
  });
  if (tile[2] % 8 == 0) {  // 8 lines of 8, or 8 planes of 8
    const int across = tile[2] / 8, down = divide_up(tile[1], 8);
    offer(tile[0] * down * across, line, [&](int i, int& base, int& end) {
      base = i / (down * across) * plane + i / across % down * 8 * line + i % across * 8;
      end = (i / (down * across) + 1) * plane;
    });
    offer(divide_up(tile[0], 8) * tile[1] * across, plane, [&](int i, int& base, int& end) {
      base = i / (tile[1] * across) * 8 * plane + i / across % tile[1] * line + i % across * 8;
      end = kNoEnd;
    });
  }
  return best.group > 0 ? std::optional(best) : std::nullopt;
}

std::optional<ImplicitGemmPlan> plan_implicit_gemm_wgmma(const ConvProblem& p, const ImplicitGemmPlan& axes) {
  if (axes.axis[2].fold > kMostSplits) return std::nullopt;
  if (std::max(axes.axis[0].in_step, axes.axis[1].in_step) > kMostStep) return std::nullopt;  // of TMA
  const int64_t of_sample = input_bytes(p);
  // More only for one sample, if that is no more than its input and its result.
  if (of_sample > std::max(kMostPacked, sample_bytes(p))) return std::nullopt;
  if (packed_voxels(p) > kMostPackedVoxels) return std::nullopt;
  ImplicitGemmPlan best = axes;
  best.cycles = -1;
  best.samples = samples_at_once(p, of_sample);
  const auto widths = implicit_gemm_widths(arithmetic_of(p), true);
  const auto asked = asked_width(p, widths);
  const bool pairs = may_pair(p, axes);
  int taps = 1;
  for (const AxisPhases& axis : axes.axis) taps *= axis.kernel;
  const auto can_slide_by = [&](int columns) {
    return p.choice.slide != 1 && may_slide(columns, three_products(p)) && can_slide(axes.axis[0]);
  };
  const bool has_to_slide =
      p.choice.slide == 2 && (asked ? can_slide_by(*asked) : std::any_of(widths.begin(), widths.end(), can_slide_by));
  // How tiles are taken: plain, in two phases, or sliding.
  struct Way {
    int tile_phases, slide;
  };
  for (const int columns : widths)
    for (const auto [tile_phases, slide] : {Way{1, 1}, Way{2, 1}, Way{1, kSlidingTaps}}) {
      if (asked && columns != *asked) continue;
      if (slide > 1 ? !can_slide_by(columns) : has_to_slide) continue;
      if (tile_phases == 2 ? !pairs || p.choice.tile_phases == 1 : pairs && p.choice.tile_phases == 2) continue;
      ImplicitGemmPlan plan = axes;
      plan.samples = best.samples;
      plan.columns = columns;
      plan.column_tiles = divide_up(static_cast<int>(p.out_channels), columns);
      plan.tile_phases = tile_phases;
      plan.slide = slide;
      if (tile_phases == 2) merge_halos(plan.axis[2]);
      if (slide > 1) slide_along(plan.axis[0]);
      const bool asked_depth = p.choice.k_blocks > 0 && plan.k_blocks % p.choice.k_blocks == 0;
      for (int depth = 1; depth <= kMostDepth && depth * taps <= kMaxTaps; ++depth) {
        if (asked_depth ? depth != p.choice.k_blocks : plan.k_blocks % depth != 0) continue;
        plan.stage_k_blocks = depth;
        choose_tile(p, plan);
        if (plan.cycles >= 0 && (best.cycles < 0 || plan.cycles < best.cycles)) best = plan;
      }
    }
  return best.cycles >= 0 && finish(p, best) ? std::optional(best) : std::nullopt;
}

}  // namespace voxgrad::cuda
