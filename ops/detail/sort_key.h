// Elements as unsigned integers of the same order; once for both devices.
#pragma once

#include <bit>

#include "scalar_ops.h"

namespace voxgrad {

template <class T>
using SortKey = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

/// Both zeros are alike, and NaN is the largest.
template <class T>
VG_HOST_DEVICE SortKey<T> sort_key(T element, bool descending) {
  using Key = SortKey<T>;
  constexpr Key sign = Key(1) << (8 * sizeof(Key) - 1);
  Key key;
  if constexpr (std::is_integral_v<T>) {
    key = static_cast<Key>(element) ^ sign;
  } else {
    const compute_t<T> x = element;
    key = std::bit_cast<Key>(x + 0);  // -0 + 0 is 0
    key = is_nan(x) ? ~Key(0) : key & sign ? ~key : key | sign;
  }
  return descending ? ~key : key;
}

}  // namespace voxgrad
