// Integer division that rounds up. Values must not be negative, and divisors must be positive.
#pragma once

#include <type_traits>

#include "../half.h"

namespace voxgrad {

/// Returns value / divisor, rounded up.
template <class A, class B>
VG_HOST_DEVICE constexpr std::common_type_t<A, B> divide_up(A value, B divisor) {
  return (value + divisor - 1) / divisor;
}

/// Returns the smallest multiple of `multiple` that is at least `value`.
template <class A, class B>
VG_HOST_DEVICE constexpr std::common_type_t<A, B> round_up(A value, B multiple) {
  return divide_up(value, multiple) * multiple;
}

}  // namespace voxgrad
