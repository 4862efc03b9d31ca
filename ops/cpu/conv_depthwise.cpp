// Depthwise convolutions on the CPU: the forward and transposed convolution, and the gradient of the weight.
//
// A task packs a tile of one channel with its border (ops/cpu/conv_pack.h). The outputs are divided into phases
// (ops/detail/conv_geometry.h). The packed tile is an array of slots, one for each input. For any stride, neighboring
// outputs of a phase read neighboring slots, so a vector holds neighboring outputs along w. The taps of a phase are
// divided into runs. A run consists of taps that read consecutive rows of slots. The register tile has several rows of
// outputs. It loads each vector of inputs once, and multiplies the vector by all taps of the run that need it.
//
// The order of each sum depends only on the geometry of the convolution.
#include "ops/cpu/conv_problem.h"

#include <algorithm>

#include "core/thread_pool.h"

namespace voxgrad::cpu {
namespace {

/// Largest size of a packed tile in bytes.
constexpr int64_t kTileBytes = 256 << 10;
/// Largest number of taps. The sums of all taps of the weight gradient should fit in the first-level cache.
constexpr int64_t kMaxTaps = 512;
/// Largest number of channels of y per channel of x.
constexpr int64_t kMaxMultiplier = 4;
/// Largest number of taps per run.
constexpr int kMaxRun = 5;
/// Largest number of rows of the register tile. Its sums and the weights of a run fit in the registers.
constexpr int kMaxRows = kVectorRegisters >= 32 ? 12 : 8;
/// Channels that are packed together if channels are innermost in memory.
constexpr int64_t kInnerChannels = 8;
/// Minimum number of parts, over all channels, into which the sums of the weight gradient are divided.
constexpr int64_t kMinParts = 64;

/// A run of taps along h. For the same output, tap k of the run reads the slot that is k rows after the slot of tap 0.
struct TapRun {
  int64_t offset = 0;  // distance from the slot of an output to the slot that tap 0 reads for this output
  int64_t first = 0;   // position of tap 0 in Taps::weights
};

/// The taps of one phase of each axis. runs[m - 1] holds the runs of m taps.
struct PhaseTaps {
  std::array<const ConvPhase*, 3> phase{};
  std::array<std::vector<TapRun>, kMaxRun> runs{};
};

/// The taps of a convolution in the order of their sums, for tiles whose rows are `pitch` elements apart.
struct Taps {
  std::vector<PhaseTaps> phases{};  // in the order of the phases along d, h and w
  std::vector<int64_t> weights{};   // offsets in the weight tensor

  Taps(const Gather3& gather, const Tiling& tiling, int64_t pitch, const Triple& weight_stride) {
    auto slot = [&](size_t axis, const ConvTap& tap) {
      return tiling.windows[axis].base[static_cast<size_t>(tap.index)];
    };
    for (const ConvPhase& pd : gather[0].phases)
      for (const ConvPhase& ph : gather[1].phases)
        for (const ConvPhase& pw : gather[2].phases) {
          PhaseTaps& to = phases.emplace_back(PhaseTaps{{&pd, &ph, &pw}});
          std::vector<ConvTap> rows = ph.taps;
          std::ranges::sort(rows, {}, [&](const ConvTap& tap) { return slot(1, tap); });
          for (const ConvTap& d : pd.taps)
            for (const ConvTap& w : pw.taps)
              // Runs depend on the offsets only: in short tiles, the slots of other taps are consecutive, too.
              for (size_t i = 0, count = 0; i < rows.size(); i += count) {
                for (count = 1; count < kMaxRun && i + count < rows.size(); ++count)
                  if (rows[i + count].offset != rows[i].offset + static_cast<int64_t>(count) * gather[1].in_step) break;
                const int64_t row = slot(0, d) * tiling.windows[1].slots + slot(1, rows[i]);
                to.runs[count - 1].push_back({row * pitch + slot(2, w), static_cast<int64_t>(weights.size())});
                for (size_t k = i; k < i + count; ++k)
                  weights.push_back(d.index * weight_stride[0] + rows[k].index * weight_stride[1] +
                                    w.index * weight_stride[2]);
              }
        }
  }
};

/// The operands and the result of the register tile of the forward and transposed convolution.
template <class T>
struct RowProduct {
  const PhaseTaps* taps = nullptr;
  const T* x = nullptr;  // packed tile, at the slot of the first output
  int64_t pitch = 0;
  int64_t channels = 0;  // channels to sum over
  int64_t channel_pitch = 0;
  const T* weights = nullptr;  // weights of the first channel, in the order of Taps::weights
  int64_t tap_count = 0;       // weights per channel
  T* out = nullptr;
  int64_t out_row = 0;   // stride of the rows
  int64_t out_step = 0;  // stride within a row
  int64_t count = 0;     // outputs per row, at most the elements of a vector
  T bias = T(0);
  bool relu = false;
};

/// Copies `count` < n elements in pieces of constant size, which the compiler inlines. A call of memcpy would take
/// longer.
template <class T, int n>
[[gnu::always_inline]] inline void copy_fewer(const T* from, int64_t count, T* to) {
  if constexpr (n > 1) {
    constexpr int half = n / 2;
    if (count & half) std::memcpy(to, from, half * sizeof(T));
    const int64_t done = count & half;
    copy_fewer<T, half>(from + done, count - done, to + done);
  }
}

template <class T, int bytes, int rows>
void multiply_rows(const RowProduct<T>& p) {
  using Vector = typename VectorOf<T, bytes>::Type;
  constexpr int lanes = bytes / static_cast<int>(sizeof(T));
  Vector sums[rows];
  unrolled<rows>([&](auto r) {
    sums[r] = p.bias + Vector{};
    __builtin_prefetch(p.out + r * p.out_row, 1);
  });
  for (int64_t c = 0; c < p.channels; ++c)
    unrolled<kMaxRun>([&](auto last) {
      constexpr int taps = last + 1;
      for (const TapRun& run : p.taps->runs[last]) {
        const T* const x = p.x + c * p.channel_pitch + run.offset;
        const T* const weights = p.weights + c * p.tap_count + run.first;
        Vector w[taps];
        unrolled<taps>([&](auto k) { w[k] = weights[k] - Vector{}; });
        unrolled<rows + taps - 1>([&](auto row) {
          const Vector in = load<T, bytes>(x + row * p.pitch);
          unrolled<taps>([&](auto k) {
            if constexpr (row >= k && row - k < rows) sums[row - k] += w[k] * in;
          });
        });
      }
    });
  unrolled<rows>([&](auto r) {
    if (p.relu) sums[r] = sums[r] < 0 ? Vector{} : sums[r];  // keeps NaN
    T* const out = p.out + r * p.out_row;
    if (p.out_step == 1 && p.count == lanes) {
      std::memcpy(out, &sums[r], bytes);
    } else {
      T values[lanes];
      std::memcpy(values, &sums[r], bytes);
      if (p.out_step == 1)
        copy_fewer<T, lanes>(values, p.count, out);
      else
        for (int64_t i = 0; i < p.count; ++i) out[i * p.out_step] = values[i];
    }
  });
}

/// Computes `rows` rows of outputs.
template <class T, int bytes>
void multiply_block(const RowProduct<T>& product, int64_t rows) {
  RowProduct<T> p = product;
  auto step = [&]<int height>(std::integral_constant<int, height>) {
    for (; rows >= height; rows -= height, p.x += height * p.pitch, p.out += height * p.out_row)
      multiply_rows<T, bytes, height>(p);
  };
  step(std::integral_constant<int, kMaxRows>());
  if constexpr (kMaxRows > 8) step(std::integral_constant<int, 8>());
  step(std::integral_constant<int, 4>());
  step(std::integral_constant<int, 2>());
  step(std::integral_constant<int, 1>());
}

/// A packed tile of `channels` channels.
template <class T>
struct DepthwiseTile {
  static constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));  // elements of a vector
  const Gather3& gather;
  Tiling tiling;
  int64_t pitch = 0;
  int64_t channel_pitch = 0;
  int64_t elements = 0;

  DepthwiseTile(const Gather3& from, const Tiling& tiles, int64_t channels)
      : gather(from),
        tiling(tiles),
        pitch(round_up(tiling.windows[2].slots, kLanes)),
        channel_pitch(tiling.windows[0].slots * tiling.windows[1].slots * pitch),
        elements(channels * channel_pitch + kLanes) {}

  int64_t plane() const { return tiling.windows[1].slots * pitch; }
  /// Packs a tile. Slots outside the input are zero. Does not write the elements between the rows.
  void pack(T* to, const Volume<const T>& in, int64_t n, int64_t channel, int64_t channels,
            const std::array<int64_t, 3>& origin) const {
    pack_tile(to, {pitch, channel_pitch, 1, true}, in.at(n, channel), in, channels, gather, tiling, origin);
  }
};

/// Returns the number of steps of a phase in a tile along `axis`. The result is not positive if there are none.
int64_t steps_in_tile(const Tiling& tiling, const std::array<int64_t, 3>& origin, size_t axis, const ConvPhase& phase) {
  return std::min(phase.count - origin[axis], tiling.length[axis]);
}

/// Computes one channel of the output in a tile.
template <class T>
void run_channel(const ConvProblem<T>& p, const Taps& taps, const DepthwiseTile<T>& tile, const RowProduct<T>& channel,
                 const std::array<int64_t, 3>& origin) {
  constexpr int64_t lanes = DepthwiseTile<T>::kLanes;
  const size_t phases_w = p.gather[2].phases.size();
  for (size_t i = 0; i < taps.phases.size(); i += phases_w) {
    const auto& [pd, ph, first_w] = taps.phases[i].phase;
    const int64_t rows = steps_in_tile(tile.tiling, origin, 1, *ph);
    for (int64_t d = 0; d < steps_in_tile(tile.tiling, origin, 0, *pd); ++d)
      for (int64_t h = 0; h < rows; h += kMaxRows)
        for (size_t j = i; j < i + phases_w; ++j) {
          RowProduct<T> row = channel;
          row.taps = &taps.phases[j];
          int64_t at = 0;
          for (size_t axis = 0; axis < 3; ++axis) {
            const int64_t step = origin[axis] + (axis == 0 ? d : axis == 1 ? h : 0);
            at +=
                (row.taps->phase[axis]->first + step * p.gather[axis].out_step) * p.out.stride[static_cast<int>(axis)];
          }
          const int64_t count = steps_in_tile(tile.tiling, origin, 2, *row.taps->phase[2]);
          for (int64_t w = 0; w < count; w += lanes) {
            row.x = channel.x + d * tile.plane() + h * tile.pitch + w;
            row.out = channel.out + at + w * row.out_step;
            row.count = std::min(lanes, count - w);
            const auto multiply =
                row.count <= lanes / 2 ? multiply_block<T, kHalfVectorBytes> : multiply_block<T, kVectorBytes>;
            multiply(row, std::min<int64_t>(kMaxRows, rows - h));
          }
        }
  }
}

/// A part of the weight gradient: the products of one plane of x with a vector of elements of y, for a run of taps.
template <class T>
struct RunProduct {
  const T* x = nullptr;  // packed tile, at the first input of tap 0
  int64_t x_pitch = 0;
  const T* y = nullptr;
  int64_t y_pitch = 0;
  int64_t rows = 0;
  int64_t count = 0;  // elements of the vectors that belong to the tile
  T* sums = nullptr;  // one vector of sums per tap; the products are added to these sums
};

template <class T, int bytes, int taps>
void add_run(const RunProduct<T>& p) {
  using Vector = typename VectorOf<T, bytes>::Type;
  using Mask = decltype(Vector{} < Vector{});
  constexpr int lanes = bytes / static_cast<int>(sizeof(T));
  constexpr int step = taps <= 2 ? 4 : 2;  // independent sums, to hide the latency of additions
  Mask inside;
  for (int i = 0; i < lanes; ++i) inside[i] = i < p.count ? -1 : 0;
  Vector sums[step * taps] = {}, x[taps - 1 + step];
  // Elements beyond `count` belong to other rows and may be infinite.
  auto load_x = [&](int64_t row, int i) {
    Mask bits;
    std::memcpy(&bits, p.x + row * p.x_pitch, bytes);
    bits &= inside;
    std::memcpy(&x[i], &bits, bytes);
  };
  auto add_rows = [&]<int now>(std::integral_constant<int, now>, int64_t row) {
    unrolled<now>([&](auto r) {
      const Vector y = load<T, bytes>(p.y + (row + r) * p.y_pitch);
      load_x(row + r + taps - 1, r + taps - 1);
      unrolled<taps>([&](auto k) { sums[r * taps + k] += x[r + k] * y; });
    });
    unrolled<taps - 1>([&](auto i) { x[i] = x[i + now]; });
  };
  unrolled<taps - 1>([&](auto i) { load_x(i, i); });
  int64_t row = 0;
  for (; row + step <= p.rows; row += step) add_rows(std::integral_constant<int, step>(), row);
  for (; row < p.rows; ++row) add_rows(std::integral_constant<int, 1>(), row);
  unrolled<taps>([&](auto k) {
    T* const to = p.sums + k * DepthwiseTile<T>::kLanes;
    Vector total = load<T, bytes>(to);
    unrolled<step>([&](auto r) { total += sums[r * taps + k]; });
    std::memcpy(to, &total, bytes);
  });
}

/// Adds the products of all taps for one tile to `sums`, which holds one vector of sums per tap.
template <class T>
void add_tile(const Taps& taps, const DepthwiseTile<T>& x, const DepthwiseTile<T>& y, const T* packed_x,
              const T* packed_y, const std::array<int64_t, 3>& origin, T* sums) {
  constexpr int64_t lanes = DepthwiseTile<T>::kLanes;
  const PhaseTaps& all = taps.phases[0];
  auto steps = [&](size_t axis) { return steps_in_tile(x.tiling, origin, axis, *all.phase[axis]); };
  for (int64_t d = 0; d < steps(0); ++d)
    for (int64_t w = 0; w < steps(2); w += lanes) {
      const int64_t count = std::min(lanes, steps(2) - w);
      unrolled<kMaxRun>([&](auto last) {
        const auto add =
            count <= lanes / 2 ? add_run<T, kHalfVectorBytes, last + 1> : add_run<T, kVectorBytes, last + 1>;
        for (const TapRun& run : all.runs[last])
          add({packed_x + d * x.plane() + w + run.offset, x.pitch, packed_y + d * y.plane() + w, y.pitch, steps(1),
               count, sums + run.first * lanes});
      });
    }
}

}  // namespace

bool is_depthwise(const View& w, const ConvGeometry& geometry) {
  return w.size[1] == 1 && w.size[0] <= kMaxMultiplier * geometry.groups &&
         w.size[2] * w.size[3] * w.size[4] <= kMaxTaps;
}

template <class T>
void convolve_depthwise(const ConvProblem<T>& p) {
  const int64_t ins = p.in_channels(), outs = p.out_channels(), item = sizeof(T);
  const bool inner = p.in.channel_stride < p.in.stride[2] || p.out.channel_stride < p.out.stride[2];
  const int64_t groups = inner ? std::min(kInnerChannels, p.groups) : 1, blocks = divide_up(p.groups, groups);
  const int64_t min_tiles = divide_up(4 * num_threads(), std::max<int64_t>(1, p.out.batch * blocks));
  const DepthwiseTile<T> tile(
      p.gather, make_tiling(p.gather, p.kernel, {.slots = kTileBytes / item / (ins * groups), .tiles = min_tiles}),
      groups * ins);
  const Taps taps(p.gather, tile.tiling, tile.pitch, p.weight_stride);
  const int64_t tap_count = static_cast<int64_t>(taps.weights.size());
  RowProduct<T> base{.pitch = tile.pitch, .channels = ins, .channel_pitch = tile.channel_pitch, .tap_count = tap_count};
  base.out_row = p.gather[1].out_step * p.out.stride[1];
  base.out_step = p.gather[2].out_step * p.out.stride[2];
  base.relu = p.relu;
  const int64_t tiles = tile.tiling.count();
  parallel_for(p.out.batch * blocks * tiles, 1, [&](int64_t begin, int64_t end) {
    const Workspace<T> packed(tile.elements), weights(ins * tap_count);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / tiles / blocks, first = i / tiles % blocks * groups;
      const auto origin = tile.tiling.origin(i % tiles);
      const int64_t now = std::min(groups, p.groups - first);
      tile.pack(packed.data(), p.in, n, first * ins, now * ins, origin);
      for (int64_t o = 0; o < now * outs; ++o) {
        const int64_t group = first + o / outs, out = first * outs + o;
        const T* const w = p.weight + group * p.weight_group_stride + o % outs * p.weight_out_stride;
        for (int64_t c = 0; c < ins; ++c)
          for (int64_t k = 0; k < tap_count; ++k)
            weights.data()[c * tap_count + k] = w[c * p.weight_in_stride + taps.weights[static_cast<size_t>(k)]];
        RowProduct<T> channel = base;
        channel.x = packed.data() + o / outs * ins * tile.channel_pitch;
        channel.weights = weights.data();
        channel.out = p.out.at(n, out);
        channel.bias = p.bias ? p.bias[out * p.bias_stride] : T(0);
        run_channel(p, taps, tile, channel, origin);
      }
    }
  });
}

template <class T>
void depthwise_weight_gradient(const View& w, const View& x_view, const View& y_view, const ConvGeometry& geometry) {
  const Volume<const T> x(x_view), y(y_view);
  const Triple kernel(w.size[2], w.size[3], w.size[4]), weight_stride(w.stride[2], w.stride[3], w.stride[4]);
  Gather3 gather, gather_y;
  for (int i = 0; i < 3; ++i) {
    const size_t axis = static_cast<size_t>(i);
    gather[axis] = gather_forward(conv_axis(x_view, w, y_view, geometry, i));
    gather_y[axis] = gather_forward({y.size[i], y.size[i], 1, 1, 0, 1});
  }
  const int64_t limit = kTileBytes / static_cast<int64_t>(sizeof(T));
  const DepthwiseTile<T> tile(gather, make_tiling(gather, kernel, {.slots = limit, .steps = limit / 2}), 1);
  Tiling tiling_y = tile.tiling;
  for (size_t axis = 0; axis < 3; ++axis) tiling_y.windows[axis] = AxisWindow(gather_y[axis], 1, tiling_y.length[axis]);
  const DepthwiseTile<T> tile_y(gather_y, tiling_y, 1);
  const Taps taps(gather, tile.tiling, tile.pitch, weight_stride);
  const int64_t tap_count = static_cast<int64_t>(taps.weights.size()), multiplier = w.size[0] / geometry.groups;
  // The tiles of a channel are divided into parts. Each part is summed in double.
  const int64_t tiles = x.batch * tile.tiling.count();
  const int64_t tiles_per_part = std::max<int64_t>(1, tiles / divide_up(kMinParts, w.size[0]));
  const int64_t parts = divide_up(tiles, tiles_per_part);
  std::vector<double> totals(static_cast<size_t>(w.size[0] * parts * tap_count), 0);
  parallel_for(w.size[0] * parts, 1, [&](int64_t begin, int64_t end) {
    constexpr int64_t lanes = DepthwiseTile<T>::kLanes;
    const Workspace<T> packed(tile.elements), packed_y(tile_y.elements), sums(tap_count * lanes);
    std::fill_n(packed_y.data(), tile_y.elements, T(0));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i / parts, first = i % parts * tiles_per_part;
      double* const total = totals.data() + i * tap_count;
      for (int64_t t = first; t < std::min(tiles, first + tiles_per_part); ++t) {
        const int64_t n = t / tile.tiling.count();
        const auto origin = tile.tiling.origin(t % tile.tiling.count());
        tile.pack(packed.data(), x, n, channel / multiplier, 1, origin);
        tile_y.pack(packed_y.data(), y, n, channel, 1, origin);
        std::fill_n(sums.data(), tap_count * lanes, T(0));
        add_tile(taps, tile, tile_y, packed.data(), packed_y.data(), origin, sums.data());
        for (int64_t k = 0; k < tap_count * lanes; ++k) total[k / lanes] += static_cast<double>(sums.data()[k]);
      }
    }
  });
  for (int64_t channel = 0; channel < w.size[0]; ++channel)
    for (int64_t k = 0; k < tap_count; ++k) {
      double sum = 0;
      for (int64_t part = 0; part < parts; ++part)
        sum += totals[static_cast<size_t>((channel * parts + part) * tap_count + k)];
      w.as<T>()[channel * w.stride[0] + taps.weights[static_cast<size_t>(k)]] = static_cast<T>(sum);
    }
}

template void convolve_depthwise(const ConvProblem<float>& problem);
template void convolve_depthwise(const ConvProblem<double>& problem);
template void depthwise_weight_gradient<float>(const View&, const View&, const View&, const ConvGeometry&);
template void depthwise_weight_gradient<double>(const View&, const View&, const View&, const ConvGeometry&);

}  // namespace voxgrad::cpu
