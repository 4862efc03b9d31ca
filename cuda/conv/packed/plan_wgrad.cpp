// The plans of wgrad by wgmma: which taps and channels a CTA sums, and over which tile of voxels it slides, so that
// tensor cores, shared memory and producers are busy for the least time.
#include <algorithm>
#include <numeric>

#include "cuda/conv/plan_common.h"

namespace voxgrad::cuda {
namespace {

constexpr int kMostColumnOctets = 16, kMostLines = 1024, kMostTaps = 1024;  // lines: of a plane of x; taps: of an axis
constexpr int kStatic = 2048;                            // bytes of shared memory: barriers, what the CTA sums
constexpr double kReach = 1 << 28, kBytesAClock = 2000;  // positions of an axis; bytes of memory
constexpr double kFromL2 = 40;                           // bytes a clock, of a multiprocessor
constexpr int kMostLineWords = 4 * kCopyThreads - 3;     // each thread copies 4, that begin at a multiple of 4

/// The axis for a CTA with so many taps of it.
SlidingAxis sliding_axis(const ConvProblem& p, int a, int taps) {
  const int stride = static_cast<int>(p.geometry.stride[a]), dilation = static_cast<int>(p.geometry.dilation[a]);
  SlidingAxis axis{};
  axis.count = static_cast<int>(p.out_size[a]);
  axis.taps = taps;
  axis.pieces = divide_up(p.kernel[a], taps);
  axis.in_stride = stride;
  axis.dilation = dilation;
  axis.padding = static_cast<int>(p.geometry.padding[a]);
  axis.in_step = taps == 1 ? stride : std::gcd(stride, dilation);
  axis.tap_step = taps == 1 ? 1 : dilation / axis.in_step;
  axis.span = (taps - 1) * axis.tap_step + 1;
  axis.advance = std::min(stride / axis.in_step, axis.span);
  return axis;
}

/// Numbers of taps of a CTA that are worth a look: all, or near-equal pieces of them.
std::vector<int> tap_counts(int64_t kernel) {
  std::vector<int> result;
  for (int pieces = 1; pieces <= 4 && pieces <= kernel; ++pieces) {
    const int taps = divide_up(kernel, pieces);
    if (result.empty() || taps < result.back()) result.push_back(taps);
  }
  if (result.back() > 1) result.push_back(1);
  return result;
}

/// Clocks in which a plane of x comes. Of floats: in which its lines are copied, then split, by warps of their
/// own. The constants, as those of complete(), are a fit to times of some hundred plans of ten shapes.
struct StagingClocks {
  double copying, finishing;
};
StagingClocks staging_clocks(const ConvProblem& p, const PackedWgradPlan& plan) {
  const int rows = plan.height.rows(plan.height.tile), channels = plan.column_octets * 8;
  if (elements_of(p) == 2) return {300 + rows * plan.column_octets * plan.pairs * 256 / kFromL2, 0};
  const int chunks = divide_up(plan.line_words + 3, 4), quads = 2 * plan.pairs;
  const int copied = std::min(kCopyThreads / chunks, channels),
            split_channels = std::min(kSplitThreads / quads, channels);
  const int copy_shares = std::min(kCopyThreads / (chunks * copied), rows);
  const int shares = std::min(kSplitThreads / (quads * split_channels), rows);
  const double copy = std::max(43.0, copied * copy_shares * chunks * 16 / kFromL2);
  return {1370 + divide_up(channels, copied) * divide_up(rows, copy_shares) * copy,
          200 + divide_up(channels, split_channels) * divide_up(rows, shares) * plan.x_shifts * 66.0 * parts(p)};
}

/// Fills in how the width and y's channels are cut.
void choose_rows(const ConvProblem& p, int y_shifts, PackedWgradPlan& plan) {
  const int stride = static_cast<int>(p.geometry.stride[2]), dilation = static_cast<int>(p.geometry.dilation[2]);
  const int common = std::gcd(stride, dilation), octets = divide_up(p.out_channels, 8);
  const int kernel = static_cast<int>(p.kernel[2]);
  plan.tap_step = stride / common;
  plan.shift = dilation / common;
  plan.y_shifts = y_shifts;
  plan.y_shift_tiles = 0;
  for (int tap = 0; tap < std::min(plan.tap_step, kernel); ++tap)
    plan.y_shift_tiles += divide_up(divide_up(kernel - tap, plan.tap_step), y_shifts);
  plan.x_shifts = 1;
  plan.row_tiles = divide_up(octets, 8 / y_shifts);
  plan.row_octets = divide_up(octets, plan.row_tiles);
}

/// Ranges of so many sliding tiles in all samples: those that are packed together have ranges of their own.
int64_t ranges_of(const ConvProblem& p, const PackedWgradPlan& plan, int64_t range) {
  const int64_t of_sample = plan.sliding_tiles / p.batch, rest = p.batch % plan.samples;
  return p.batch / plan.samples * divide_up(plan.samples * of_sample, range) + divide_up(rest * of_sample, range);
}

/// Blocks of a range.
int64_t tiles_of(const ConvProblem& p, const PackedWgradPlan& plan) {
  return p.groups * plan.x_shift_tiles * plan.row_tiles * plan.column_tiles * plan.depth.pieces * plan.height.pieces;
}

/// Clocks of a CTA's tensor cores for the products of a k-block.
double tensor_clocks(const ConvProblem& p, const PackedWgradPlan& plan) {
  return 1.08 * plan.products * (plan.by_k_blocks ? 1 : 2) * (three_products(p) ? 3 : 1) * plan.columns / 2;
}

/// The least clocks of a range and of all, for so many sliding tiles of `sliding_tile` clocks, by ranges whose CTAs
/// fill the GPU.
void choose_ranges(const ConvProblem& p, PackedWgradPlan& plan, double sliding_tile) {
  const int64_t tiles = tiles_of(p, plan);
  const int64_t voxels = int64_t{plan.depth.tile} * plan.height.tile * plan.pairs * 8 * elements_of(p);
  const int64_t most = std::max<int64_t>(1, most_voxels(p) / voxels * (plan.by_k_blocks ? 2 : 1));
  plan.ranges = 1;
  const auto at_a_time = static_cast<double>(packed_y_bytes(p, plan));
  const double packed = at_a_time / static_cast<double>(plan.samples) * static_cast<double>(p.batch);
  const double inputs = static_cast<double>(input_bytes(p, plan));
  const double bytes = static_cast<double>(workspace_bytes(p, plan)) - at_a_time -
                       inputs * static_cast<double>(plan.samples);  // of a range
  const double begin = 4000 + plan.columns * plan.products * 16.0;
  const double read = static_cast<double>(p.batch * p.groups * p.out_channels * p.out_size[0] * p.out_size[1]) *
                      static_cast<double>(p.out_size[2]) * 4 / elements_of(p);
  const double packing = 6000 + (read + packed + 2 * inputs * static_cast<double>(p.batch)) / kBytesAClock;
  plan.cycles = -1;
  int64_t before = 0;
  for (int waves = 1; waves <= 16; ++waves) {
    int64_t ranges =
        std::clamp(kMultiprocessors * waves / tiles, divide_up(plan.sliding_tiles, most), plan.sliding_tiles);
    ranges = std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(kMostSums) / bytes), 1, ranges);
    int64_t range = divide_up(plan.sliding_tiles, ranges);
    ranges = ranges_of(p, plan, range);
    while (static_cast<double>(ranges) * bytes > kMostSums && range < plan.sliding_tiles) {
      range += (range + 7) / 8;
      ranges = ranges_of(p, plan, range);
    }
    if (ranges == before) continue;
    before = ranges;
    const auto times = static_cast<double>(divide_up(ranges * tiles, kMultiprocessors));
    const double cycles = packing + times * (begin + static_cast<double>(range) * sliding_tile) +
                          static_cast<double>(ranges) * bytes / kBytesAClock;
    if (plan.cycles >= 0 && cycles >= plan.cycles) continue;
    plan.cycles = cycles;
    plan.range = range;
    plan.ranges = ranges;
  }
}

/// Whether boxes of x can be staged as they shall lie: consecutive lines, and of halves by TMA.
bool can_stage(const ConvProblem& p, const PackedWgradPlan& plan) {
  const SlidingAxis& height = plan.height;
  const int rows = height.rows(height.tile);
  if (rows > kMostLines) return false;
  const bool apart = height.in_stride > height.span * height.in_step;  // voxels share no line
  if (elements_of(p) == 1)                                             // lines of a residue are at equal distances
    return (height.tap_step == 1 || !apart) && plan.line_words <= kMostLineWords &&
           int64_t{rows} * plan.column_octets * 8 * plan.line_words * 4 <= p.shared_limit;
  const int step = height.tap_step * height.in_step, lines = divide_up(rows, height.tap_step);
  return !apart && step <= kMostStep && (lines - 1) * step < kMostBox && p.geometry.stride[2] <= kMostSplits;
}

/// Fills in the tile and the cost; false if it does not fit.
bool complete(const ConvProblem& p, PackedWgradPlan& plan) {
  if (!can_stage(p, plan)) return false;
  plan.height.tiles = divide_up(plan.height.count, plan.height.tile);
  plan.depth.tiles = divide_up(plan.depth.count, plan.depth.tile);
  const int words = 8 * plan.pairs * elements_of(p);
  plan.width_tiles = divide_up(p.out_size[2] + (plan.y_shifts - 1) * plan.shift, words);
  plan.sliding_tiles = p.batch * plan.depth.tiles * plan.height.tiles * plan.width_tiles;
  if (static_cast<double>(plan.sliding_tiles) > kReach) return false;
  plan.x_stages = std::min(plan.depth.span + 2 * plan.depth.advance + 1, kMostWgradStages);
  plan.y_stages = 3;
  plan.raw_stages = elements_of(p) == 1 ? 3 : 0;
  if (plan.x_stages <= plan.depth.span) return false;  // one is being staged
  while (memory_of(p, plan).total > p.shared_limit - kStatic) {
    if (plan.raw_stages > 2)
      --plan.raw_stages;
    else if (plan.y_stages > 2)
      --plan.y_stages;
    else if (plan.x_stages > plan.depth.span + 1)
      --plan.x_stages;
    else
      return false;
  }
  plan.late = may_be_late(arithmetic_of(p)) && plan.x_stages >= plan.depth.span + 2 * plan.depth.advance;
  plan.samples = 1;
  const int64_t lattice = packed_y_bytes(p, plan), inputs = input_bytes(p, plan), sample = lattice + inputs;
  if (lattice + (elements_of(p) == 2 ? inputs : 0) > std::max(kMostPacked, sample_bytes(p))) return false;
  plan.samples = std::clamp<int64_t>(p.choice.samples > 0 ? p.choice.samples : kMostPacked / sample, 1, p.batch);
  plan.samples = divide_up(p.batch, divide_up(p.batch, plan.samples));
  const int k_blocks = plan.height.tile * plan.pairs;
  const double products =
      static_cast<double>(k_blocks) * plan.products * (plan.by_k_blocks ? 1 : 2) * (three_products(p) ? 3 : 1);
  const double stores_x = 2.0 * plan.pairs * plan.height.rows(plan.height.tile) * plan.x_shifts * plan.column_octets;
  const double loads_y = 2.0 * plan.pairs * plan.height.tile * plan.row_octets * plan.y_shifts;
  const double stores = parts(p) * ((elements_of(p) == 1 ? 3 : 1) * plan.depth.advance * stores_x + loads_y);
  const double tensor = k_blocks * tensor_clocks(p, plan), shared = products * (16 + plan.columns / 4.0) + stores;
  const double multiplying = std::max(tensor, shared * (elements_of(p) == 1 ? 1.17 : 1.05)) + 250 +
                             (three_products(p) ? 60 * plan.products : 0);
  // As many planes as there are stages for are on their way, of which each voxel of y needs `advance`.
  const double advance = plan.depth.advance, ahead = plan.x_stages - plan.depth.span;
  const double copying_y = elements_of(p) == 2 ? memory_of(p, plan).y_stage / kFromL2 : 0;
  const auto [copying, finishing] = staging_clocks(p, plan);
  const double staging =
      std::max(advance * std::max(copying, finishing) + copying_y, (advance * finishing + 500) * advance / ahead);
  const double both = elements_of(p) == 2 ? 0.1 : three_products(p) ? 0.5 : 0.35;  // they share memory
  const double plane = std::max(multiplying, staging) + both * std::min(multiplying, staging);
  const double begin = (plan.depth.span - advance) * copying;
  const double depth = static_cast<double>(plan.depth.count) / plan.depth.tiles;
  choose_ranges(p, plan, depth * plane + begin);
  return true;
}

/// Words of a line that a CTA reads for all its x shifts, at most.
int line_words(const ConvProblem& p, const PackedWgradPlan& plan) {
  const int kernel = static_cast<int>(p.kernel[2]);
  int most = 0, tile = 0, first = 0, last = 0;  // taps of a CTA
  for (int residue = 0; residue < std::min(plan.tap_step, kernel); ++residue)
    for (int tap = residue; tap < kernel; tap += plan.y_shifts * plan.tap_step, ++tile) {
      first = tile % plan.x_shifts == 0 ? tap : std::min(first, tap);
      last = tile % plan.x_shifts == 0 ? tap : std::max(last, tap);
      most = std::max(most, last - first);
    }
  const auto step = static_cast<double>(p.geometry.stride[2]);
  return static_cast<int>(
      std::min(kReach, (8 * plan.pairs - 1) * step + most * static_cast<double>(p.geometry.dilation[2]) + 1));
}

/// Looks at all tiles.
void look_at_tiles(const ConvProblem& p, PackedWgradPlan plan, std::optional<PackedWgradPlan>& best) {
  const int elements = elements_of(p);
  for (plan.pairs = 1; plan.pairs <= 4; plan.pairs *= 2) {
    if (p.choice.pairs > 0 ? plan.pairs != p.choice.pairs
                           : plan.pairs > 1 && p.out_size[2] <= 4 * plan.pairs * elements)
      continue;
    plan.line_words = elements == 1 ? line_words(p, plan) : 0;
    for (plan.height.tile = 1; plan.height.tile * plan.pairs <= kMostKBlocks; plan.height.tile *= 2) {
      if (plan.height.tile >= 2 * plan.height.count && plan.height.tile > 2) break;
      if (plan.by_k_blocks && plan.height.tile * plan.pairs % 2) continue;
      if (three_products(p) && plan.height.tile * plan.pairs > (plan.by_k_blocks ? 16 : 8)) continue;
      const int voxels = plan.height.tile * plan.pairs * 8 * elements;
      for (int pieces = 1; pieces <= 8; pieces *= 2) {
        const int depth =
            static_cast<int>(std::min<int64_t>(divide_up(plan.depth.count, pieces), most_voxels(p) / voxels));
        if (depth < 1 || (pieces > 1 && depth < 4)) break;
        plan.depth.tile = depth;
        if (complete(p, plan) && (!best || plan.cycles < best->cycles)) best = plan;
        if (plan.sliding_tiles * plan.x_shift_tiles * plan.row_tiles * plan.column_tiles > 512) break;
      }
    }
  }
}

/// The clocks of the products, whatever the tile.
double least_cycles(const ConvProblem& p, const PackedWgradPlan& plan) {
  const auto blocks = static_cast<double>(tiles_of(p, plan));
  const double k_blocks = static_cast<double>(p.batch * p.out_size[0] * p.out_size[1]) *
                          static_cast<double>(p.out_size[2]) / (8 * elements_of(p));
  return k_blocks * tensor_clocks(p, plan) * blocks / kMultiprocessors;
}

/// Looks at all products for a CTA with these taps and channels.
void look_at_products(const ConvProblem& p, PackedWgradPlan plan, std::optional<PackedWgradPlan>& best) {
  const auto widths = wgrad_widths(arithmetic_of(p), true);
  const auto asked = asked_width(p, widths);
  for (const int columns : widths) {
    if (asked && columns != *asked) continue;
    plan.columns = columns;
    plan.plane_products = divide_up(plan.height.taps * plan.x_shifts * plan.column_octets * 8, columns);
    const int all = plan.depth.taps * plan.plane_products, most = most_products(arithmetic_of(p), columns);
    for (const bool by_k_blocks : {false, true}) {
      plan.by_k_blocks = by_k_blocks;
      const int wanted = by_k_blocks ? all : divide_up(all, 2);
      if (wanted > most || (!by_k_blocks && all == 1)) continue;
      plan.products = std::max<int>(wanted, std::min<int>(p.choice.m_tiles, most));
      if (!best || least_cycles(p, plan) < best->cycles) look_at_tiles(p, plan, best);
    }
  }
}

}  // namespace

WgradSharedMemory memory_of(const ConvProblem& p, const PackedWgradPlan& plan) {
  constexpr int kOctet = 128;                                // bytes of 8 channels of a quad, or of 8 voxels
  const int apart = plan.pairs <= 2 ? 64 / plan.pairs : 16;  // for which neighbours' words lie in different banks
  WgradSharedMemory m{};
  const int lines = plan.height.rows(plan.height.tile);
  m.x_lines = divide_up(lines, plan.height.tap_step) * plan.height.tap_step;
  if (elements_of(p) == 2) {
    m.x_pitch = m.y_pitch = kOctet;
    m.x_octet = 2 * plan.pairs * kOctet;
    m.y_octet = plan.height.tile * m.x_octet;
    m.x_stage = m.x_lines * plan.column_octets * m.x_octet;
    m.y_stage = plan.row_octets * plan.y_shifts * m.y_octet;
    // Products read all 64 rows and whole columns, even of the last line.
    const int of_y = plan.y_stages * m.y_stage, beyond = (8 - plan.row_octets * plan.y_shifts) * m.y_octet;
    m.total = plan.x_stages * m.x_stage + of_y + std::max(beyond, plan.columns / 8 * m.x_octet - of_y);
    return m;
  }
  m.x_octet = m.y_octet = kOctet;
  m.x_pitch = m.x_lines * plan.x_shifts * plan.column_octets * kOctet + apart;
  m.y_pitch = plan.height.tile * plan.row_octets * plan.y_shifts * kOctet + apart;
  m.x_stage = parts(p) * 2 * plan.pairs * m.x_pitch;
  m.y_stage = parts(p) * 2 * plan.pairs * m.y_pitch;
  // Products read whole rows and columns, even of the last line. (Two quads of them: as if they were consecutive, as
  // compute-sanitizer seems to take them.)
  m.total = plan.x_stages * m.x_stage + plan.y_stages * m.y_stage + 2 * kOctet * std::max(8, plan.columns / 8);
  m.raw_pitch = divide_up(plan.line_words + 3, 4) * 16;
  m.raw_stage = m.x_lines * plan.column_octets * 8 * m.raw_pitch;
  m.total += plan.raw_stages * m.raw_stage;
  return m;
}

std::optional<PackedWgradPlan> plan_packed_wgrad(const ConvProblem& p) {
  if (p.dtype == DType::f64 || p.choice.plain || !may_use_wgmma(p)) return std::nullopt;
  if (p.batch < 1 || p.groups < 1 || p.in_channels < 1 || p.out_channels < 1) return std::nullopt;
  double lattice = static_cast<double>(p.out_channels * p.groups) * 4 / elements_of(p);  // bytes of a sample
  for (int a = 0; a < 3; ++a) {
    const ConvGeometry& g = p.geometry;
    const double reach = static_cast<double>(p.out_size[a]) * static_cast<double>(g.stride[a]) +
                         static_cast<double>(p.kernel[a]) * static_cast<double>(g.dilation[a]) +
                         static_cast<double>(g.padding[a]) + static_cast<double>(p.in_size[a]);
    if (reach > kReach || p.kernel[a] > kMostTaps || p.in_size[a] < 1 || p.out_size[a] < 1) return std::nullopt;
    lattice *= static_cast<double>(p.out_size[a]);
  }
  if (lattice > kMostPacked || std::max({p.batch, p.in_channels, p.groups}) > kReach / 8) return std::nullopt;
  if (elements_of(p) == 2 && packed_voxels(p) > kMostPackedVoxels) return std::nullopt;
  PackedWgradPlan plan{};
  const int octets = divide_up(p.in_channels, 8), row_octets = divide_up(p.out_channels, 8);
  std::optional<PackedWgradPlan> best;
  const int of_residue =
      divide_up(p.kernel[2], p.geometry.stride[2] / std::gcd(p.geometry.stride[2], p.geometry.dilation[2]));
  for (int y_shifts = std::min(8 / std::min(row_octets, 8), of_residue); y_shifts > 0; --y_shifts) {
    choose_rows(p, y_shifts, plan);
    int before = 0;
    for (int tiles = divide_up(octets, kMostColumnOctets); tiles <= octets; ++tiles) {
      plan.column_octets = divide_up(octets, tiles);
      plan.column_tiles = divide_up(octets, plan.column_octets);
      if (plan.column_octets == before) continue;
      before = plan.column_octets;
      for (const int depth_taps : tap_counts(p.kernel[0]))
        for (const int height_taps : tap_counts(p.kernel[1])) {
          plan.depth = sliding_axis(p, 0, depth_taps);
          plan.height = sliding_axis(p, 1, height_taps);
          const int most = std::min(plan.y_shift_tiles, elements_of(p) == 1 ? kMostXShifts : 1);
          for (plan.x_shifts = 1; plan.x_shifts <= most; ++plan.x_shifts) {
            if (p.choice.x_shifts > 0 && plan.x_shifts != std::min<int>(p.choice.x_shifts, most)) continue;
            plan.x_shift_tiles = divide_up(plan.y_shift_tiles, plan.x_shifts);
            look_at_products(p, plan, best);
          }
        }
    }
  }
  if (best && static_cast<double>(blocks_of(p, *best)) >= 2147483647.0) return std::nullopt;
  return best;
}

int64_t packed_y_bytes(const ConvProblem& p, const PackedWgradPlan& plan) {
  return p.groups * plan.row_tiles * plan.samples * plan.depth.count * plan.height.tiles * plan.width_tiles *
         memory_of(p, plan).y_stage;
}

int64_t input_bytes(const ConvProblem& p, const PackedWgradPlan&) {
  if (elements_of(p) == 1)  // lines of words are copied as they lie along the width; others are made to
    return p.in_stride[2] == 1 || p.in_size[2] == 1
               ? 0
               : p.groups * p.in_channels * p.in_size[0] * p.in_size[1] * p.in_size[2] * int64_t{sizeof(float)};
  return input_bytes(p);
}

int64_t workspace_bytes(const ConvProblem& p, const PackedWgradPlan& plan) {
  const int64_t taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  return packed_y_bytes(p, plan) + plan.samples * input_bytes(p, plan) +
         plan.ranges * (plan.by_k_blocks ? 2 : 1) * p.groups * p.out_channels * taps * ((p.in_channels + 7) / 8 * 8) *
             static_cast<int64_t>(sizeof(float));
}

int64_t blocks_of(const ConvProblem& p, const PackedWgradPlan& plan) { return plan.ranges * tiles_of(p, plan); }

}  // namespace voxgrad::cuda
