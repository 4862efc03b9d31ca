// Decides which problems the kernels for few channels support, and chooses their CTA tiles.
#include "cuda/conv/plan/small_channel.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"

namespace voxgrad::cuda {
namespace {

constexpr double kReach = 1 << 28;
constexpr int kMultiprocessor = 228 * 1024;  // bytes of shared memory of an SM

bool few_channels(const ConvProblem& p) {
  const auto few = [](int64_t channels) { return channels >= 1 && channels <= kMaxSmallChannels; };
  return p.wgmma && p.dtype != DType::f64 && p.batch >= 1 && p.groups >= 1 && few(p.in_channels) &&
         few(p.out_channels) && p.batch * p.groups < kReach;
}

/// Returns true if 32-bit offsets from the first channel reach all channels of a group.
bool are_in_reach(const ConvProblem& p, int64_t channels, int64_t stride) {
  constexpr int64_t kMaxBytes = int64_t{3} << 30;  // a plane has up to 2^30 bytes
  return channels == 1 ||
         (stride >= 0 && stride <= kMaxBytes / static_cast<int64_t>(item_size(p.dtype)) / (channels - 1));
}

/// Returns true if lines are contiguous and 32-bit offsets reach a whole plane.
bool has_dense_lines(const Triple& size, const Triple& stride) {
  const double reach = static_cast<double>(size[1]) * static_cast<double>(stride[1]) + static_cast<double>(size[2]);
  return (stride[2] == 1 || size[2] == 1) && stride[1] >= 0 && reach < kReach;
}

/// Returns the halo of a tile, or nothing if numbers exceed the range of the kernels.
std::optional<SmallChannelHalo> halo_of(const AxisPhases (&axis)[3]) {
  SmallChannelHalo halo{};
  for (int a = 0; a < 3; ++a) {
    int low = 0, high = 0;
    for (int i = 0; i < axis[a].phases; ++i) {
      const AxisPhase& part = axis[a].phase[i];
      const int last = part.start + (part.taps - 1) * part.step;
      low = i == 0 ? std::min(part.start, last) : std::min({low, part.start, last});
      high = i == 0 ? std::max(part.start, last) : std::max({high, part.start, last});
    }
    halo.step[a] = axis[a].fold;
    halo.low[a] = low;
    halo.span[a] = high - low + 1;
    if (high - low >= 4096 || halo.step[a] >= 4096) return std::nullopt;
  }
  return halo.span[0] >= halo.step[0] ? std::optional(halo) : std::nullopt;  // the kernels cannot skip unread planes
}

/// Fills in the members of a halo that follow from the tile. The distance between channels is `bank` words more than a
/// multiple of `modulus`. Returns false if a plane does not fit into shared memory.
bool extend(const ConvProblem& p, SmallChannelHalo& halo, const int (&tile)[3], int channels, int bank, int modulus) {
  const double lines = (tile[1] - 1.0) * halo.step[1] + halo.span[1],
               positions = (tile[2] - 1.0) * halo.step[2] + halo.span[2];
  if ((lines + 1) * (positions + halo.step[2] + 1) * channels * 4 > static_cast<double>(p.shared_limit)) return false;
  halo.lines = static_cast<int>(lines);
  halo.positions = static_cast<int>(positions);
  halo.run = divide_up(halo.positions, halo.step[2]);
  halo.line = halo.run * halo.step[2];
  halo.channels = channels;
  halo.pitch = round_up(std::max(halo.lines * halo.line - bank, 0), modulus) + bank;
  return true;
}

/// Returns the time in clocks of a plane of the tile, from the instructions of its warps and the transferred bytes. The
/// constants were fitted to measurements: instructions per clock with two CTAs or one CTA per SM, and bytes per clock
/// and SM.
double plane_clocks(double instructions, double bytes, int resident) {
  const double issue = instructions / (resident == 2 ? 1.8 : 1.36), memory = bytes / 18;
  return std::max(issue, memory) + 0.3 * std::min(issue, memory) + 300;
}

/// Returns the number of CTAs that fit on an SM, at most `most`.
int resident_blocks(int shared_bytes, int most) {
  return std::clamp(kMultiprocessor / (shared_bytes + kSmallChannelStaticBytes), 1, most);
}

/// Chooses the depth of sliding tiles, at most `most` planes, so that the CTAs fill the SMs evenly. Returns the total
/// time in clocks, or a negative number if no depth is possible. A plane of a tile takes `plane` clocks. A CTA takes
/// `first` clocks before its first plane.
template <class Plan>
double slide(const ConvProblem& p, Plan& plan, int64_t multiprocessors, int resident, int most, double plane,
             double first) {
  const double columns = static_cast<double>(p.batch * p.groups) * plan.tiles[1] * plan.tiles[2];
  const double places = static_cast<double>(multiprocessors * resident);
  double best = -1;
  const int count = plan.axis[0].count;
  for (const int depth : box_widths(count, most)) {
    const int tiles = divide_up(count, depth);
    const double waves = std::ceil(columns * tiles / places);
    const double cycles = waves * resident * (depth * plane + first + 1500);
    if (best >= 0 && cycles >= best) continue;
    best = cycles;
    plan.tile[0] = depth;
    plan.tiles[0] = tiles;
  }
  return best;
}

/// Sets the number of planes in shared memory, up to those of two steps ahead. If the planes of one step fit while
/// `blocks` CTAs share the SM, no plane needs to be loaded ahead, because the other CTA runs in the meantime.
/// Otherwise, a CTA has the SM for itself and must load at least one plane ahead. Returns false if too few planes fit.
bool choose_stages(const ConvProblem& p, SmallChannelHalo& halo, int blocks, int other_bytes) {
  const auto fitting = [&](int64_t bytes) {
    return static_cast<int>((bytes - kSmallChannelStaticBytes - other_bytes) / (halo.plane() * 4));
  };
  const int shared = fitting(std::min<int64_t>(p.shared_limit, kMultiprocessor / blocks));
  const int most = std::min(halo.span[0] + 2 * halo.step[0], kMaxSmallChannelStages);
  const bool beside = blocks > 1 && shared >= halo.span[0];
  halo.stages = std::min(beside ? shared : fitting(p.shared_limit), most);
  return halo.stages > halo.span[0] || (beside && halo.stages == halo.span[0]);
}

bool finish(const ConvProblem& p, SmallChannelPlan& plan) {
  const int voxels = plan.tile[1] * plan.tile[2];
  if (!extend(p, plan.halo, plan.tile, plan.quads * 4, 8, 16)) return false;
  // With strides, there are more inputs than results, and the producers need a whole SM. Three products and more than
  // 16 columns need the registers of a whole SM.
  const bool strided = plan.halo.step[0] > 1 || plan.halo.step[1] > 1 || plan.halo.step[2] > 1;
  plan.blocks = strided || three_products(p) || plan.columns > 16 ? 1 : 2;
  const int element = static_cast<int>(item_size(p.dtype));
  // The pitch of results puts the channels of a warp into different banks, as far as their alignment in memory allows.
  const int64_t lines = std::min<int64_t>(int64_t{plan.tile[1]} * plan.axis[1].out_step, p.out_size[1]);
  if (lines * p.out_size[2] > p.shared_limit) return false;
  const int unit = 64 / element, bank = (plan.axis[2].out_step == 1 ? 16 : 32) / element;
  plan.result_pitch = round_up(static_cast<int>(lines * p.out_size[2]) + 16 / element - bank, unit) + bank;
  const int64_t all_results = 2 * plan.result_pitch * p.out_channels * element;
  const int64_t all_weights = p.kernel[0] * plan.pairs * plan.columns * 8 * parts(p) * 4;
  if (all_results + all_weights > p.shared_limit) return false;
  const int results = static_cast<int>(all_results), weights = static_cast<int>(all_weights);
  const int other = results + weights + round_up(plan.halo.table_bytes(), 16);
  if (!choose_stages(p, plan.halo, plan.blocks, other)) return false;
  plan.shared_bytes = other + plan.halo.stages * plan.halo.plane() * 4;
  plan.tiles[1] = divide_up(plan.axis[1].count, plan.tile[1]);
  plan.tiles[2] = 1;
  // Instructions of a warp: for a pair of units, for a tap along the depth, for a phase and its results, and for
  // staging.
  const double rows16 = plan.row_tiles, words = plan.columns / 8.0, products = three_products(p) ? 3 : 1;
  const double of_pair = 8 + rows16 * 4 + words * (1 + rows16 * products) + (products - 1) * rows16 * (6 + 2 * words);
  const double of_phase = 45 + 26 * rows16 * words;
  const double phases = plan.axis[0].phases * plan.axis[1].phases;
  const double multiplying =
      static_cast<double>(p.kernel[0]) * (plan.pairs * of_pair + plan.axis[1].phases * 22.0) + phases * of_phase;
  const double plane = plan.halo.lines * plan.halo.positions / 32.0 * static_cast<double>(p.in_channels);
  const double staged = plan.halo.step[0] * plane;
  const double bytes =
      element * (staged * 32 + phases * voxels * static_cast<double>(p.out_channels) * plan.axis[2].phases);
  const int resident = resident_blocks(plan.shared_bytes, plan.blocks);
  plan.cycles = slide(p, plan, kMultiprocessors, resident, plan.axis[0].count,
                      plane_clocks(multiplying * kSmallChannelConsumers / 32 + staged * 9, bytes, resident),
                      plane * plan.halo.span[0] * 5 + weights / 8 + 2000);
  return true;
}

}  // namespace

std::vector<int> read_along(const AxisPhases& axis) {
  std::set<int> read;
  for (int i = 0; i < axis.phases; ++i)
    for (int tap = 0; tap < axis.phase[i].taps; ++tap) read.insert(axis.phase[i].start + tap * axis.phase[i].step);
  return {read.begin(), read.end()};
}

std::optional<SmallChannelPlan> plan_small_channel_fprop_dgrad(const ConvProblem& p) {
  if (!few_channels(p) || !has_dense_lines(p.in_size, p.in_stride) || !has_dense_lines(p.out_size, p.out_stride))
    return std::nullopt;
  if (p.out_stride[1] != p.out_size[2] && p.out_size[1] > 1)
    return std::nullopt;  // lines of results must be consecutive
  if (!are_in_reach(p, p.in_channels, p.in_channel_stride)) return std::nullopt;
  SmallChannelPlan plan{};
  for (int a = 0; a < 3; ++a) {
    const auto axis = phases_of(p, a, true);
    if (!axis || !axis->complete || axis->phases == 0 || p.out_size[a] < 1 || p.in_size[a] < 1) return std::nullopt;
    if (axis->out_step > kMaxAxisPhases) return std::nullopt;
    plan.axis[a] = *axis;
  }
  const auto halo = halo_of(plan.axis);
  if (!halo) return std::nullopt;
  plan.halo = *halo;
  const int64_t columns = p.out_channels * plan.axis[2].out_step;
  for (const int fitting : kSmallChannelColumns)
    if (columns <= fitting && plan.columns == 0) plan.columns = fitting;
  if (plan.columns == 0) return std::nullopt;
  plan.quads = static_cast<int>(divide_up(p.in_channels, 4));
  const auto read = static_cast<int64_t>(read_along(plan.axis[2]).size());
  int64_t pairs = 0;
  for (int h = 0; h < plan.axis[1].phases; ++h) pairs += divide_up(plan.axis[1].phase[h].taps * read * plan.quads, 2);
  if (pairs > kMaxSmallChannelPairs || p.kernel[0] > 4096 || plan.axis[2].count > kSmallChannelConsumers)
    return std::nullopt;
  plan.pairs = static_cast<int>(pairs);
  plan.tile[2] = plan.axis[2].count;
  std::optional<SmallChannelPlan> best;
  for (plan.row_tiles = 1; plan.row_tiles <= 2; ++plan.row_tiles)
    for (plan.tile[1] = 1; plan.tile[1] <= std::min(plan.axis[1].count, 128 * plan.row_tiles / plan.tile[2]);
         ++plan.tile[1])
      if ((p.choice.width == 0 || p.choice.width == 128 * plan.row_tiles) && finish(p, plan) &&
          (!best || plan.cycles < best->cycles))
        best = plan;
  if (!best) return std::nullopt;
  const double blocks = static_cast<double>(p.batch * p.groups) * best->tiles[0] * best->tiles[1];
  return blocks < 2147483647.0 ? best : std::nullopt;
}

namespace {

bool finish(const ConvProblem& p, SmallChannelWgradPlan& plan) {
  const int padded[3] = {1, plan.tile[1], round_up(plan.tile[2], 8)};
  for (int a = 0; a < 3; ++a) plan.y.step[a] = plan.y.span[a] = 1;
  plan.y.stages = 2;
  if (!extend(p, plan.x, padded, plan.octets * 8, 4, 8) || !extend(p, plan.y, padded, plan.columns, 4, 8)) return false;
  const int warps = kSmallChannelWgradConsumers / 32;
  const int other = (plan.y.stages * plan.y.plane() + kMaxSmallChannelStages * plan.units) * 4 + plan.x.table_bytes() +
                    plan.y.table_bytes();
  if (!choose_stages(p, plan.x, 1, other)) return false;
  const int sums = warps * small_channel_units(plan.columns) * 8 * plan.columns * 4;  // the sums overwrite the planes
  plan.shared_bytes = std::max(other + plan.x.stages * plan.x.plane() * 4, sums);
  if (plan.shared_bytes + kSmallChannelStaticBytes > p.shared_limit) return false;
  plan.tiles[1] = divide_up(plan.axis[1].count, plan.tile[1]);
  plan.tiles[2] = divide_up(plan.axis[2].count, plan.tile[2]);
  // Instructions of a warp: for 8 voxels, for a plane, and for staging.
  const double octs = plan.tile[1] * padded[2] / 8.0, products = three_products(p) ? 3 : 1, words = plan.columns / 8.0;
  const double of_oct =
      20 + words * 9 +
      small_channel_units(plan.columns) / 2 * (4 + words * products + (products - 1) * (6 + 2 * words));
  const double multiplying = 80 * warps + octs * plan.splits * of_oct;
  const double plane = plan.x.lines * plan.x.positions / 32.0 * static_cast<double>(p.in_channels);
  const double staged = plan.x.step[0] * plane + octs / 4 * static_cast<double>(p.out_channels);
  const double ends =
      (plan.tiles[2] > 1 ? 48.0 : 0) * plan.x.step[0] * plan.x.lines * static_cast<double>(p.in_channels);
  const double bytes =
      static_cast<double>(item_size(p.dtype)) * staged * 32 + ends;  // `ends`: partial sectors at both ends of a line
  const double waiting = plan.x.stages < plan.x.span[0] + plan.x.step[0] ? 1.3 : 1;  // waits for planes to be released
  const int most = static_cast<int>(most_voxels(p) * warps / (octs * 8 * plan.splits));  // planes of a CTA
  plan.cycles = slide(p, plan, kMultiprocessors, 1, std::min(most, plan.axis[0].count),
                      waiting * plane_clocks(multiplying + staged * 10, bytes, 1), plane * plan.x.span[0] * 5 + 6000);
  if (plan.cycles < 0) return false;
  plan.ranges = p.batch * plan.tiles[0] * plan.tiles[1] * plan.tiles[2];
  return true;
}

}  // namespace

std::optional<SmallChannelWgradPlan> plan_small_channel_wgrad(const ConvProblem& p) {
  if (!few_channels(p) || !has_dense_lines(p.in_size, p.in_stride) || !has_dense_lines(p.out_size, p.out_stride))
    return std::nullopt;
  if (!are_in_reach(p, p.in_channels, p.in_channel_stride) || !are_in_reach(p, p.out_channels, p.out_channel_stride))
    return std::nullopt;
  SmallChannelWgradPlan plan{};
  int64_t taps = 1;
  for (int a = 0; a < 3; ++a) {
    const auto axis = phases_of(p, a, true);
    if (!axis || p.out_size[a] < 1 || p.in_size[a] < 1) return std::nullopt;
    plan.axis[a] = *axis;
    taps *= p.kernel[a];
    if (taps > 1024) return std::nullopt;
  }
  const auto halo = halo_of(plan.axis);
  if (!halo) return std::nullopt;
  plan.x = *halo;
  plan.columns = p.out_channels > 8 ? 16 : 8;
  plan.octets = static_cast<int>(divide_up(p.in_channels, 8));
  plan.units = static_cast<int>(taps) * plan.octets;
  for (plan.splits = 1; plan.splits * small_channel_units(plan.columns) < plan.units;) plan.splits *= 2;
  if (plan.splits > kSmallChannelWgradConsumers / 32) return std::nullopt;
  if (2 * plan.units < small_channel_units(plan.columns)) return std::nullopt;  // most products would be unused
  std::optional<SmallChannelWgradPlan> best;
  for (const int width : box_widths(divide_up(plan.axis[2].count, 8), 32))
    for (plan.tile[1] = 1; plan.tile[1] <= std::min(plan.axis[1].count, 64); ++plan.tile[1]) {
      plan.tile[2] = std::min(width * 8, plan.axis[2].count);
      if (finish(p, plan) && (!best || plan.cycles < best->cycles)) best = plan;
    }
  if (!best || static_cast<double>(best->ranges) * static_cast<double>(p.groups) >= 2147483647.0) return std::nullopt;
  return workspace_bytes(p, *best) <= kMaxSums ? best : std::nullopt;
}

int64_t workspace_bytes(const ConvProblem& p, const SmallChannelWgradPlan& plan) {
  return plan.ranges * p.groups * plan.units * 8 * plan.columns * static_cast<int64_t>(sizeof(float));
}

}  // namespace voxgrad::cuda
