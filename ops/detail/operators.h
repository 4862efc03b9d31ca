// The table of elementwise operators. The enums, the names, the CPU and CUDA kernels, the gradients and the dtypes in
// the tests are generated from its rows.
//
// A unary row lists: name, dtypes, formula of x, the tensor that the gradient needs (x: the operand, y: the result, or
// nothing), and the gradient as an expression of differentiable operators, where g is the gradient of the result.
// A binary row lists: name, dtypes, formula of x and y, then for each operand the tensors that the gradient of the
// operand needs, and this gradient. The code that uses the rows sums the gradients over broadcast axes.
//
// `a` and `b` are the constants of an operator, and T is the type in which the operator computes (compute_t). If a
// formula returns bool, the result is a bool tensor and has no gradient. Helpers of the formulas are in
// ops/detail/scalar_ops.h, helpers of the gradients in ops/elementwise.cpp.
//
// The rows named *_grad are gradients with their own kernel: x is the gradient of the result, y is the saved tensor.
// These operators are linear in x, so that the same operator computes the gradient of x. VG_GRADIENT_ROW fills in this
// gradient. The arguments of VG_GRADIENT_ROW after the formula describe the gradient of y.
#pragma once

#include <cmath>
#include <cstdint>

// clang-format off
#define VG_UNARY_OPERATORS(ROW) \
  ROW(affine,      Numbers,  static_cast<T>(wrapping(a) * wrapping(x) + wrapping(b)), nothing, affine(g, a, 0)) \
  ROW(neg,         Numbers,  static_cast<T>(-wrapping(x)), nothing, neg(g)) \
  ROW(abs,         Numbers,  is_negative(x) ? static_cast<T>(-wrapping(x)) : (x == T(0) ? T(0) : x), x, g * sign(x)) \
  ROW(sign,        Numbers,  is_nan(x) ? x : static_cast<T>((x > T(0)) - is_negative(x)), nothing, zeros_like(g)) \
  ROW(clamp,       Numbers,  (x < a ? a : x) > b ? b : (x < a ? a : x), x, call<BinaryOp::clamp_grad>(g, x, a, b)) \
  ROW(exp,         Floats,   std::exp(x), y, g * y) \
  ROW(log,         Floats,   std::log(x), x, g / x) \
  ROW(sqrt,        Floats,   std::sqrt(x), y, g * 0.5 / y) \
  ROW(rsqrt,       Floats,   T(1) / std::sqrt(x), y, g * -0.5 * y * y * y) \
  ROW(reciprocal,  Floats,   T(1) / x, y, -(g * y * y)) \
  ROW(sin,         Floats,   std::sin(x), x, g * cos(x)) \
  ROW(cos,         Floats,   std::cos(x), x, -(g * sin(x))) \
  ROW(erf,         Floats,   std::erf(x), x, g * exp(-(x * x)) * kTwoOverSqrtPi) \
  ROW(pow,         Floats,   a == T(2) ? x * x : std::pow(x, a), \
                           x, a == 0 ? zeros_like(g) : g * affine(pow(x, a - 1), a, 0)) \
  ROW(relu,        Floats,   x < T(0) ? T(0) : x, y, call<BinaryOp::relu_grad>(g, y)) \
  ROW(leaky_relu,  Floats,   x < T(0) ? a * x : x, y, call<BinaryOp::leaky_relu_grad>(g, y, a)) \
  ROW(sigmoid,     Floats,   sigmoid_of(x), y, call<BinaryOp::sigmoid_grad>(g, y)) \
  ROW(tanh,        Floats,   std::tanh(x), y, call<BinaryOp::tanh_grad>(g, y)) \
  ROW(gelu,        Floats,   T(0.5) * x * (T(1) + std::erf(x * T(kSqrtHalf))), x, call<BinaryOp::gelu_grad>(g, x)) \
  ROW(silu,        Floats,   x * sigmoid_of(x), x, call<BinaryOp::silu_grad>(g, x)) \
  ROW(mish,        Floats,   x * mish_gate(x), x, call<BinaryOp::mish_grad>(g, x)) \
  ROW(softplus,    Floats,   a * x > b ? x : std::log1p(std::exp(a * x)) / a, \
                           x, call<BinaryOp::softplus_grad>(g, x, a, b)) \
  ROW(elu,         Floats,   x > T(0) ? b * x : b * a * std::expm1(x), x, call<BinaryOp::elu_grad>(g, x, a, b)) \
  ROW(hardsigmoid, Floats,   x <= T(-3) ? T(0) : x >= T(3) ? T(1) : x / T(6) + T(0.5), \
                           x, call<BinaryOp::hardsigmoid_grad>(g, x)) \
  ROW(hardswish,   Floats,   x <= T(-3) ? T(0) : x >= T(3) ? x : x * (x + T(3)) / T(6), \
                           x, call<BinaryOp::hardswish_grad>(g, x)) \
  ROW(logical_not, Anything, x == T(0), nothing, Tensor()) \
  ROW(isfinite,    Floats,   x - x == T(0), nothing, Tensor())

#define VG_GRADIENT_ROW(ROW, name, formula, kept_y, derivative_y) \
  ROW(name, Floats, formula, y, call<BinaryOp::name>(g, y, a, b), kept_y, derivative_y)
#define VG_BINARY_OPERATORS(ROW) \
  ROW(add,              Anything, static_cast<T>(wrapping(x) + wrapping(y)), nothing, g, nothing, g) \
  ROW(sub,              Numbers,  static_cast<T>(wrapping(x) - wrapping(y)), nothing, g, nothing, neg(g)) \
  ROW(mul,              Anything, static_cast<T>(wrapping(x) * wrapping(y)), y, g * y, x, g * x) \
  ROW(maximum,          Anything, is_nan(x) || x > y ? x : y, \
                                both, g * share(x, y, lt(x, y)), both, g * share(x, y, lt(y, x))) \
  ROW(minimum,          Anything, is_nan(x) || x < y ? x : y, \
                                both, g * share(x, y, gt(x, y)), both, g * share(x, y, gt(y, x))) \
  ROW(div,              Floats,   x / y, y, g / y, both, -(g * (x / y / y))) \
  ROW(pow,              Floats,   std::pow(x, y), \
                                both, g * pow_slope_in_base(x, y), both, g * pow_slope_in_exponent(x, y)) \
  VG_GRADIENT_ROW(ROW, relu_grad,        y <= T(0) ? T(0) : x, nothing, Tensor()) \
  VG_GRADIENT_ROW(ROW, leaky_relu_grad,  y > T(0) ? x : a * x, nothing, Tensor()) \
  VG_GRADIENT_ROW(ROW, clamp_grad,       y >= a && y <= b ? x : T(0), nothing, Tensor()) \
  VG_GRADIENT_ROW(ROW, sigmoid_grad,     x * y * (T(1) - y), both, g * x * affine(y, -2, 1)) \
  VG_GRADIENT_ROW(ROW, tanh_grad,        x * (T(1) - y * y), both, g * x * affine(y, -2, 0)) \
  VG_GRADIENT_ROW(ROW, gelu_grad,        x * gelu_slope(y), both, g * x * gelu_curvature(y)) \
  VG_GRADIENT_ROW(ROW, silu_grad,        x * silu_slope(y), both, g * x * silu_curvature(y)) \
  VG_GRADIENT_ROW(ROW, mish_grad,        x * mish_slope(y), both, g * x * mish_curvature(y)) \
  VG_GRADIENT_ROW(ROW, softplus_grad, a * y > b ? x : x * sigmoid_of(a * y), both, g * x * softplus_curvature(y, a, b)) \
  VG_GRADIENT_ROW(ROW, elu_grad, y > T(0) ? b * x : x * b * a * std::exp(y), both, g * x * elu_curvature(y, a, b)) \
  VG_GRADIENT_ROW(ROW, hardsigmoid_grad, y > T(-3) && y < T(3) ? x / T(6) : T(0), nothing, Tensor()) \
  VG_GRADIENT_ROW(ROW, hardswish_grad,   y < T(-3) ? T(0) : y <= T(3) ? x * (y / T(3) + T(0.5)) : x, \
                                         both, g * x * hardswish_curvature(y)) \
  ROW(eq,               Anything, x == y, nothing, Tensor(), nothing, Tensor()) \
  ROW(ne,               Anything, x != y, nothing, Tensor(), nothing, Tensor()) \
  ROW(lt,               Anything, x < y, nothing, Tensor(), nothing, Tensor()) \
  ROW(le,               Anything, x <= y, nothing, Tensor(), nothing, Tensor()) \
  ROW(gt,               Anything, x > y, nothing, Tensor(), nothing, Tensor()) \
  ROW(ge,               Anything, x >= y, nothing, Tensor(), nothing, Tensor())

// clang-format on

namespace voxgrad {

#define VG_NAME(name, ...) name,
/// out = op(x; a, b).
enum class UnaryOp : uint8_t { VG_UNARY_OPERATORS(VG_NAME) };
/// out = op(x, y; a, b). Broadcast operands have zero strides.
enum class BinaryOp : uint8_t { VG_BINARY_OPERATORS(VG_NAME) };
#undef VG_NAME

}  // namespace voxgrad
