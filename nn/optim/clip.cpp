// Implements gradient norms and gradient clipping.
#include "nn/optim/clip.h"

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/halves.h"
#include "ops/elementwise.h"
#include "ops/optim.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad::optim {
namespace {

/// Returns the gradients that have elements. If `writes`, throws if a gradient is an expanded view, which cannot be
/// written in place.
Tensors gradients(const char* op, const Tensors& params, bool writes = true) {
  Tensors grads;
  for (size_t i = 0; i < params.size(); ++i) {
    check(params[i].defined(), op, "parameter ", i, " is undefined");
    const Tensor grad = params[i].grad();
    if (!grad.defined() || grad.numel() == 0) continue;
    for (int64_t axis = 0; axis < grad.dim(); ++axis)
      check(!writes || grad.strides()[axis] != 0 || grad.size(axis) == 1, op, "the gradient of parameter ", i,
            " is an expanded view: ", describe(grad));
    grads.push_back(grad);
  }
  return grads;
}

Tensor total_norm(const char* op, const Tensors& grads, double type) {
  check(type > 0, op, "norm_type must be positive, got ", type);
  if (grads.empty()) return zeros({});
  const TensorOptions common{widened(grads[0].dtype()), grads[0].device()};
  if (type == 2) return sqrt(sum_of_squares(grads)).to(common.dtype);
  Tensors parts;
  for (const Tensor& grad : grads) parts.push_back(norm(widened(grad), type).to(common.device, common.dtype));
  return norm(stack(parts), type);
}

}  // namespace

Tensor grad_norm(const Tensors& params, double norm_type) {
  NoGradGuard no_grad;
  return total_norm("grad_norm", gradients("grad_norm", params, false), norm_type);
}

Tensor clip_grad_norm_(const Tensors& params, double max_norm, const ClipOptions& options) {
  check(std::isfinite(max_norm) && max_norm >= 0, "clip_grad_norm_", "max_norm must be finite and at least 0, got ",
        max_norm);
  NoGradGuard no_grad;
  const Tensors grads = gradients("clip_grad_norm_", params);
  const Tensor total = total_norm("clip_grad_norm_", grads, options.norm_type);
  if (options.error_if_nonfinite)
    check(std::isfinite(total.item()), "clip_grad_norm_", "the norm of the gradients is ", total.item(),
          "; the gradients were not changed");
  scale_gradients(grads, clamp(max_norm / (total.to(f64) + 1e-6), 0, 1));
  return total;
}

void clip_grad_value_(const Tensors& params, double clip_value) {
  check(std::isfinite(clip_value) && clip_value >= 0, "clip_grad_value_",
        "clip_value must be finite and at least 0, got ", clip_value);
  NoGradGuard no_grad;
  for (const Tensor& grad : gradients("clip_grad_value_", params)) grad.copy_(clamp(grad, -clip_value, clip_value));
}

}  // namespace voxgrad::optim
