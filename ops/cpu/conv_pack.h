// What the CPU convolutions copy before they multiply: a tile of the input with its border, zero where the input
// ends, and laid out so that neighbouring outputs read neighbouring elements whatever the stride.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "core/detail/divide.h"
#include "core/storage.h"
#include "core/view.h"
#include "ops/cpu/conv_tile.h"
#include "ops/cpu/vectors.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"

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

/// Lines that are interleaved at a time.
inline constexpr int kInterleaved = 8;

/// A run of slots along w, of which [begin, end) lie inside the input; the first of those is `start` elements behind
/// the start of a row, and they are `step` apart.
struct PackedRun {
  int64_t slot = 0, length = 0, begin = 0, end = 0;
  int64_t start = 0, step = 0;

  PackedRun(const AxisWindow::Run& run, const ConvGather& gather, int64_t origin, int64_t stride);

  /// Slots [at, at + count) of a row, side by side in `to`.
  template <class T>
  void copy(const T* row, int64_t at, int64_t count, T* to) const {
    const int64_t zeros = std::clamp<int64_t>(begin - at, 0, count), stop = std::clamp<int64_t>(end - at, zeros, count);
    const T* from = row + start + (at + zeros - begin) * step;
    std::fill(to, to + zeros, T(0));
    if (step == 1) {
      std::copy(from, from + (stop - zeros), to + zeros);
    } else {
      const int64_t inside = stop - zeros;
      int64_t j = 0;
      for (; step == 2 && j + kInterleaved < inside; j += kInterleaved)
        even_elements<T, kInterleaved>(from + 2 * j, to + zeros + j);
      for (; j < inside; ++j) to[zeros + j] = from[j * step];
    }
    std::fill(to + stop, to + count, T(0));
  }

  /// All slots of the rows of `channels` channels; slots are `width` elements apart, and channels side by side.
  template <class T>
  void interleave(const T* row, int64_t channels, int64_t channel_stride, int64_t width, T* to) const {
    constexpr int64_t kSlots = 64;
    T lines[kInterleaved][kSlots];
    for (int64_t at = 0; at < length; at += kSlots)
      for (int64_t c = 0; c < channels; c += kInterleaved) {
        const int64_t count = std::min(kSlots, length - at), now = std::min<int64_t>(kInterleaved, channels - c);
        for (int64_t i = 0; i < now; ++i) copy(row + (c + i) * channel_stride, at, count, lines[i]);
        const auto squares = [&]<int n>(std::integral_constant<int, n>, int64_t i) {
          T* out = to + at * width + c + i;
          int64_t j = 0;
          for (; j + n <= count; j += n)
            transpose<T, n>([&](int k) { return lines[i + k] + j; }, [&](int k) { return out + (j + k) * width; });
          for (; j < count; ++j)
            for (int k = 0; k < n; ++k) out[j * width + k] = lines[i + k][j];
          return i + n;
        };
        int64_t i = 0;
        if (now == kInterleaved) i = squares(std::integral_constant<int, kInterleaved>(), i);
        if (now - i >= 4) i = squares(std::integral_constant<int, 4>(), i);
        for (; i < now; ++i) squares(std::integral_constant<int, 1>(), i);
      }
  }
};

/// Copies the tile at `origin`: `channels` channels from `source` on (the element at n, first channel, 0, 0, 0). Slots
/// beyond the ends of the w axis become 0. Rows that lie outside the input are left as they are: no tap reads them.
/// Either the layout's step is 1, or its channel is, or there is one channel.
template <class T>
void pack_tile(T* packed, const PackedLayout& layout, const T* source, const Volume<const T>& volume, int64_t channels,
               const Gather3& gather, const Tiling& tiling, const std::array<int64_t, 3>& origin) {
  const auto& windows = tiling.windows;
  auto position = [&](size_t axis, int64_t slot) {
    const int64_t at = windows[axis].position(slot, gather[axis].in_step) + origin[axis] * gather[axis].in_step;
    return at < gather[axis].in_size ? at : -1;
  };
  std::vector<PackedRun> runs;
  for (const AxisWindow::Run& run : windows[2].runs) runs.emplace_back(run, gather[2], origin[2], volume.stride[2]);
  // Memory is read in its order: few channels at a time where each is a volume of its own.
  const int64_t few = layout.step == 1 ? 1 : kInterleaved;
  const int64_t together = volume.channel_stride < volume.stride[2] ? channels : few;
  for (int64_t c = 0; c < channels; c += together)
    for (int64_t d = 0; d < windows[0].slots; ++d)
      for (int64_t h = 0; h < windows[1].slots; ++h) {
        const int64_t pd = position(0, d), ph = position(1, h);
        if (pd < 0 || ph < 0) continue;
        const T* row = source + c * volume.channel_stride + pd * volume.stride[0] + ph * volume.stride[1];
        T* to = packed + (d * windows[1].slots + h) * layout.row + c * layout.channel;
        const int64_t now = std::min(together, channels - c);
        // The next channels are far away: no prefetcher of the processor's finds them.
        constexpr int64_t kLine = 64 / sizeof(T);
        for (int64_t i = together; volume.stride[2] == 1 && i < std::min(2 * together, channels - c); ++i)
          for (int64_t j = 0; j < volume.size[2]; j += kLine) __builtin_prefetch(row + i * volume.channel_stride + j);
        for (const PackedRun& run : runs) {
          if (layout.step != 1) {
            run.interleave(row, now, volume.channel_stride, layout.step, to + run.slot * layout.step);
          } else {
            for (int64_t i = 0; i < now; ++i)
              run.copy(row + i * volume.channel_stride, 0, run.length, to + i * layout.channel + run.slot);
          }
        }
      }
}

/// Rows to give each tile of a run of `count`: as few tiles as possible, as even as possible.
inline int64_t even_piece(int64_t count, int64_t most) {
  const int64_t pieces = divide_up(count, most);
  return pieces == 0 ? 0 : divide_up(count, pieces);
}

}  // namespace voxgrad::cpu
