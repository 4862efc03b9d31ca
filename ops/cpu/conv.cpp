// Forward and transposed convolution on the CPU: one gather for both, see ops/conv_geometry.h.
//
// A task packs a tile of the input once, then walks the rows of outputs that it feeds. A row is a product whose
// left factor is the packed tile itself, read at one offset for each tap; taps that miss the input along d or h are
// left out, along w they meet zeros. Sums run over taps, then channels, in an order that depends on shapes only.
#include <algorithm>
#include <atomic>

#include "core/parallel.h"
#include "ops/cpu/conv_pack.h"
#include "ops/cpu/conv_tile.h"
#include "ops/cpu/kernels.h"
#include "ops/halves.h"

namespace voxgrad::cpu {
namespace {

// Memory beside the operands: kWeightBytes in all, and kTileBytes for each thread; a thread's tile and the weights of
// one phase (at most kPanelBytes) share its second-level cache.
constexpr int64_t kWeightBytes = 16 << 20;
constexpr int64_t kTileBytes = 320 << 10;
constexpr int64_t kPanelBytes = 384 << 10;
// Taps at the ends of w multiply their own rows where a row's product has this many terms.
constexpr int64_t kLeastDepth = 64;
constexpr int64_t kInputBytes = 4 << 20;  // packed all at once where they are few beside the weights
// Input channels that are packed together where they lie side by side, as in channels_last: a cache line's worth.
constexpr int64_t kPackedChannels = 16;
// Rows shorter than this are not worth a wider range of channels.
constexpr int64_t kShortestRow = 32;

/// out(n, co) = bias(co) + sum over ci and taps of in(n, ci) * weight(co, ci), channels counted within a group.
template <class T>
struct Problem {
  Volume<T> out;
  Volume<const T> in;
  Gather3 gather;
  Triple kernel{1};
  int64_t groups = 1;
  const T* weight = nullptr;
  int64_t weight_group_stride = 0, weight_out_stride = 0, weight_in_stride = 0;
  Triple weight_stride{0};
  const T* bias = nullptr;
  int64_t bias_stride = 0;
  bool adds = false;  ///< to what is in `out`, in place of the bias
  bool relu = false;  ///< of complete results

  int64_t in_channels() const { return in.channels / groups; }
  int64_t out_channels() const { return out.channels / groups; }
};

/// The smallest piece of work: some output channels of a group from some of its input channels.
template <class T>
struct Unit {
  int64_t group = 0;
  int64_t first_channel = 0, channels = 0;
  ColumnBlock<T> block;
  int64_t weights = 0, weight_count = 0;  // packed: [phase d, h, w][tap d, h, w][channel][column]

  int64_t end() const { return weights + weight_count; }
};

/// One phase of each axis, and the number of taps in the phases before it.
struct Phase3 {
  std::array<const ConvPhase*, 3> axis{};
  int64_t taps_before = 0;
};

/// The phases of the three axes in all combinations, numbered with w fastest. They are never
/// listed: there are as many as taps.
class Phases {
 public:
  explicit Phases(const Gather3& gather) : gather_(gather) {
    for (size_t i = 0; i < 3; ++i) {
      taps_before_[i].push_back(0);
      for (const ConvPhase& phase : gather[i].phases) {
        taps_before_[i].push_back(taps_before_[i].back() + taps(phase));
        most_[i] = std::max(most_[i], taps(phase));
      }
    }
  }
  int64_t taps() const { return taps(0) * taps(1) * taps(2); }
  int64_t most_taps() const { return most_[0] * most_[1] * most_[2]; }

  Phase3 at(size_t d, size_t h, size_t w) const {
    const ConvPhase &pd = gather_[0].phases[d], &ph = gather_[1].phases[h], &pw = gather_[2].phases[w];
    return {{&pd, &ph, &pw},
            (taps_before_[0][d] * taps(1) + taps(pd) * taps_before_[1][h]) * taps(2) +
                taps(pd) * taps(ph) * taps_before_[2][w]};
  }

 private:
  static int64_t taps(const ConvPhase& phase) { return static_cast<int64_t>(phase.taps.size()); }
  int64_t taps(size_t axis) const { return taps_before_[axis].back(); }

  const Gather3& gather_;
  std::array<std::vector<int64_t>, 3> taps_before_;
  std::array<int64_t, 3> most_{};
};

/// What a thread works on: one tile of outputs, and its own memory.
template <class T>
struct TileTask {
  const T* weights = nullptr;
  T* packed = nullptr;
  std::vector<TileSegment> lines = {}, segments = {};
  std::vector<ColumnBlock<T>> voxel_blocks = {};  // of rows of `voxels`
  int64_t voxels = 0;
  int64_t n = 0;
  std::array<int64_t, 3> origin{};
};

template <class T>
class Convolution {
 public:
  explicit Convolution(const Problem<T>& problem)
      : p_(problem), blocks_(column_blocks<T>(problem.out_channels())), phases_(problem.gather) {
    channels_per_unit_ = choose_channels();
    number_taps();
    const int64_t wanted = (4 * num_threads() + p_.out.batch - 1) / p_.out.batch;
    const int64_t slots = kTileBytes / item() / std::max<int64_t>(1, channels_per_unit_);
    tiling_ = make_tiling(p_.gather, p_.kernel, {.slots = slots, .tiles = wanted});
    layout_ = {tiling_.windows[2].slots * channels_per_unit_, tiling_.windows[2].slots, 1};
    const int64_t channels = p_.out_channels(), width = tiling_.length[2];
    voxels_are_columns_ = 2 * channels <= padded_columns(blocks_) &&
                          channels * padded_columns(column_blocks<T>(width)) < width * padded_columns(blocks_);
  }

  void run() {
    if (p_.in_channels() > 0 && inputs_are_small())
      run_by_columns();
    else
      run_by_tiles();
  }

 private:
  static constexpr int64_t item() { return static_cast<int64_t>(sizeof(T)); }

  void number_taps() {
    tap_slot_.assign(static_cast<size_t>(p_.kernel[0] * p_.kernel[1] * p_.kernel[2]), -1);
    int64_t next = 0;
    for (const ConvPhase& pd : p_.gather[0].phases)
      for (const ConvPhase& ph : p_.gather[1].phases)
        for (const ConvPhase& pw : p_.gather[2].phases)
          for (const ConvTap& d : pd.taps)
            for (const ConvTap& h : ph.taps)
              for (const ConvTap& w : pw.taps)
                tap_slot_[static_cast<size_t>((d.index * p_.kernel[1] + h.index) * p_.kernel[2] + w.index)] = next++;
  }

  int64_t slabs() const { return (p_.in_channels() + channels_per_unit_ - 1) / channels_per_unit_; }
  Unit<T> unit_of(int64_t group, int64_t slab, const ColumnBlock<T>& block) const {
    const int64_t first = slab * channels_per_unit_, channels = std::min(channels_per_unit_, p_.in_channels() - first);
    return {group, first, channels, block, 0, phases_.taps() * channels * block.family->columns};
  }

  /// All units, in passes whose packed weights fit in kWeightBytes.
  void run_by_tiles() {
    int64_t columns = 0;
    for (const ColumnBlock<T>& block : blocks_) columns += block.family->columns;
    const int64_t limit = kWeightBytes / item();
    const Workspace<T> weights(std::min(limit, p_.groups * p_.in_channels() * phases_.taps() * columns));
    std::vector<Unit<T>> pass;
    for (int64_t group = 0; group < p_.groups; ++group)
      for (int64_t slab = 0; slab < slabs(); ++slab)
        for (const ColumnBlock<T>& block : blocks_) {
          Unit<T> unit = unit_of(group, slab, block);
          if (!pass.empty()) unit.weights = pass.back().end();
          if (unit.end() > limit) {
            run_pass(pass, weights.data());
            pass.clear();
            unit.weights = 0;
          }
          pass.push_back(unit);
        }
    run_pass(pass, weights.data());
  }

  int64_t tiles() const { return p_.out.batch * tiling_.count(); }
  /// Of a packed tile; a register tile may read beyond the last row.
  int64_t tile_elements() const { return tiling_.slots() * channels_per_unit_ + kMaxTileWidth / item(); }

  /// Whether the weights are more than all packed inputs, as with many channels of few voxels.
  bool inputs_are_small() const {
    const int64_t inputs = tiles() * tile_elements() * slabs() * p_.groups;
    return inputs * item() <= kInputBytes &&
           inputs <= p_.groups * p_.out_channels() * p_.in_channels() * phases_.taps();
  }

  /// The inputs are packed first. A task is a block of columns: it packs its weights unit by unit into the cache, and
  /// all tiles use them there.
  void run_by_columns() {
    const int64_t tile_count = tiles(), inputs = p_.groups * slabs() * tile_count;
    const Workspace<T> packed(inputs * tile_elements());
    auto input = [&](int64_t group, int64_t slab, int64_t tile) {
      return packed.data() + ((group * slabs() + slab) * tile_count + tile) * tile_elements();
    };
    auto task_of = [&](int64_t group, int64_t slab, int64_t tile, TileTask<T>& task) {
      task.packed = input(group, slab, tile);
      task.n = tile / tiling_.count();
      task.origin = tiling_.origin(tile % tiling_.count());
    };
    parallel_for(inputs, 1, [&](int64_t begin, int64_t end) {
      TileTask<T> task;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t group = i / tile_count / slabs(), slab = i / tile_count % slabs();
        task_of(group, slab, i % tile_count, task);
        pack_input(unit_of(group, slab, blocks_[0]), task);
      }
    });
    const int64_t block_count = static_cast<int64_t>(blocks_.size());
    std::atomic<int64_t> next = 0;
    parallel_for(std::min<int64_t>(p_.groups * block_count, num_threads()), 1, [&](int64_t, int64_t) {
      const Workspace<T> weights(phases_.taps() * channels_per_unit_ * (kMaxTileWidth / item()));
      TileTask<T> task{.weights = weights.data()};
      for (int64_t i = next++; i < p_.groups * block_count; i = next++)
        for (int64_t slab = 0; slab < slabs(); ++slab) {
          const Unit<T> unit = unit_of(i / block_count, slab, blocks_[static_cast<size_t>(i % block_count)]);
          pack_weights(unit, 0, unit.channels, weights.data());
          for (int64_t tile = 0; tile < tile_count; ++tile) {
            task_of(unit.group, slab, tile, task);
            run_unit(unit, task);
          }
        }
    });
  }

  int64_t choose_channels() const {
    int64_t slots = 1, columns = 1;
    for (const ColumnBlock<T>& block : blocks_) columns = std::max<int64_t>(columns, block.family->columns);
    for (int axis = 0; axis < 3; ++axis) {
      const ConvGather& gather = p_.gather[static_cast<size_t>(axis)];
      const int64_t length = axis == 2 ? std::min(gather.steps(), kShortestRow) : 1;
      slots *= std::max<int64_t>(1, AxisWindow(gather, p_.kernel[axis], length).slots);
    }
    const int64_t panel = std::max<int64_t>(1, phases_.most_taps()) * columns * item();
    const int64_t weights = std::max<int64_t>(1, phases_.taps()) * columns * item();
    const int64_t most = std::min({kPanelBytes / panel, kTileBytes / (slots * item()), kWeightBytes / weights});
    return even_piece(p_.in_channels(), std::max<int64_t>(1, most));
  }

  /// All outputs of these units, whose weights are packed first.
  void run_pass(const std::vector<Unit<T>>& units, T* weights) const {
    const int64_t together = p_.weight_in_stride == 1 ? kPackedChannels : 1;
    const int64_t parts = (channels_per_unit_ + together - 1) / together;
    parallel_for(static_cast<int64_t>(units.size()) * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        pack_weights(units[static_cast<size_t>(i / parts)], i % parts * together, together, weights);
    });
    // Tiles at the border are cheaper: each thread takes the next one when it is done.
    const int64_t tasks = tiles();
    std::atomic<int64_t> next = 0;
    parallel_for(std::min<int64_t>(tasks, num_threads()), 1, [&](int64_t, int64_t) {
      const Workspace<T> packed(tile_elements());
      TileTask<T> task{.weights = weights, .packed = packed.data()};
      for (int64_t i = next++; i < tasks; i = next++) {
        task.n = i / tiling_.count();
        task.origin = tiling_.origin(i % tiling_.count());
        run_tile(units, task);
      }
    });
  }

  /// Input channels [first, first + together) of a unit.
  void pack_weights(const Unit<T>& unit, int64_t first, int64_t together, T* weights) const {
    const int64_t columns = unit.block.family->columns, channels = std::min(together, unit.channels - first);
    if (channels <= 0) return;
    const T* source = p_.weight + unit.group * p_.weight_group_stride + unit.block.first * p_.weight_out_stride +
                      (unit.first_channel + first) * p_.weight_in_stride;
    T* to = weights + unit.weights + first * columns;
    const int64_t taps = p_.kernel[0] * p_.kernel[1] * p_.kernel[2], run = p_.weight_in_stride == taps ? channels : 1;
    if (taps_are_contiguous() && run * taps >= kColumnUnit<T>) {
      for (int64_t c = 0; c < channels; c += run)
        pack_columns(unit, source + c * p_.weight_in_stride, run * taps, run == 1 ? p_.weight_in_stride : 64,
                     to + c * columns);
      return;
    }
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (tap_slot_[static_cast<size_t>(tap)] < 0) continue;
      const T* from = source + tap / (p_.kernel[1] * p_.kernel[2]) * p_.weight_stride[0] +
                      tap / p_.kernel[2] % p_.kernel[1] * p_.weight_stride[1] +
                      tap % p_.kernel[2] * p_.weight_stride[2];
      for (int64_t c = 0; c < channels; ++c) {
        T* const row = to + (tap_slot_[static_cast<size_t>(tap)] * unit.channels + c) * columns;
        for (int64_t n = 0; n < unit.block.count; ++n)
          row[n] = from[n * p_.weight_out_stride + c * p_.weight_in_stride];
        std::fill(row + unit.block.count, row + columns, T(0));
      }
    }
  }

  bool taps_are_contiguous() const {
    return p_.weight_stride[2] == 1 && p_.weight_stride[1] == p_.kernel[2] &&
           p_.weight_stride[0] == p_.kernel[1] * p_.kernel[2];
  }

  /// `count` weights that follow each other in memory, whole kernels of one or more channels. Squares of weights x
  /// columns are transposed; the last square overlaps the one before, and columns beyond the block repeat its last.
  /// What comes `ahead` elements later is prefetched.
  void pack_columns(const Unit<T>& unit, const T* source, int64_t count, int64_t ahead, T* to) const {
    constexpr int kSquare = kColumnUnit<T>;
    const int64_t columns = unit.block.family->columns, taps = static_cast<int64_t>(tap_slot_.size());
    for (int64_t i = 0; i < count; i += kSquare) {
      const int64_t at = std::min(i, count - kSquare);
      T unused[kSquare];
      T* rows[kSquare];
      int64_t channel = at / taps, tap = at % taps;
      for (T*& row : rows) {
        const int64_t slot = tap_slot_[static_cast<size_t>(tap)];
        row = slot < 0 ? nullptr : to + (slot * unit.channels + channel) * columns;
        if (++tap == taps) tap = 0, ++channel;
      }
      for (int64_t n = 0; n < columns; n += kSquare)
        transpose<T, kSquare>(
            [&](int64_t k) {
              const T* from = source + std::min(n + k, unit.block.count - 1) * p_.weight_out_stride + at;
              __builtin_prefetch(from + ahead);
              return from;
            },
            [&](int64_t k) { return rows[k] ? rows[k] + n : unused; });
    }
  }

  void pack_input(const Unit<T>& unit, const TileTask<T>& task) const {
    const T* source = p_.in.at(task.n, unit.group * p_.in_channels() + unit.first_channel);
    pack_tile(task.packed, layout_, source, p_.in, unit.channels, p_.gather, tiling_, task.origin);
  }

  void run_tile(const std::vector<Unit<T>>& units, TileTask<T>& task) const {
    const Unit<T>* held = nullptr;  // whose channels are packed
    for (const Unit<T>& unit : units) {
      if (!held || held->group != unit.group || held->first_channel != unit.first_channel) {
        pack_input(unit, task);
        held = &unit;
      }
      run_unit(unit, task);
    }
  }

  /// The phases along w stay innermost, so that a line of the output is completed while it is in the cache.
  void run_unit(const Unit<T>& unit, TileTask<T>& task) const {
    const std::array<int64_t, 3>& origin = task.origin;
    for (size_t pd = 0; pd < p_.gather[0].phases.size(); ++pd)
      for (size_t ph = 0; ph < p_.gather[1].phases.size(); ++ph) {
        const int64_t end_d = std::min(p_.gather[0].phases[pd].count, origin[0] + tiling_.length[0]);
        const int64_t end_h = std::min(p_.gather[1].phases[ph].count, origin[1] + tiling_.length[1]);
        for (int64_t qd = origin[0]; qd < end_d; ++qd)
          for (int64_t qh = origin[1]; qh < end_h; ++qh) {
            fill_lines(phases_.at(pd, ph, 0), {qd, qh, origin[2]}, task.lines);
            for (size_t pw = 0; pw < p_.gather[2].phases.size(); ++pw)
              run_row(unit, phases_.at(pd, ph, pw), {qd, qh, origin[2]}, task);
          }
      }
  }

  /// Row (q[0], q[1]) of one phase, from step q[2] to the end of the tile.
  void run_row(const Unit<T>& unit, const Phase3& phase, const std::array<int64_t, 3>& q, TileTask<T>& task) const {
    const int64_t count = std::min(phase.axis[2]->count - q[2], tiling_.length[2]);
    if (count <= 0) return;
    const TileFamily<T>& family = *unit.block.family;
    fill_segments(unit, *phase.axis[2], task);
    const int64_t row = (q[0] - task.origin[0]) * tiling_.windows[1].slots + q[1] - task.origin[1];
    const T* a = task.packed + row * layout_.row;
    const T* b = task.weights + unit.weights + phase.taps_before * unit.channels * family.columns;
    T* out = p_.out.at(task.n, unit.group * p_.out_channels() + unit.block.first);
    for (int axis = 0; axis < 3; ++axis) {
      const size_t i = static_cast<size_t>(axis);
      out += (phase.axis[i]->first + q[i] * p_.gather[i].out_step) * p_.out.stride[axis];
    }
    const int64_t out_step = p_.gather[2].out_step * p_.out.stride[2];
    alignas(kTileAlignment) T sums[kMaxTileRows * kMaxTileWidth / sizeof(T)];
    if (voxels_are_columns_) {
      if (task.voxels != count) task.voxel_blocks = column_blocks<T>(task.voxels = count);
      for (const ColumnBlock<T>& voxels : task.voxel_blocks) {
        const int64_t channels = even_piece(unit.block.count, voxels.family->max_rows), width = voxels.family->columns;
        for (int64_t n = 0; n < unit.block.count; n += channels) {
          const int64_t now = std::min(channels, unit.block.count - n);
          voxels.family->products[now - 1](
              {b + n, family.columns, a + voxels.first, layout_.channel, task.segments, unit.channels, sums});
          store(unit, {n, n + now}, {sums, 1, width}, voxels.count, out + voxels.first * out_step, out_step);
        }
      }
      return;
    }
    const int64_t rows = even_piece(count, family.max_rows);
    for (int64_t m = 0; m < count; m += rows) {
      const int64_t now = std::min(rows, count - m);
      // Each channel's outputs lie in a place of their own, which would be waited for at the end.
      for (int64_t n = 0; n < unit.block.count; ++n) {
        __builtin_prefetch(out + n * p_.out.channel_stride + m * out_step, 1);
        __builtin_prefetch(out + n * p_.out.channel_stride + (m + now - 1) * out_step, 1);
      }
      const TileProduct<T> product{a + m, layout_.channel, b, family.columns, task.segments, unit.channels, sums};
      multiply_inside(family, product, now, q[2] + m, *phase.axis[2]);
      store(unit, {0, unit.block.count}, {sums, family.columns, 1}, now, out + m * out_step, out_step);
    }
  }

  /// A product of `rows` rows, steps from `step` on. The taps at the ends of w meet only some of them: each such tap
  /// multiplies these alone, where it has enough to do.
  void multiply_inside(const TileFamily<T>& family, TileProduct<T> product, int64_t rows, int64_t step,
                       const ConvPhase& along_w) const {
    const size_t taps = along_w.taps.size(), each = product.segments.size() / taps;
    const std::span<const TileSegment> segments = product.segments;
    T* const sums = product.c;
    const T* const a = product.a;
    auto inside = [&](const ConvTap& tap) {
      const ConvRange range = tap_range(p_.gather[2], along_w, tap);
      return ConvRange{std::clamp<int64_t>(range.begin - step, 0, rows),
                       std::clamp<int64_t>(range.end - step, 0, rows)};
    };
    const bool whole = static_cast<int64_t>(each) * product.depth < kLeastDepth;
    product.adds = false;
    for (size_t k = 0, next; k < taps; k = next) {
      const ConvRange range = whole ? ConvRange{0, rows} : inside(along_w.taps[k]);
      for (next = k + 1; next < taps; ++next)
        if (!whole) {
          const ConvRange r = inside(along_w.taps[next]);
          if (r.begin != range.begin || r.end != range.end) break;
        }
      const int64_t count = range.end - range.begin;
      if (!product.adds && count < rows) std::fill_n(sums, rows * family.columns, T(0));
      product.adds = product.adds || count < rows;
      product.a = a + range.begin;
      product.c = sums + range.begin * family.columns;
      product.segments = segments.subspan(k * each, (next - k) * each);
      if (count > 0) family.products[count - 1](product);
      product.adds = true;
    }
  }

  /// The taps (d, h) that row (q[0], q[1]) meets: where their rows are in the packed tile, and their number.
  void fill_lines(const Phase3& phase, const std::array<int64_t, 3>& q, std::vector<TileSegment>& lines) const {
    auto misses = [&](size_t axis, const ConvTap& tap) {
      const int64_t position = q[axis] * p_.gather[axis].in_step + tap.offset;
      return position < 0 || position >= p_.gather[axis].in_size;
    };
    auto slot = [&](size_t axis, const ConvTap& tap) {
      return tiling_.windows[axis].base[static_cast<size_t>(tap.index)];
    };
    lines.clear();
    int64_t number = 0;
    for (const ConvTap& d : phase.axis[0]->taps)
      for (const ConvTap& h : phase.axis[1]->taps) {
        if (!misses(0, d) && !misses(1, h))
          lines.push_back({(slot(0, d) * tiling_.windows[1].slots + slot(1, h)) * layout_.row, number});
        ++number;
      }
  }

  /// In the order of the taps along w, then d, then h.
  void fill_segments(const Unit<T>& unit, const ConvPhase& along_w, TileTask<T>& task) const {
    const int64_t panel = unit.channels * unit.block.family->columns;
    const int64_t taps = static_cast<int64_t>(along_w.taps.size());
    task.segments.clear();
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t slot = tiling_.windows[2].base[static_cast<size_t>(along_w.taps[static_cast<size_t>(k)].index)];
      for (const TileSegment& line : task.lines) {
        const TileSegment segment{line.a + slot, (line.b * taps + k) * panel};
        task.segments.push_back(voxels_are_columns_ ? TileSegment{segment.b, segment.a} : segment);
      }
    }
  }

  /// Sums of one tile: of row m and of the n-th of its channels at data[m * row + n * channel].
  struct Sums {
    const T* data;
    int64_t row, channel;
  };

  /// Channels [channels.begin, channels.end) of a unit, of `rows` outputs from `out` on. The first range of input
  /// channels sets the outputs, the others add to them.
  void store(const Unit<T>& unit, const ConvRange& channels, const Sums& sums, int64_t rows, T* out,
             int64_t out_step) const {
    const int64_t channel_stride = p_.out.channel_stride, count = channels.end - channels.begin;
    const bool adds = p_.adds || unit.first_channel > 0;
    const bool relu = p_.relu && unit.first_channel + unit.channels == p_.in_channels();
    const auto finished = [relu](T value) { return relu && value < T(0) ? T(0) : value; };
    const int64_t first = unit.group * p_.out_channels() + unit.block.first + channels.begin;
    const T* bias = p_.bias ? p_.bias + first * p_.bias_stride : nullptr;
    out += channels.begin * channel_stride;
    if (channel_stride < out_step) {
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < count; ++n) {
          T& to = out[m * out_step + n * channel_stride];
          to = finished(sums.data[m * sums.row + n * sums.channel] + (adds   ? to
                                                                      : bias ? bias[n * p_.bias_stride]
                                                                             : T(0)));
        }
      return;
    }
    for (int64_t n = 0; n < count; ++n) {
      T* to = out + n * channel_stride;
      const T* from = sums.data + n * sums.channel;
      const T start = bias ? bias[n * p_.bias_stride] : T(0);
      if (adds) {
        for (int64_t m = 0; m < rows; ++m) to[m * out_step] = finished(to[m * out_step] + from[m * sums.row]);
      } else {
        for (int64_t m = 0; m < rows; ++m) to[m * out_step] = finished(start + from[m * sums.row]);
      }
    }
  }

  const Problem<T>& p_;
  std::vector<ColumnBlock<T>> blocks_;
  Phases phases_;
  std::vector<int64_t> tap_slot_;  // by index in the kernel: place among the packed taps, or -1
  int64_t channels_per_unit_ = 0;
  Tiling tiling_;
  PackedLayout layout_;
  bool voxels_are_columns_ = false;  ///< of the register tile, whose rows are output channels then
};

/// Every output's bias, or zero.
template <class T>
void fill_bias(const View& out, const View* bias) {
  T zero{0};
  View values = out;
  values.data = bias ? bias->data : &zero;
  std::fill_n(values.stride, values.rank, 0);
  if (bias) values.stride[1] = bias->stride[0];
  copy(out, values);
}

/// `transposed`: out is x and in is y; the weight is (y channels, x channels / groups, ...) either way.
void convolve(const char* op, bool transposed, const View& out, const View& in, const View& w,
              const ConvEpilogue& epilogue, const ConvGeometry& geometry) {
  if (is_half(out.dtype))
    return through_float32(out, in, w, epilogue.bias, [&](const View& o, const View& i, const View& v, const View* b) {
      convolve(op, transposed, o, i, v, {b, epilogue.relu}, geometry);
    });
  dispatch(WideFloats(), out.dtype, op, "CPU", [&]<class T>() {
    if (out.numel() == 0) return;
    Problem<T> problem{.out = Volume<T>(out), .in = Volume<const T>(in), .gather = {}};
    const View &x = transposed ? out : in, &y = transposed ? in : out;
    problem.groups = geometry.groups;
    problem.weight_group_stride = w.size[0] / geometry.groups * w.stride[0];
    problem.weight_out_stride = w.stride[transposed ? 1 : 0];
    problem.weight_in_stride = w.stride[transposed ? 0 : 1];
    const View* bias = epilogue.bias;
    problem.bias = bias ? bias->as<const T>() : nullptr;
    problem.bias_stride = bias ? bias->stride[0] : 0;
    bool whole = true;  // one piece writes every result, complete
    for_each_kernel_piece(w, geometry, [&](const View& piece, const ConvGeometry& g) {
      bool covered = true;
      for (int axis = 0; axis < 3; ++axis) {
        const ConvAxis a{x.size[axis + 2], y.size[axis + 2], piece.size[axis + 2],
                         g.stride[axis],   g.padding[axis],  g.dilation[axis]};
        ConvGather& gather = problem.gather[static_cast<size_t>(axis)];
        gather = transposed ? gather_transposed(a) : gather_forward(a);
        covered = covered && gather.covers_all();
        problem.kernel[axis] = piece.size[axis + 2];
        problem.weight_stride[axis] = piece.stride[axis + 2];
      }
      problem.weight = piece.as<const T>();
      whole = whole && covered && piece.numel() == w.numel();
      problem.relu = epilogue.relu && whole;
      if (!covered && !problem.adds) fill_bias<T>(out, bias);
      Convolution<T>(problem).run();
      problem.adds = true;
    });
    if (epilogue.relu && !whole) unary(UnaryOp::relu, out, out, 0, 0);
  });
}

}  // namespace

void conv_forward(const View& y, const View& x, const View& w, const ConvEpilogue& epilogue,
                  const ConvGeometry& geometry) {
  convolve("conv", false, y, x, w, epilogue, geometry);
}

void conv_backward_data(const View& x, const View& y, const View& w, const ConvEpilogue& epilogue,
                        const ConvGeometry& geometry) {
  convolve("conv_transpose", true, x, y, w, epilogue, geometry);
}

ConvExplanation explain_conv(ConvPass, const View&, const View& w, const View&, const ConvGeometry&) {
  return {concat(is_half(w.dtype) ? "float32 copies, then " : "", "CPU: register tile, ", num_threads(),
                 " threads, workspace below 64 MB")};
}

}  // namespace voxgrad::cpu
