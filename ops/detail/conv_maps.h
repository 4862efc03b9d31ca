// The three maps of the convolution family on tensors (N, C, D, H, W): the convolution, the gradient of its input and
// the gradient of its weight. Each map is linear in both of its operands, and its gradients are the other two maps. The
// caller passes the size of the result. Elements outside of an operand count as zero. Private to ops/.
#pragma once

#include "../../core/autograd.h"
#include "../../core/communicator.h"
#include "kernels.h"
#include "volume.h"

namespace voxgrad {

/// Spatial size (kD, kH, kW) and memory format of a weight.
struct WeightForm {
  Triple size;
  MemoryFormat format;
};
inline WeightForm form_of(const Tensor& weight) { return {spatial_size(weight), weight.suggest_memory_format()}; }

/// Operations that a convolution kernel applies before it stores the result.
struct FusedEpilogue {
  bool relu = false;          ///< applies ReLU after the bias
  bool bias_recorded = true;  ///< records the bias as an input of the autograd node (ops/detail/unrecorded.h)
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
/// Returns the gradient of the bias (C) from the gradient (N, C, D, H, W) of the result.
Tensor sum_over_voxels(const Tensor& grad);

/// Saves t for the backward pass if `needed`.
inline Saved saved_if(bool needed, const Tensor& t) { return needed ? Saved(t) : Saved(); }

/// Computes convolve() of a volume that the ranks of `group` share. `x` and the result are this rank's slabs
/// (consecutive planes along D) of the operand and of the result. Throws Error unless a convolution divides the depth
/// of the volume by exactly the stride, or a transposed convolution multiplies the depth by exactly the stride
/// (ops/spatial.h).
Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     FusedEpilogue epilogue);

}  // namespace voxgrad
