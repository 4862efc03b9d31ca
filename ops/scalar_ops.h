// The formulas of the elementwise operators, once for both devices.
#pragma once
// clang-format off: one formula a line

#include <cmath>
#include <type_traits>

#include "ops/kernels.h"

namespace voxgrad {

inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kInvSqrtTwoPi = 0.39894228040143267794;

template <class T>
VG_HOST_DEVICE T sigmoid_of(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

/// T(x) for a NaN-propagating comparison: true if x wins over y.
template <class T>
VG_HOST_DEVICE bool is_nan(T x) {
  return x != x;
}

/// op(x; a, b), a and b already of type T.
template <UnaryOp op, class T>
VG_HOST_DEVICE auto apply(T x, [[maybe_unused]] T a, [[maybe_unused]] T b) {
  if constexpr (op == UnaryOp::affine)
    return static_cast<T>(a * x + b);
  else if constexpr (op == UnaryOp::neg)
    return static_cast<T>(-x);
  else if constexpr (op == UnaryOp::abs)
    return x < T(0) ? static_cast<T>(-x) : (x == T(0) ? T(0) : x);
  else if constexpr (op == UnaryOp::exp)
    return std::exp(x);
  else if constexpr (op == UnaryOp::log)
    return std::log(x);
  else if constexpr (op == UnaryOp::sqrt)
    return std::sqrt(x);
  else if constexpr (op == UnaryOp::rsqrt)
    return T(1) / std::sqrt(x);
  else if constexpr (op == UnaryOp::reciprocal)
    return T(1) / x;
  else if constexpr (op == UnaryOp::sin)
    return std::sin(x);
  else if constexpr (op == UnaryOp::cos)
    return std::cos(x);
  else if constexpr (op == UnaryOp::erf)
    return std::erf(x);
  else if constexpr (op == UnaryOp::sign)
    return is_nan(x) ? x : T((x > T(0)) - (x < T(0)));
  else if constexpr (op == UnaryOp::pow)
    return a == T(2) ? x * x : std::pow(x, a);
  else if constexpr (op == UnaryOp::clamp)
    return x < a ? a : (x > b ? b : x);
  else if constexpr (op == UnaryOp::relu)
    return x < T(0) ? T(0) : x;
  else if constexpr (op == UnaryOp::leaky_relu)
    return x < T(0) ? a * x : x;
  else if constexpr (op == UnaryOp::sigmoid)
    return sigmoid_of(x);
  else if constexpr (op == UnaryOp::tanh)
    return std::tanh(x);
  else if constexpr (op == UnaryOp::gelu)
    return T(0.5) * x * (T(1) + std::erf(x * T(kSqrtHalf)));
  else if constexpr (op == UnaryOp::silu)
    return x * sigmoid_of(x);
  else if constexpr (op == UnaryOp::softplus)
    return a * x > b ? x : std::log1p(std::exp(a * x)) / a;
  else if constexpr (op == UnaryOp::logical_not)
    return !x;
  else if constexpr (op == UnaryOp::isfinite)
    return x - x == T(0);
}

/// op(x, y; a, b).
template <BinaryOp op, class T>
VG_HOST_DEVICE auto apply(T x, T y, [[maybe_unused]] T a, [[maybe_unused]] T b) {
  if constexpr (op == BinaryOp::add)
    return static_cast<T>(x + y);
  else if constexpr (op == BinaryOp::sub)
    return static_cast<T>(x - y);
  else if constexpr (op == BinaryOp::mul)
    return static_cast<T>(x * y);
  else if constexpr (op == BinaryOp::maximum)
    return is_nan(x) || x > y ? x : y;
  else if constexpr (op == BinaryOp::minimum)
    return is_nan(x) || x < y ? x : y;
  else if constexpr (op == BinaryOp::div)
    return x / y;
  else if constexpr (op == BinaryOp::pow)
    return std::pow(x, y);
  else if constexpr (op == BinaryOp::relu_grad)
    return y > T(0) ? x : T(0);
  else if constexpr (op == BinaryOp::leaky_relu_grad)
    return y > T(0) ? x : a * x;
  else if constexpr (op == BinaryOp::sigmoid_grad)
    return x * y * (T(1) - y);
  else if constexpr (op == BinaryOp::tanh_grad)
    return x * (T(1) - y * y);
  else if constexpr (op == BinaryOp::gelu_grad)
    return x * (T(0.5) * (T(1) + std::erf(y * T(kSqrtHalf))) + y * T(kInvSqrtTwoPi) * std::exp(T(-0.5) * y * y));
  else if constexpr (op == BinaryOp::silu_grad) {
    const T s = sigmoid_of(y);
    return x * s * (T(1) + y * (T(1) - s));
  } else if constexpr (op == BinaryOp::softplus_grad)
    return a * y > b ? x : x * sigmoid_of(a * y);
  else if constexpr (op == BinaryOp::clamp_grad)
    return y < a || y > b ? T(0) : x;
  else if constexpr (op == BinaryOp::eq)
    return x == y;
  else if constexpr (op == BinaryOp::ne)
    return x != y;
  else if constexpr (op == BinaryOp::lt)
    return x < y;
  else if constexpr (op == BinaryOp::le)
    return x <= y;
  else if constexpr (op == BinaryOp::gt)
    return x > y;
  else if constexpr (op == BinaryOp::ge)
    return x >= y;
}

}  // namespace voxgrad
