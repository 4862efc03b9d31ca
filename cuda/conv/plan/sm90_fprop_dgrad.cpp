// Plans fprop and dgrad as implicit GEMMs of channels-last inputs.
#include "cuda/conv/plan/sm90_fprop_dgrad.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

// Constants of the cost model, fitted to 9,600 times of 820 passes with different tiles, measured on an H200. Rates are
// in bytes per clock, and times are in clocks.
constexpr double kInputs = 37.6;        // rate at which an SM reads inputs from L2
constexpr double kWeights = 88;         // rate at which an SM reads weights from L2
constexpr double kCluster = 1.12;       // slowdown of CTAs that wait for each other
constexpr double kToMemory = 14.3;      // rate at which an SM writes results
constexpr double kUnit = 3200;          // time per work unit
constexpr double kBox = 18;             // time per box
constexpr double kTap = 52;             // time per tap and chunk, because the products of a tap begin with a delay
constexpr double kStage = 213;          // time per stage of weights
constexpr double kShared = 0.24;        // part of kBox, kTap and kStage in which no cooperative warpgroup multiplies
constexpr double kNarrow = 22.6;        // part of the time of a product that does not depend on the columns
constexpr double kNarrowOfThree = 16;   // kNarrow for three products
constexpr double kAloneOfThree = 1.28;  // three products: slowdown of a single m64 tile, whose products wait
constexpr double kReduction = 8000;     // time of a second kernel
constexpr double kMemory = 3200;        // rate at which all SMs together transfer data from and to memory
constexpr double kInFlight = 30720;     // bytes that an SM must request at a time to keep memory busy
constexpr int kAhead = 49152;           // bytes to request at a time if each GEMM has a single box (not fitted)
constexpr double kShortRows = 2.0;      // slowdown of memory if the rows of boxes have less than 128 bytes
constexpr double kAtom = 720;      // additional bytes per tile and voxel if tiles share 64 bytes of results (fitted)
constexpr double kLatency = 2040;  // time from the request of a box to its arrival
constexpr double kFirst = 0.09;    // part of the time of a unit's boxes that does not overlap with products
constexpr double kSingle = 0.5;    // time per result if results are not stored as vectors
constexpr double kStrided = 3;     // slowdown of stores with a distance between elements
constexpr double kFewBoxes = 0.8;  // omitted boxes count if less than this part of all boxes remains

/// Columns of the widest tile.
constexpr int kMaxColumns = std::ranges::max(kFpropDgradTiles, {}, [](const CompiledFpropDgradTile& compiled) {
                              return compiled.tile.columns;
                            }).tile.columns;

// Candidates for the axes (depth, height, width) whose taps share a box. A box without the halo of the width has no
// rows between the lines of results.
constexpr bool kHalos[][3] = {
    {false, false, false}, {true, false, false}, {true, true, false}, {false, true, true}, {true, true, true}};

/// m64 tiles that cover the results of a CTA tile in its box of inputs.
struct M64Cover {
  int pitch;                                  ///< rows of the box from one group of 8 rows of an m64 tile to the next
  int tiles;                                  ///< number of m64 tiles
  std::array<int, kMaxFpropDgradTiles> base;  ///< first row of each m64 tile, or -1
};

/// Divides the box into regions: the whole box (level 0), samples (1) or planes (2). Divides each region into m64 tiles
/// of consecutive rows or, with `octets`, of 8 lines with 8 neighbors each. Returns nothing if the number of tiles
/// exceeds `most`.
std::optional<M64Cover> cover(const int (&tile)[4], const int (&box)[4], int level, bool octets, int most) {
  const int line = box[3], plane = line * box[2], volume = plane * box[1];
  const int regions = level == 0 ? 1 : level == 1 ? tile[0] : tile[0] * tile[1];
  int lines = tile[2];  // lines of a region, from the first to the last line with results
  if (level < 2) lines += (tile[1] - 1) * box[2];
  if (level < 1) lines += (tile[0] - 1) * box[1] * box[2];
  const int pieces = octets ? divide_up(lines, 8) * (tile[3] / 8) : divide_up((lines - 1) * line + tile[3], 64);
  if (regions * pieces > most) return std::nullopt;
  M64Cover found{octets ? line : 8, regions * pieces, {}};
  found.base.fill(-1);
  for (int r = 0, i = 0; r < regions; ++r)
    for (int piece = 0; piece < pieces; ++piece) {
      const int region = level == 0 ? 0 : level == 1 ? r * volume : r / tile[1] * volume + r % tile[1] * plane;
      const int blocks = tile[3] / 8;
      found.base[static_cast<size_t>(i++)] =
          region + (octets ? piece / blocks * 8 * line + piece % blocks * 8 : piece * 64);
    }
  return found;
}

/// Returns the cover of a CTA tile (sample, depth, height, width) with the fewest m64 tiles. `box` has the sizes of the
/// box of inputs. Returns nothing if the number of tiles exceeds `most`.
std::optional<M64Cover> best_cover(const int (&tile)[4], const int (&box)[4], int most) {
  std::optional<M64Cover> best;
  for (const bool octets : {false, true})
    for (int level = 0; level < 3; ++level)
      if (!octets || tile[3] % 8 == 0)
        if (const auto found = cover(tile, box, level, octets, most)) {
          best = found;
          most = found->tiles - 1;
        }
  return best;
}

/// Enumerates the plans of a problem and keeps the plan with the lowest estimated cost.
class Search {
 public:
  Search(const ConvProblem& problem, const FpropDgradPlan& axes) : p_(problem), axes_(axes) {
    taps_ = 1;
    for (const AxisPhases& axis : axes.axis) {
      taps_ *= axis.kernel;
      complete_ &= axis.complete;
    }
  }

  std::optional<FpropDgradPlan> best() {
    for (const CompiledFpropDgradTile& compiled : kFpropDgradTiles) {
      const FpropDgradTile& cta = compiled.tile;
      if (p_.choice.width > 0 && p_.choice.width != cta.columns) continue;
      if (p_.choice.m_tiles > 0 && p_.choice.m_tiles != cta.row_tiles) continue;
      if (p_.choice.slide > 0 && (p_.choice.slide == 2) != (cta.slide > 1)) continue;
      if (cta.slide > 1 && !may_slide(cta.slide)) continue;
      for (const int row_bytes : {128, 64, 32})
        for (const auto& halo : kHalos) {
          if (p_.choice.k_blocks > 0 && row_bytes != 32 * p_.choice.k_blocks) continue;
          FpropDgradPlan plan = axes_;
          plan.cta = cta;
          std::copy_n(halo, 3, plan.halo);
          if (cta.slide > 1 && halo[0]) continue;
          if (!compiled.has(row_bytes, static_cast<int>(item_size(p_.dtype)), three_products(p_))) continue;
          plan.row_bytes = row_bytes;
          plan.chunk_channels = row_bytes / static_cast<int>(item_size(p_.dtype));
          if (row_bytes > 32 && plan.chunk_channels > 2 * p_.in_channels) continue;
          if (p_.groups > 1 && p_.in_channels % plan.chunk_channels != 0) continue;
          plan.products = three_products(p_) ? 3 : 1;
          plan.chunks = plan.products * divide_up(static_cast<int>(p_.in_channels), plan.chunk_channels);
          for (const bool cooperative : {false, true}) {
            if (p_.choice.pairs > 0 && (p_.choice.pairs == 2) != cooperative) continue;
            if (three_products(p_) ? !cooperative : cooperative && cta.slide > 1) continue;
            plan.cooperative = cooperative;
            try_tiles(plan);
          }
        }
    }
    return best_;
  }

 private:
  /// Returns true if a tile with this number of taps along the depth may slide: neighboring planes of results must read
  /// neighboring planes of inputs.
  bool may_slide(int taps) const {
    const AxisPhases& depth = axes_.axis[0];
    return axes_.phases == 1 && depth.phases == 1 && depth.in_step == 1 && depth.phase[0].taps == taps &&
           depth.max_span == taps;
  }

  /// Returns whether all taps of all phases can read the same box.
  static bool shares_boxes(const FpropDgradPlan& plan) {
    for (int a = 0; a < 3; ++a) {
      const AxisPhases& axis = plan.axis[a];
      if (plan.phases > 1 ? !plan.halo[a] : !(plan.halo[a] ? axis.phases == 1 : axis.kernel == 1)) return false;
    }
    return true;
  }

  /// Tries plans in which each box is loaded once for all phases, and for all phases and all output channels. The
  /// latter is slower than a tile with all output channels.
  void try_resident(FpropDgradPlan plan) {
    if (!shares_boxes(plan) || plan.resident_chunks() > kMaxFpropDgradStages) return;
    plan.resident = true;
    for (AxisPhases& axis : plan.axis) merge_halos(axis);
    if (plan.phases > 1) try_tiles(plan);
    plan.unit_columns = divide_up(static_cast<int>(p_.out_channels), plan.cta.columns);
    if (p_.out_channels > kMaxColumns) try_tiles(plan);
  }

  using Tile = std::array<int, 4>;  // samples, depth, height, width

  void try_tiles(FpropDgradPlan& plan) {
    if (!plan.resident) try_resident(plan);
    for (const Tile& tile : tiles(64 * plan.m_tiles(), plan.cta.slide > 1)) {
      std::ranges::copy(tile, plan.tile);
      try_tile(plan);
    }
  }
  /// Returns candidates for a CTA tile with at most `rows` results. Tiles that slide have a depth of 1.
  const std::vector<Tile>& tiles(int rows, bool slides) {
    const auto [known, is_new] = tiles_.try_emplace({rows, slides});
    if (!is_new) return known->second;
    const int depth = axes_.axis[0].count, height = axes_.axis[1].count, width = axes_.axis[2].count;
    for (const int w : sides(width, rows))
      for (const int h : sides(height, rows / w))
        for (const int d : sides(depth, slides ? 1 : rows / (w * h))) {
          const bool whole = w == width && h == height && d == depth;
          const int samples = whole ? std::min(rows / (w * h * d), kMaxFpropDgradSide) : 1;
          known->second.push_back({static_cast<int>(std::min<int64_t>(p_.batch, samples)), d, h, w});
        }
    return known->second;
  }
  /// Returns candidates for the size of a tile along an axis: nearly equal parts of `count`, and multiples of 8.
  static std::vector<int> sides(int count, int most) {
    std::vector<int> result;
    for (const int width : box_widths(count, std::min(most, kMaxFpropDgradSide)))
      if (result.size() < 6) result.push_back(width);
    for (const int width : {8, 16, 32})
      if (width <= most && width < count + 8) result.push_back(width);
    return result;
  }

  /// Returns a lower bound of cycles() for any number of stages and splits: the time of the products if all SMs were
  /// always busy.
  double least_cycles(const FpropDgradPlan& plan) {
    double tiles = static_cast<double>(divide_up(p_.batch, plan.tile[0]) * p_.groups *
                                       divide_up(p_.out_channels, plan.cta.columns));
    for (int a = 0; a < 3; ++a) tiles *= divide_up(plan.axis[a].count, plan.tile[a + 1]);
    return tiles * taps_ / plan.cta.slide * tap_clocks(plan) / static_cast<double>(kMultiprocessors) *
           (plan.halo[0] ? 1 : inside(plan));
  }
  /// Returns the clocks of the products of a CTA tile with one tap.
  static double tap_clocks(const FpropDgradPlan& plan) {
    const bool three = plan.products == 3;
    const double b = plan.cta.product_columns(), narrow = three ? kNarrowOfThree : kNarrow;
    const double product = std::max(b / 2, narrow + b / 4);  // m64 product, 32 bytes of K
    return plan.row_bytes / 32.0 * plan.chunks * plan.m_tiles() * product *
           (three && plan.cta.row_tiles == 1 ? kAloneOfThree : 1);
  }

  /// Returns the part of the boxes, if each tap along the depth has its own box, that do not lie outside of the inputs.
  /// Returns 1 if this part is at least kFewBoxes, because the model is not precise enough for small differences.
  double inside(const FpropDgradPlan& plan) {
    double& known = inside_[plan.tile[1]];
    if (known > 0) return known;
    const AxisPhases& depth = plan.axis[0];
    // Only boxes near both ends may lie outside.
    if (depth.count > 8 * (depth.max_span + plan.tile[1])) return known = 1;
    int64_t boxes = 0, read = 0;
    for (int i = 0; i < depth.phases; ++i)
      for (int at = 0; at < depth.phase[i].count; at += plan.tile[1])
        for (int tap = 0; tap < depth.phase[i].taps; ++tap, ++boxes) {
          const int64_t first =
              int64_t{at + depth.phase[i].start + tap * depth.phase[i].step} * depth.in_step + depth.phase[i].residue;
          read += first < depth.in_size && first + int64_t{plan.tile[1] - 1} * depth.in_step >= 0;
        }
    const double part = read > 0 ? static_cast<double>(read) / static_cast<double>(boxes) : 1;
    return known = part < kFewBoxes ? part : 1;
  }

  void try_tile(FpropDgradPlan& plan) {
    if (p_.choice.columns > 0 && (p_.choice.columns == 2) != (plan.unit_columns > 1)) return;
    if (best_ && least_cycles(plan) * (1 - 1e-9) >= best_->cycles) return;
    plan.box[0] = plan.tile[0];
    for (int a = 0; a < 3; ++a) {
      plan.box[a + 1] = plan.tile[a + 1] + (plan.halo[a] ? plan.axis[a].max_span - 1 : 0);
      if ((plan.box[a + 1] - 1) * plan.axis[a].in_step + 1 > kMaxBox) return;
    }
    if (plan.box_rows() * plan.row_bytes > room_ / 2) return;
    const auto covered = best_cover(plan.tile, plan.box, plan.m_tiles());
    if (!covered) return;
    plan.group_pitch = covered->pitch;
    std::copy(covered->base.begin(), covered->base.end(), plan.base);
    for (const bool kept : {true, false}) {
      if (!kept && plan.unit_columns > 1) continue;  // L2 would limit the kernel
      plan.kept = kept;
      if (choose_stages(plan, *covered)) plan.cta.slide > 1 ? choose_run(plan) : choose_cluster(plan);
    }
  }
  /// Tries divisions of the depth into nearly equal runs of planes. Two runs are a work unit.
  void choose_run(FpropDgradPlan& plan) {
    const int depth = plan.axis[0].count;
    for (int runs = 2; runs < 2 * depth; runs += 2)
      if (plan.run = divide_up(depth, runs); runs == 2 || plan.run != divide_up(depth, runs - 2)) choose_cluster(plan);
  }

  /// Returns the largest number of taps that read the same box.
  static int most_box_taps(const FpropDgradPlan& plan) {
    int all = 1;
    for (int a = 0; a < 3; ++a) {
      int most = 1;
      for (int i = 0; plan.halo[a] && i < plan.axis[a].phases; ++i)
        most = std::max(most, static_cast<int>(plan.axis[a].phase[i].taps));
      all *= most;
    }
    return all;
  }

  /// Chooses the numbers of stages. Returns false if they do not fit into shared memory. m64 tiles may read rows after
  /// the end of the box. These rows belong to no result, but must lie in shared memory.
  bool choose_stages(FpropDgradPlan& plan, const M64Cover& covered) const {
    int end = 0;
    for (const int base : covered.base) end = std::max(end, base + 7 * covered.pitch + 8);
    for (int a = 0, pitch[] = {plan.box[2] * plan.box[3], plan.box[3], 1}; a < 3; ++a)
      if (plan.halo[a]) end += (plan.axis[a].max_span - 1) * pitch[a];
    const bool by_tap = (!plan.halo[0] && !plan.halo[1]) || taps_ == 1;
    plan.stage_taps =
        std::min(plan.kept ? kMaxFpropDgradTaps : most_stage_taps(plan.cta.product_columns()), most_box_taps(plan));
    const int weight = plan.weight_bytes(), input = plan.input_bytes();
    plan.weight_stages = plan.kept
                             ? weight_stages(plan)
                             : std::min(by_tap && !plan.resident ? room_ / (input + weight) : 4, kMaxFpropDgradStages);
    if (plan.weight_stages > (plan.unit_columns > 1 ? kMaxFpropDgradWeightStages : kMaxFpropDgradStages)) return false;
    const int most = plan.resident ? std::min(2 * plan.resident_chunks(), kMaxFpropDgradStages)
                     : by_tap      ? std::min(plan.kept ? kMaxFpropDgradStages : plan.weight_stages, most_boxes(plan))
                     : plan.cta.slide > 1 ? 6
                                          : 3;
    plan.input_stages = std::min((room_ - plan.all_weight_bytes()) / input, most);
    const int least = plan.resident ? plan.resident_chunks() : plan.cta.slide > 1 ? 3 : 2;
    if (plan.input_stages < least) return false;
    // Boxes for all output channels stay so long that boxes of the next work unit must arrive meanwhile.
    if (plan.unit_columns > 1 && (plan.input_stages - least) * input < kInFlight) return false;
    if (!plan.kept) {
      if (plan.weight_stages < 2) return false;
      plan.weight_stages = std::min((room_ - plan.input_stages * input) / weight, kMaxFpropDgradStages);
    }
    return end * plan.row_bytes <= input + plan.all_weight_bytes();
  }
  /// Returns the largest useful number of boxes in shared memory if each tap has its own box. If a GEMM has a single
  /// box, memory limits the kernel, and boxes of later GEMMs would only delay the stores of results.
  int most_boxes(const FpropDgradPlan& plan) const {
    if (plan.chunks * taps_ > 1) return kMaxFpropDgradStages;
    const int voxel = static_cast<int>(p_.in_channels * item_size(p_.dtype));
    return std::clamp(divide_up(kAhead, plan.box_rows() * voxel), 2, kMaxFpropDgradStages);
  }
  /// Returns the number of boxes that all phases load for a chunk of channels.
  static int all_loads(const FpropDgradPlan& plan) {
    int loads = 1;
    for (int a = plan.cta.slide > 1 ? 1 : 0; a < 3; ++a)
      loads *= plan.halo[a] ? plan.axis[a].phases : plan.axis[a].kernel;
    return loads;
  }
  /// Returns the number of stages that all weights need. Returns more than kMaxFpropDgradWeightStages if the weights
  /// differ between work units.
  int weight_stages(const FpropDgradPlan& plan) const {
    if (p_.groups > 1 || p_.out_channels > plan.unit_columns * plan.cta.columns) return kMaxFpropDgradWeightStages + 1;
    return plan.unit_columns * plan.chunks * all_loads(plan);
  }

  /// Chooses whether two CTAs share weights.
  void choose_cluster(FpropDgradPlan& plan) {
    for (const int cluster : {1, 2}) {
      if (p_.choice.cluster > 0 && p_.choice.cluster != cluster) continue;
      if (cluster > 1 && (plan.kept || plan.cta.slide > 1 || p_.groups > 1)) continue;
      plan.cluster = cluster;
      choose_units(plan);
    }
  }

  /// Chooses whether a work unit consists of all phases of a tile. Phases that are separate units read the inputs at
  /// different times, so the inputs must fit into L2.
  void choose_units(FpropDgradPlan& plan) {
    int64_t tiles = divide_up(p_.batch, plan.tile[0]);
    for (int a = 0; a < 3; ++a) tiles *= divide_up(plan.axis[a].count, a == 0 ? plan.unit_depth() : plan.tile[a + 1]);
    tiles =
        divide_up(tiles, plan.cluster) * p_.groups * divide_up(p_.out_channels, plan.unit_columns * plan.cta.columns);
    const int64_t clusters = kMultiprocessors / plan.cluster;
    for (const bool merged : {false, true}) {
      if (merged ? plan.phases == 1 : plan.phases > 1 && (plan.resident || tiles >= 4 * clusters)) continue;
      plan.merged = merged;
      choose_splits(plan, merged ? tiles : tiles * plan.phases, clusters);
    }
  }

  void choose_splits(FpropDgradPlan& plan, int64_t units, int64_t clusters) {
    const int k_blocks = plan.chunks * k_loads(plan);
    for (int splits = 1; splits <= std::min(k_blocks, 32); ++splits) {
      plan.splits = splits;
      plan.units = units * splits;
      plan.cycles = cycles(plan);
      if (plan.units < kMaxUnits && (!best_ || plan.cycles < best_->cycles)) best_ = plan;
      // Splits into more than four rounds of units cost more than they save.
      if (!complete_ || units >= clusters || plan.units >= 4 * clusters || plan.resident || plan.kept ||
          plan.cta.slide > 1 || p_.choice.unsplit)
        break;
    }
  }
  /// Returns the mean number of boxes that a phase loads for a chunk, at least 1.
  static int k_loads(const FpropDgradPlan& plan) { return std::max(all_loads(plan) / plan.phases, 1); }

  /// Returns the time in clocks according to the cost model.
  double cycles(const FpropDgradPlan& plan) {
    const int gemms = (plan.merged ? plan.phases : 1) * plan.unit_columns;  // of a work unit
    // In few rounds, some SM computes only tiles whose boxes all lie inside.
    const double rounds = rounds_of(plan), read = plan.omits_boxes() && rounds > 2 ? inside(plan) : 1;
    const double taps = read * taps_ / plan.cta.slide / plan.phases * gemms, n = plan.cta.columns;
    const double b = plan.cta.product_columns(), multiplies = taps * tap_clocks(plan);
    const double loads = plan.resident ? plan.resident_chunks() : read * k_loads(plan) * gemms * plan.chunks;
    const double weights = taps * b * plan.chunks * plan.row_bytes;
    const double inputs = loads * plan.box_rows() * plan.row_bytes, streamed = plan.kept ? 0 : weights;
    const double load = inputs / kInputs + streamed / plan.cluster / kWeights;
    const double results = 64.0 * plan.m_tiles() * n * gemms;
    const double stages = taps * plan.chunks * (kTap + kStage / plan.stage_taps) + loads * kBox;
    // Without cooperation, one warpgroup runs its epilogue while the other multiplies.
    const bool vectors = plan.splits > 1 || has_vectors_;
    const double bytes = plan.splits > 1 ? 4.0 : static_cast<double>(item_size(p_.dtype));
    const double epilogue = results * (vectors ? bytes / kToMemory : kSingle) + kUnit * gemms;
    // A stage is free again when its box has arrived and has been multiplied. Resident boxes stay longer.
    const double latency = plan.resident ? 0 : (kLatency * loads + multiplies) / plan.input_stages;
    const double late = plan.resident ? std::max(2 * loads - plan.input_stages, 0.0) / loads : 0;  // part of the boxes
    const double products =
        plan.cooperative ? std::max(multiplies, multiplies / 2 + stages) + kShared * stages : multiplies + stages;
    const double mainloop = std::max({products, load, latency}) / plan.splits;
    const double both =
        plan.cooperative ? mainloop + epilogue : std::max(mainloop, (products / plan.splits + epilogue) / 2);
    const double unit = both + load / plan.splits * kFirst + (late > 0 ? kLatency + inputs / kInputs * late : 0);
    const int planes = plan.cta.slide > 1 ? 2 * (plan.run + plan.cta.slide - 1) : 1;
    double all = rounds * unit * planes + (plan.cooperative ? 0 : epilogue / gemms);
    if (plan.kept) all += weights / kWeights;
    const double memory = static_cast<double>(p_.batch * sample_bytes(p_)) * pieces(plan) / kMemory *
                          std::max(kInFlight / (plan.input_stages * plan.input_bytes()), 1.0) *
                          (plan.row_bytes < 128 ? kShortRows : 1);
    all = std::max(all, memory + all / 12);  // the other times decide between plans that memory limits
    // N-major weights must be copied unless the tile supports them.
    if (p_.pass == ConvPass::dgrad && is_half(p_.dtype) && !may_be_n_major(plan.cta.columns)) all += kReduction;
    if (plan.cluster > 1) all *= kCluster;
    if (plan.splits > 1) all += kReduction + static_cast<double>(workspace_bytes(p_, plan)) / kMemory;
    return all;
  }

  /// Returns the work units of the SM that computes most, as a multiple of the mean unit.
  static double rounds_of(const FpropDgradPlan& plan) {
    const int64_t ctas = plan.units * plan.cluster;
    if (plan.phases == 1 || plan.merged) return static_cast<double>(divide_up(ctas, kMultiprocessors));
    double longest = 1;  // phase
    for (const AxisPhases& axis : plan.axis) {
      int taps = 0;
      for (int i = 0; i < axis.phases; ++i) taps = std::max(taps, static_cast<int>(axis.phase[i].taps));
      longest *= 1.0 * taps * axis.phases / axis.kernel;
    }
    return std::max(longest, static_cast<double>(ctas) / kMultiprocessors + 0.5);
  }

  /// Returns how often each byte of the results is transferred. Two tiles may write parts of the same 64 bytes of a
  /// channels-last result, which memory then reads before a write. If the width is contiguous and a line of a tile ends
  /// within a sector of 32 bytes, this applies to the sector.
  double pieces(const FpropDgradPlan& plan) const {
    if (p_.out_channels_last) {
      const int64_t item = static_cast<int64_t>(item_size(p_.dtype)), piece = plan.cta.columns * item;
      const bool whole = p_.groups == 1 && p_.out_channels <= plan.unit_columns * plan.cta.columns;
      if (whole || (piece % 64 == 0 && p_.out_channels * item % 64 == 0)) return 1;
      const double results =
          static_cast<double>(p_.out_channels * p_.groups * item * p_.out_size[0] * p_.out_size[1] * p_.out_size[2]);
      return 1 + kAtom / static_cast<double>(piece) * results / static_cast<double>(sample_bytes(p_));
    }
    if (plan.axis[2].out_step > 1) return kStrided;
    if (plan.tile[3] >= plan.axis[2].count) return 1;
    const int64_t sector = 32 / static_cast<int64_t>(item_size(p_.dtype)), piece = plan.tile[3] * plan.axis[2].out_step;
    if (piece % sector == 0 && p_.out_size[2] % sector == 0) return 1;
    return 1 + 4.0 * static_cast<double>(sector) / static_cast<double>(piece);
  }

  const ConvProblem& p_;
  const FpropDgradPlan& axes_;
  int taps_;
  double inside_[kMaxFpropDgradSide + 1] = {};  // of inside(), for each depth of a tile
  bool complete_ = true;                        // each result has a tap
  const int room_ = static_cast<int>(p_.shared_limit) - fprop_dgrad_static_bytes(is_half(p_.dtype));  // for the rings
  const bool has_vectors_ = p_.out_channels_last && p_.out_aligned && p_.out_channels * item_size(p_.dtype) % 16 == 0;
  std::map<std::pair<int, bool>, std::vector<Tile>> tiles_;  // of tiles()
  std::optional<FpropDgradPlan> best_;
};

/// Returns true if 32-bit offsets from the first result reach all results of a CTA tile (see ResultRow).
bool are_near(const ConvProblem& p, const FpropDgradPlan& plan) {
  int64_t reach = p.out_sample_stride * (plan.tile[0] - 1), least = p.out_sample_stride;
  for (int a = 0; a < 3; ++a) {
    reach += p.out_stride[a] * (plan.tile[a + 1] - 1) * plan.axis[a].out_step;
    least = std::min(least, p.out_stride[a]);
  }
  return least >= 0 && reach <= UINT32_MAX;
}

}  // namespace

std::optional<FpropDgradPlan> plan_fprop_dgrad(const ConvProblem& p) {
  if (!p.wgmma || p.dtype == DType::f64) return std::nullopt;
  if (copied_bytes(p) > p.batch * std::max(kMaxCopied, sample_bytes(p))) return std::nullopt;
  FpropDgradPlan axes;
  const int phases = set_axes(p, axes.axis, true, kMaxFpropDgradTaps, kMaxFpropDgradPhases);
  if (phases == 0) return std::nullopt;
  axes.phases = p.pass == ConvPass::dgrad ? phases : 1;
  auto best = Search(p, axes).best();
  if (!best || !are_near(p, *best)) return std::nullopt;
  best->cycles += memory_cycles(2.0 * static_cast<double>(copied_bytes(p)));
  return best;
}

int64_t copied_bytes(const ConvProblem& p) {
  if (p.in_channels_last && p.in_aligned && !three_products(p)) return 0;
  const int64_t voxel = divide_up(p.groups * p.in_channels * static_cast<int64_t>(item_size(p.dtype)), 16) * 16;
  return parts(p) * p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2] * voxel;
}

int64_t workspace_bytes(const ConvProblem& p, const FpropDgradPlan& plan) {
  if (plan.splits == 1) return 0;
  return plan.splits * p.batch * p.out_size[0] * p.out_size[1] * p.out_size[2] * p.out_channels * p.groups * 4;
}

}  // namespace voxgrad::cuda
