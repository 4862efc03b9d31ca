// Building blocks of the fused operators (ops/fused.h). Some of these functions return partly recorded results: a
// kernel computes several operations at once, but autograd records only the first operation. The caller must record the
// other operations before it returns the tensor to users. Otherwise, the gradient would not match the values. Private
// to ops/.
#pragma once

#include <functional>

#include "../activation.h"
#include "../conv.h"
#include "../norm.h"
#include "conv_maps.h"

namespace voxgrad {

/// Computes conv1d, conv2d or conv3d if `Options` is ConvOptions<N>, and conv_transpose1d, conv_transpose2d or
/// conv_transpose3d if `Options` is ConvTransposeOptions<N>, with an epilogue. Autograd does not record the ReLU, and
/// records the bias only if epilogue.bias_recorded is true. With epilogue.appended, returns the concatenation of the
/// result and this tensor along the channels; if possible, the kernel stores its result in the concatenation.
template <class Options>
Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
            const FusedEpilogue& epilogue = {});

/// Records that the bias `added` (C) was already added to the elements of x. Returns x if `added` needs no gradient.
Tensor record_added(const Tensor& x, const Tensor& added);
/// Returns the gradients of the inputs that require grad, where `grad_output` is the gradient of function(inputs). The
/// gradients are differentiable. Other elements of the result are undefined.
Tensors recorded_gradients(const std::function<Tensor(const Tensors&)>& function, const Tensors& inputs,
                           const Tensor& grad_output);

/// Computes a group, instance or batch norm with activations before and after the norm, and records all operations.
/// `added` is undefined or a bias (C) whose addition to x was not recorded; this function records the addition, too.
/// `residual` is undefined or a tensor that is added to the result of the norm before the second activation.
/// With `overwrite`, the result may replace x in memory if no graph is recorded; the caller ensures that nothing else
/// uses x.
Tensor normalize_with_activations(const Tensor& x, const NormArguments& norm, const NormActivations& activations,
                                  const Tensor& added = {}, bool overwrite = false, const Tensor& residual = {});

/// Computes an activation of x with differentiable operators.
Tensor activation(const ActivationArguments& a, const Tensor& x);
/// Computes the gradient of x, the input of an activation, from the gradient g of its result, with differentiable
/// operators.
Tensor activation_gradient(const ActivationArguments& a, const Tensor& g, const Tensor& x);

}  // namespace voxgrad
