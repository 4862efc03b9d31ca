// Conversion of elements to unsigned integers that sort in the same order, for the CPU and CUDA kernels.
#pragma once

#include <bit>

#include "scalar_ops.h"

namespace voxgrad {

template <class T>
using SortKey = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

/// Returns the sort key of an element. -0 and 0 have the same key. NaN sorts as the largest value. `descending`
/// reverses the order.
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
