// Limits on gradients before a step.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad::optim {

struct ClipOptions {
  double norm_type = 2;             ///< positive; infinity for the largest absolute value
  bool error_if_nonfinite = false;  ///< throw for a norm that is not finite; waits for the device
};

/// The norm of all gradients, taken together: a tensor without axes on the first gradient's device, f32 if that is of
/// halves; nothing waits for it. Parameters without a gradient do not count; if none has one, the norm is 0. Throws
/// unless norm_type is positive and all of `params` are defined.
Tensor grad_norm(const Tensors& params, double norm_type = 2);

/// Scales all gradients in place so that their norm, taken together, is at most max_norm: by
/// max_norm / (norm + 1e-6) where that is below 1, as in PyTorch. Returns grad_norm() before that. Throws, before
/// anything is changed, as grad_norm() does, and unless max_norm >= 0 is finite and no gradient is an expanded view.
Tensor clip_grad_norm_(const Tensors& params, double max_norm, const ClipOptions& options = {});

/// Limits every element of every gradient to [-clip_value, clip_value], in place. Throws as clip_grad_norm_ does.
void clip_grad_value_(const Tensors& params, double clip_value);

}  // namespace voxgrad::optim
