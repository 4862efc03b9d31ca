// The plans of the weight gradients: a tile of rows (channels of y) and columns (tap, channel of x), and a box of
// voxels, such that what a multiprocessor multiplies and stages costs it least.
#include <algorithm>
#include <cmath>

#include "cuda/conv/plan.h"

namespace voxgrad::cuda {
namespace {

constexpr int kBoxWords = 128, kWeightShared = 112 * 1024;  // with which two blocks fit on sm_90
constexpr int kMaxTaps = 1024, kMaxClasses = 64;
constexpr int64_t kWorkspace = int64_t{256} << 20;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

int divide_up(int64_t value, int64_t divisor) { return static_cast<int>((value + divisor - 1) / divisor); }

bool three_products(const ConvProblem& p) { return arithmetic_of(p) == ConvArithmetic::tf32x3; }

int elements_of(const ConvProblem& p) { return p.dtype == DType::f32 ? 1 : 2; }  // a word

int weight_shared(const ConvProblem& p) { return static_cast<int>(std::min<int64_t>(kWeightShared, p.shared_limit)); }

/// Taps of each class.
std::vector<int> class_taps(const WeightPlan& plan) {
  std::vector<int> result;
  for (int number = 0;; ++number) {
    int rest = number, taps = 1;
    for (int a = 2; a >= 0; --a) {
      taps *= plan.axis[a].part[rest % plan.axis[a].parts].taps;
      rest /= plan.axis[a].parts;
    }
    if (rest > 0) return result;
    result.push_back(taps);
  }
}

/// Fills in what follows from the box; false if it is too large.
bool extend_box(const ConvProblem& p, WeightPlan& plan) {
  const int elements = elements_of(p);
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
  return true;
}

/// Adds a class; false if there are too many taps.
bool add_class(WeightPlan& plan, const WeightPlan::Class& c) {
  plan.column_tiles += c.tiles;
  plan.columns += plan.blocks8 * c.padded_taps;
  plan.classes.push_back(c);
  int taps = 0;
  for (const WeightPlan::Class& each : plan.classes) taps += each.padded_taps;
  return taps <= kMaxTaps;
}

void clear_classes(WeightPlan& plan) {
  plan.classes.clear();
  plan.column_tiles = plan.columns = 0;
  plan.shared_bytes = plan.table_bytes = 0;
}

// ---- mma.sync

/// Columns of 8 that a block of 4 warps takes beside so many rows (weight_columns()).
int most_columns(const ConvProblem& p, int rows) { return 4 * (rows > 32 || three_products(p) ? 7 : 14); }

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

/// Fills in the tiles; false if they do not fit.
bool tile_weight(const ConvProblem& p, WeightPlan& plan) {
  const int room = weight_shared(p) - plan.rows * (kBoxWords + 4) * 4;
  const int most = most_columns(p, plan.rows);
  clear_classes(plan);
  double staged = 0;
  for (const int taps : class_taps(plan)) {
    const WeightPlan::Class c = tile_class(taps, plan.blocks8, most, plan.pitch, room);
    const int blocks = std::max(1, c.tile_columns / c.padded_taps);
    const int bytes = (plan.rows * (kBoxWords + 4) + blocks * 8 * plan.pitch) * 4;
    if (bytes > kWeightShared || !add_class(plan, c)) return false;
    plan.shared_bytes = std::max(plan.shared_bytes, bytes);
    staged += static_cast<double>(c.tiles) * (plan.rows * kBoxWords + blocks * 8 * plan.halo_words);
  }
  // Halves go through registers.
  plan.buffers = elements_of(p) == 1 && 2 * plan.shared_bytes <= weight_shared(p) ? 2 : 1;
  const double products = 16.0 * (plan.rows / 16) * most * 1.46 * (three_products(p) ? 3 : 1);
  const double of_box = plan.column_tiles * (products + 400) + staged * (plan.buffers == 2 ? 0.15 : 0.3);
  plan.cycles = of_box * static_cast<double>(plan.boxes) * plan.row_tiles * static_cast<double>(p.groups);
  return true;
}

// ---- wgmma

/// The least compiled height of a tile with so many columns of 8.
int stacks_of(int columns) {
  return *std::find_if(std::begin(kWgmmaStacks), std::end(kWgmmaStacks), [&](int s) { return 8 * s >= columns; });
}

/// Cycles of a stack's product: of tensor cores, or of shared memory, from which x comes word by word.
double product_cycles(const ConvProblem& p, int rows) {
  const int products = three_products(p) ? 3 : 1;
  return std::max(0.55 * rows * products, 16 + rows / 4.0 * products);
}

/// Tiles of a class that are worth a look: of whole blocks of 8 channels, of pieces of one, or whatever fills a height.
std::vector<WeightPlan::Class> wgmma_tiles(const ConvProblem& p, int taps, int blocks8, int most) {
  std::vector<WeightPlan::Class> result;
  const auto add = [&](int tile, int padded_taps) {
    result.push_back({taps, padded_taps, tile, divide_up(int64_t{blocks8} * padded_taps, tile)});
  };
  if (p.choice.stacks == 0) {
    for (int blocks = 1; blocks <= blocks8 && blocks * taps <= 8 * most; ++blocks) add(blocks * taps, taps);
    for (int pieces = divide_up(taps, 8 * most), i = 0; i < 3 && pieces > 1; ++pieces, ++i) {
      const int tile = divide_up(taps, pieces);
      add(tile, tile * pieces);
    }
  }
  for (const int stacks : kWgmmaStacks)
    if (stacks <= most && (p.choice.stacks == 0 || stacks == std::min<int>(p.choice.stacks, most)))
      add(std::min(8 * stacks, blocks8 * taps), taps);
  return result;
}

/// Blocks of 8 channels that a tile may touch.
int touched_blocks(const WeightPlan::Class& c, int blocks8) {
  if (c.padded_taps % c.tile_columns == 0) return 1;
  const int most = c.tile_columns % c.padded_taps == 0 ? c.tile_columns / c.padded_taps
                                                       : (c.tile_columns - 2 + c.padded_taps) / c.padded_taps + 1;
  return std::min(most, blocks8);
}

/// Cycles of a class a box.
double wgmma_cycles(const ConvProblem& p, const WeightPlan& plan, const WeightPlan::Class& c) {
  const int steps = divide_up(plan.box[0] * plan.box[1] * plan.box[2], 8 * elements_of(p));
  const int last = plan.blocks8 * c.padded_taps - (c.tiles - 1) * c.tile_columns;
  const double stacks = (c.tiles - 1.0) * stacks_of(c.tile_columns) + stacks_of(last);
  const double blocks = std::min<double>(touched_blocks(c, plan.blocks8), (c.tile_columns - 1.0) / c.padded_taps + 1);
  // Halves of x go through registers, one by one.
  const double staged =
      plan.rows * plan.box_words * 0.1 + blocks * 8 * plan.halo_words * (p.dtype == DType::f32 ? 0.12 : 0.3);
  return stacks * steps * product_cycles(p, plan.rows) * 1.15 +
         c.tiles * (300 + staged * (plan.buffers == 2 ? 1 : 1.6));
}

/// Fills in the tiles; false if they do not fit.
bool tile_wgmma(const ConvProblem& p, WeightPlan& plan) {
  const int words_y = plan.box_words / 4 * quad_words(plan.rows) * (three_products(p) ? 2 : 1);
  const int most = most_stacks(arithmetic_of(p), plan.rows);
  clear_classes(plan);
  plan.table_bytes = round_up(plan.halo_words * 8, 16);
  const int room = (weight_shared(p) - plan.table_bytes) / plan.buffers;
  plan.cycles = 0;
  for (const int taps : class_taps(plan)) {
    const WeightPlan::Class* best = nullptr;
    double least = 0;
    const auto candidates = wgmma_tiles(p, taps, plan.blocks8, most);
    const auto bytes = [&](const WeightPlan::Class& c) {
      return (words_y + touched_blocks(c, plan.blocks8) * 8 * plan.pitch) * 4;
    };
    for (const WeightPlan::Class& c : candidates) {
      const double cycles = wgmma_cycles(p, plan, c);
      if (bytes(c) > room || (best && cycles >= least)) continue;
      best = &c;
      least = cycles;
    }
    if (!best || !add_class(plan, *best)) return false;
    plan.shared_bytes = std::max(plan.shared_bytes, bytes(*best));
    plan.cycles += least;
  }
  plan.cycles *= static_cast<double>(plan.boxes) * plan.row_tiles * static_cast<double>(p.groups);
  return true;
}

/// Whether offsets in a halo fit the table that the kernel makes of them.
bool fits_table(const ConvProblem& p, const WeightPlan& plan) {
  double reach = 0;  // elements
  for (int a = 0; a < 3; ++a) {
    if (p.in_stride[a] < 0 || plan.extent[a] > (a < 2 ? 1024 : 4096)) return false;
    reach += static_cast<double>(p.in_stride[a]) * plan.axis[a].in_step * plan.extent[a];
  }
  return reach < (1 << 29);
}

// ---- both

int choose_rows(const ConvProblem& p, bool wgmma) {
  const auto compiled = weight_widths(arithmetic_of(p), wgmma);
  if (const auto asked = asked_width(p, compiled)) return *asked;
  int best = compiled.front();
  for (const int rows : compiled) {
    const auto computed = [&](int r) {
      return divide_up(p.out_channels, r) * (wgmma ? product_cycles(p, r) + 6 : r + 8.0);
    };
    if (computed(rows) <= computed(best)) best = rows;
  }
  return best;
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

/// The best box and tiles for one of the kernels.
std::optional<WeightPlan> best_weight(const ConvProblem& p, WeightPlan plan, bool wgmma) {
  WeightPlan best{};
  best.cycles = -1;
  const int elements = elements_of(p);
  const auto consider = [&] {
    if ((wgmma ? tile_wgmma(p, plan) : tile_weight(p, plan)) && (best.cycles < 0 || plan.cycles < best.cycles))
      best = plan;
  };
  plan.wgmma = wgmma;
  plan.rows = choose_rows(p, wgmma);
  plan.row_tiles = divide_up(p.out_channels, plan.rows);
  plan.blocks8 = divide_up(p.in_channels, 8);
  for (plan.box_words = wgmma ? kBoxWords / 2 : kBoxWords; plan.box_words <= kBoxWords; plan.box_words *= 2)
    for (int w = 8 * elements; w <= plan.box_words * elements; w += 8 * elements)
      for (int h = 1; w * h <= plan.box_words * elements; ++h) {
        plan.box[0] = plan.box_words * elements / (w * h);
        plan.box[1] = h;
        plan.box[2] = w;
        if (!extend_box(p, plan) || (wgmma && !fits_table(p, plan))) continue;
        for (plan.buffers = wgmma ? 2 : 1; plan.buffers > 0; plan.buffers = wgmma ? plan.buffers - 1 : 0) consider();
      }
  if (best.cycles < 0) return std::nullopt;
  choose_range(p, best);
  const double blocks = static_cast<double>(best.ranges) * best.column_tiles * best.row_tiles * p.groups;
  if (blocks >= 2147483647.0) return std::nullopt;
  return best;
}

}  // namespace

std::span<const int> weight_widths(ConvArithmetic, bool wgmma) {
  static constexpr int kWidths[] = {16, 32, 48, 64}, kWgmmaWidths[] = {8, 16, 24, 32, 48, 64};
  if (wgmma) return kWgmmaWidths;
  return kWidths;
}

std::optional<WeightPlan> plan_weight(const ConvProblem& p) {
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
  if (may_use_wgmma(p))
    if (auto best = best_weight(p, plan, true)) return best;
  return best_weight(p, plan, false);
}

int64_t workspace_bytes(const ConvProblem& p, const WeightPlan& plan) {
  return plan.ranges * p.groups * p.out_channels * plan.columns * 8 * static_cast<int64_t>(sizeof(float));
}

}  // namespace voxgrad::cuda
