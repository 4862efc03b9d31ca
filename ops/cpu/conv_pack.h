// What the CPU convolutions copy before they multiply: a tile of the input with its border, zero where the input
// ends, and laid out so that neighbouring outputs read neighbouring elements whatever the stride.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "core/view.h"
#include "ops/conv_geometry.h"
#include "ops/cpu/conv_tile.h"
#include "ops/kernels.h"

namespace voxgrad::cpu {

/// Uninitialised elements, aligned for the tiles.
template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t count) {
    const size_t bytes = static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T);
    data_.reset(static_cast<T*>(
        std::aligned_alloc(kTileAlignment, (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment)));
    if (!data_) throw std::bad_alloc();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> data_;
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

/// Copies row `row` = (d slot) * slots_h + (h slot) of the tile at `origin`: `channels` channels from `source` on (the
/// element at n, first channel, 0, 0, 0). Slots beyond the ends of the w axis become 0. Rows that lie outside the
/// input are left as they are: no tap reads them.
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
    // Slots [begin, end) of the run lie inside the input.
    const int64_t begin = first >= 0 ? 0 : std::min(run.length, (-first + g.in_step - 1) / g.in_step);
    const int64_t end = first >= g.in_size
                            ? begin
                            : std::max(begin, std::min(run.length, (g.in_size - first + g.in_step - 1) / g.in_step));
    const T* from = source + (first + begin * g.in_step) * volume.stride[2];
    T* to = packed + row * layout.row + run.slot * layout.step;
    const int64_t from_step = g.in_step * volume.stride[2];
    for (int64_t c = 0; c < channels; ++c, from += volume.channel_stride, to += layout.channel) {
      for (int64_t j = 0; j < begin; ++j) to[j * layout.step] = T(0);
      T* inside = to + begin * layout.step;
      if (from_step == 1 && layout.step == 1) {
        std::copy(from, from + (end - begin), inside);
      } else {
        for (int64_t j = 0; j < end - begin; ++j) inside[j * layout.step] = from[j * from_step];
      }
      for (int64_t j = end; j < run.length; ++j) to[j * layout.step] = T(0);
    }
  }
}

/// Rows to give each tile of a run of `count`: as few tiles as possible, as even as possible.
inline int64_t even_piece(int64_t count, int64_t most) {
  const int64_t pieces = (count + most - 1) / most;
  return pieces == 0 ? 0 : (count + pieces - 1) / pieces;
}

}  // namespace voxgrad::cpu
