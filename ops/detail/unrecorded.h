// Functions that fused operators (ops/fused.h) are made of. Some return partly recorded results: a kernel computed
// several functions at once, but autograd has recorded only the first of them, and the caller must record the others.
// Until then the gradient of the tensor does not match its values, so that it must not leave ops/. Private to ops/.
#pragma once

#include "../activation.h"
#include "../conv.h"
#include "../norm.h"

namespace voxgrad {

/// Computes conv1d, conv2d or conv3d for `Options` = ConvOptions<N>, conv_transpose1d, conv_transpose2d or
/// conv_transpose3d for ConvTransposeOptions<N>. Fully recorded.
template <class Options>
Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options);
/// Computes conv() and, if `relu`, its ReLU in one kernel. Neither the bias nor the ReLU is recorded.
template <class Options>
Tensor unrecorded_conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options, bool relu);

/// Computes a group, instance or batch norm with activations around it and records all of them. `added`: the bias (C)
/// that x contains but that is not recorded, or undefined; it is recorded as well.
Tensor normalize_with_activations(const Tensor& x, const NormArguments& norm, const NormActivations& activations,
                                  const Tensor& added = {});

/// Computes an activation of x with differentiable operators.
Tensor activation(const ActivationArguments& a, const Tensor& x);
/// Returns the gradient in x of an activation from the gradient g of its result, with differentiable operators.
Tensor activation_gradient(const ActivationArguments& a, const Tensor& g, const Tensor& x);

}  // namespace voxgrad
