// The formulas of the elementwise operators as functions, and the keys by which elements are sorted, for the CPU and
// CUDA kernels.
#pragma once

#include <bit>
#include <cmath>
#include <type_traits>

#include "../../core/dtype.h"
#include "operators.h"

namespace voxgrad {

inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kTwoOverSqrtPi = 1.12837916709551257390;
inline constexpr double kInvSqrtTwoPi = 0.39894228040143267794;

/// Names of the operators in messages, in the order of the enums.
#define VG_NAME(name, ...) #name,
inline constexpr const char* kUnaryNames[] = {VG_UNARY_OPERATORS(VG_NAME)};
inline constexpr const char* kBinaryNames[] = {VG_BINARY_OPERATORS(VG_NAME)};
#undef VG_NAME
constexpr const char* name(UnaryOp op) { return kUnaryNames[static_cast<size_t>(op)]; }
constexpr const char* name(BinaryOp op) { return kBinaryNames[static_cast<size_t>(op)]; }

template <class T>
VG_HOST_DEVICE T sigmoid_of(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <class T>
VG_HOST_DEVICE bool is_nan(T x) {
  return x != x;
}

template <class T>
VG_HOST_DEVICE bool is_negative(T x) {
  if constexpr (std::is_unsigned_v<T>)
    return false;
  else
    return x < T(0);
}

/// Converts a signed integer to unsigned, so that +, - and * wrap around; overflow of signed integers is undefined in
/// C++. Returns other values unchanged.
template <class T>
VG_HOST_DEVICE auto wrapping(T x) {
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>)
    return static_cast<std::make_unsigned_t<T>>(x);
  else
    return x;
}

/// Returns element `i` of arange. std::fma rounds once, so that the result does not depend on whether the compiler
/// fuses the product and the sum.
VG_HOST_DEVICE inline double arange_value(double start, double step, int64_t i) {
  return std::fma(static_cast<double>(i), step, start);
}

// ---- sorting

/// An unsigned integer that sorts in the same order as an element.
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

// ---- helpers of the formulas

template <class T>
VG_HOST_DEVICE T gelu_slope(T x) {
  return T(0.5) * (T(1) + std::erf(x * T(kSqrtHalf))) + x * T(kInvSqrtTwoPi) * std::exp(T(-0.5) * x * x);
}
template <class T>
VG_HOST_DEVICE T silu_slope(T x) {
  const T s = sigmoid_of(x);
  return s * (T(1) + x * (T(1) - s));
}
/// Returns tanh(softplus(x)).
template <class T>
VG_HOST_DEVICE T mish_gate(T x) {
  if (x > T(20)) return T(1);
  const T e = std::exp(x), n = e * (e + T(2));
  return n / (n + T(2));
}
template <class T>
VG_HOST_DEVICE T mish_slope(T x) {
  const T gate = mish_gate(x);
  return gate + x * sigmoid_of(x) * (T(1) - gate * gate);
}

// ---- the rows of the table as types: formula and dtypes

template <auto op>
struct Operator;

#define VG_OPERATOR(op, types, formula)                                                                       \
  template <>                                                                                                 \
  struct Operator<op> {                                                                                       \
    using DTypes = types;                                                                                     \
    template <class T>                                                                                        \
    static VG_HOST_DEVICE auto apply(T x, [[maybe_unused]] T y, [[maybe_unused]] T a, [[maybe_unused]] T b) { \
      return formula;                                                                                         \
    }                                                                                                         \
  };
#define VG_ROW(name, types, formula, ...) VG_OPERATOR(UnaryOp::name, types, formula)
VG_UNARY_OPERATORS(VG_ROW)
#undef VG_ROW
#define VG_ROW(name, types, formula, ...) VG_OPERATOR(BinaryOp::name, types, formula)
VG_BINARY_OPERATORS(VG_ROW)
#undef VG_ROW
#undef VG_OPERATOR

/// Computes op(x, y; a, b), or op(x; a, b) for a unary operator. All arguments have the same type, compute_t of the
/// elements.
template <auto op, class T>
VG_HOST_DEVICE auto apply(T x, T y, T a, T b) {
  return Operator<op>::apply(x, y, a, b);
}
template <auto op, class T>
VG_HOST_DEVICE auto apply(T x, T a, T b) {
  return Operator<op>::apply(x, T(0), a, b);
}

/// The element type of the result for operands with elements of type T: T or bool.
template <auto op, class T, class C = compute_t<T>>
using result_t = std::conditional_t<std::is_same_v<decltype(apply<op>(C(), C(), C(), C())), bool>, bool, T>;

}  // namespace voxgrad
