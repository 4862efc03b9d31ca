// Elementwise operators. Their gradients are generated from the rows of ops/detail/operators.h.
#include "ops/elementwise.h"

#include <limits>

#include "ops/detail/norm_activations.h"
#include "ops/detail/unrecorded.h"

namespace voxgrad {
namespace {

/// The tensors that a gradient reads, which are therefore saved for the backward pass.
enum class Reads : uint8_t { nothing, x, y, both };

// ---- helpers of the gradients in ops/detail/operators.h

/// Applies a binary operator. Declared here because the gradients below use it before its definition.
template <BinaryOp op>
Tensor call(const Tensor& first, const Tensor& second, double a = 0, double b = 0);

/// Returns the derivative of maximum or minimum with respect to one operand. `lost` is true where the other operand was
/// selected. The derivative is 0 there, 1/2 where the operands are equal, and 1 elsewhere. Where an operand is NaN, the
/// derivative is 1, too.
Tensor share(const Tensor& x, const Tensor& y, const Tensor& lost) {
  const Tensor half_if_tied = affine(eq(x, y).to(x.dtype()), 0.5, 0);
  return 1.0 - lost.to(x.dtype()) - half_if_tied;
}

Tensor pow_slope_in_base(const Tensor& x, const Tensor& y) {
  // x^0 is 1 for every x. Its derivative with respect to x is 0, but the formula y * x^(y - 1) gives 0 * 0^-1 = NaN for
  // x = 0 and 0 * NaN for x = NaN.
  const Tensor flat = mul(eq(y, 0), logical_not(gt(abs(x), 0)));
  return y * pow(where(flat, full({}, 1, x.options()), x), y - 1.0);
}
Tensor pow_slope_in_exponent(const Tensor& x, const Tensor& y) {
  // 0^y is constant for y > 0, so its derivative with respect to y is 0, but the formula x^y * log(x) gives
  // 0 * log(0) = NaN. At y = 0, 0^y is not continuous; its derivative is set to 0, as in PyTorch.
  const Tensor flat = mul(eq(x, 0), ge(y, 0));
  return pow(x, y) * log(where(flat, full({}, 1, x.options()), x));
}

// Second derivatives of activations.
Tensor gelu_curvature(const Tensor& x) {
  const Tensor square = widened(x) * widened(x);  // x * x exceeds the range of f16 for |x| >= 256
  return (affine(exp(square * -0.5), kInvSqrtTwoPi, 0) * (2.0 - square)).to(x.dtype());
}
Tensor silu_curvature(const Tensor& x) {
  const Tensor s = sigmoid(x);
  return s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s));
}
Tensor mish_curvature(const Tensor& x) {
  const Tensor s = sigmoid(x), gate = tanh(softplus(x)), bend = s * (1.0 - gate * gate);
  return bend * (2.0 + x * (1.0 - s - 2.0 * gate * s));
}
Tensor softplus_curvature(const Tensor& x, double beta, double threshold) {
  const Tensor s = sigmoid(x * beta);
  return where(gt(x * beta, threshold), full({}, 0, x.options()), s * (1.0 - s) * beta);
}
Tensor elu_curvature(const Tensor& x, double alpha, double scale) {
  return where(gt(x, 0), full({}, 0, x.options()), exp(x) * (alpha * scale));
}
Tensor hardswish_curvature(const Tensor& x) { return lt(abs(x), 3).to(x.dtype()) * (1.0 / 3); }

// ---- the gradients of the rows in ops/detail/operators.h

/// The gradient of the result, the operands or, for a unary operator, the operand x and the result y, and the constants
/// of the operator. A tensor that the gradient does not read is undefined.
struct GradientArguments {
  const Tensor& g;
  const Tensor& x;
  const Tensor& y;
  double a;
  double b;
};

template <auto op>
struct Gradient;

#define VG_GRADIENT(op, kept_x, derivative_x, kept_y, derivative_y)                           \
  template <>                                                                                 \
  struct Gradient<op> : GradientArguments {                                                   \
    [[maybe_unused]] static constexpr Reads reads_x = Reads::kept_x, reads_y = Reads::kept_y; \
    Tensor of_x() const { return derivative_x; }                                              \
    Tensor of_y() const { return derivative_y; }                                              \
  };
#define VG_ROW(name, types, formula, kept, derivative) VG_GRADIENT(UnaryOp::name, kept, derivative, nothing, Tensor())
VG_UNARY_OPERATORS(VG_ROW)
#undef VG_ROW
#define VG_ROW(name, types, formula, ...) VG_GRADIENT(BinaryOp::name, __VA_ARGS__)
VG_BINARY_OPERATORS(VG_ROW)
#undef VG_ROW
#undef VG_GRADIENT

/// Returns true if `kept` includes `operand`.
constexpr bool reads(Reads kept, Reads operand) { return kept == operand || kept == Reads::both; }

/// True if the formula of an operator returns bool.
template <auto op>
inline constexpr bool gives_bool = std::is_same_v<result_t<op, float>, bool>;

template <UnaryOp op>
Tensor unary(const Tensor& input, double a = 0, double b = 0) {
  check_defined(name(op), "input", input);
  const Tensor x = autocasted(name(op), input);
  constexpr bool to_bool = gives_bool<op>;
  Tensor out =
      to_bool && x.dtype() != b8 ? empty_strided(x.shape(), empty_like_strides(x), {b8, x.device()}) : empty_like(x);
  kernels(x.device()).unary(op, out.view_out(), x.view_in(), a, b);
  using G = Gradient<op>;
  if constexpr (to_bool)
    return out;
  else if constexpr (G::reads_x == Reads::y)
    return record(name(op), out, {x}, [a, b](const Tensor& g, const Tensor& y) {
      return Tensors{G{{g, {}, y, a, b}}.of_x()};
    });
  else
    return record(name(op), out, {x}, [x = G::reads_x == Reads::x ? Saved(x) : Saved(), a, b](const Tensor& g) {
      return Tensors{G{{g, x(), {}, a, b}}.of_x()};
    });
}

/// Returns a view of x broadcast to `shape`. Autograd does not record the view.
Tensor broadcast(const Tensor& x, const Shape& shape) {
  NoGradGuard no_grad;
  return x.shape() == shape ? x : expand(x, shape);
}

/// Returns an uninitialized result. The result has the memory format of x unless x is broadcast, by this operator or by
/// an earlier expand(). If x is broadcast, the result has the memory format of y, or is contiguous if this operator
/// broadcasts y, too.
Tensor empty_for(const Tensor& x, const Tensor& y, const Shape& shape, DType dtype) {
  const auto fits = [&](const Tensor& t) {
    for (int64_t i = 0; i < t.dim(); ++i)
      if (t.strides()[i] == 0 && t.shape()[i] > 1) return false;
    return t.shape() == shape;
  };
  const Tensor& like = fits(x) ? x : y;
  const TensorOptions options{dtype, x.device()};
  return like.shape() == shape ? empty_strided(shape, empty_like_strides(like), options) : empty(shape, options);
}

/// Converts x and y to the dtype in which `op` computes. An operator that supports only floating-point dtypes converts
/// integers and bool to f32.
template <BinaryOp op>
std::pair<Tensor, Tensor> promoted(const Tensor& x, const Tensor& y) {
  check_defined(name(op), "the first operand", x, "the second operand", y);
  DType dtype = result_type(x, y);
  if (!has(typename Operator<op>::DTypes(), i64) && !is_floating(dtype)) dtype = f32;
  return {autocasted(name(op), x.to(dtype)), autocasted(name(op), y.to(dtype))};
}

template <BinaryOp op>
Tensor call(const Tensor& first, const Tensor& second, double a, double b) {
  const auto [x, y] = promoted<op>(first, second);
  check_same_kind(name(op), {{"the first operand", x}, {"the second operand", y}});
  const Shape shape = broadcast_shapes(x.shape(), y.shape(), name(op));
  Tensor out = empty_for(x, y, shape, gives_bool<op> ? b8 : x.dtype());
  kernels(x.device()).binary(op, out.view_out(), broadcast(x, shape).view_in(), broadcast(y, shape).view_in(), a, b);
  if constexpr (gives_bool<op>) return out;
  using G = Gradient<op>;
  const bool dx = x.requires_grad(), dy = y.requires_grad();
  const auto keep = [&](const Tensor& t, Reads operand) {
    return (dx && reads(G::reads_x, operand)) || (dy && reads(G::reads_y, operand)) ? Saved(t) : Saved();
  };
  return record(
      name(op), out, {x, y},
      [=, sx = x.shape(), sy = y.shape(), kept_x = keep(x, Reads::x), kept_y = keep(y, Reads::y)](const Tensor& g) {
        const auto summed = [](const Tensor& grad, const Shape& to) {
          return grad.defined() ? sum_to(grad, to) : grad;
        };
        const G gradient{{g, kept_x(), kept_y(), a, b}};
        return Tensors{dx ? summed(gradient.of_x(), sx) : Tensor(), dy ? summed(gradient.of_y(), sy) : Tensor()};
      });
}

/// Returns 0 for bool, 1 for integers and 2 for floating-point dtypes.
int kind_of(DType dtype) { return is_floating(dtype) ? 2 : dtype == b8 ? 0 : 1; }

/// Converts x to the dtype in which an operator computes with x and the number `s`.
Tensor promoted_for(const char* op, const Tensor& x, Scalar s) {
  check_defined(op, "input", x);
  if (is_floating(x.dtype())) return x;
  if (s.kind == f32 || (x.dtype() == b8 && s.kind == i64)) return x.to(s.kind);
  check_constants(op, x, {s.value});
  return x;
}

/// Returns the number `s` as a tensor without axes, with the dtype and device of x. The caller obtains x from
/// promoted_for().
Tensor scalar_for(const Tensor& x, Scalar s) { return full({}, s.value, x.options()); }

template <BinaryOp op>
Tensor with_scalar(const Tensor& x, Scalar s) {
  const Tensor converted = promoted_for(name(op), x, s);
  // Compare bf16 and f16 in float32, because rounding the number to their precision could change the result.
  if (gives_bool<op>) return call<op>(widened(converted), scalar_for(widened(converted), s));
  return call<op>(converted, scalar_for(converted, s));
}

/// Assigns the result of an operator to its operand x: in place, or as a new tensor if autograd recorded the operator.
Tensor& assign(const char* op, Tensor& x, const Tensor& result) {
  check(kind_of(result.dtype()) <= kind_of(x.dtype()), op, "a result of ", result.dtype(),
        " cannot be written to the target ", describe(x));
  check(result.shape() == x.shape(), op, "a result of shape ", result.shape(), " cannot be written to the target ",
        describe(x));
  if (result.requires_grad() && !(x.is_leaf() && x.requires_grad())) return x = result.to(x.dtype());
  check_in_place(op, x, result);
  x.copy_(result.to(x.dtype()));
  return x;
}

// ---- prelu: one kernel computes the result, and another kernel computes the gradients. If the gradients are
// differentiated again, they are composed of differentiable operators instead.

/// Returns the weight expanded to (C), one element per channel of x.
Tensor by_channels(const Tensor& weight, const Tensor& x) {
  return expand(reshape(weight, {weight.numel()}), {x.size(1)});
}

/// Computes the gradients of x and of the expanded weight (C) with one kernel.
Tensors prelu_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  const Tensor dy = grad.contiguous(x.suggest_memory_format());
  Tensors grads{empty_like(x), empty({x.size(1)}, {widened(x.dtype()), x.device()})};
  kernels(x.device())
      .prelu_backward(as_rows(x, grads[0].view_out()), grads[1].view_out(), as_rows(x, dy.view_in()),
                      as_rows(x, x.view_in()), by_channels(weight, x).view_in());
  return grads;
}

/// Computes the same gradients with differentiable operators.
Tensors composed_prelu_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  Shape shape = Dims::filled(x.dim(), 1);
  shape[1] = weight.numel();
  // Clamp x instead of multiplying it by a mask: infinity * 0 would make the gradient of the weight NaN.
  const Tensor negative = clamp(x, -std::numeric_limits<double>::infinity(), 0);
  return {where(gt(x, 0.0), grad, grad * reshape(weight, shape)), sum(grad * negative, all_but_channels(x))};
}

}  // namespace

DType result_type(const Tensor& x, const Tensor& y) {
  check_defined("result_type", "the first tensor", x, "the second tensor", y);
  if ((x.dim() == 0) == (y.dim() == 0)) return promote_types(x.dtype(), y.dtype());
  const DType with_axes = (x.dim() == 0 ? y : x).dtype(), without = (x.dim() == 0 ? x : y).dtype();
  return kind_of(without) > kind_of(with_axes) ? promote_types(with_axes, without) : with_axes;
}

// ---- functions that only apply an operator

// clang-format off
#define VG_UNARY_FUNCTIONS(ROW) \
  ROW(neg) ROW(abs) ROW(sign) ROW(exp) ROW(log) ROW(sqrt) ROW(rsqrt) ROW(reciprocal) ROW(sin) ROW(cos) ROW(erf) \
  ROW(isfinite) ROW(logical_not) \
  ROW(relu) ROW(sigmoid) ROW(tanh) ROW(gelu) ROW(silu) ROW(mish) ROW(hardsigmoid) ROW(hardswish)
// Functions of two tensors.
#define VG_BINARY_FUNCTIONS(ROW) ROW(add) ROW(sub) ROW(mul) ROW(div) ROW(pow)
// Functions whose second operand is a tensor or a number.
#define VG_MIXED_FUNCTIONS(ROW) ROW(maximum) ROW(minimum) ROW(eq) ROW(ne) ROW(lt) ROW(le) ROW(gt) ROW(ge)
// clang-format on

#define VG_UNARY(name) \
  Tensor name(const Tensor& x) { return unary<UnaryOp::name>(x); }
#define VG_BINARY(name) \
  Tensor name(const Tensor& x, const Tensor& y) { return call<BinaryOp::name>(x, y); }
#define VG_WITH_SCALAR(name) \
  Tensor name(const Tensor& x, Scalar y) { return with_scalar<BinaryOp::name>(x, y); }
VG_UNARY_FUNCTIONS(VG_UNARY)
VG_BINARY_FUNCTIONS(VG_BINARY)
VG_MIXED_FUNCTIONS(VG_BINARY)
VG_MIXED_FUNCTIONS(VG_WITH_SCALAR)

// ---- arithmetic

Tensor pow(const Tensor& x, double exponent) {
  check_finite("pow", "exponent", exponent);
  return unary<UnaryOp::pow>(x, exponent);
}

Tensor affine(const Tensor& x, double factor, double offset) {
  check_defined("affine", "input", x);
  check_constants("affine", x, {factor, offset});
  return unary<UnaryOp::affine>(x, factor, offset);
}

#define VG_ARITHMETIC(symbol, function)                                                                            \
  Tensor operator symbol(const Tensor& x, const Tensor& y) { return function(x, y); }                              \
  Tensor& operator symbol##=(Tensor& x, const Tensor& y) { return assign("operator" #symbol "=", x, x symbol y); } \
  Tensor& operator symbol##=(Tensor& x, Scalar y) { return assign("operator" #symbol "=", x, x symbol y); }
VG_ARITHMETIC(+, add)
VG_ARITHMETIC(-, sub)
VG_ARITHMETIC(*, mul)
VG_ARITHMETIC(/, div)
#undef VG_ARITHMETIC
Tensor operator+(const Tensor& x, Scalar y) {
  const Tensor converted = promoted_for("add", x, y);
  return converted.dtype() == b8 ? add(converted, scalar_for(converted, y)) : affine(converted, 1, y.value);
}
Tensor operator-(const Tensor& x, Scalar y) {
  const Tensor converted = promoted_for("sub", x, y);
  return is_floating(converted.dtype()) ? affine(converted, 1, -y.value) : sub(converted, scalar_for(converted, y));
}
Tensor operator*(const Tensor& x, Scalar y) {
  const Tensor converted = promoted_for("mul", x, y);
  return converted.dtype() == b8 ? mul(converted, scalar_for(converted, y)) : affine(converted, y.value, 0);
}
Tensor operator/(const Tensor& x, Scalar y) {
  const Tensor converted = promoted_for("div", x, y);
  // The divisor may exceed the range of bf16 or f16. Multiply by its reciprocal in float32 instead. The rounding error
  // of the reciprocal is much smaller than the rounding error of the result.
  return is_half(converted.dtype()) ? affine(converted, 1 / y.value, 0) : div(converted, scalar_for(converted, y));
}
Tensor operator+(Scalar x, const Tensor& y) { return y + x; }
Tensor operator-(Scalar x, const Tensor& y) {
  const Tensor converted = promoted_for("sub", y, x);
  return is_floating(converted.dtype()) ? affine(converted, -1, x.value) : sub(scalar_for(converted, x), converted);
}
Tensor operator*(Scalar x, const Tensor& y) { return y * x; }
Tensor operator/(Scalar x, const Tensor& y) {
  const Tensor converted = promoted_for("div", y, x);
  return div(scalar_for(widened(converted), x), widened(converted))
      .to(converted.dtype() == f64 || is_half(converted.dtype()) ? converted.dtype() : f32);
}
Tensor operator-(const Tensor& x) { return neg(x); }

Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y) {
  check_defined("where", "condition", condition, "x", x, "y", y);
  check(condition.dtype() == b8, "where", "condition must be bool, got ", describe(condition));
  check_same_device("where", {"condition", condition}, {"x", x});
  if (const DType dtype = result_type(x, y); x.dtype() != dtype || y.dtype() != dtype)
    return where(condition, x.to(dtype), y.to(dtype));
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

Tensor where(const Tensor& condition, const Tensor& x, Scalar y) {
  const Tensor converted = promoted_for("where", x, y);
  return where(condition, converted, scalar_for(converted, y));
}
Tensor where(const Tensor& condition, Scalar x, const Tensor& y) {
  const Tensor converted = promoted_for("where", y, x);
  return where(condition, scalar_for(converted, x), converted);
}

// ---- functions of one tensor

Tensor clamp(const Tensor& x, double low, double high) {
  check(!std::isnan(low) && !std::isnan(high) && low <= high, "clamp", "needs low <= high, got ", low, " and ", high);
  check_defined("clamp", "input", x);
  constexpr double kOpen = std::numeric_limits<double>::infinity();
  if (low != -kOpen) check_constants("clamp", x, {low});
  if (high != kOpen) check_constants("clamp", x, {high});
  return unary<UnaryOp::clamp>(x, low, high);
}
Tensor clamp_min(const Tensor& x, double low) { return clamp(x, low, std::numeric_limits<double>::infinity()); }
Tensor clamp_max(const Tensor& x, double high) { return clamp(x, -std::numeric_limits<double>::infinity(), high); }

Tensor leaky_relu(const Tensor& x, double negative_slope) {
  check_finite("leaky_relu", "negative_slope", negative_slope);
  // The gradient of UnaryOp::leaky_relu uses the sign of the result, which equals the sign of x only if the slope is
  // not negative.
  if (negative_slope < 0) return where(gt(x, 0), x, x * negative_slope);
  return unary<UnaryOp::leaky_relu>(x, negative_slope);
}

Tensor prelu(const Tensor& given, const Tensor& given_weight) {
  const Tensor x = autocasted("prelu", given), weight = autocasted("prelu", given_weight);
  check_defined("prelu", "input", x, "weight", weight);
  check_same_kind("prelu", {{"input", x}, {"weight", weight}});
  check_floating("prelu", x);
  const int64_t channels = x.dim() > 1 ? x.shape()[1] : 1;
  check(weight.numel() == 1 || (weight.dim() == 1 && weight.numel() == channels), "prelu",
        "weight must have one element or one per channel (C is ", channels, "), got ", weight.shape());
  // Treat (N, C) as one channels-last sample with N positions, so that the kernel can split the positions among
  // threads.
  if (x.dim() == 2) return transpose(squeeze(prelu(unsqueeze(transpose(x, 0, 1), 0), weight), 0), 0, 1);
  if (x.dim() < 2) return reshape(prelu(reshape(x, {1, 1, x.numel()}), weight), x.shape());
  const Tensor dense = is_dense_volume(x) ? x : x.contiguous(x.suggest_memory_format());
  const Tensor y = empty_like(dense);
  kernels(x.device())
      .prelu(as_rows(dense, y.view_out()), as_rows(dense, dense.view_in()), by_channels(weight, dense).view_in());
  return record("prelu", y, {dense, weight}, [x = Saved(dense), weight = Saved(weight)](const Tensor& grad) {
    Tensors grads = (grad_enabled() ? composed_prelu_gradients : prelu_gradients)(grad, x(), weight());
    const Tensor weight_grad = weight().numel() == 1 ? sum(grads[1]) : grads[1];
    grads[1] = reshape(weight_grad, weight().shape()).to(weight().dtype());
    return grads;
  });
}

Tensor elu(const Tensor& x, double alpha) {
  check_finite("elu", "alpha", alpha);
  return unary<UnaryOp::elu>(x, alpha, 1);
}
Tensor selu(const Tensor& x) {
  constexpr double kAlpha = 1.6732632423543772848170429916717, kScale = 1.0507009873554804934193349852946;
  return unary<UnaryOp::elu>(x, kAlpha, kScale);
}
Tensor softplus(const Tensor& x, double beta, double threshold) {
  check(std::isfinite(beta) && beta != 0, "softplus", "beta must be finite and not zero, got ", beta);
  check(!std::isnan(threshold), "softplus", "threshold is NaN");
  return unary<UnaryOp::softplus>(x, beta, threshold);
}

Tensor activation(const ActivationArguments& a, const Tensor& x) {
  if (a.kind == ActivationKind::leaky_relu) return leaky_relu(x, a.negative_slope);
  return with_operators(a.kind, x, [&]<UnaryOp op, BinaryOp>() { return unary<op>(x); });
}
Tensor activation_gradient(const ActivationArguments& a, const Tensor& g, const Tensor& x) {
  return with_operators(a.kind, g, [&]<UnaryOp, BinaryOp op>() { return call<op>(g, x, a.negative_slope); });
}

Tensor dropout(const Tensor& x, double p, bool training, Generator* generator) {
  check_floating("dropout", x);
  check(p >= 0 && p <= 1, "dropout", "p must lie in [0, 1], got ", p);
  if (!training || p == 0) return x;
  // Draw the random numbers in f32 even for bf16 and f16, because rounding the numbers would change the probability.
  const Tensor draws = rand(x.shape(), {widened(x.dtype()), x.device()}, generator);
  return affine(x, p < 1 ? 1 / (1 - p) : 0, 0) * ge(draws, p).to(x.dtype());
}

Tensor dropout3d(const Tensor& x, double p, bool training, Generator* generator) {
  check_defined("dropout3d", "input", x);
  check(x.dim() == 5 || x.dim() == 4, "dropout3d", "input must be (N, C, D, H, W) or (C, D, H, W), got ", describe(x));
  if (!training || p == 0) return dropout(x, p, training);
  Shape shape = x.shape();
  for (int64_t axis = x.dim() - 3; axis < x.dim(); ++axis) shape[axis] = 1;
  return x * dropout(ones(shape, x.options()), p, true, generator);
}

}  // namespace voxgrad
