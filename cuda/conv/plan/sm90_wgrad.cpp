// Plans the channels-last weight gradient by wgmma.
#include "cuda/conv/plan/sm90_wgrad.h"

#include <algorithm>
#include <bit>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

// Constants of the cost model. Rates are in bytes per clock, and times are in clocks.
constexpr double kFromL2 = 45;            // rate at which an SM reads from L2
constexpr double kUnit = 1500;            // time per work unit
constexpr double kStage = 150;            // time per stage
constexpr double kLatency = 3000;         // time from the request of a stage until it is loaded
constexpr double kToMemory = 16;          // rate at which an SM writes sums or results
constexpr double kToShared = 64;          // rate at which an SM reads or writes sums in its shared memory
constexpr double kFromCluster = 32;       // rate at which an SM reads sums of two CTAs
constexpr double kCluster = 1000;         // time of the barriers of a cluster
constexpr double kReduction = 4000;       // time of the second kernel
constexpr double kCopy = 9500;            // time to launch the copy of an operand
constexpr double kMemory = 0.9;           // time of a copy / memory_cycles() of its bytes (fitted)
constexpr double kReductionBytes = 1500;  // rate at which all SMs together transfer partial sums

constexpr WgradTile kTiles[] = {{64, 64, 5}, {64, 64, 3}, {64, 32, 7}, {32, 64, 5}, {32, 32, 7}, {32, 32, 3, 3}};
// With three products, the sums need registers in addition to the accumulators.
constexpr WgradTile kPromotedTiles[] = {{64, 64, 4}, {64, 32, 6}, {32, 32, 6}};

constexpr bool fits(const WgradTile& tile) { return tile.m_tiles <= kMaxWgradMTiles; }
static_assert(std::all_of(std::begin(kTiles), std::end(kTiles), fits));
static_assert(std::all_of(std::begin(kPromotedTiles), std::end(kPromotedTiles), fits));

/// Returns the number of m64 tiles that the taps of a box need.
int m_tiles_of(const WgradTile& cta, int taps) { return divide_up(taps, 64 / cta.chunk); }

/// Enumerates the plans of a problem and keeps the plan with the lowest estimated cost.
class Search {
 public:
  /// one_launch: one launch computes the gradient of all samples.
  Search(const ConvProblem& problem, const WgradPlan& axes, bool one_launch)
      : p_(problem), axes_(axes), one_launch_(one_launch) {}

  std::optional<WgradPlan> best() {
    for (const WgradTile& cta : wgrad_tiles(arithmetic_of(p_))) {
      if (p_.choice.width > 0 &&
          (p_.choice.width != cta.columns || p_.choice.k_blocks != cta.chunk || p_.choice.m_tiles != cta.m_tiles))
        continue;
      if (p_.choice.slide > 0 && (p_.choice.slide == 2) != (cta.slide > 1)) continue;
      if (cta.slide > 1 && !may_slide(cta.slide)) continue;
      const int chunks = static_cast<int>(divide_up(p_.in_channels, cta.chunk));
      const int room = cta.m_tiles * (64 / cta.chunk);
      for (const MostTaps& most : {MostTaps{2 * room, 2 * room}, {room, room}, {2 * room, 1}, {room, 1}, {1, 1}}) {
        WgradPlan plan = axes_;
        plan.cta = cta;
        plan.depth = static_cast<int>(cta.slide > 1 ? read_size(p_, 0) : p_.out_size[0]);
        list_sets(plan, most, chunks);
        if (plan.sets.size() > kMaxWgradSets ||
            plan.sets.size() * static_cast<size_t>(plan.most_boxes()) > kMaxWgradBoxes)
          continue;
        plan.channel_tiles = divide_up(chunks, plan.chunks);
        try_tiles(plan);
      }
    }
    return best_;
  }

 private:
  /// Maximum number of taps that read one box of x. Lines of a box without a halo along the width are contiguous, so
  /// that the tile may be narrower than an octet.
  struct MostTaps {
    int all;
    int along_width;
  };
  /// Times in clocks of the sets of taps according to the cost model.
  struct SetTimes {
    double mean = 0;        ///< of a tile
    double longest = 0;     ///< of a tile
    double first_load = 0;  ///< of the boxes of a tile
  };

  /// Returns true if a tile may slide along the depth: neighboring taps must read neighboring planes of x.
  bool may_slide(int taps) const {
    const AxisPhases& depth = axes_.axis[0];
    const AxisPhase& part = depth.phase[0];
    return depth.phases == 1 && depth.in_step == 1 && part.taps == taps && part.step == 1 && part.tap_first == 0 &&
           part.tap_step == 1 && read_size(p_, 0) > 0;
  }

  /// Divides the taps of each phase into boxes, and packs the boxes into sets. If there are few taps, a set contains
  /// boxes of several chunks of channels.
  void list_sets(WgradPlan& plan, const MostTaps& most, int chunks) const {
    std::vector<WgradBox> boxes;
    int m_tiles = 0;
    const AxisPhases* axis = plan.axis;
    for (int d = 0; d < axis[0].phases; ++d)
      for (int h = 0; h < axis[1].phases; ++h)
        for (int w = 0; w < axis[2].phases; ++w) add_boxes(plan, {d, h, w}, most, boxes);
    for (const WgradBox& box : boxes) m_tiles += m_tiles_of(plan.cta, box.taps());
    const int room = 2 * plan.cta.m_tiles;
    plan.chunks = std::clamp(room / m_tiles, 1, chunks);
    m_tiles *= plan.chunks;
    const size_t boxes_of_chunk = boxes.size();
    for (int chunk = 1; chunk < plan.chunks; ++chunk)
      for (size_t i = 0; i < boxes_of_chunk; ++i) boxes.push_back(boxes[i]), boxes.back().chunk = chunk;
    std::stable_sort(boxes.begin(), boxes.end(),
                     [](const WgradBox& left, const WgradBox& right) { return left.taps() > right.taps(); });
    for (int sets = divide_up(m_tiles, room);; ++sets)
      for (int capacity = divide_up(m_tiles, sets); capacity <= room; ++capacity)
        if (pack(plan, boxes, sets, capacity)) return;
  }
  /// Packs the boxes into sets of at most `capacity` m64 tiles, each box into the first set with room. Returns false if
  /// there are too few sets.
  static bool pack(WgradPlan& plan, const std::vector<WgradBox>& boxes, int sets, int capacity) {
    std::vector<int> left(static_cast<size_t>(sets), capacity);
    plan.sets.assign(left.size(), {});
    for (const WgradBox& box : boxes) {
      const int m_tiles = m_tiles_of(plan.cta, box.taps());
      const auto found = std::find_if(left.begin(), left.end(), [&](int room) { return room >= m_tiles; });
      if (found == left.end()) return false;
      *found -= m_tiles;
      plan.sets[static_cast<size_t>(found - left.begin())].push_back(box);
    }
    return true;
  }
  /// Appends the boxes of one phase.
  static void add_boxes(const WgradPlan& plan, const int (&part)[3], const MostTaps& most,
                        std::vector<WgradBox>& boxes) {
    int taps[3], piece[3], left = most.all;
    for (int a = 2; a >= 0; --a) {
      taps[a] = a == 0 && plan.cta.slide > 1 ? 1 : plan.axis[a].phase[part[a]].taps;
      piece[a] = divide_up(taps[a], divide_up(taps[a], std::max(a == 2 ? std::min(left, most.along_width) : left, 1)));
      left /= piece[a];
    }
    for (int d = 0; d < taps[0]; d += piece[0])
      for (int h = 0; h < taps[1]; h += piece[1])
        for (int w = 0; w < taps[2]; w += piece[2])
          boxes.push_back(
              {{part[0], part[1], part[2]},
               {d, h, w},
               {std::min(piece[0], taps[0] - d), std::min(piece[1], taps[1] - h), std::min(piece[2], taps[2] - w)},
               0});
  }

  void try_tiles(WgradPlan& plan) {
    int span[3] = {1, 1, 1};  // box size minus tile size, plus 1
    for (const auto& set : plan.sets)
      for (const WgradBox& box : set)
        for (int a = 0; a < 3; ++a)
          span[a] = std::max(span[a], (box.count[a] - 1) * plan.axis[a].phase[box.part[a]].step + 1);
    for (const int w : widths(static_cast<int>(p_.out_size[2])))
      for (const int h : sides(p_.out_size[1], 16))
        for (const int d : sides(plan.depth, 8))
          for (const int n : {1, 2, 4, 8, 16}) {
            if (w > round_up(static_cast<int>(p_.out_size[2]), 8) || h >= 2 * p_.out_size[1] || d >= 2 * plan.depth)
              continue;
            if (products_ > 1 && p_.batch % n != 0) continue;  // a tile must not contain both parts
            if (n > 1 && (n >= 2 * p_.batch || d < plan.depth || h < p_.out_size[1] || w < p_.out_size[2])) continue;
            // Sliding: planes of y are blocks of columns. They must be consecutive and begin at multiples of 8 rows.
            if (plan.cta.slide > 1 && (n > 1 || h * w % 8 != 0)) continue;
            const int tile[] = {n, d, h, w};
            std::copy_n(tile, 4, plan.tile);
            if (plan.rows() % (products_ > 1 ? 64 : 16) != 0 || plan.rows() > 16 * kMaxWgradSteps || plan.rows() < 64)
              continue;
            plan.box[0] = n;
            bool fits = true;
            for (int a = 0; a < 3; ++a) {
              plan.box[a + 1] = tile[a + 1] + span[a] - 1;
              fits &= (plan.box[a + 1] - 1) * plan.axis[a].in_step < kMaxBox;
            }
            if (fits && plan.has_regular_octets()) try_tile(plan);
          }
  }

  /// Returns candidates for the width of a tile. Narrow tiles are only useful if octets do not fill the lines.
  static std::vector<int> widths(int count) {
    std::vector<int> result{8, 16, 32};
    if (count % 8 == 0) return result;
    if (count < 32) result.push_back(count);
    for (const int width : {4, 2, 1})
      if (width != count) result.push_back(width);
    return result;
  }
  /// Returns candidates for the size of a tile along an axis: powers of two, and `count` and count + 1, which cover a
  /// short axis.
  static std::vector<int> sides(int64_t count, int most) {
    std::vector<int> result;
    for (int side = 1; side <= most; side *= 2) result.push_back(side);
    for (const int whole : {static_cast<int>(count), static_cast<int>(count) + 1})
      if (whole < most && !std::has_single_bit(static_cast<unsigned>(whole))) result.push_back(whole);
    return result;
  }

  void try_tile(WgradPlan& plan) {
    plan.stages = static_cast<int>(
        std::min<int64_t>((p_.shared_limit - kWgradStaticBytes) / plan.stage_bytes(), kMaxWgradStages));
    if (plan.stages < 2) return;
    int64_t tiles = products_ * divide_up(p_.batch, plan.tile[0]);
    for (int a = 0; a < 3; ++a) tiles *= divide_up(a == 0 ? plan.depth : p_.out_size[a], plan.tile[a + 1]);
    if (tiles > INT32_MAX) return;
    plan.all_tiles = static_cast<int>(tiles);
    const int64_t units = static_cast<int64_t>(plan.sets.size()) * divide_up(p_.out_channels, plan.cta.columns) *
                          plan.channel_tiles * p_.groups;
    const int most = std::max(most_voxels(p_) / plan.rows(), 1);
    const SetTimes times = times_of_sets(plan);
    if (p_.choice.cluster != 2)
      for (const int waves : {1, 2, 3, 4, 8})
        try_splits(plan, units, std::clamp<int64_t>(kMultiprocessors * waves / units, 1, tiles), most, times);
    plan.direct = true;
    if (one_launch_ && p_.choice.cluster != 1 && plan.cta.sums_bytes() + kWgradStaticBytes <= p_.shared_limit)
      for (int splits = 1; splits <= std::min<int64_t>(tiles, WgradPlan::kMaxDirectSplits); ++splits)
        try_splits(plan, units, splits, most, times);
    plan.direct = false;
  }
  /// Tries to divide the tiles of y into about `splits` splits of at most `most` tiles.
  void try_splits(WgradPlan& plan, int64_t units, int64_t splits, int most, const SetTimes& times) {
    plan.tiles_of_split = static_cast<int>(std::min<int64_t>(divide_up(plan.all_tiles, splits), most));
    plan.splits = divide_up(plan.all_tiles, plan.tiles_of_split);
    if (plan.direct && plan.splits > WgradPlan::kMaxDirectSplits) return;
    plan.units = units * plan.splits;
    plan.cycles = cycles(plan, times);
    if (plan.units < kMaxUnits && workspace_bytes(p_, plan) <= kMaxSums && (!best_ || plan.cycles < best_->cycles))
      best_ = plan;
  }

  /// Returns the times of the sets of a plan.
  static SetTimes times_of_sets(const WgradPlan& plan) {
    const double n = plan.cta.columns, b = plan.cta.product_columns(), product = std::max(b / 2, 16 + b / 4);
    SetTimes times;
    for (const auto& set : plan.sets) {
      // A warpgroup multiplies all its m64 tiles or all but one, even if some have no tap.
      int m_tiles = 0;
      for (const WgradBox& box : set) m_tiles += m_tiles_of(plan.cta, box.taps());
      const double multiplies = plan.rows() / 16 * product * std::max(m_tiles, 2 * (plan.cta.m_tiles - 1));
      const double bytes =
          static_cast<double>(set.size()) * plan.box_rows() * plan.chunk_bytes() + plan.y_rows() * 2.0 * n;
      const double load = bytes / kFromL2;
      times.first_load = std::max(times.first_load, load);
      // A stage is loaded again after its products, while the products of the other stages are computed.
      const double latency = (kLatency + multiplies) / plan.stages;
      const double of_set = std::max({multiplies, load, latency}) + kStage;
      times.mean += of_set / static_cast<double>(plan.sets.size());
      times.longest = std::max(times.longest, of_set);
    }
    return times;
  }
  /// Returns the time in clocks according to the cost model.
  double cycles(const WgradPlan& plan, const SetTimes& times) const {
    const double sums = 2.0 * plan.cta.m_tiles * 64 * plan.cta.product_columns();
    double unit =
        plan.tiles_of_split * (plan.units <= kMultiprocessors ? times.longest : times.mean) + times.first_load + kUnit;
    if (plan.direct)
      unit += 4 * sums * (1 / kToShared + 1 / (plan.splits > 1 ? kFromCluster : kToShared)) +
              sums / plan.splits * static_cast<double>(item_size(p_.dtype)) / kToMemory +
              (plan.splits > 1 ? kCluster : 0);
    else
      unit += 4 * sums / kToMemory;
    const double units = static_cast<double>(divide_up(plan.units, kMultiprocessors)) * unit;
    return plan.direct ? units : units + kReduction + static_cast<double>(workspace_bytes(p_, plan)) / kReductionBytes;
  }

  const ConvProblem& p_;
  const WgradPlan& axes_;
  const bool one_launch_;
  const int products_ = three_products(p_) ? 3 : 1;
  std::optional<WgradPlan> best_;
};

/// Returns the bytes of a voxel of the copy of an operand (operand.h) with `channels` channels per group, or 0 if the
/// operand needs no copy.
int64_t copied_bytes_of_voxel(const ConvProblem& p, int64_t channels, bool readable) {
  if (is_half(p.dtype) && readable && (p.groups == 1 || channels % 8 == 0)) return 0;
  const int64_t pitch = p.groups > 1 ? divide_up(channels, 8) * 8 : channels;
  return parts(p) * 2 * (divide_up(p.groups * pitch, 8) * 8);
}

/// The copies that a launch makes.
struct Copies {
  int operands;   ///< number of operands that are copied
  int64_t bytes;  ///< of one sample
};
/// Returns the copies of the operands.
Copies copies_of(const ConvProblem& p) {
  int64_t in = copied_bytes_of_voxel(p, p.in_channels, p.in_channels_last && p.in_aligned),
          out = copied_bytes_of_voxel(p, p.out_channels, p.out_channels_last && p.out_aligned);
  const int operands = (in > 0) + (out > 0);
  for (int a = 0; a < 3; ++a) {
    in *= std::max<int64_t>(read_size(p, a), 1);
    out *= p.out_size[a];
  }
  return {operands, in + out};
}

/// Returns the number of samples whose operands may be copied at a time.
int64_t samples_at_once(const ConvProblem& p) {
  int64_t samples = samples_to_copy(p, copies_of(p).bytes);
  // The low parts follow the last sample of a launch, and a tile must not contain both parts. All launches therefore
  // have the same number of samples.
  while (parts(p) > 1 && p.batch % samples != 0) --samples;
  return samples;
}

}  // namespace

int WgradPlan::most_boxes() const {
  size_t most = 0;
  for (const auto& set : sets) most = std::max(most, set.size());
  return static_cast<int>(most);
}

int WgradPlan::box_row(int row) const {
  int at[4];
  for (int a = 3; a >= 0; --a) {
    at[a] = row % tile[a];
    row /= tile[a];
  }
  return ((at[0] * box[1] + at[1]) * box[2] + at[2]) * box[3] + at[3];
}

bool WgradPlan::has_regular_octets() const {
  int a = 3, run = tile[3];  // neighboring rows of both y and x
  for (; a > 0 && box[a] == tile[a]; --a) run *= tile[a - 1];
  if (a == 0 || run % 16 == 0) return true;
  for (--a; a > 0 && tile[a] == 1;) --a;  // the axis from one run to the next
  return run == 8 && tile[a] % 2 == 0;
}

std::span<const WgradTile> wgrad_tiles(ConvArithmetic arithmetic) {
  if (arithmetic == ConvArithmetic::tf32x3) return kPromotedTiles;
  return kTiles;
}

std::optional<WgradPlan> plan_wgrad(const ConvProblem& p) {
  if (!p.wgmma || p.dtype == DType::f64 || p.batch == 0) return std::nullopt;
  int64_t in_voxels = p.batch, out_voxels = p.batch;
  for (int a = 0; a < 3; ++a) {
    in_voxels *= p.in_size[a];
    out_voxels *= p.out_size[a];
  }
  if (in_voxels == 0 || out_voxels == 0 || std::max(in_voxels, out_voxels) > INT32_MAX) return std::nullopt;
  WgradPlan axes;
  if (set_axes(p, axes.axis, true, kMaxWgradTaps, kMaxWgradTaps) == 0) return std::nullopt;
  ConvProblem at_once = p;
  at_once.batch = axes.samples = samples_at_once(p);
  auto best = Search(at_once, axes, at_once.batch == p.batch).best();
  if (!best) return std::nullopt;
  // The copies of floats read their source twice: to find the scale, and to apply it.
  const Copies copies = copies_of(p);
  const double copied = static_cast<double>(p.batch * copies.bytes),
               read = is_half(p.dtype) ? copied : 4.0 / parts(p) * copied;
  const double launches = static_cast<double>(divide_up(p.batch, best->samples));
  best->cycles = launches * (best->cycles + kCopy * copies.operands) + kMemory * memory_cycles(copied + read);
  return best;
}

int64_t workspace_bytes(const ConvProblem& p, const WgradPlan& plan) {
  if (plan.direct) return 0;
  return plan.splits * p.groups * p.out_channels * p.in_channels * p.kernel[0] * p.kernel[1] * p.kernel[2] * 4;
}

}  // namespace voxgrad::cuda
