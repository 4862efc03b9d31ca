// A convolution, a normalization and an activation as one operation, in the order convolution, norm, activation or
// convolution, activation, norm. The result and all derivatives equal those of the separate functions, with fewer
// passes over memory. Where the operations are fused, only one intermediate result is saved for the backward pass.
// nn::Sequential uses these functions automatically.
#pragma once

#include "activation.h"
#include "conv.h"
#include "norm.h"

namespace voxgrad {

/// The operations after a convolution: a norm, an activation, or both.
struct NormActivation {
  NormArguments norm{};
  ActivationArguments activation{};
  bool activation_first = false;  ///< applies the activation before the norm
};

/// Applies the norm and the activation to x (N, C, spatial...). Group and instance norm, and batch norm in training,
/// use one kernel for the forward pass and one for the backward pass. Layer norm, and batch norm in evaluation, call
/// the separate functions. Throws the same errors as the separate functions.
Tensor norm_activation(const Tensor& x, const NormActivation& operations);

/// Applies norm_activation to the result of a convolution. `Options` selects the convolution: conv1d, conv2d and conv3d
/// for ConvOptions<1>, <2> and <3>, conv_transpose1d to conv_transpose3d for ConvTransposeOptions<1> to <3>. x, weight,
/// bias and the errors are those of that function.
template <class Options>
Tensor conv_norm_activation(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const NormActivation& operations);

}  // namespace voxgrad
