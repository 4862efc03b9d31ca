// A convolution, a normalisation and an activation as one operation, in the orders convolution, norm, activation and
// convolution, activation, norm: the results and gradients of the chain of functions, of any order, in fewer passes
// over memory. What is kept for the backward pass is the convolution's result alone. nn::Sequential uses this by
// itself.
#pragma once

#include "activation.h"
#include "conv.h"
#include "norm.h"

namespace voxgrad {

/// What follows a convolution: a norm, an activation, or both.
struct NormActivation {
  NormArguments norm{};
  ActivationArguments activation{};
  bool activation_first = false;  ///< activation, then norm
};

/// norm and activation of x: one kernel forward and one backward for group, instance and, in training, batch norm; the
/// functions one after the other for layer norm and batch norm in evaluation. Throws what the
/// functions by themselves throw.
Tensor norm_activation(const Tensor& x, const NormActivation& what);

/// The same of a convolution's result. `Options` is ConvOptions<N> (conv1d, conv2d, conv3d) or ConvTransposeOptions<N>
/// (conv_transpose1d, ...), for N = 1, 2 and 3; the other arguments and the errors are those of the functions.
template <class Options>
Tensor conv_norm_activation(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const NormActivation& what);

}  // namespace voxgrad
