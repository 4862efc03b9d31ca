// Which inputs an output of a Resample map reads, with what weight; once for both devices.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../core/detail/divide.h"
#include "kernels.h"

namespace voxgrad {

/// The inputs `first` .. `first + count - 1`; of a cubic map those outside are the border's.
struct Taps {
  int64_t first, count;
  double weight;  // of each; linear, cubic: how far the output lies from the first, the second of them to the next
};

/// Where output `o` of a linear or cubic map lies between the inputs.
VG_HOST_DEVICE inline double resample_position(const Resample& map, int64_t o) {
  const auto at = static_cast<double>(o);
  return map.align_corners ? at * map.scale : (at + 0.5) * map.scale - 0.5;
}

/// The input of a padded axis that position `i` shows.
VG_HOST_DEVICE inline int64_t padded_input(Resample::Mode mode, int64_t i, int64_t n) {
  if (i >= 0 && i < n) return i;
  if (mode == Resample::Mode::circular) return i < 0 ? i + n : i - n;
  if (mode == Resample::Mode::reflect) return i < 0 ? -i : 2 * (n - 1) - i;
  return i < 0 ? 0 : n - 1;
}

/// The part of a window, [start, end), that lies inside.
VG_HOST_DEVICE inline Taps window_taps(const Resample& map, int64_t start, int64_t end, int64_t n) {
  const int64_t first = start > 0 ? start : 0, last = end < n ? end : n, count = last > first ? last - first : 0;
  // A window of ceil mode may reach past the padding: count up to there.
  const int64_t reach = end < n + map.padding_end ? end : n + map.padding_end;
  const int64_t counted = map.count_include_pad ? reach - start : count;
  return {first, count, map.weight != 0 ? map.weight : 1 / static_cast<double>(counted)};
}

/// The inputs that output `o` reads; `n` is the input's size.
VG_HOST_DEVICE inline Taps resample_taps(const Resample& map, int64_t o, int64_t n) {
  using enum Resample::Mode;
  if (map.mode == box) {
    const int64_t start = o * map.stride - map.padding;
    return window_taps(map, start, start + map.kernel, n);
  }
  if (map.mode == adaptive)
    return window_taps(map, o * n / map.outputs, divide_up((o + 1) * n, map.outputs), n);
  if (map.mode == nearest || map.mode == nearest_exact) {
    // A hair above the product: where a rounded scale such as 2.0 / 98 falls just short of a whole number, o belongs to
    // the input that the exact ratio names.
    const double at = static_cast<double>(o) + (map.mode == nearest ? 0 : 0.5);
    const auto i = static_cast<int64_t>(std::floor(at * map.scale * (1 + 0x1p-51)));
    return {i < n ? i : n - 1, 1, 1};
  }
  if (map.mode == linear) {
    const double position = resample_position(map, o);
    auto i = static_cast<int64_t>(position > 0 ? position : 0);
    if (i > n - 1) i = n - 1;
    return {i, i + 1 < n ? 2 : 1, position > 0 ? position - static_cast<double>(i) : 0};
  }
  if (map.mode == cubic) {
    const double position = resample_position(map, o), below = std::floor(position);
    return {static_cast<int64_t>(below) - 1, 4, position - below};
  }
  return {padded_input(map.mode, o - map.padding, n), 1, 1};
}

/// The input that tap `k` of `taps` reads.
VG_HOST_DEVICE inline int64_t tap_input(const Taps& taps, int64_t k, int64_t n) {
  const int64_t i = taps.first + k;
  return i < 0 ? 0 : i < n ? i : n - 1;
}

/// Its weight. Cubic: R. G. Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -0.75.
VG_HOST_DEVICE inline double tap_weight(const Resample& map, const Taps& taps, int64_t k) {
  if (map.mode == Resample::Mode::linear) return taps.count == 1 ? 1 : k == 0 ? 1 - taps.weight : taps.weight;
  if (map.mode != Resample::Mode::cubic) return taps.weight;
  constexpr double a = -0.75;
  const double d = std::fabs(taps.weight + 1 - static_cast<double>(k));
  return d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : ((d - 5) * d + 8) * d * a - 4 * a;
}

/// The outputs `first` .. `last`, outside of which none reads input `i`; those inside may or may not. Not for reflect
/// and circular.
struct Readers {
  int64_t first, last;
};

VG_HOST_DEVICE inline Readers resample_readers(const Resample& map, int64_t i, int64_t n, int64_t outputs) {
  using enum Resample::Mode;
  double low = 0, high = static_cast<double>(outputs - 1);
  const auto at = static_cast<double>(i), size = static_cast<double>(n);
  if (map.mode == box) {
    low = std::floor(static_cast<double>(i + map.padding - map.kernel + 1) / static_cast<double>(map.stride));
    high = std::ceil(static_cast<double>(i + map.padding) / static_cast<double>(map.stride));
  } else if (map.mode == adaptive) {
    low = std::floor(at * static_cast<double>(outputs) / size) - 1;
    high = std::ceil((at + 1) * static_cast<double>(outputs) / size) + 1;
  } else if (map.mode == replicate) {
    if (i > 0) low = at + static_cast<double>(map.padding);
    if (i < n - 1) high = at + static_cast<double>(map.padding);
  } else if (map.scale > 0) {  // else one output position stands for all
    const double reach = map.mode == cubic ? 2.5 : 1.5;
    if (i > 0) low = std::floor((at - reach) / map.scale) - 1;
    if (i < n - 1) high = std::ceil((at + reach) / map.scale) + 1;
  }
  const int64_t first = low > 0 ? low < static_cast<double>(outputs) ? static_cast<int64_t>(low) : outputs : 0;
  return {first, high < static_cast<double>(outputs) ? static_cast<int64_t>(high) : outputs - 1};
}

/// Calls f(place, weight) for what makes element `o` of a line of the result: of the map, or of the transposed one.
/// `n` is the size of the map's input, `outputs` that of its output.
template <class F>
VG_HOST_DEVICE void for_terms(const Resample& map, bool transposed, int64_t o, int64_t n, int64_t outputs, F f) {
  if (!transposed) {
    const Taps taps = resample_taps(map, o, n);
    for (int64_t k = 0; k < taps.count; ++k) f(tap_input(taps, k, n), tap_weight(map, taps, k));
    return;
  }
  if (map.mode == Resample::Mode::reflect || map.mode == Resample::Mode::circular) {  // itself and its images
    const bool mirror = map.mode == Resample::Mode::reflect;
    const int64_t self = o + map.padding, before = mirror ? map.padding - o : self - n,
                  after = mirror ? 2 * (n - 1) - o + map.padding : self + n;
    int64_t last = -1;
    for (int image = 0; image < 3; ++image) {
      const int64_t reader = image == 0 ? before : image == 1 ? self : after;
      if (reader <= last || reader >= outputs || padded_input(map.mode, reader - map.padding, n) != o) continue;
      f(reader, 1.0);
      last = reader;
    }
    return;
  }
  const Readers readers = resample_readers(map, o, n, outputs);
  for (int64_t reader = readers.first; reader <= readers.last; ++reader) {
    const Taps taps = resample_taps(map, reader, n);
    // The inputs are in order: at a border several taps of a cubic map read the same one.
    int64_t k = map.mode == Resample::Mode::cubic || taps.first > o ? 0 : o - taps.first;
    for (; k < taps.count && tap_input(taps, k, n) <= o; ++k)
      if (tap_input(taps, k, n) == o) f(reader, tap_weight(map, taps, k));
  }
}

/// The most terms that an element can have.
inline int64_t most_terms(const Resample& map, bool transposed, int64_t n, int64_t outputs) {
  using enum Resample::Mode;
  int64_t most = 1;
  if (!transposed) {
    if (map.mode == box) most = map.kernel;
    if (map.mode == adaptive) most = divide_up(n, outputs) + 1;
    if (map.mode == linear) most = 2;
    if (map.mode == cubic) return 4;
    return most < n ? most : n;
  }
  if (map.mode == box) {
    most = divide_up(map.kernel, map.stride);
  } else if (map.mode == adaptive) {
    most = divide_up(outputs, n) + 1;
  } else if (map.mode == replicate) {
    const int64_t behind = outputs - n - map.padding;
    most = 1 + (map.padding > 0 ? map.padding : 0) + (behind > 0 ? behind : 0);
  } else if (map.mode >= reflect) {
    most = 3;
  } else {
    // Of a linear map also those in front of the first input, with weight 0.
    const double reach = map.mode == linear ? 3 : map.mode == cubic ? 4 : 1, readers = reach / map.scale + 2;
    most = readers < static_cast<double>(outputs) ? static_cast<int64_t>(readers) : outputs;
    if (map.mode == cubic) return 4 * most;  // all taps of a reader may be the border's
  }
  return most < outputs ? most : outputs;
}

}  // namespace voxgrad
