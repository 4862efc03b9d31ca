// Which inputs an output of a Resample map reads, with what weight; once for both devices.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/kernels.h"

namespace voxgrad {

/// The inputs `first` .. `first + count - 1`.
struct Taps {
  int64_t first, count;
};

/// The inputs that output `o` reads; `n` is the input's size.
VG_HOST_DEVICE inline Taps resample_taps(const Resample& map, int64_t o, int64_t n) {
  if (map.mode == Resample::Mode::box) {
    const int64_t start = o * map.stride - map.padding;
    const int64_t first = start > 0 ? start : 0;
    const int64_t end = start + map.kernel < n ? start + map.kernel : n;
    return {first, end > first ? end - first : 0};
  }
  if (map.mode == Resample::Mode::nearest) {
    // A hair above the product: where a rounded scale such as 2.0 / 98 falls just short of a whole number, o belongs to
    // the input that the exact ratio names.
    const auto i = static_cast<int64_t>(std::floor(static_cast<double>(o) * map.scale * (1 + 0x1p-51)));
    return {i < n ? i : n - 1, 1};
  }
  double position =
      map.align_corners ? static_cast<double>(o) * map.scale : (static_cast<double>(o) + 0.5) * map.scale - 0.5;
  if (position < 0) position = 0;
  auto i = static_cast<int64_t>(position);
  if (i > n - 1) i = n - 1;
  return {i, i + 1 < n ? 2 : 1};
}

/// The weight of input `i`, one of resample_taps(map, o, n).
VG_HOST_DEVICE inline double resample_weight(const Resample& map, int64_t o, int64_t i, int64_t n) {
  if (map.mode == Resample::Mode::box) {
    const int64_t start = o * map.stride - map.padding;
    int64_t end = start + map.kernel;
    if (map.count_include_pad) {  // a window of ceil mode may reach past the padding: count up to there
      if (end > n + map.padding) end = n + map.padding;
      return 1.0 / static_cast<double>(end - start);
    }
    const Taps taps = resample_taps(map, o, n);
    return 1.0 / static_cast<double>(taps.count);
  }
  if (map.mode == Resample::Mode::nearest) return 1;
  double position =
      map.align_corners ? static_cast<double>(o) * map.scale : (static_cast<double>(o) + 0.5) * map.scale - 0.5;
  if (position < 0) position = 0;
  const Taps taps = resample_taps(map, o, n);
  if (taps.count == 1) return 1;
  const double upper = position - static_cast<double>(taps.first);
  return i == taps.first ? 1 - upper : upper;
}

/// A range of outputs outside of which none reads input `i`; those inside may or may not.
VG_HOST_DEVICE inline Taps resample_readers(const Resample& map, int64_t i, int64_t n, int64_t outputs) {
  double low, high;
  if (map.mode == Resample::Mode::box) {
    low = std::floor(static_cast<double>(i + map.padding - map.kernel + 1) / static_cast<double>(map.stride));
    high = std::ceil(static_cast<double>(i + map.padding) / static_cast<double>(map.stride));
  } else if (map.scale <= 0) {  // one output position stands for all
    low = 0;
    high = static_cast<double>(outputs);
  } else {
    low = std::floor((static_cast<double>(i) - 1.5) / map.scale) - 1;
    high = i >= n - 1 ? static_cast<double>(outputs) : std::ceil((static_cast<double>(i) + 1.5) / map.scale) + 1;
    if (i == 0) low = 0;
  }
  if (low >= static_cast<double>(outputs)) return {outputs, 0};
  const int64_t first = low > 0 ? static_cast<int64_t>(low) : 0;
  int64_t last = high < static_cast<double>(outputs - 1) ? static_cast<int64_t>(high) : outputs - 1;
  return {first, last >= first ? last - first + 1 : 0};
}

}  // namespace voxgrad
