// The three maps of the convolution family on (N, C, D, H, W), for the public functions and for slabs of volumes that
// several ranks share. Each is linear in both of its arguments, and its gradients are the two others. They take their
// result's size as an argument: positions outside of an operand count as zero. Private to ops/.
#pragma once

#include "../../core/autograd.h"
#include "../../core/communicator.h"
#include "kernels.h"
#include "volume.h"

namespace voxgrad {

/// Of a weight that a gradient is wanted of.
struct WeightForm {
  Triple size;
  MemoryFormat format;
};
inline WeightForm form_of(const Tensor& weight) { return {spatial_size(weight), weight.suggest_memory_format()}; }

/// What a kernel does behind a convolution; whether the bias is recorded as an input (ops/detail/unrecorded.h).
struct Behind {
  bool relu = false, bias_recorded = true;
};

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& bias, const Triple& size,
                const ConvGeometry& geometry, Behind behind = {});
Tensor convolve_transposed(const Tensor& y, const Tensor& weight, const Tensor& bias, const Triple& size,
                           const ConvGeometry& geometry, Behind behind = {});
/// The weight (y's channels, x's channels / groups, form.size...) for which <convolve(x, weight), y> grows fastest.
Tensor convolve_weight(const Tensor& x, const Tensor& y, const WeightForm& form, const ConvGeometry& geometry);
/// The gradient of a bias.
Tensor sum_over_voxels(const Tensor& grad);

inline Saved saved_if(bool needed, const Tensor& t) { return needed ? Saved(t) : Saved(); }

/// convolve, or convolve_transposed, of a volume of which `x` is this rank's slab, and the result its slab of the
/// result. Throws Error if the depths do not fit (ops/spatial.h).
Tensor convolve_slab(const char* op, distributed::Communicator& group, bool transposed, const Tensor& x,
                     const Tensor& weight, const Tensor& bias, const Triple& size, const ConvGeometry& geometry,
                     Behind behind);

}  // namespace voxgrad
