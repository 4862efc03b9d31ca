// Integer division by divisors that are fixed when a kernel is launched.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace voxgrad::cuda {

/// A divisor that the host prepares, so that a kernel divides with one multiplication, one addition and one shift
/// instead of an integer division. Dividends are int or unsigned and in [0, 2^31). The divisor is in [1, 2^31).
/// T. Granlund, P. L. Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994.
class Divisor {
 public:
  /// Creates the divisor 1.
  Divisor() = default;
  explicit Divisor(int64_t value) : value_(static_cast<uint32_t>(value)) {
    while ((uint64_t{1} << shift_) < value_) ++shift_;
    magic_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value_) << 32) / value_ + 1);
  }

  VG_HOST_DEVICE int value() const { return static_cast<int>(value_); }

  /// Returns dividend / value().
  template <class T>
  VG_HOST_DEVICE T divide(T dividend) const {
    static_assert(sizeof(T) == sizeof(uint32_t));
    const auto n = static_cast<uint32_t>(dividend);
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic_);
#else
    const auto high = static_cast<uint32_t>(uint64_t{n} * magic_ >> 32);
#endif
    return static_cast<T>((high + n) >> shift_);
  }

  /// Returns number % value() and replaces `number` by number / value(). Calls with the sizes of several axes,
  /// innermost axis first, split the index of an element into its positions along the axes.
  template <class T>
  VG_HOST_DEVICE T take_digit(T& number) const {
    const T quotient = divide(number);
    const T digit = number - quotient * static_cast<T>(value_);
    number = quotient;
    return digit;
  }

 private:
  uint32_t value_ = 1;
  uint32_t magic_ = 1;
  uint32_t shift_ = 0;
};

/// Returns number % base and replaces `number` by number / base. Use Divisor::take_digit() instead if the base is a
/// run-time value that is used more than once.
template <class T>
VG_HOST_DEVICE T take_digit(T& number, int base) {
  const T digit = number % static_cast<T>(base);
  number /= static_cast<T>(base);
  return digit;
}

}  // namespace voxgrad::cuda
