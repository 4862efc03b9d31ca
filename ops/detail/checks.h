// The checks that operators share. Private to ops/.
#pragma once

#include <cmath>
#include <initializer_list>

#include "../../core/tensor.h"

namespace voxgrad {

inline void check_defined(const char* op, const char* what, const Tensor& tensor) {
  check(tensor.defined(), op, what, " is undefined");
}

inline void check_floating(const char* op, const Tensor& tensor) {
  check(is_floating(tensor.dtype()), op, "needs a floating dtype, got ", describe(tensor));
}

/// A tensor and what messages call it.
struct Operand {
  const char* name;
  const Tensor& tensor;
  friend std::ostream& operator<<(std::ostream& out, const Operand& operand) {
    return out << operand.name << ' ' << describe(operand.tensor);
  }
};

/// All defined tensors share the first one's dtype and device; undefined ones are passed over.
inline void check_same_kind(const char* op, std::initializer_list<Operand> operands) {
  const Operand* first = nullptr;
  for (const Operand& operand : operands) {
    if (!operand.tensor.defined()) continue;
    if (!first) first = &operand;
    check(operand.tensor.device() == first->tensor.device(), op, "tensors lie on different devices: ", *first, " and ",
          operand);
    check(operand.tensor.dtype() == first->tensor.dtype(), op, "dtypes differ: ", *first, " and ", operand,
          "; convert one with to()");
  }
}

/// Numbers that meet an integer tensor are integers that its dtype holds; those that meet a bool tensor are 0 or 1.
inline void check_constants(const char* op, const Tensor& tensor, std::initializer_list<double> constants) {
  const DType dtype = tensor.dtype();
  if (is_floating(dtype)) return;
  for (double constant : constants) {
    check(constant == std::trunc(constant), op, "an integer tensor takes integer constants, got ", constant, " for ",
          Operand{"input", tensor});
    check_fits(op, constant, dtype);
    check(dtype != b8 || constant == 0 || constant == 1, op, constant, " does not fit bool");
  }
}

/// Options stay far beyond any volume, and small enough for products with positions to fit in 64 bits.
inline void check_extent(const char* op, const char* what, const Dims& values, int64_t least) {
  for (int64_t value : values)
    check(value >= least && value < int64_t{1} << 31, op, what, " must lie in [", least, ", 2^31), got ", values);
}

/// a * b of sizes. Throws Error if the product does not fit in 64 bits.
inline int64_t checked_product(const char* op, int64_t a, int64_t b) {
  int64_t product = 0;
  check(!__builtin_mul_overflow(a, b, &product), op, "the size ", a, " * ", b, " does not fit in 64 bits");
  return product;
}

inline void check_finite(const char* op, const char* what, double value) {
  check(std::isfinite(value), op, what, " must be finite, got ", value);
}

}  // namespace voxgrad
