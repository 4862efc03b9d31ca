#include "ops/elementwise.h"

#include <limits>

#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/create.h"
#include "ops/kernels.h"
#include "ops/reduce.h"
#include "ops/scalar_ops.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

Tensor unary(UnaryOp op, const char* name, const Tensor& x, double a = 0, double b = 0) {
  check_defined(name, "input", x);
  Tensor out = empty_like(x);
  kernels(x.device()).unary(op, out.view_out(), x.view_in(), a, b);
  return out;
}

/// The view of `x` broadcast to `shape`, without a record.
Tensor broadcast(const Tensor& x, const Shape& shape) {
  NoGradGuard no_grad;
  return x.shape() == shape ? x : expand(x, shape);
}

/// Runs the kernel on the broadcast operands; the result takes the memory format of the first that is not stretched.
Tensor binary(BinaryOp op, const char* name, const Tensor& x, const Tensor& y, double a = 0, double b = 0) {
  check_defined(name, "the first operand", x);
  check_defined(name, "the second operand", y);
  check_same_kind(name, {{"the first operand", x}, {"the second operand", y}});
  const Shape shape = broadcast_shapes(x.shape(), y.shape(), name);
  const bool comparison = op >= BinaryOp::eq;
  const Tensor& like = x.shape() == shape ? x : y;
  Tensor out =
      like.shape() == shape && !comparison ? empty_like(like) : empty(shape, {comparison ? b8 : x.dtype(), x.device()});
  kernels(x.device()).binary(op, out.view_out(), broadcast(x, shape).view_in(), broadcast(y, shape).view_in(), a, b);
  return out;
}

/// Kept for the gradient of the other operand, if that one is wanted.
Saved keep(const Tensor& x, const Tensor& other) { return other.requires_grad() ? Saved(x) : Saved(); }

}  // namespace

// ---- arithmetic

Tensor add(const Tensor& x, const Tensor& y) {
  Tensor out = binary(BinaryOp::add, "add", x, y);
  return record("add", out, {x, y}, [sx = x.shape(), sy = y.shape()](const Tensor& g) {
    return Tensors{sum_to(g, sx), sum_to(g, sy)};
  });
}

Tensor sub(const Tensor& x, const Tensor& y) {
  Tensor out = binary(BinaryOp::sub, "sub", x, y);
  return record("sub", out, {x, y}, [sx = x.shape(), sy = y.shape()](const Tensor& g) {
    return Tensors{sum_to(g, sx), sum_to(neg(g), sy)};
  });
}

Tensor mul(const Tensor& x, const Tensor& y) {
  Tensor out = binary(BinaryOp::mul, "mul", x, y);
  return record("mul", out, {x, y}, [sx = x.shape(), sy = y.shape(), x = keep(x, y), y = keep(y, x)](const Tensor& g) {
    return Tensors{y.defined() ? sum_to(g * y(), sx) : Tensor(), x.defined() ? sum_to(g * x(), sy) : Tensor()};
  });
}

Tensor div(const Tensor& x, const Tensor& y) {
  Tensor out = binary(BinaryOp::div, "div", x, y);
  return record("div", out, {x, y},
                [sx = x.shape(), x = keep(x, y), y = Saved(y), dx = x.requires_grad()](const Tensor& g) {
                  return Tensors{dx ? sum_to(g / y(), sx) : Tensor(),
                                 x.defined() ? sum_to(-(g * x() / y() / y()), y().shape()) : Tensor()};
                });
}

Tensor pow(const Tensor& x, const Tensor& y) {
  Tensor out = binary(BinaryOp::pow, "pow", x, y);
  return record("pow", out, {x, y},
                [x = Saved(x), y = Saved(y), dx = x.requires_grad(), dy = y.requires_grad()](const Tensor& g) {
                  Tensors grads(2);
                  const Tensor one = full({}, 1, x().options());
                  if (dx) {
                    // x ^ 0 is 1 for every x: its slope is 0 there, not 0 * 0 ^ -1 or 0 * NaN.
                    const Tensor flat = mul(eq(y(), 0), logical_not(gt(abs(x()), 0)));
                    grads[0] = sum_to(g * (y() * pow(where(flat, one, x()), y() - 1.0)), x().shape());
                  }
                  if (dy) {
                    // 0 ^ y is constant for y > 0: its slope in y is 0 there, not 0 * log(0); nor at 0 ^ 0.
                    const Tensor flat = mul(eq(x(), 0), ge(y(), 0));
                    grads[1] = sum_to(g * (pow(x(), y()) * log(where(flat, one, x()))), y().shape());
                  }
                  return grads;
                });
}

Tensor pow(const Tensor& x, double exponent) {
  check_finite("pow", "exponent", exponent);
  Tensor out = unary(UnaryOp::pow, "pow", x, exponent);
  return record("pow", out, {x}, [x = Saved(x), exponent](const Tensor& g) {
    if (exponent == 0) return Tensors{zeros_like(g)};
    return Tensors{g * affine(pow(x(), exponent - 1), exponent, 0)};
  });
}

namespace {
Tensor extremum(BinaryOp op, const char* name, const Tensor& x, const Tensor& y) {
  Tensor out = binary(op, name, x, y);
  return record(name, out, {x, y},
                [op, x = Saved(x), y = Saved(y), dx = x.requires_grad(), dy = y.requires_grad()](const Tensor& g) {
                  const Tensor half_if_tied = affine(eq(x(), y()).to(g.dtype()), 0.5, 0);
                  const auto part = [&](const Tensor& mine, const Tensor& other) {
                    const Tensor loses = op == BinaryOp::maximum ? lt(mine, other) : gt(mine, other);
                    return sum_to(g * (1.0 - loses.to(g.dtype()) - half_if_tied), mine.shape());
                  };
                  return Tensors{dx ? part(x(), y()) : Tensor(), dy ? part(y(), x()) : Tensor()};
                });
}
}  // namespace

Tensor maximum(const Tensor& x, const Tensor& y) { return extremum(BinaryOp::maximum, "maximum", x, y); }
Tensor minimum(const Tensor& x, const Tensor& y) { return extremum(BinaryOp::minimum, "minimum", x, y); }

Tensor affine(const Tensor& x, double factor, double offset) {
  check_defined("affine", "input", x);
  check_constants("affine", x, {factor, offset});
  Tensor out = unary(UnaryOp::affine, "affine", x, factor, offset);
  return record("affine", out, {x}, [factor](const Tensor& g) { return Tensors{affine(g, factor, 0)}; });
}

Tensor operator+(const Tensor& x, const Tensor& y) { return add(x, y); }
Tensor operator-(const Tensor& x, const Tensor& y) { return sub(x, y); }
Tensor operator*(const Tensor& x, const Tensor& y) { return mul(x, y); }
Tensor operator/(const Tensor& x, const Tensor& y) { return div(x, y); }
Tensor operator+(const Tensor& x, double y) { return affine(x, 1, y); }
Tensor operator-(const Tensor& x, double y) { return affine(x, 1, -y); }
Tensor operator*(const Tensor& x, double y) { return affine(x, y, 0); }
Tensor operator/(const Tensor& x, double y) { return div(x, full({}, y, x.options())); }
Tensor operator+(double x, const Tensor& y) { return affine(y, 1, x); }
Tensor operator-(double x, const Tensor& y) { return affine(y, -1, x); }
Tensor operator*(double x, const Tensor& y) { return affine(y, x, 0); }
Tensor operator/(double x, const Tensor& y) { return x == 1 ? reciprocal(y) : affine(reciprocal(y), x, 0); }
Tensor operator-(const Tensor& x) { return neg(x); }

Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y) {
  check_defined("where", "condition", condition);
  check_defined("where", "x", x);
  check_defined("where", "y", y);
  check(condition.dtype() == b8, "where", "condition must be bool, got ", describe(condition));
  check(condition.device() == x.device(), "where", "tensors lie on different devices: ", describe(condition), " and ",
        describe(x));
  check_same_kind("where", {{"x", x}, {"y", y}});
  const Shape shape = broadcast_shapes(broadcast_shapes(condition.shape(), x.shape(), "where"), y.shape(), "where");
  Tensor out = x.shape() == shape ? empty_like(x) : empty(shape, x.options());
  kernels(x.device())
      .where(out.view_out(), broadcast(condition, shape).view_in(), broadcast(x, shape).view_in(),
             broadcast(y, shape).view_in());
  return record("where", out, {x, y}, [condition = Saved(condition), sx = x.shape(), sy = y.shape()](const Tensor& g) {
    const Tensor zero = full({}, 0, g.options());
    return Tensors{sum_to(where(condition(), g, zero), sx), sum_to(where(condition(), zero, g), sy)};
  });
}

Tensor eq(const Tensor& x, const Tensor& y) { return binary(BinaryOp::eq, "eq", x, y); }
Tensor ne(const Tensor& x, const Tensor& y) { return binary(BinaryOp::ne, "ne", x, y); }
Tensor lt(const Tensor& x, const Tensor& y) { return binary(BinaryOp::lt, "lt", x, y); }
Tensor le(const Tensor& x, const Tensor& y) { return binary(BinaryOp::le, "le", x, y); }
Tensor gt(const Tensor& x, const Tensor& y) { return binary(BinaryOp::gt, "gt", x, y); }
Tensor ge(const Tensor& x, const Tensor& y) { return binary(BinaryOp::ge, "ge", x, y); }

namespace {
Tensor compare(BinaryOp op, const char* name, const Tensor& x, double y) {
  check_defined(name, "input", x);
  check_constants(name, x, {y});
  return binary(op, name, x, full({}, y, x.options()));
}
}  // namespace

Tensor eq(const Tensor& x, double y) { return compare(BinaryOp::eq, "eq", x, y); }
Tensor ne(const Tensor& x, double y) { return compare(BinaryOp::ne, "ne", x, y); }
Tensor lt(const Tensor& x, double y) { return compare(BinaryOp::lt, "lt", x, y); }
Tensor le(const Tensor& x, double y) { return compare(BinaryOp::le, "le", x, y); }
Tensor gt(const Tensor& x, double y) { return compare(BinaryOp::gt, "gt", x, y); }
Tensor ge(const Tensor& x, double y) { return compare(BinaryOp::ge, "ge", x, y); }

Tensor logical_not(const Tensor& x) {
  check_defined("logical_not", "input", x);
  check(x.dtype() == b8, "logical_not", "needs bool, got ", describe(x));
  return unary(UnaryOp::logical_not, "logical_not", x);
}

Tensor isfinite(const Tensor& x) {
  check_defined("isfinite", "input", x);
  check_floating("isfinite", x);
  Tensor out = empty(x.shape(), {b8, x.device()});
  kernels(x.device()).unary(UnaryOp::isfinite, out.view_out(), x.view_in(), 0, 0);
  return out;
}

// ---- functions of one tensor

Tensor neg(const Tensor& x) {
  return record("neg", unary(UnaryOp::neg, "neg", x), {x}, [](const Tensor& g) { return Tensors{neg(g)}; });
}
Tensor abs(const Tensor& x) {
  return record("abs", unary(UnaryOp::abs, "abs", x), {x},
                [x = Saved(x)](const Tensor& g) { return Tensors{g * sign(x())}; });
}
Tensor exp(const Tensor& x) {
  return record("exp", unary(UnaryOp::exp, "exp", x), {x},
                [](const Tensor& g, const Tensor& y) { return Tensors{g * y}; });
}
Tensor log(const Tensor& x) {
  return record("log", unary(UnaryOp::log, "log", x), {x},
                [x = Saved(x)](const Tensor& g) { return Tensors{g / x()}; });
}
Tensor sqrt(const Tensor& x) {
  return record("sqrt", unary(UnaryOp::sqrt, "sqrt", x), {x},
                [](const Tensor& g, const Tensor& y) { return Tensors{g * 0.5 / y}; });
}
Tensor rsqrt(const Tensor& x) {
  return record("rsqrt", unary(UnaryOp::rsqrt, "rsqrt", x), {x},
                [](const Tensor& g, const Tensor& y) { return Tensors{g * -0.5 * y * y * y}; });
}
Tensor reciprocal(const Tensor& x) {
  return record("reciprocal", unary(UnaryOp::reciprocal, "reciprocal", x), {x},
                [](const Tensor& g, const Tensor& y) { return Tensors{-(g * y * y)}; });
}
Tensor sin(const Tensor& x) {
  return record("sin", unary(UnaryOp::sin, "sin", x), {x},
                [x = Saved(x)](const Tensor& g) { return Tensors{g * cos(x())}; });
}
Tensor cos(const Tensor& x) {
  return record("cos", unary(UnaryOp::cos, "cos", x), {x},
                [x = Saved(x)](const Tensor& g) { return Tensors{-(g * sin(x()))}; });
}
Tensor erf(const Tensor& x) {
  constexpr double kTwoOverSqrtPi = 1.12837916709551257390;
  return record("erf", unary(UnaryOp::erf, "erf", x), {x},
                [x = Saved(x)](const Tensor& g) { return Tensors{g * exp(-(x() * x())) * kTwoOverSqrtPi}; });
}
Tensor sign(const Tensor& x) {
  return record("sign", unary(UnaryOp::sign, "sign", x), {x}, [](const Tensor& g) { return Tensors{zeros_like(g)}; });
}

namespace {
/// The gradients that have a kernel of their own: out = op(g, saved). Linear in g, so the gradient in g is the
/// same kernel again; `slope` gives d out / d saved where it is not zero.
using Slope = Tensor (*)(const Tensor& g, const Tensor& saved, double a, double b);

Tensor activation_grad(BinaryOp op, const char* name, const Tensor& g, const Tensor& saved, Slope slope, double a = 0,
                       double b = 0) {
  Tensor out = binary(op, name, g, saved, a, b);
  return record(name, out, {g, saved},
                [=, g = Saved(g), saved = Saved(saved), d_saved = saved.requires_grad()](const Tensor& gg) {
                  return Tensors{activation_grad(op, name, gg, saved(), slope, a, b),
                                 slope && d_saved ? gg * slope(g(), saved(), a, b) : Tensor()};
                });
}

// The second derivatives, written in ops.
Tensor sigmoid_slope(const Tensor& g, const Tensor& y, double, double) { return g * affine(y, -2, 1); }
Tensor tanh_slope(const Tensor& g, const Tensor& y, double, double) { return g * affine(y, -2, 0); }
Tensor gelu_slope(const Tensor& g, const Tensor& x, double, double) {
  return g * kInvSqrtTwoPi * exp(x * x * -0.5) * (2.0 - x * x);
}
Tensor silu_slope(const Tensor& g, const Tensor& x, double, double) {
  const Tensor s = sigmoid(x);
  return g * s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s));
}
Tensor softplus_slope(const Tensor& g, const Tensor& x, double beta, double threshold) {
  const Tensor s = sigmoid(x * beta);
  const Tensor zero = full({}, 0, x.options());
  return g * where(gt(x * beta, threshold), zero, s * (1.0 - s) * beta);
}
}  // namespace

Tensor clamp(const Tensor& x, double low, double high) {
  check(!std::isnan(low) && !std::isnan(high) && low <= high, "clamp", "needs low <= high, got ", low, " and ", high);
  check_defined("clamp", "input", x);
  constexpr double kOpen = std::numeric_limits<double>::infinity();
  if (low != -kOpen) check_constants("clamp", x, {low});
  if (high != kOpen) check_constants("clamp", x, {high});
  return record("clamp", unary(UnaryOp::clamp, "clamp", x, low, high), {x}, [x = Saved(x), low, high](const Tensor& g) {
    return Tensors{activation_grad(BinaryOp::clamp_grad, "clamp_grad", g, x(), nullptr, low, high)};
  });
}
Tensor relu(const Tensor& x) {
  return record("relu", unary(UnaryOp::relu, "relu", x), {x}, [](const Tensor& g, const Tensor& y) {
    return Tensors{activation_grad(BinaryOp::relu_grad, "relu_grad", g, y, nullptr)};
  });
}
Tensor leaky_relu(const Tensor& x, double negative_slope) {
  check_finite("leaky_relu", "negative_slope", negative_slope);
  // The gradient is decided by the input: the output has the input's sign only for positive slopes.
  return record(
      "leaky_relu", unary(UnaryOp::leaky_relu, "leaky_relu", x, negative_slope), {x},
      [x = Saved(x), negative_slope](const Tensor& g) {
        return Tensors{activation_grad(BinaryOp::leaky_relu_grad, "leaky_relu_grad", g, x(), nullptr, negative_slope)};
      });
}
Tensor sigmoid(const Tensor& x) {
  return record("sigmoid", unary(UnaryOp::sigmoid, "sigmoid", x), {x}, [](const Tensor& g, const Tensor& y) {
    return Tensors{activation_grad(BinaryOp::sigmoid_grad, "sigmoid_grad", g, y, sigmoid_slope)};
  });
}
Tensor tanh(const Tensor& x) {
  return record("tanh", unary(UnaryOp::tanh, "tanh", x), {x}, [](const Tensor& g, const Tensor& y) {
    return Tensors{activation_grad(BinaryOp::tanh_grad, "tanh_grad", g, y, tanh_slope)};
  });
}
Tensor gelu(const Tensor& x) {
  return record("gelu", unary(UnaryOp::gelu, "gelu", x), {x}, [x = Saved(x)](const Tensor& g) {
    return Tensors{activation_grad(BinaryOp::gelu_grad, "gelu_grad", g, x(), gelu_slope)};
  });
}
Tensor silu(const Tensor& x) {
  return record("silu", unary(UnaryOp::silu, "silu", x), {x}, [x = Saved(x)](const Tensor& g) {
    return Tensors{activation_grad(BinaryOp::silu_grad, "silu_grad", g, x(), silu_slope)};
  });
}
Tensor softplus(const Tensor& x, double beta, double threshold) {
  check(std::isfinite(beta) && beta != 0, "softplus", "beta must be finite and not zero, got ", beta);
  check(!std::isnan(threshold), "softplus", "threshold is NaN");
  return record("softplus", unary(UnaryOp::softplus, "softplus", x, beta, threshold), {x},
                [x = Saved(x), beta, threshold](const Tensor& g) {
                  return Tensors{activation_grad(BinaryOp::softplus_grad, "softplus_grad", g, x(), softplus_slope, beta,
                                                 threshold)};
                });
}

Tensor dropout(const Tensor& x, double p, bool training, Generator* generator) {
  check_defined("dropout", "input", x);
  check(p >= 0 && p <= 1, "dropout", "p must lie in [0, 1], got ", p);
  if (!training || p == 0) return x;
  const Tensor draws = rand(x.shape(), {x.dtype(), x.device()}, generator);
  const Tensor kept = ge(draws, p).to(x.dtype());
  return x * affine(kept, p < 1 ? 1 / (1 - p) : 0, 0);
}

}  // namespace voxgrad
