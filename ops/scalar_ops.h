// The formulas of the elementwise operators, once for both devices.
#pragma once

#include <cmath>
#include <iterator>
#include <type_traits>

#include "ops/kernels.h"

namespace voxgrad {

inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kInvSqrtTwoPi = 0.39894228040143267794;

/// The operators' names in messages, in the order of the enums.
inline constexpr const char* kUnaryNames[] = {"affine", "neg",        "abs",      "exp",         "log",     "sqrt",
                                              "rsqrt",  "reciprocal", "sin",      "cos",         "erf",     "sign",
                                              "pow",    "clamp",      "relu",     "leaky_relu",  "sigmoid", "tanh",
                                              "gelu",   "silu",       "softplus", "logical_not", "isfinite"};
inline constexpr const char* kBinaryNames[] = {"add",
                                               "sub",
                                               "mul",
                                               "maximum",
                                               "minimum",
                                               "div",
                                               "pow",
                                               "relu_grad",
                                               "leaky_relu_grad",
                                               "sigmoid_grad",
                                               "tanh_grad",
                                               "gelu_grad",
                                               "silu_grad",
                                               "softplus_grad",
                                               "clamp_grad",
                                               "eq",
                                               "ne",
                                               "lt",
                                               "le",
                                               "gt",
                                               "ge"};
static_assert(std::size(kUnaryNames) == static_cast<size_t>(UnaryOp::isfinite) + 1);
static_assert(std::size(kBinaryNames) == static_cast<size_t>(BinaryOp::ge) + 1);

template <class T>
VG_HOST_DEVICE T sigmoid_of(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <class T>
VG_HOST_DEVICE bool is_nan(T x) {
  return x != x;
}

/// x for +, - and * that wrap around: signed integers, whose overflow C++ leaves undefined, as unsigned ones.
template <class T>
VG_HOST_DEVICE auto wrapping(T x) {
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>)
    return static_cast<std::make_unsigned_t<T>>(x);
  else
    return x;
}

/// Element `i` of arange, rounded once: whether a compiler fuses the product and the sum makes no difference.
VG_HOST_DEVICE inline double arange_value(double start, double step, int64_t i) {
  return std::fma(static_cast<double>(i), step, start);
}

/// op(x; a, b), a and b already of type T. Integer arithmetic wraps around.
template <UnaryOp op, class T>
VG_HOST_DEVICE auto apply(T x, [[maybe_unused]] T a, [[maybe_unused]] T b) {
  if constexpr (op == UnaryOp::affine)
    return static_cast<T>(wrapping(a) * wrapping(x) + wrapping(b));
  else if constexpr (op == UnaryOp::neg)
    return static_cast<T>(-wrapping(x));
  else if constexpr (op == UnaryOp::abs)
    return x < T(0) ? static_cast<T>(-wrapping(x)) : (x == T(0) ? T(0) : x);
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
    return (x < a ? a : x) > b ? b : (x < a ? a : x);
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
    return static_cast<T>(wrapping(x) + wrapping(y));
  else if constexpr (op == BinaryOp::sub)
    return static_cast<T>(wrapping(x) - wrapping(y));
  else if constexpr (op == BinaryOp::mul)
    return static_cast<T>(wrapping(x) * wrapping(y));
  else if constexpr (op == BinaryOp::maximum)
    return is_nan(x) || x > y ? x : y;
  else if constexpr (op == BinaryOp::minimum)
    return is_nan(x) || x < y ? x : y;
  else if constexpr (op == BinaryOp::div)
    return x / y;
  else if constexpr (op == BinaryOp::pow)
    return std::pow(x, y);
  else if constexpr (op == BinaryOp::relu_grad)
    return y <= T(0) ? T(0) : x;  // a NaN in y lets the gradient through, as in PyTorch
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
    return y >= a && y <= b ? x : T(0);
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
