// Elementwise arithmetic, comparisons, mathematical functions and activations.
//
// Operands broadcast, and different dtypes are promoted, as in PyTorch. All tensors must be on the same device;
// otherwise the functions throw Error. The result has the memory format of the first operand that is not broadcast.
// All functions whose result is not bool can be differentiated any number of times.
//
// Integer arithmetic wraps around on every device: in i32, 2147483647 + 1 is -2147483648, and neg() and abs() return
// -2147483648 unchanged. Numbers (Scalar and the constants of affine and clamp) are passed as double, which represents
// integers exactly up to 2^53.
#pragma once

#include <type_traits>

#include "../core/random.h"
#include "../core/tensor.h"

namespace voxgrad {

/// Returns the dtype to which an operator promotes x and y, as torch.result_type does. The result is promote_types of
/// the two dtypes, with one exception. If only one of the tensors has axes, the other tensor affects the result only if
/// its dtype is of a higher kind (bool < integer < floating).
DType result_type(const Tensor& x, const Tensor& y);

/// A number as an operand. If the number is of a higher kind than the dtype of the tensor, the operator computes in f32
/// (floating number and integer or bool tensor) or in i64 (integer number and bool tensor). Operators throw Error if
/// the number is an integer that the integer dtype of the tensor cannot represent.
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

/// Arithmetic of two operands. div and pow convert integers to f32; there is no integer division.
Tensor add(const Tensor& x, const Tensor& y);
Tensor sub(const Tensor& x, const Tensor& y);
Tensor mul(const Tensor& x, const Tensor& y);
Tensor div(const Tensor& x, const Tensor& y);
Tensor pow(const Tensor& x, const Tensor& y);
Tensor pow(const Tensor& x, double exponent);
/// Return the larger or the smaller element, or NaN if one of the two elements is NaN. Where the elements are equal,
/// each operand gets half of the gradient. Where one element is NaN, both operands get the full gradient.
Tensor maximum(const Tensor& x, const Tensor& y);
Tensor maximum(const Tensor& x, Scalar y);
Tensor minimum(const Tensor& x, const Tensor& y);
Tensor minimum(const Tensor& x, Scalar y);
/// Returns factor * x + offset.
Tensor affine(const Tensor& x, double factor, double offset);

/// Arithmetic with operators: add, sub, mul and div, and the negation of each element.
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
Tensor operator-(const Tensor& x);

/// Assign the result to x, in the dtype of x. If autograd records the operation, x becomes a new tensor; otherwise, the
/// operators write the result to the memory of x. Throw Error if x is a leaf that requires grad, or if the result has a
/// different shape than x or a dtype of a higher kind.
Tensor& operator+=(Tensor& x, const Tensor& y);
Tensor& operator-=(Tensor& x, const Tensor& y);
Tensor& operator*=(Tensor& x, const Tensor& y);
Tensor& operator/=(Tensor& x, const Tensor& y);
Tensor& operator+=(Tensor& x, Scalar y);
Tensor& operator-=(Tensor& x, Scalar y);
Tensor& operator*=(Tensor& x, Scalar y);
Tensor& operator/=(Tensor& x, Scalar y);

/// Functions that apply to each element. neg, abs and sign accept floating and integer dtypes; the other functions
/// accept only floating dtypes.
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
/// Limits x to [low, high]. An infinite limit leaves that side open, also for integers. The gradient is 1 inside the
/// interval and on its limits, and 0 outside and where x is NaN.
Tensor clamp(const Tensor& x, double low, double high);
/// Limit x only from below or only from above.
Tensor clamp_min(const Tensor& x, double low);
Tensor clamp_max(const Tensor& x, double high);
/// Returns condition ? x : y for each element. `condition` must be bool; all three operands broadcast.
Tensor where(const Tensor& condition, const Tensor& x, const Tensor& y);
Tensor where(const Tensor& condition, const Tensor& x, Scalar y);
Tensor where(const Tensor& condition, Scalar x, const Tensor& y);

/// Comparisons, logical_not and isfinite return bool tensors and have no gradient.
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

/// Activations accept only floating-point dtypes.
Tensor relu(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor tanh(const Tensor& x);
/// Returns x where x > 0, otherwise negative_slope * x.
Tensor leaky_relu(const Tensor& x, double negative_slope = 0.01);
/// Returns x where x > 0, otherwise weight * x. `weight` has one element, or one for each channel (axis 1), and the
/// dtype of x (He et al., "Delving deep into rectifiers", 2015).
Tensor prelu(const Tensor& x, const Tensor& weight);
/// Returns x * Phi(x), where Phi is the standard normal distribution function, computed with erf (Hendrycks and Gimpel
/// 2016).
Tensor gelu(const Tensor& x);
/// Returns x * sigmoid(x).
Tensor silu(const Tensor& x);
/// Returns x * tanh(softplus(x)) (Misra, "Mish", 2019).
Tensor mish(const Tensor& x);
/// Returns x where x > 0, otherwise alpha * (exp(x) - 1) (Clevert, Unterthiner and Hochreiter 2015).
Tensor elu(const Tensor& x, double alpha = 1);
/// Returns elu with constants that keep the mean of activations near 0 and their variance near 1 (Klambauer et al.,
/// "Self-normalizing neural networks", 2017).
Tensor selu(const Tensor& x);
/// Returns x / 6 + 1/2, limited to [0, 1].
Tensor hardsigmoid(const Tensor& x);
/// Returns x * hardsigmoid(x) (Howard et al., "Searching for MobileNetV3", 2019).
Tensor hardswish(const Tensor& x);
/// Returns log(1 + exp(beta * x)) / beta, or x where beta * x > threshold.
Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
/// Zeroes each element with probability p and scales the others by 1 / (1 - p). Returns x if `training` is false.
/// Throws Error unless 0 <= p <= 1. Uses default_generator() if `generator` is null.
Tensor dropout(const Tensor& x, double p = 0.5, bool training = true, Generator* generator = nullptr);
/// Zeroes each channel of x (N, C, D, H, W) or (C, D, H, W) with probability p and scales the others like dropout.
Tensor dropout3d(const Tensor& x, double p = 0.5, bool training = true, Generator* generator = nullptr);

}  // namespace voxgrad
