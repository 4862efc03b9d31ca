// Argument checks that operators share. Each check_... function throws Error if the condition in its comment is not
// met. The message begins with `op`, the name of the operator. Private to ops/.
#pragma once

#include <cmath>
#include <initializer_list>

#include "../../core/tensor.h"

namespace voxgrad {

/// Requires defined tensors. Each name is followed by its tensor.
template <class... Rest>
void check_defined(const char* op, const char* what, const Tensor& tensor, const Rest&... rest) {
  check(tensor.defined(), op, what, " is undefined");
  if constexpr (sizeof...(rest) > 0) check_defined(op, rest...);
}

/// Requires a defined tensor with a floating-point dtype.
inline void check_floating(const char* op, const Tensor& tensor, const char* what = "input") {
  check_defined(op, what, tensor);
  check(is_floating(tensor.dtype()), op, "needs a floating-point dtype, got ", describe(tensor));
}

/// Requires the shape (N, C, L), (N, C, H, W) or (N, C, D, H, W).
inline void check_batched(const char* op, const Tensor& tensor) {
  check(tensor.dim() >= 3 && tensor.dim() <= 5, op, "input must be (N, C, L), (N, C, H, W) or (N, C, D, H, W), got ",
        describe(tensor));
}

/// A tensor and its name in error messages.
struct Operand {
  const char* name;
  const Tensor& tensor;
  friend std::ostream& operator<<(std::ostream& out, const Operand& operand) {
    return out << operand.name << ' ' << describe(operand.tensor);
  }
};

/// Requires both operands on the same device.
inline void check_same_device(const char* op, const Operand& a, const Operand& b) {
  check(a.tensor.device() == b.tensor.device(), op, "tensors are on different devices: ", a, " and ", b);
}

/// Requires the same device and dtype for all defined operands.
inline void check_same_kind(const char* op, std::initializer_list<Operand> operands) {
  const Operand* first = nullptr;
  for (const Operand& operand : operands) {
    if (!operand.tensor.defined()) continue;
    if (!first) first = &operand;
    check_same_device(op, *first, operand);
    check(operand.tensor.dtype() == first->tensor.dtype(), op, "dtypes differ: ", *first, " and ", operand,
          "; convert one with to()");
  }
}

/// Requires constants that the dtype of the tensor can represent: integers in its range for an integer tensor, 0 or 1
/// for a bool tensor.
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

/// Requires the values of an option to be in [min_value, 2^31). Because of the upper limit, the product of the value
/// and a position fits in 64 bits.
inline void check_extent(const char* op, const char* what, const Dims& values, int64_t min_value) {
  for (int64_t value : values)
    check(value >= min_value && value < int64_t{1} << 31, op, what, " must lie in [", min_value, ", 2^31), got ",
          values);
}

/// Returns the product of two sizes. Requires that the product fits in 64 bits.
inline int64_t checked_product(const char* op, int64_t a, int64_t b) {
  int64_t product = 0;
  check(!__builtin_mul_overflow(a, b, &product), op, "the size ", a, " * ", b, " does not fit in 64 bits");
  return product;
}

/// Requires a defined tensor with axes. Returns the axis as a nonnegative number.
inline int64_t checked_axis(const char* op, const Tensor& tensor, int64_t axis) {
  check_defined(op, "input", tensor);
  check(tensor.dim() > 0, op, "the tensor has no axes");
  return normalize_axis(axis, tensor.dim(), op);
}

/// Requires an eps that is finite and not negative.
inline void check_eps(const char* op, double eps) {
  check(std::isfinite(eps) && eps >= 0, op, "eps must be finite and not negative, got ", eps);
}

/// Requires a finite value.
inline void check_finite(const char* op, const char* what, double value) {
  check(std::isfinite(value), op, what, " must be finite, got ", value);
}

}  // namespace voxgrad
