// Building blocks of convolutions and of the fused operators (ops/fused.h). Some of these functions return partly
// recorded results: a kernel computes several operations at once, but autograd records only the first operation. The
// caller must record the other operations before it returns the tensor to users. Otherwise, the gradient would not
// match the values. Private to ops/.
#pragma once

#include <functional>

#include "../activation.h"
#include "../conv.h"
#include "../norm.h"
#include "common.h"

namespace voxgrad {

// ---- The three maps of the convolution family on tensors (N, C, D, H, W): the convolution, the gradient of its input
// and the gradient of its weight. Each map is linear in both of its operands, and its gradients are the other two maps.
// The caller passes the size of the result. Elements outside of an operand count as zero.

/// Spatial size (kD, kH, kW) and memory format of a weight.
struct WeightForm {
  Triple size;
  MemoryFormat format;
};
inline WeightForm form_of(const Tensor& weight) { return {spatial_size(weight), weight.suggest_memory_format()}; }

/// Operations that a convolution kernel applies before it stores the result.
struct FusedEpilogue {
  bool relu = false;          ///< applies ReLU after the bias
  bool bias_recorded = true;  ///< records the bias as an input of the autograd node
  Tensor appended{};  ///< undefined, or a tensor whose channels follow those of the convolution in the result. It
                      ///< must fit the result (N, spatial size, dtype and device)
};

/// Returns the convolution (N, Cout, size...) of `in` with the weight (Cout, Cin / groups, kD, kH, kW), plus the bias.
/// With `transposed`, returns the transposed convolution (N, Cin, size...) of `in` (N, Cout, D, H, W), plus the bias.
/// Without a bias, the transposed convolution is the gradient of the input of a convolution, where `in` is the gradient
/// of the result.
Tensor convolve(bool transposed, const Tensor& in, const Tensor& weight, const Tensor& bias, const Triple& size,
                const ConvGeometry& geometry, FusedEpilogue epilogue = {});
/// Returns the gradient of the weight of convolve, where `out_grad` is the gradient of its result. The spatial size of
/// the result is form.size.
Tensor convolve_weight(bool transposed, const Tensor& in, const Tensor& out_grad, const WeightForm& form,
                       const ConvGeometry& geometry);

/// Saves t for the backward pass if `needed`.
inline Saved saved_if(bool needed, const Tensor& t) { return needed ? Saved(t) : Saved(); }

/// Computes convolve() of a volume that the ranks of `group` share. `x` and the result are this rank's slabs
/// (consecutive planes along D) of the operand and of the result. Throws Error unless a convolution divides the depth
/// of the volume by exactly the stride, or a transposed convolution multiplies the depth by exactly the stride
/// (ops/spatial.h).
Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     FusedEpilogue epilogue);

// ---- operators with unrecorded operations

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
