// Functions that compute a convolution, a normalization and an activation as one operation. The activation follows
// either the norm or the convolution. The result and all derivatives equal those of the separate functions up to
// rounding. Where the operations are fused, they need fewer passes over memory, and only one intermediate result is
// saved for the backward pass. nn::Sequential uses these functions automatically.
#pragma once

#include "activation.h"
#include "conv.h"
#include "norm.h"

namespace voxgrad {

/// The operations after a convolution: a norm, the addition of a residual, and an activation, each of which may be
/// omitted.
struct NormActivation {
  NormArguments norm{};
  ActivationArguments activation{};
  bool activation_first = false;  ///< applies the activation before the norm
  Tensor appended{};              ///< undefined, or a tensor whose channels follow those of the result: the function
                                  ///< returns cat({result, appended}, channel axis)
  Tensor residual{};              ///< is added before the activation; undefined, or of the shape of the result.
                                  ///< Requires activation_first = false
};

/// Applies the norm and the activation to x (N, C, spatial...). Group and instance norm, and batch norm in training,
/// use one kernel for the forward pass and one for the backward pass. Batch norm in evaluation calls the separate
/// functions. Throws the same errors as the separate functions.
Tensor norm_activation(const Tensor& x, const NormActivation& operations);

/// Computes conv3d(gelu(conv3d(x, weight1, bias1)), weight2, bias2), the inverted bottleneck of MedNeXt and ConvNeXt.
/// The shapes are (N, C, D, H, W) for x, (E, C, 1, 1, 1) for weight1 and (O, E, 1, 1, 1) for weight2; bias1 (E) and
/// bias2 (O) may be undefined. The backward pass needs x and the result of the first convolution. It computes GELU
/// again together with the gradient of GELU and the gradient of bias1. If x has no batch axis or ranks share the volume
/// (ops/spatial.h), the result is that of the separate functions, which also keep the result of GELU. Throws Error like
/// conv3d, and if a weight has another kernel size.
Tensor inverted_bottleneck(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2,
                           const Tensor& bias2);

/// Applies norm_activation to the result of a convolution. ConvOptions<N> selects conv1d, conv2d or conv3d, and
/// ConvTransposeOptions<N> selects conv_transpose1d, conv_transpose2d or conv_transpose3d. The selected function
/// describes x, weight, bias and the errors.
template <class Options>
Tensor conv_norm_activation(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const NormActivation& operations);

}  // namespace voxgrad
