// Division by a number that the host knows, as one multiplication.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace voxgrad::cuda {

/// Division of numbers below 2^31 by one of them. Source: T. Granlund, P. L. Montgomery, "Division by Invariant
/// Integers using Multiplication", PLDI 1994.
struct Divisor {
  int value = 1;
  unsigned magic = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int v) : value(v) {
    if (v == 1) return;
    while (uint64_t{2} << shift < static_cast<uint64_t>(v)) ++shift;  // 2^shift < v <= 2^(shift + 1)
    magic = static_cast<unsigned>((uint64_t{1} << (32 + shift)) / static_cast<uint64_t>(v) + 1);
  }
  VG_HOST_DEVICE int divide(int x) const {
    return value == 1 ? x : static_cast<int>(uint64_t{static_cast<unsigned>(x)} * magic >> 32 >> shift);
  }
  /// The remainder; x becomes the quotient.
  VG_HOST_DEVICE int take(int& x) const {
    const int quotient = divide(x), remainder = x - quotient * value;
    x = quotient;
    return remainder;
  }
};

/// The last digit of a number of mixed bases; the others remain.
template <class T>
VG_HOST_DEVICE T take_digit(T& number, int base) {
  const T digit = number % static_cast<T>(base);
  number /= static_cast<T>(base);
  return digit;
}

}  // namespace voxgrad::cuda
