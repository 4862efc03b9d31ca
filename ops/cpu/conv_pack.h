// Packing of input tiles for the CPU convolutions. A packed tile contains all inputs that a tile of outputs reads,
// including the border. For any stride, neighboring outputs read neighboring elements of the packed tile.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/detail/divide.h"
#include "core/storage.h"
#include "ops/cpu/conv_tile.h"
#include "ops/cpu/vectors.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cpu {

/// Uninitialized memory, aligned for the register tiles. The memory comes from the tensor allocator, which reuses freed
/// blocks. The page faults of new memory would cost as much time as packing.
template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t count)
      : storage_(static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T), Device::cpu()) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage storage_;
};

/// The inputs that `length` consecutive steps of an axis read, stored in slots. For step q, counted from the first of
/// these steps, tap k reads slot q + base[k]. Each input that is read has one slot. Inputs between dilated taps that no
/// step reads have no slot.
struct AxisWindow {
  /// Consecutive slots that hold inputs with a distance of in_step. Slot number slot + j, with j in [0, length), holds
  /// the input at (first step + j) * in_step + position.
  struct Run {
    int64_t slot = 0;
    int64_t position = 0;
    int64_t length = 0;
  };
  int64_t slots = 0;
  std::vector<int64_t> base;  // per tap, by its index in the kernel
  std::vector<Run> runs;

  AxisWindow() = default;
  AxisWindow(const ConvGather& gather, int64_t kernel, int64_t length);
  /// Returns the input position in `slot` for a window that starts at step 0.
  int64_t position(int64_t slot, int64_t in_step) const;
};

/// The division of the steps of three axes into tiles.
struct Tiling {
  std::array<int64_t, 3> length{1, 1, 1};  // steps per tile
  std::array<int64_t, 3> pieces{0, 0, 0};  // tiles along each axis
  std::vector<AxisWindow> windows;         // the inputs that a tile reads

  int64_t count() const { return pieces[0] * pieces[1] * pieces[2]; }
  int64_t slots() const { return windows[0].slots * windows[1].slots * windows[2].slots; }
  /// Returns the first step of tile `index` on each axis.
  std::array<int64_t, 3> origin(int64_t index) const;
};

using Gather3 = std::array<ConvGather, 3>;

/// Limits for the size of a tile. A tile has at least one step, even if the tile then exceeds the limits.
struct TilingLimits {
  int64_t slots = 0;                                    ///< largest number of slots per tile
  int64_t steps = std::numeric_limits<int64_t>::max();  ///< largest number of steps per tile
  int64_t tiles = 1;                                    ///< smallest number of tiles, if there are enough rows
};

/// Returns the largest tiles within the limits. The tiles of an axis have equal lengths, except for the last tile. Axis
/// w is divided only if tiles have one step along d and h.
Tiling make_tiling(const Gather3& gather, const Triple& kernel, const TilingLimits& limits);

/// An (N, C, D, H, W) view with elements of type T.
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

/// Strides of a packed tile. Channel c of slot (d, h, w) is at (d * slots_h + h) * row + c * channel + w * step.
struct PackedLayout {
  int64_t row = 0;
  int64_t channel = 0;
  int64_t step = 0;
  bool fills_rows = false;  ///< sets rows outside the input to 0; requires that the rows of channels do not interleave
};

/// Number of channels that PackedRun::interleave() transposes at a time.
inline constexpr int kInterleaved = 8;

/// The slots of an AxisWindow::Run along w in one tile, and their inputs.
struct PackedRun {
  int64_t slot = 0;    // first slot of the run
  int64_t length = 0;  // number of slots
  int64_t begin = 0;   // slots [begin, end) of the run are inside the input
  int64_t end = 0;
  int64_t start = 0;  // offset of slot `begin` in a row of the input
  int64_t step = 0;   // distance between the inputs of neighboring slots

  PackedRun(const AxisWindow::Run& run, const ConvGather& gather, int64_t origin, int64_t stride);

  /// Copies slots [at, at + count) of a row of the input to contiguous memory, with zeros outside the input.
  template <class T>
  void copy(const T* row, int64_t at, int64_t count, T* to) const {
    const int64_t zeros = std::clamp<int64_t>(begin - at, 0, count), stop = std::clamp<int64_t>(end - at, zeros, count);
    const T* from = row + start + (at + zeros - begin) * step;
    clear(to, zeros);
    copy_inside(from, stop - zeros, to + zeros);
    clear(to + stop, count - stop);
  }

  /// Sets `count` elements to 0. Borders are so short that a call of memset would take longer than the stores.
  template <class T>
  static void clear(T* to, int64_t count) {
    if (count > 2) std::fill_n(to, count, T(0));
    if (count == 1 || count == 2) to[0] = T(0);
    if (count == 2) to[1] = T(0);
  }

  /// Computes to[j] = from[j * step] for j in [0, count). Copies vectors if the step is 1 or 2. The last vector
  /// overlaps the previous one.
  template <class T>
  void copy_inside(const T* from, int64_t count, T* to) const {
    constexpr int n = kInterleaved;
    const int64_t last = count - n;
    if (step == 1 && last >= 0) {
      for (int64_t j = 0; j < last; j += n) std::memcpy(to + j, from + j, n * sizeof(T));
      std::memcpy(to + last, from + last, n * sizeof(T));
    } else if (step == 2 && last > 0) {
      for (int64_t j = 0; j < last; j += n) every_second<T, n, 0>(from + 2 * j, to + j);
      every_second<T, n, 1>(from + 2 * last - 1, to + last);  // does not read the element after the last
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] = from[j * step];
    }
  }

  /// Copies all slots of a row for `channels` channels. In `to`, the channels of a slot are contiguous, and slots are
  /// `width` elements apart.
  template <class T>
  void interleave(const T* row, int64_t channels, int64_t channel_stride, int64_t width, T* to) const {
    constexpr int64_t kSlots = 64;
    T lines[kInterleaved][kSlots];
    for (int64_t at = 0; at < length; at += kSlots)
      for (int64_t c = 0; c < channels; c += kInterleaved) {
        const int64_t count = std::min(kSlots, length - at), now = std::min<int64_t>(kInterleaved, channels - c);
        for (int64_t i = 0; i < now; ++i) copy(row + (c + i) * channel_stride, at, count, lines[i]);
        // Transposes n channels from channel i on, in squares of n slots. Returns the next channel.
        const auto transpose_squares = [&]<int n>(std::integral_constant<int, n>, int64_t i) {
          T* out = to + at * width + c + i;
          int64_t j = 0;
          for (; j + n <= count; j += n)
            transpose<T, n>([&](int k) { return lines[i + k] + j; }, [&](int k) { return out + (j + k) * width; });
          for (; j < count; ++j)
            for (int k = 0; k < n; ++k) out[j * width + k] = lines[i + k][j];
          return i + n;
        };
        int64_t i = 0;
        if (now == kInterleaved) i = transpose_squares(std::integral_constant<int, kInterleaved>(), i);
        if (now - i >= 4) i = transpose_squares(std::integral_constant<int, 4>(), i);
        while (i < now) i = transpose_squares(std::integral_constant<int, 1>(), i);
      }
  }
};

/// Packs `channels` channels of the tile at `origin`. `source` is the element (n, first channel, 0, 0, 0). Slots
/// outside the input along w become 0. Rows outside the input are written only if layout.fills_rows is true, which
/// requires that layout.step is 1. Requires that layout.step or layout.channel is 1, or that there is a single channel.
template <class T>
void pack_tile(T* packed, const PackedLayout& layout, const T* source, const Volume<const T>& volume, int64_t channels,
               const Gather3& gather, const Tiling& tiling, const std::array<int64_t, 3>& origin) {
  const auto& windows = tiling.windows;
  auto position = [&](size_t axis, int64_t slot) {
    const int64_t at = windows[axis].position(slot, gather[axis].in_step) + origin[axis] * gather[axis].in_step;
    return at < gather[axis].in_size ? at : -1;
  };
  std::vector<int64_t> positions;  // along h
  for (int64_t h = 0; h < windows[1].slots; ++h) positions.push_back(position(1, h));
  std::vector<PackedRun> runs;
  for (const AxisWindow::Run& run : windows[2].runs) runs.emplace_back(run, gather[2], origin[2], volume.stride[2]);
  const int64_t first_w = origin[2] * gather[2].in_step;
  const int64_t end_w = std::min(volume.size[2], first_w + tiling.length[2] * gather[2].in_step);
  // Read the input in memory order: all channels of a voxel at once in channels_last, otherwise few channels at a time.
  const int64_t few = layout.step == 1 ? 1 : kInterleaved;
  const int64_t together = volume.channel_stride < volume.stride[2] ? channels : few;
  for (int64_t c = 0; c < channels; c += together)
    for (int64_t d = 0; d < windows[0].slots; ++d) {
      const int64_t pd = position(0, d), now = std::min(together, channels - c);  // this iteration packs `now` channels
      if (pd < 0) {
        const int64_t plane = windows[1].slots * layout.row;
        for (int64_t i = 0; layout.fills_rows && i < now; ++i)
          std::fill_n(packed + d * plane + (c + i) * layout.channel, plane - layout.row + windows[2].slots, T(0));
        continue;
      }
      for (int64_t h = 0; h < windows[1].slots; ++h) {
        const int64_t ph = positions[static_cast<size_t>(h)];
        T* to = packed + (d * windows[1].slots + h) * layout.row + c * layout.channel;
        if (ph < 0) {
          for (int64_t i = 0; layout.fills_rows && i < now; ++i)
            std::fill_n(to + i * layout.channel, windows[2].slots, T(0));
          continue;
        }
        const T* row = source + c * volume.channel_stride + pd * volume.stride[0] + ph * volume.stride[1];
        // Prefetch the next channels, which are too far away for the hardware prefetcher.
        constexpr int64_t kLine = 64 / sizeof(T);
        for (int64_t i = together; volume.stride[2] == 1 && i < std::min(2 * together, channels - c); ++i)
          for (int64_t j = first_w; j < end_w; j += kLine) __builtin_prefetch(row + i * volume.channel_stride + j);
        // Prefetch a later row of the same channel: with a stride along h, the next row is not the next in memory.
        const int64_t later = h + 4 < windows[1].slots ? positions[static_cast<size_t>(h + 4)] : -1;
        for (int64_t j = first_w; together == 1 && volume.stride[2] == 1 && later >= 0 && j < end_w; j += kLine)
          __builtin_prefetch(row + (later - ph) * volume.stride[1] + j);
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
}

/// Divides `count` elements into as few pieces of at most `max_length` elements as possible, and returns the length of
/// these pieces. Only the last piece may be shorter.
inline int64_t even_piece(int64_t count, int64_t max_length) {
  const int64_t pieces = divide_up(count, max_length);
  return pieces == 0 ? 0 : divide_up(count, pieces);
}

}  // namespace voxgrad::cpu
