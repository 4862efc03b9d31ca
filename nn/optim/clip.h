// Gradient norms and gradient clipping.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad::optim {

/// Options of clip_grad_norm_.
struct ClipOptions {
  double norm_type = 2;             ///< exponent of the norm, positive; infinity: the maximum absolute value
  bool error_if_nonfinite = false;  ///< throws Error if the norm is not finite; waits for the device
};

/// Returns the norm of the concatenation of all gradients, a scalar on the device of the first gradient. Its dtype is
/// that of the first gradient, or f32 for bf16 and f16. Parameters without a gradient are skipped; without any gradient
/// the norm is 0. Does not wait for the device. Throws Error if norm_type is not positive or if a parameter is
/// undefined.
Tensor grad_norm(const Tensors& params, double norm_type = 2);

/// Scales all gradients in place so that their total norm is at most max_norm. As in PyTorch, the factor is min(1,
/// max_norm / (norm + 1e-6)). Returns grad_norm() of the original gradients. Throws the errors of grad_norm(), and
/// throws Error if max_norm is negative or not finite or if a gradient is an expanded view. Gradients are unchanged
/// after an error.
Tensor clip_grad_norm_(const Tensors& params, double max_norm, const ClipOptions& options = {});

/// Clamps all elements of all gradients to [-clip_value, clip_value], in place. Throws Error if clip_value is negative
/// or not finite, if a parameter is undefined, or if a gradient is an expanded view.
void clip_grad_value_(const Tensors& params, double clip_value);

}  // namespace voxgrad::optim
