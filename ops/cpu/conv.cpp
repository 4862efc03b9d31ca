// Forward and transposed convolution on the CPU, in the gather form of ops/detail/conv_geometry.h: along each axis, the
// outputs are divided into phases, and all outputs of a phase use the same taps. A step is the index of an output
// within its phase.
//
// Usually, a task computes a tile of outputs. The task packs the inputs of the tile once and then computes the rows of
// outputs one after another. A row is a matrix product whose left operand is the packed tile, read at one offset per
// tap. Taps that are outside the input along d or h are skipped. A tap may be outside the input along w for some
// outputs of the row. The product then skips these outputs for this tap. A product with few terms reads zeros instead.
// If the weights are larger than the inputs, a task instead computes a block of output channels and packs their
// weights.
//
// Each row of the register tile (conv_tile.h) is a voxel, and each column is an output channel. With few output
// channels, the roles are exchanged. A sum adds the products of one tap after another, in an order that depends only on
// the shapes.
#include <algorithm>
#include <atomic>

#include "ops/cpu/conv_problem.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

// kWeightBytes limits the packed weights, kTileBytes limits the packed tile of each thread, and kPanelBytes limits the
// weights of one phase. The tile of a thread and the weights of one phase fit in the second-level cache together. A
// kernel with more than 10^5 taps may exceed the limits.
constexpr int64_t kWeightBytes = 16 << 20;
constexpr int64_t kTileBytes = 320 << 10;
constexpr int64_t kPanelBytes = 384 << 10;
// Products with fewer terms per tap along w read zeros where a tap is outside the input; see multiply_inside().
constexpr int64_t kMinDepth = 64;
// All inputs are packed at once if they are smaller than this limit and smaller than the weights.
constexpr int64_t kInputBytes = 4 << 20;
// Number of input channels whose weights one task packs. In channels_last, the f32 weights of these channels fill a
// cache line.
constexpr int64_t kPackedChannels = 16;
// Minimum length of a tile along w. A tile is not shortened further to hold more channels.
constexpr int64_t kMinRow = 32;

/// One phase of each axis.
using Phase3 = std::array<const ConvPhase*, 3>;

/// The state of a thread: the output tile that the thread computes, and its buffers.
template <class T>
struct TileTask {
  const T* weights = nullptr;
  T* packed = nullptr;                            // the packed input tile
  std::vector<TileSegment> lines = {};            // the taps (d, h) of the current row, see fill_lines()
  std::vector<TileSegment> segments = {};         // the segments of the current product
  std::vector<ColumnBlock<T>> voxel_blocks = {};  // column blocks for rows of `voxels` voxels
  int64_t voxels = 0;
  int64_t n = 0;                    // index of the sample
  std::array<int64_t, 3> origin{};  // first step of the tile on each axis
};

template <class T>
class Convolution {
 public:
  explicit Convolution(const ConvProblem<T>& problem)
      : p_(problem), blocks_(column_blocks<T>(problem.out_channels())), weights_(problem) {
    channels_per_unit_ = choose_channels();
    const int64_t min_tiles = divide_up(4 * num_threads(), p_.out.batch);
    const int64_t slots = kTileBytes / item() / std::max<int64_t>(1, channels_per_unit_);
    tiling_ = make_tiling(p_.gather, p_.kernel, {.slots = slots, .tiles = min_tiles});
    voxels_are_columns_ = choose_columns();
    const int64_t slots_w = tiling_.windows[2].slots;
    layout_ = {slots_w * channels_per_unit_, slots_w, 1};
  }

  void run() {
    if (p_.in_channels() > 0 && inputs_are_small())
      run_by_columns();
    else
      run_by_tiles();
  }

 private:
  static constexpr int64_t item() { return static_cast<int64_t>(sizeof(T)); }

  /// Returns the number of slabs. A slab is a range of channels_per_unit_ input channels of a group.
  int64_t slabs() const { return divide_up(p_.in_channels(), channels_per_unit_); }
  ConvUnit<T> unit_of(int64_t group, int64_t slab, const ColumnBlock<T>& block) const {
    const int64_t first = slab * channels_per_unit_, channels = std::min(channels_per_unit_, p_.in_channels() - first);
    return {group, first, channels, block, 0, weights_.taps() * channels * block.family->columns};
  }

  /// Computes all units (ConvUnit), in passes whose packed weights fit in kWeightBytes.
  void run_by_tiles() {
    const int64_t limit =
        std::max(kWeightBytes, weights_.taps() * channels_per_unit_ * int64_t{kMaxTileWidth}) / item();
    const Workspace<T> weights(
        std::min(limit, p_.groups * p_.in_channels() * weights_.taps() * padded_columns(blocks_)));
    std::vector<ConvUnit<T>> pass;
    for (int64_t group = 0; group < p_.groups; ++group)
      for (int64_t slab = 0; slab < slabs(); ++slab)
        for (const ColumnBlock<T>& block : blocks_) {
          ConvUnit<T> unit = unit_of(group, slab, block);
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
  /// Returns the number of elements of a packed tile, plus padding because a register tile may read beyond the last
  /// row.
  int64_t tile_elements() const {
    return tiling_.windows[0].slots * tiling_.windows[1].slots * layout_.row + kMaxTileWidth / item();
  }

  /// Returns whether all packed inputs are smaller than the weights, as with many channels and few voxels.
  bool inputs_are_small() const {
    const int64_t inputs = tiles() * tile_elements() * slabs() * p_.groups;
    return inputs * item() <= kInputBytes && p_.groups * static_cast<int64_t>(blocks_.size()) >= num_threads() &&
           weights_.taps() * channels_per_unit_ * kMaxTileWidth <= 4 * kPanelBytes &&
           inputs <= p_.groups * p_.out_channels() * p_.in_channels() * weights_.taps();
  }

  /// Packs all inputs first. Each task then handles one block of output channels. The task packs the weights of one
  /// unit at a time, so that they stay in the cache, and uses them for all tiles.
  void run_by_columns() {
    const int64_t tile_count = tiles(), block_count = static_cast<int64_t>(blocks_.size());
    const int64_t inputs = p_.groups * slabs() * tile_count;
    const Workspace<T> packed(inputs * tile_elements());
    auto use_input = [&](TileTask<T>& task, int64_t i) {
      task.packed = packed.data() + i * tile_elements();
      set_tile(task, i % tile_count);
    };
    parallel_for(inputs, 1, [&](int64_t begin, int64_t end) {
      TileTask<T> task;
      for (int64_t i = begin; i < end; ++i) {
        use_input(task, i);
        pack_input(unit_of(i / tile_count / slabs(), i / tile_count % slabs(), blocks_[0]), task);
      }
    });
    std::atomic<int64_t> next = 0;
    parallel_for(std::min<int64_t>(p_.groups * block_count, num_threads()), 1, [&](int64_t, int64_t) {
      const Workspace<T> weights(weights_.taps() * channels_per_unit_ * (kMaxTileWidth / item()));
      TileTask<T> task{.weights = weights.data()};
      for (int64_t i = next++; i < p_.groups * block_count; i = next++)
        for (int64_t slab = 0; slab < slabs(); ++slab) {
          const ConvUnit<T> unit = unit_of(i / block_count, slab, blocks_[static_cast<size_t>(i % block_count)]);
          weights_.pack(unit, 0, unit.channels, weights.data());
          for (int64_t tile = 0; tile < tile_count; ++tile) {
            use_input(task, (unit.group * slabs() + slab) * tile_count + tile);
            run_unit(unit, task);
          }
        }
    });
  }

  void set_tile(TileTask<T>& task, int64_t tile) const {
    task.n = tile / tiling_.count();
    task.origin = tiling_.origin(tile % tiling_.count());
  }

  /// Returns the number of input channels per unit, so that the weights of a phase fit in kPanelBytes and a tile with
  /// short rows fits in kTileBytes.
  int64_t choose_channels() const {
    int64_t slots = 1;
    int64_t columns = 1;
    int64_t max_taps = 1;  // largest number of taps of a phase
    for (const ColumnBlock<T>& block : blocks_) columns = std::max<int64_t>(columns, block.family->columns);
    for (int axis = 0; axis < 3; ++axis) {
      const ConvGather& gather = p_.gather[static_cast<size_t>(axis)];
      const int64_t length = axis == 2 ? std::min(gather.steps(), kMinRow) : 1;
      slots *= std::max<int64_t>(1, AxisWindow(gather, p_.kernel[axis], length).slots);
      size_t taps = 1;
      for (const ConvPhase& phase : gather.phases) taps = std::max(taps, phase.taps.size());
      max_taps *= static_cast<int64_t>(taps);
    }
    const int64_t panel = max_taps * columns * item();
    const int64_t weights = std::max<int64_t>(1, weights_.taps()) * columns * item();
    const int64_t max_channels = std::min({kPanelBytes / panel, kTileBytes / (slots * item()), kWeightBytes / weights});
    return even_piece(p_.in_channels(), std::max<int64_t>(1, max_channels));
  }

  /// Returns whether voxels are the columns of the register tile, because columns of channels would be mostly padding.
  bool choose_columns() const {
    const int64_t channels = p_.out_channels(), width = tiling_.length[2];
    const int64_t with_voxels = channels * padded_columns(column_blocks<T>(width));
    const int64_t with_channels = width * padded_columns(blocks_);
    return 2 * channels <= padded_columns(blocks_) && with_voxels < with_channels;
  }

  /// Packs the weights of the units, then computes their outputs.
  void run_pass(const std::vector<ConvUnit<T>>& units, T* weights) const {
    const int64_t parts = divide_up(channels_per_unit_, kPackedChannels);
    parallel_for(static_cast<int64_t>(units.size()) * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        weights_.pack(units[static_cast<size_t>(i / parts)], i % parts * kPackedChannels, kPackedChannels, weights);
    });
    // Threads take tiles from a common counter, because tiles at the border of the volume need less time.
    const int64_t tasks = tiles();
    std::atomic<int64_t> next = 0;
    parallel_for(std::min<int64_t>(tasks, num_threads()), 1, [&](int64_t, int64_t) {
      const Workspace<T> packed(tile_elements());
      TileTask<T> task{.weights = weights, .packed = packed.data()};
      for (int64_t i = next++; i < tasks; i = next++) {
        set_tile(task, i);
        run_tile(units, task);
      }
    });
  }

  void pack_input(const ConvUnit<T>& unit, const TileTask<T>& task) const {
    const T* source = p_.in.at(task.n, unit.group * p_.in_channels() + unit.first_channel);
    pack_tile(task.packed, layout_, source, p_.in, unit.channels, p_.gather, tiling_, task.origin);
  }

  void run_tile(const std::vector<ConvUnit<T>>& units, TileTask<T>& task) const {
    const ConvUnit<T>* packed = nullptr;  // the unit whose input channels are packed
    for (const ConvUnit<T>& unit : units) {
      if (!packed || packed->group != unit.group || packed->first_channel != unit.first_channel) {
        pack_input(unit, task);
        packed = &unit;
      }
      run_unit(unit, task);
    }
  }

  /// Computes a unit for one tile. The phases along w are innermost, so that a line of the output is completed while
  /// the line is in the cache.
  void run_unit(const ConvUnit<T>& unit, TileTask<T>& task) const {
    const std::array<int64_t, 3>& origin = task.origin;
    for (const ConvPhase& pd : p_.gather[0].phases)
      for (const ConvPhase& ph : p_.gather[1].phases) {
        const int64_t end_d = std::min(pd.count, origin[0] + tiling_.length[0]);
        const int64_t end_h = std::min(ph.count, origin[1] + tiling_.length[1]);
        for (int64_t qd = origin[0]; qd < end_d; ++qd)
          for (int64_t qh = origin[1]; qh < end_h; ++qh) {
            const std::array<int64_t, 3> q{qd, qh, origin[2]};
            fill_lines(pd, ph, q, task.lines);
            for (const ConvPhase& pw : p_.gather[2].phases) run_row(unit, {&pd, &ph, &pw}, q, task);
          }
      }
  }

  /// Computes row (q[0], q[1]) of one phase, from step q[2] to the end of the tile.
  void run_row(const ConvUnit<T>& unit, const Phase3& phase, const std::array<int64_t, 3>& q, TileTask<T>& task) const {
    const int64_t count = std::min(phase[2]->count - q[2], tiling_.length[2]);
    if (count <= 0) return;
    const TileFamily<T>& family = *unit.block.family;
    fill_segments(unit, *phase[2], task);
    const int64_t row = (q[0] - task.origin[0]) * tiling_.windows[1].slots + q[1] - task.origin[1];
    const T* a = task.packed + row * layout_.row;
    const T* b = task.weights + unit.weights + weights_.first_slot(phase) * unit.channels * family.columns;
    T* out = p_.out.at(task.n, unit.group * p_.out_channels() + unit.block.first);
    for (int axis = 0; axis < 3; ++axis) {
      const size_t i = static_cast<size_t>(axis);
      out += (phase[i]->first + q[i] * p_.gather[i].out_step) * p_.out.stride[axis];
    }
    const int64_t out_step = p_.gather[2].out_step * p_.out.stride[2];
    alignas(kTileAlignment) T sums[kMaxTileRows * kMaxTileWidth / sizeof(T)];
    if (voxels_are_columns_) {
      if (task.voxels != count) task.voxel_blocks = column_blocks<T>(task.voxels = count);
      // Compute few channels at a time, because the processor prefetches the outputs of only a few channels.
      const int64_t channels = even_piece(unit.block.count, task.voxel_blocks.back().family->max_rows);
      for (int64_t first = 0; first < unit.block.count; first += channels)
        for (const ColumnBlock<T>& voxels : task.voxel_blocks) {
          const int64_t width = voxels.family->columns, end = std::min(first + channels, unit.block.count);
          for (int64_t n = first, next = n; n < end; n = next) {
            next = std::min<int64_t>(n + voxels.family->max_rows, end);
            voxels.family->products[next - n - 1](
                {b + n, family.columns, a + voxels.first, layout_.channel, task.segments, unit.channels, sums, width});
            if (out_step == 1)
              store_vectors(unit, {n, next}, {sums, 1, width}, voxels.count, out + voxels.first);
            else
              store(unit, {n, next}, {sums, 1, width}, voxels.count, out + voxels.first * out_step, out_step);
          }
        }
      return;
    }
    const int64_t rows = even_piece(count, family.max_rows);
    for (int64_t m = 0; m < count; m += rows) {
      const int64_t now = std::min(rows, count - m);
      // Prefetch the outputs of each channel, which store() would otherwise wait for.
      for (int64_t n = 0; n < unit.block.count; ++n) {
        __builtin_prefetch(out + n * p_.out.channel_stride + m * out_step, 1);
        __builtin_prefetch(out + n * p_.out.channel_stride + (m + now - 1) * out_step, 1);
      }
      const TileProduct<T> product{a + m,         layout_.channel, b,    family.columns,
                                   task.segments, unit.channels,   sums, family.columns};
      multiply_inside(family, product, now, q[2] + m, *phase[2]);
      store(unit, {0, unit.block.count}, {sums, family.columns, 1}, now, out + m * out_step, out_step);
    }
  }

  /// Computes a product for `rows` steps, starting at `step`. A tap may be inside the input along w for only some of
  /// these steps. If the product has at least kMinDepth terms per tap along w, each tap is multiplied only for the
  /// steps for which the tap is inside. Otherwise, all taps are multiplied for all steps, and read zeros outside.
  void multiply_inside(const TileFamily<T>& family, const TileProduct<T>& product, int64_t rows, int64_t step,
                       const ConvPhase& along_w) const {
    const size_t each = product.segments.size() / along_w.taps.size();
    auto inside = [&](const ConvTap& tap) {
      const ConvRange range = tap_range(p_.gather[2], along_w, tap);
      return ConvRange{std::clamp<int64_t>(range.begin - step, 0, rows),
                       std::clamp<int64_t>(range.end - step, 0, rows)};
    };
    auto is_inside = [&](const ConvTap& tap) { return inside(tap).end - inside(tap).begin == rows; };
    if (static_cast<int64_t>(each) * product.depth < kMinDepth || std::ranges::all_of(along_w.taps, is_inside))
      return family.products[rows - 1](product);
    std::fill_n(product.c, rows * product.c_step, T(0));
    for (size_t k = 0; k < along_w.taps.size(); ++k) {
      const ConvRange range = inside(along_w.taps[k]);
      if (range.begin == range.end) continue;
      family.products[range.end - range.begin - 1]({product.a + range.begin, product.a_step, product.b, product.b_step,
                                                    product.segments.subspan(k * each, each), product.depth,
                                                    product.c + range.begin * product.c_step, product.c_step, true});
    }
  }

  /// Lists the taps (d, h) that are inside the input for row (q[0], q[1]), with the offset of their rows in the packed
  /// tile and their index among the taps of the phase.
  void fill_lines(const ConvPhase& pd, const ConvPhase& ph, const std::array<int64_t, 3>& q,
                  std::vector<TileSegment>& lines) const {
    auto is_inside = [&](size_t axis, const ConvTap& tap) {
      const int64_t position = q[axis] * p_.gather[axis].in_step + tap.offset;
      return position >= 0 && position < p_.gather[axis].in_size;
    };
    auto slot = [&](size_t axis, const ConvTap& tap) {
      return tiling_.windows[axis].base[static_cast<size_t>(tap.index)];
    };
    lines.clear();
    int64_t number = 0;
    for (const ConvTap& d : pd.taps)
      for (const ConvTap& h : ph.taps) {
        if (is_inside(0, d) && is_inside(1, h))
          lines.push_back({(slot(0, d) * tiling_.windows[1].slots + slot(1, h)) * layout_.row, number});
        ++number;
      }
  }

  /// Lists the segments of a product, ordered by the taps along w, then d, then h.
  void fill_segments(const ConvUnit<T>& unit, const ConvPhase& along_w, TileTask<T>& task) const {
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

  /// Sums of one register tile. The sum of output m and channel n is data[m * row + n * channel].
  struct Sums {
    const T* data;
    int64_t row, channel;
  };

  /// Stores the sums of channels [channels.begin, channels.end) of a unit to `rows` outputs, starting at `out`. The
  /// unit with the first input channels overwrites the outputs; later units add to the outputs.
  void store(const ConvUnit<T>& unit, const ConvRange& channels, const Sums& sums, int64_t rows, T* out,
             int64_t out_step) const {
    const int64_t channel_stride = p_.out.channel_stride, count = channels.end - channels.begin;
    const bool adds = unit.first_channel > 0;
    const bool relu = p_.relu && unit.first_channel + unit.channels == p_.in_channels();
    const auto finished = [relu](T value) { return relu && value < T(0) ? T(0) : value; };
    const int64_t first = unit.group * p_.out_channels() + unit.block.first + channels.begin;
    const T* bias = p_.bias ? p_.bias + first * p_.bias_stride : nullptr;
    out += channels.begin * channel_stride;
    if (channel_stride < out_step) {
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < count; ++n) {
          T& to = out[m * out_step + n * channel_stride];
          const T start = adds ? to : bias ? bias[n * p_.bias_stride] : T(0);
          to = finished(sums.data[m * sums.row + n * sums.channel] + start);
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

  /// Does the same as store() if the voxels are contiguous in `sums` and in the output.
  [[gnu::noinline]] void store_vectors(const ConvUnit<T>& unit, const ConvRange& channels, const Sums& sums,
                                       int64_t count, T* out) const {
    for (int64_t n = channels.begin; n < channels.end; ++n) {
      T* const to = out + n * p_.out.channel_stride;
      const T* const from = sums.data + (n - channels.begin) * sums.channel;
      const int64_t channel = unit.group * p_.out_channels() + unit.block.first + n;
      const T start = p_.bias ? p_.bias[channel * p_.bias_stride] : T(0);
      const bool relu = p_.relu && unit.first_channel + unit.channels == p_.in_channels();
      for (int64_t m = 0; m < count; ++m) {
        const T sum = from[m] + (unit.first_channel > 0 ? to[m] : start);
        to[m] = relu && sum < T(0) ? T(0) : sum;
      }
    }
  }

  const ConvProblem<T>& p_;
  std::vector<ColumnBlock<T>> blocks_;
  WeightPacking<T> weights_;
  int64_t channels_per_unit_ = 0;
  Tiling tiling_;
  PackedLayout layout_;
  bool voxels_are_columns_ = false;  // exchanges the roles of the rows and columns of the register tile
};

/// Sets every output to the bias of its channel, or to zero if there is no bias.
template <class T>
void fill_bias(const View& out, const View* bias) {
  T zero{0};
  View values = out;
  values.data = bias ? bias->data : &zero;
  std::fill_n(values.stride, values.rank, 0);
  if (bias) values.stride[1] = bias->stride[0];
  copy(out, values);
}

/// Computes a forward convolution (`out` is y, `in` is x) or a transposed convolution (`out` is x, `in` is y). In both
/// cases the weight is (y channels, x channels / groups, ...).
void convolve(const char* op, bool transposed, View out, View in, const View& w, const ConvEpilogue& epilogue,
              const ConvGeometry& geometry) {
  if (is_half(out.dtype))
    return through_float32(out, in, w, epilogue.bias, [&](const View& o, const View& i, const View& v, const View* b) {
      convolve(op, transposed, o, i, v, {b, epilogue.relu}, geometry);
    });
  dispatch(WideFloats(), out.dtype, op, "CPU", [&]<class T>() {
    if (out.numel() == 0) return;
    const bool merged = merge_voxels(out, in, w, geometry);
    ConvProblem<T> problem{.out = Volume<T>(out), .in = Volume<const T>(in), .gather = {}};
    const View &x = transposed ? out : in, &y = transposed ? in : out;
    problem.groups = geometry.groups;
    problem.weight_group_stride = w.size[0] / geometry.groups * w.stride[0];
    problem.weight_out_stride = w.stride[transposed ? 1 : 0];
    problem.weight_in_stride = w.stride[transposed ? 0 : 1];
    const View* bias = epilogue.bias;
    problem.bias = bias ? bias->as<const T>() : nullptr;
    problem.bias_stride = bias ? bias->stride[0] : 0;
    bool covered = true;  // whether every output has a tap
    for (int axis = 0; axis < 3; ++axis) {
      const ConvAxis a = conv_axis(x, w, y, geometry, axis);
      ConvGather& gather = problem.gather[static_cast<size_t>(axis)];
      gather = transposed ? gather_transposed(a) : gather_forward(a);
      covered = covered && gather.covers_all();
      problem.kernel[axis] = w.size[axis + 2];
      problem.weight_stride[axis] = w.stride[axis + 2];
    }
    problem.weight = w.as<const T>();
    problem.relu = epilogue.relu && covered;
    if (merged && has_many_voxels(problem)) return multiply_pointwise(problem);
    if (!covered) fill_bias<T>(out, bias);
    if (is_depthwise(w, geometry))
      convolve_depthwise(problem);
    else
      Convolution<T>(problem).run();
    if (epilogue.relu && !covered) unary(UnaryOp::relu, out, out, 0, 0);
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
                 num_threads() == 1 ? " thread" : " threads", ", workspace below 64 MB")};
}

}  // namespace voxgrad::cpu
