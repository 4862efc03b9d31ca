// What the CPU convolutions copy before they multiply: a tile of the input with its border, zero where the input
// ends, and laid out so that neighbouring outputs read neighbouring elements whatever the stride.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "core/storage.h"
#include "core/view.h"
#include "ops/conv_geometry.h"
#include "ops/cpu/conv_tile.h"
#include "ops/cpu/vectors.h"
#include "ops/kernels.h"

namespace voxgrad::cpu {

/// Uninitialised elements, aligned for the tiles. They come from the tensors' allocator, which keeps freed blocks: the
/// page faults of fresh ones would cost as much as packing.
template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t count)
      : storage_(static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T), Device::cpu()) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage storage_;
};

/// Calls body(piece of the weight, geometry that puts its taps where they were) for pieces of few enough taps for
/// everything that is kept for each tap to stay within a few megabytes. Nearly always that is the weight itself.
void for_each_kernel_piece(const View& w, const ConvGeometry& geometry,
                           const std::function<void(const View&, const ConvGeometry&)>& body);

/// The inputs that `length` consecutive steps of an axis read, as slots: step q (counted from the first) and tap k
/// find theirs in slot q + base[k]. Each input has one slot, and gaps between dilated taps have none.
struct AxisWindow {
  /// Slots [slot, slot + length) hold the inputs at first_step * in_step + position + j * in_step.
  struct Run {
    int64_t slot = 0;
    int64_t position = 0;
    int64_t length = 0;
  };
  int64_t slots = 0;
  std::vector<int64_t> base;  // by the index of the tap
  std::vector<Run> runs;

  AxisWindow() = default;
  AxisWindow(const ConvGather& gather, int64_t kernel, int64_t length);
  /// The input position in `slot` for a window that starts at step 0.
  int64_t position(int64_t slot, int64_t in_step) const;
};

/// How the steps of the three axes are cut into tiles, each with its window.
struct Tiling {
  std::array<int64_t, 3> length{1, 1, 1};
  std::array<int64_t, 3> pieces{0, 0, 0};
  std::vector<AxisWindow> windows;

  int64_t count() const { return pieces[0] * pieces[1] * pieces[2]; }
  int64_t slots() const { return windows[0].slots * windows[1].slots * windows[2].slots; }
  /// First step of each axis in tile `index`.
  std::array<int64_t, 3> origin(int64_t index) const;
};

using Gather3 = std::array<ConvGather, 3>;

/// What a tile may hold; one step is the least.
struct TilingLimits {
  int64_t slots = 0;
  int64_t steps = std::numeric_limits<int64_t>::max();
  int64_t tiles = 1;  ///< at least so many, if there are that many rows
};

/// The largest tiles within the limits, cut evenly, and along w last.
Tiling make_tiling(const Gather3& gather, const Triple& kernel, const TilingLimits& limits);

/// One element type's view of an (N, C, D, H, W) tensor.
template <class T>
struct Volume {
  T* data = nullptr;
  int64_t batch = 0, channels = 0;
  Triple size{1};
  int64_t batch_stride = 0, channel_stride = 0;
  Triple stride{0};

  explicit Volume(const View& view)
      : data(view.as<T>()),
        batch(view.size[0]),
        channels(view.size[1]),
        size(view.size[2], view.size[3], view.size[4]),
        batch_stride(view.stride[0]),
        channel_stride(view.stride[1]),
        stride(view.stride[2], view.stride[3], view.stride[4]) {}

  T* at(int64_t n, int64_t c) const { return data + n * batch_stride + c * channel_stride; }
};

/// Where a packed tile's elements go: channel c of slot (d, h, w) is at
/// (d * slots_h + h) * row + c * channel + w * step.
struct PackedLayout {
  int64_t row = 0;
  int64_t channel = 0;
  int64_t step = 0;
};

/// Slots [0, length) of a run, of which those inside the input, [begin, end), start at `first`.
template <class T>
struct PackedRun {
  const T* first = nullptr;
  int64_t step = 0;
  int64_t length = 0, begin = 0, end = 0;

  /// Slots [at, at + count), side by side in `to`.
  void copy(int64_t channel, int64_t at, int64_t count, T* to) const {
    const int64_t zeros = std::clamp<int64_t>(begin - at, 0, count), stop = std::clamp<int64_t>(end - at, zeros, count);
    const T* from = first + channel + (at + zeros - begin) * step;
    std::fill(to, to + zeros, T(0));
    if (step == 1) {
      std::copy(from, from + (stop - zeros), to + zeros);
    } else if (step == 2) {  // a number known to the compiler becomes vector instructions
      for (int64_t j = 0; j < stop - zeros; ++j) to[zeros + j] = from[2 * j];
    } else {
      for (int64_t j = 0; j < stop - zeros; ++j) to[zeros + j] = from[j * step];
    }
    std::fill(to + stop, to + count, T(0));
  }

  /// All slots, `channels` channels of each side by side, every `width` elements.
  void interleave(int64_t channels, int64_t channel_stride, int64_t width, T* to) const {
    constexpr int kLines = 4;
    constexpr int64_t kSlots = 64;
    T lines[kLines][kSlots];
    for (int64_t at = 0; at < length; at += kSlots) {
      const int64_t count = std::min(kSlots, length - at);
      for (int64_t c = 0; c < channels; c += kLines) {
        const int64_t now = std::min<int64_t>(kLines, channels - c);
        for (int64_t i = 0; i < now; ++i) copy((c + i) * channel_stride, at, count, lines[i]);
        T* out = to + at * width + c;
        int64_t j = 0;
        for (; now == kLines && j + kLines <= count; j += kLines)
          transpose<T, kLines>([&](int i) { return lines[i] + j; }, [&](int i) { return out + (j + i) * width; });
        for (; j < count; ++j)
          for (int64_t i = 0; i < now; ++i) out[j * width + i] = lines[i][j];
      }
    }
  }
};

/// Copies row `row` = (d slot) * slots_h + (h slot) of the tile at `origin`: `channels` channels from `source` on (the
/// element at n, first channel, 0, 0, 0). Slots beyond the ends of the w axis become 0. Rows that lie outside the
/// input are left as they are: no tap reads them. Either the layout's step is 1 or its channel is.
template <class T>
void pack_row(T* packed, const PackedLayout& layout, const T* source, const Volume<const T>& volume, int64_t channels,
              const Gather3& gather, const Tiling& tiling, const std::array<int64_t, 3>& origin, int64_t row) {
  const int64_t slots_h = tiling.windows[1].slots;
  const std::array<int64_t, 2> slot{row / slots_h, row % slots_h};
  for (int axis = 0; axis < 2; ++axis) {
    const ConvGather& g = gather[static_cast<size_t>(axis)];
    const size_t i = static_cast<size_t>(axis);
    const int64_t position = tiling.windows[i].position(slot[i], g.in_step) + origin[i] * g.in_step;
    if (position < 0 || position >= g.in_size) return;
    source += position * volume.stride[axis];
  }
  const ConvGather& g = gather[2];
  for (const AxisWindow::Run& run : tiling.windows[2].runs) {
    const int64_t first = run.position + origin[2] * g.in_step;
    PackedRun<T> line{.step = g.in_step * volume.stride[2], .length = run.length};
    line.begin = first >= 0 ? 0 : std::min(run.length, (-first + g.in_step - 1) / g.in_step);
    line.end = first >= g.in_size ? line.begin
                                  : std::clamp((g.in_size - first + g.in_step - 1) / g.in_step, line.begin, run.length);
    line.first = source + (first + line.begin * g.in_step) * volume.stride[2];
    T* to = packed + row * layout.row + run.slot * layout.step;
    if (layout.channel == 1 && layout.step != 1) {
      line.interleave(channels, volume.channel_stride, layout.step, to);
    } else {
      for (int64_t c = 0; c < channels; ++c)
        line.copy(c * volume.channel_stride, 0, run.length, to + c * layout.channel);
    }
  }
}

/// Rows to give each tile of a run of `count`: as few tiles as possible, as even as possible.
inline int64_t even_piece(int64_t count, int64_t most) {
  const int64_t pieces = (count + most - 1) / most;
  return pieces == 0 ? 0 : (count + pieces - 1) / pieces;
}

}  // namespace voxgrad::cpu
