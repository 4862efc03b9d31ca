// The checks that operators share. Private to ops/.
#pragma once

#include <cmath>
#include <initializer_list>

#include "core/tensor.h"

namespace voxgrad {

inline void check_defined(const char* op, const char* what, const Tensor& tensor) {
  check(tensor.defined(), op, what, " is undefined");
}

inline void check_floating(const char* op, const Tensor& tensor) {
  check(is_floating(tensor.dtype()), op, "needs a floating dtype, got ", describe(tensor));
}

/// All defined tensors share the first one's dtype and device; undefined ones are passed over.
inline void check_same_kind(const char* op, std::initializer_list<Tensor> tensors) {
  const Tensor* first = nullptr;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (!first) first = &tensor;
    check(tensor.device() == first->device(), op, "tensors lie on different devices: ", describe(*first), " and ",
          describe(tensor));
    check(tensor.dtype() == first->dtype(), op, "dtypes differ: ", describe(*first), " and ", describe(tensor),
          "; convert one with to()");
  }
}

/// Numbers that meet an integer tensor are integers themselves.
inline void check_integer_constants(const char* op, const Tensor& tensor, std::initializer_list<double> constants) {
  if (is_floating(tensor.dtype())) return;
  for (double constant : constants)
    check(constant == std::trunc(constant) && std::abs(constant) < 0x1p63, op,
          "an integer tensor takes integer constants, got ", constant, " for ", describe(tensor));
}

/// Options stay far beyond any volume, and small enough for products with positions to fit in 64 bits.
inline void check_extent(const char* op, const char* what, const Dims& values, int64_t least) {
  for (int64_t value : values)
    check(value >= least && value < int64_t{1} << 31, op, what, " must lie in [", least, ", 2^31), got ", values);
}

inline void check_finite(const char* op, const char* what, double value) {
  check(std::isfinite(value), op, what, " must be finite, got ", value);
}

}  // namespace voxgrad
