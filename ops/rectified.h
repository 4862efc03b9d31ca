// Results to which a kernel has applied bias and ReLU already, and how autograd sees them. Private to ops/.
//
// A *rectified* tensor holds the values y = relu(z + bias) and is recorded as z, the result of the operation alone. The
// two functions here record the rest. A rectified tensor never leaves ops/: its values are not what its gradient is of.
//
// So the chain of a convolution, a ReLU and a normalisation saves y and nothing else, and the gradient in z is made in
// the pass that differentiates what came last.
#pragma once

#include "ops/conv.h"

namespace voxgrad {

/// The rectified result of conv1d, conv2d or conv3d.
template <int N>
Tensor rectified_conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions<N>& options);
/// Of conv_transpose1d, conv_transpose2d or conv_transpose3d.
template <int N>
Tensor rectified_conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
                      const ConvTransposeOptions<N>& options);

/// y as an ordinary tensor. `bias` (over axis 1) may be undefined.
Tensor record_relu(const Tensor& rectified, const Tensor& bias);
/// group_norm(y).
Tensor record_relu_group_norm(const Tensor& rectified, const Tensor& relu_bias, int64_t num_groups,
                              const Tensor& weight, const Tensor& bias, double eps);

/// The gradients in z and, if wanted, in the bias, in differentiable operators.
Tensors relu_gradients(const Tensor& grad, const Tensor& y, bool bias_wanted);

}  // namespace voxgrad
