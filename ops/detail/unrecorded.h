// Results of which autograd does not know all yet: kernels have computed several functions at once, and what is
// recorded is the first of them alone. Who calls these records the rest. Such a tensor never leaves ops/: its values
// are not what its gradient is of. Private to ops/.
#pragma once

#include "../activation.h"
#include "../conv.h"
#include "../norm.h"

namespace voxgrad {

/// The result of conv1d, conv2d or conv3d with its bias, and through a ReLU if `relu`; recorded without bias and ReLU.
template <int N>
Tensor unrecorded_conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions<N>& options,
                       bool relu);
/// Of conv_transpose1d, conv_transpose2d or conv_transpose3d.
template <int N>
Tensor unrecorded_conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const ConvTransposeOptions<N>& options, bool relu);

/// A norm of group, instance or batch, with activations around it. `added`: the bias over axis 1 in x that is not
/// recorded; may be undefined.
Tensor normalised(const Tensor& x, const NormArguments& norm, const NormActivations& activations,
                  const Tensor& added = {});

/// The function, and the gradient g behind it at x, in differentiable operators.
Tensor activation(const ActivationArguments& a, const Tensor& x);
Tensor activation_gradient(const ActivationArguments& a, const Tensor& g, const Tensor& x);

}  // namespace voxgrad
