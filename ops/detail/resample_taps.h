// The inputs and weights of each output of a Resample map, for the CPU and CUDA kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../core/detail/divide.h"
#include "kernels.h"

namespace voxgrad {

/// The inputs first, ..., first + count - 1 of one output. A cubic map replaces inputs outside of the axis by the
/// nearest border element.
struct Taps {
  int64_t first;
  int64_t count;
  /// The weight of each input. For a linear map, `weight` is instead the distance of the output from the first input.
  /// For a cubic map, `weight` is the distance from the second input.
  double weight;
};

/// Returns the position of output `o` of a linear or cubic map in units of the inputs.
VG_HOST_DEVICE inline double resample_position(const Resample& map, int64_t o) {
  const auto at = static_cast<double>(o);
  return map.align_corners ? at * map.scale : (at + 0.5) * map.scale - 0.5;
}

/// Returns the input at position `i` of a padded axis, where position 0 is the first input.
VG_HOST_DEVICE inline int64_t padded_input(Resample::Mode mode, int64_t i, int64_t n) {
  if (i >= 0 && i < n) return i;
  if (mode == Resample::Mode::circular) return i < 0 ? i + n : i - n;
  if (mode == Resample::Mode::reflect) return i < 0 ? -i : 2 * (n - 1) - i;
  return i < 0 ? 0 : n - 1;
}

/// Returns the taps of the window [start, end), restricted to positions inside of the axis.
VG_HOST_DEVICE inline Taps window_taps(const Resample& map, int64_t start, int64_t end, int64_t n) {
  const int64_t first = start > 0 ? start : 0, last = end < n ? end : n, count = last > first ? last - first : 0;
  // In ceil mode, a window may extend beyond the padding. Positions beyond the padding do not count.
  const int64_t reach = end < n + map.padding ? end : n + map.padding;
  const int64_t counted = map.count_include_pad ? reach - start : count;
  return {first, count, map.weight != 0 ? map.weight : 1 / static_cast<double>(counted)};
}

/// Returns the taps of output `o`, where `n` is the number of inputs.
VG_HOST_DEVICE inline Taps resample_taps(const Resample& map, int64_t o, int64_t n) {
  using enum Resample::Mode;
  if (map.mode == box) {
    const int64_t start = o * map.stride - map.padding;
    return window_taps(map, start, start + map.kernel, n);
  }
  if (map.mode == adaptive) return window_taps(map, o * n / map.outputs, divide_up((o + 1) * n, map.outputs), n);
  if (map.mode == nearest || map.mode == nearest_exact) {
    // Enlarge the product slightly: with a rounded scale such as 2.0 / 98, the product may be just below the integer
    // that exact arithmetic gives.
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

/// Returns the input of tap `k`.
VG_HOST_DEVICE inline int64_t tap_input(const Taps& taps, int64_t k, int64_t n) {
  const int64_t i = taps.first + k;
  return i < 0 ? 0 : i < n ? i : n - 1;
}

/// Returns the weight of tap `k`. Cubic maps: R. G. Keys, "Cubic convolution interpolation for digital image
/// processing", 1981, with a = -0.75.
VG_HOST_DEVICE inline double tap_weight(const Resample& map, const Taps& taps, int64_t k) {
  if (map.mode == Resample::Mode::linear) return taps.count == 1 ? 1 : k == 0 ? 1 - taps.weight : taps.weight;
  if (map.mode != Resample::Mode::cubic) return taps.weight;
  constexpr double a = -0.75;
  const double d = std::fabs(taps.weight + 1 - static_cast<double>(k));
  return d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : ((d - 5) * d + 8) * d * a - 4 * a;
}

/// The outputs from `first` to `last`, both included.
struct Readers {
  int64_t first;
  int64_t last;
};

/// Returns a range that contains all outputs that read input `i`. The range may contain other outputs. Does not support
/// reflect and circular maps.
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
  } else if (map.scale > 0) {  // with scale 0, all outputs have the same position
    const double reach = map.mode == cubic ? 2.5 : 1.5;
    if (i > 0) low = std::floor((at - reach) / map.scale) - 1;
    if (i < n - 1) high = std::ceil((at + reach) / map.scale) + 1;
  }
  const int64_t first = low > 0 ? low < static_cast<double>(outputs) ? static_cast<int64_t>(low) : outputs : 0;
  return {first, high < static_cast<double>(outputs) ? static_cast<int64_t>(high) : outputs - 1};
}

/// Element `o` of the result of the map or, if `transposed`, of the transposed map is a sum of weighted elements of the
/// operand. Calls f(position, weight) for each term of this sum, where `position` is the index of the element. `n` and
/// `outputs` are the numbers of inputs and outputs of the map, not of the transposed map.
template <class F>
VG_HOST_DEVICE void for_terms(const Resample& map, bool transposed, int64_t o, int64_t n, int64_t outputs, F f) {
  if (!transposed) {
    const Taps taps = resample_taps(map, o, n);
    for (int64_t k = 0; k < taps.count; ++k) f(tap_input(taps, k, n), tap_weight(map, taps, k));
    return;
  }
  // In reflect and circular maps, input o is read by the output at its own position and by at most one output in the
  // padding on each side.
  if (map.mode == Resample::Mode::reflect || map.mode == Resample::Mode::circular) {
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
    // tap_input() does not decrease with k. At a border, several taps of a cubic map read the same input.
    int64_t k = map.mode == Resample::Mode::cubic || taps.first > o ? 0 : o - taps.first;
    for (; k < taps.count && tap_input(taps, k, n) <= o; ++k)
      if (tap_input(taps, k, n) == o) f(reader, tap_weight(map, taps, k));
  }
}

/// Returns an upper bound of the number of calls of f in for_terms().
inline int64_t max_terms(const Resample& map, bool transposed, int64_t n, int64_t outputs) {
  using enum Resample::Mode;
  int64_t bound = 1;
  if (!transposed) {
    if (map.mode == box) bound = map.kernel;
    if (map.mode == adaptive) bound = divide_up(n, outputs) + 1;
    if (map.mode == linear) bound = 2;
    if (map.mode == cubic) return 4;
    return bound < n ? bound : n;
  }
  if (map.mode == box) {
    bound = divide_up(map.kernel, map.stride);
  } else if (map.mode == adaptive) {
    bound = divide_up(outputs, n) + 1;
  } else if (map.mode == replicate) {
    const int64_t padding_end = outputs - n - map.padding;
    bound = 1 + (map.padding > 0 ? map.padding : 0) + (padding_end > 0 ? padding_end : 0);
  } else if (map.mode >= reflect) {
    bound = 3;
  } else {
    // A linear map also has terms with weight 0, for outputs before the first input.
    const double reach = map.mode == linear ? 3 : map.mode == cubic ? 4 : 1, readers = reach / map.scale + 2;
    bound = readers < static_cast<double>(outputs) ? static_cast<int64_t>(readers) : outputs;
    if (map.mode == cubic) return 4 * bound;  // all four taps of an output may read the border element
  }
  return bound < outputs ? bound : outputs;
}

}  // namespace voxgrad
