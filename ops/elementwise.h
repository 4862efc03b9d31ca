// Elementwise arithmetic with broadcasting, comparisons, and the activations. All keep the first operand's
// memory format, demand one device of all tensors, and are differentiable any number of times. Two dtypes promote as in
// PyTorch.
//
// Arithmetic of integers wraps around, on every device: in i32, 2147483647 + 1 is -2147483648, whose neg() and abs()
// are itself. Numbers (Scalar, and the constants of affine and clamp) come as doubles, which are exact up to 2^53.
#pragma once

#include <type_traits>

#include "../core/random.h"
#include "../core/tensor.h"

namespace voxgrad {

/// The dtype in which an operator computes on both, as torch.result_type: promote_types of theirs, but a tensor without
/// axes only counts where it is of a higher kind (bool, integer, floating) than the one with axes.
DType result_type(const Tensor& x, const Tensor& y);

/// A number beside a tensor. One of a higher kind than the tensor's makes the result f32 (a floating number beside
/// integers) or i64 (an integer beside bools); an integer that the tensor's integer dtype cannot hold is refused.
struct Scalar {
  template <class T>
  requires std::is_arithmetic_v<T> Scalar(T number)
      : value(static_cast<double>(number)),
        kind(std::is_same_v<T, bool> ? b8
             : std::is_integral_v<T> ? i64
                                     : f32) {}

  double value;
  DType kind;  ///< b8, i64 or f32
};

Tensor add(const Tensor& x, const Tensor& y);
Tensor sub(const Tensor& x, const Tensor& y);
Tensor mul(const Tensor& x, const Tensor& y);
Tensor div(const Tensor& x, const Tensor& y);
Tensor pow(const Tensor& x, const Tensor& y);
Tensor pow(const Tensor& x, double exponent);
/// Where both are equal, the gradient is shared half and half; where one is NaN, both get it whole.
Tensor maximum(const Tensor& x, const Tensor& y);
Tensor maximum(const Tensor& x, Scalar y);
Tensor minimum(const Tensor& x, const Tensor& y);
Tensor minimum(const Tensor& x, Scalar y);
/// factor * x + offset.
Tensor affine(const Tensor& x, double factor, double offset);

Tensor operator+(const Tensor& x, const Tensor& y);
Tensor operator-(const Tensor& x, const Tensor& y);
Tensor operator*(const Tensor& x, const Tensor& y);
Tensor operator/(const Tensor& x, const Tensor& y);
Tensor operator+(const Tensor& x, Scalar y);
Tensor operator-(const Tensor& x, Scalar y);
Tensor operator*(const Tensor& x, Scalar y);
Tensor operator/(const Tensor& x, Scalar y);
Tensor operator+(Scalar x, const Tensor& y);
Tensor operator-(Scalar x, const Tensor& y);
Tensor operator*(Scalar x, const Tensor& y);
Tensor operator/(Scalar x, const Tensor& y);
/// In place, in x's dtype. Where autograd records it, x becomes a new tensor; a leaf that requires grad throws.
Tensor& operator+=(Tensor& x, const Tensor& y);
Tensor& operator-=(Tensor& x, const Tensor& y);
Tensor& operator*=(Tensor& x, const Tensor& y);
Tensor& operator/=(Tensor& x, const Tensor& y);
Tensor& operator+=(Tensor& x, Scalar y);
Tensor& operator-=(Tensor& x, Scalar y);
Tensor& operator*=(Tensor& x, Scalar y);
Tensor& operator/=(Tensor& x, Scalar y);
Tensor operator-(const Tensor& x);

Tensor neg(const Tensor& x);
Tensor abs(const Tensor& x);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor rsqrt(const Tensor& x);
Tensor reciprocal(const Tensor& x);
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
Tensor erf(const Tensor& x);
Tensor sign(const Tensor& x);
/// x limited to [low, high]; use infinities for an open side, of integers too. The gradient is 1 inside and on the
/// limits, 0 at NaN.
Tensor clamp(const Tensor& x, double low, double high);
/// clamp with the other side open.
Tensor clamp_min(const Tensor& x, double low);
Tensor clamp_max(const Tensor& x, double high);
/// `condition` (bool) ? x : y, all three broadcast.
Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y);
Tensor where(const Tensor& condition, const Tensor& x, Scalar y);
Tensor where(const Tensor& condition, Scalar x, const Tensor& y);

/// Comparisons give bool tensors and have no gradient.
Tensor eq(const Tensor& x, const Tensor& y);
Tensor ne(const Tensor& x, const Tensor& y);
Tensor lt(const Tensor& x, const Tensor& y);
Tensor le(const Tensor& x, const Tensor& y);
Tensor gt(const Tensor& x, const Tensor& y);
Tensor ge(const Tensor& x, const Tensor& y);
Tensor eq(const Tensor& x, Scalar y);
Tensor ne(const Tensor& x, Scalar y);
Tensor lt(const Tensor& x, Scalar y);
Tensor le(const Tensor& x, Scalar y);
Tensor gt(const Tensor& x, Scalar y);
Tensor ge(const Tensor& x, Scalar y);
inline Tensor operator<(const Tensor& x, const Tensor& y) { return lt(x, y); }
inline Tensor operator<=(const Tensor& x, const Tensor& y) { return le(x, y); }
inline Tensor operator>(const Tensor& x, const Tensor& y) { return gt(x, y); }
inline Tensor operator>=(const Tensor& x, const Tensor& y) { return ge(x, y); }
inline Tensor operator<(const Tensor& x, Scalar y) { return lt(x, y); }
inline Tensor operator<=(const Tensor& x, Scalar y) { return le(x, y); }
inline Tensor operator>(const Tensor& x, Scalar y) { return gt(x, y); }
inline Tensor operator>=(const Tensor& x, Scalar y) { return ge(x, y); }
inline Tensor operator<(Scalar x, const Tensor& y) { return gt(y, x); }
inline Tensor operator<=(Scalar x, const Tensor& y) { return ge(y, x); }
inline Tensor operator>(Scalar x, const Tensor& y) { return lt(y, x); }
inline Tensor operator>=(Scalar x, const Tensor& y) { return le(y, x); }
Tensor logical_not(const Tensor& x);
Tensor isfinite(const Tensor& x);

Tensor relu(const Tensor& x);
Tensor leaky_relu(const Tensor& x, double negative_slope = 0.01);
/// x where positive, else weight * x: one weight, or one for each channel (axis 1), of x's dtype (He et al., "Delving
/// deep into rectifiers", 2015).
Tensor prelu(const Tensor& x, const Tensor& weight);
Tensor sigmoid(const Tensor& x);
Tensor tanh(const Tensor& x);
/// x * Phi(x), the exact form with erf (Hendrycks and Gimpel 2016).
Tensor gelu(const Tensor& x);
/// x * sigmoid(x).
Tensor silu(const Tensor& x);
/// x * tanh(softplus(x)) (Misra, "Mish", 2019).
Tensor mish(const Tensor& x);
/// x where positive, else alpha * (exp(x) - 1) (Clevert, Unterthiner and Hochreiter 2015).
Tensor elu(const Tensor& x, double alpha = 1);
/// elu scaled so that activations keep mean 0 and variance 1 (Klambauer et al., "Self-normalizing neural networks",
/// 2017).
Tensor selu(const Tensor& x);
/// x / 6 + 1/2, limited to [0, 1].
Tensor hardsigmoid(const Tensor& x);
/// x * hardsigmoid(x) (Howard et al., "Searching for MobileNetV3", 2019).
Tensor hardswish(const Tensor& x);
/// log(1 + exp(beta * x)) / beta; x itself where beta * x > threshold.
Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
/// Zeroes each element with probability p and scales the others by 1 / (1 - p); x itself if not training.
/// Throws unless 0 <= p <= 1.
Tensor dropout(const Tensor& x, double p = 0.5, bool training = true, Generator* generator = nullptr);
/// Like dropout, but zeroes whole channels: x is (N, C, D, H, W) or (C, D, H, W).
Tensor dropout3d(const Tensor& x, double p = 0.5, bool training = true, Generator* generator = nullptr);

}  // namespace voxgrad
