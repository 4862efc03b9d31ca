// Division by a number that the host knows, as one multiplication.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace voxgrad::cuda {

/// Division of numbers below 2^16 by one below 2^16.
struct Divisor {
  int value = 1;
  unsigned magic = 0;

  Divisor() = default;
  explicit Divisor(int v) : value(v), magic(v == 1 ? 0 : static_cast<unsigned>((uint64_t{1} << 32) / v + 1)) {}
  VG_HOST_DEVICE int divide(int x) const {
    return value == 1 ? x : static_cast<int>(uint64_t{static_cast<unsigned>(x)} * magic >> 32);
  }
  /// The remainder; x becomes the quotient.
  VG_HOST_DEVICE int take(int& x) const {
    const int quotient = divide(x), remainder = x - quotient * value;
    x = quotient;
    return remainder;
  }
};

}  // namespace voxgrad::cuda
