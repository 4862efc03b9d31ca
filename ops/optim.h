// Optimizer steps on lists of parameters with their gradients and state, in place. ops/detail/optim_step.h contains the
// update of one element. nn/optim/ contains the optimizers that users construct.
//
// The following holds for all steps. Entry i of each list belongs to parameter i; a list that the options do not use is
// empty. A gradient has the shape, device and floating-point dtype of its parameter. The state has the same shape,
// device and dtype, except that the state of parameters in bf16 and f16 is f32. Dtype and device may differ between
// parameters. Parameters are contiguous or channels-last, and their state has the same memory format. Autograd records
// nothing. If an argument is invalid, the functions throw Error before they modify any tensor.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <variant>

namespace voxgrad {

class Tensor;

// Options of the steps, with the names and definitions of PyTorch. `step` is the number of the step, counted from 1.

/// Stochastic gradient descent. In step 1, the momentum buffer is initialized with the gradient.
struct SgdStep {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  int64_t step = 1;
};
/// Adam, or AdamW if `decoupled` is true.
struct AdamStep {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< decoupled weight decay, as in AdamW
  bool amsgrad = false, maximize = false;
  int64_t step = 1;
};
/// RMSprop; the centered form divides by an estimate of the variance instead of the mean square.
struct RmspropStep {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
};
/// Adagrad.
struct AdagradStep {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, eps = 1e-10;
  bool maximize = false;
  int64_t step = 1;
};
/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023), which is not part of PyTorch.
struct LionStep {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool maximize = false;
};
/// average = decay * average + (1 - decay) * parameter. Does not modify the parameter.
struct EmaStep {
  double decay = 0.999;
};
/// Divides gradients, which the caller passes as `params`, by StepScaling::scale. Sets *found_inf to 1 if a quotient is
/// not finite. Writes the quotients to the gradients if `write` is true.
struct UnscaleStep {
  int64_t* found_inf = nullptr;
  bool write = false;
};
/// Multiplies gradients, which the caller passes as `params`, by *factor, a value on the same device.
struct ScaleStep {
  const double* factor = nullptr;
};
/// Copies the gradients to the parameters: parameter = factor * gradient.
struct CopyStep {
  double factor = 1;
};
/// The options of any of these steps.
using AnyStep =
    std::variant<SgdStep, AdamStep, RmspropStep, AdagradStep, LionStep, EmaStep, UnscaleStep, ScaleStep, CopyStep>;

/// Arguments of a step for gradient scaling (nn/optim/grad_scaler.h). Each member is null or points to a tensor with
/// one element on the device of the parameters. Only kernels read the values, so that the host does not wait for the
/// GPU.
struct StepScaling {
  const Tensor* scale = nullptr;      ///< f32: the step divides the gradients by this value
  const Tensor* found_inf = nullptr;  ///< i64: the step changes nothing if this is not 0
  const Tensor* skipped = nullptr;  ///< i64: number of skipped steps, which is subtracted from the number of this step
};

/// A list of tensors that the caller keeps.
using TensorSpan = std::span<const Tensor>;

/// Performs one step of an optimizer. `states` are momentum_buffers (SgdStep), exp_avgs, exp_avg_sqs and
/// max_exp_avg_sqs (AdamStep), square_avgs, momentum_buffers and grad_avgs (RmspropStep), sums (AdagradStep), exp_avgs
/// (LionStep) or averages (EmaStep). Lists that the options do not use are empty; empty lists at the end may be
/// omitted. EmaStep reads no gradients, so that any list of matching tensors, such as the parameters, may be passed as
/// `grads`.
void optimizer_step(TensorSpan params, TensorSpan grads, std::initializer_list<TensorSpan> states, const AnyStep& step,
                    const StepScaling& scaling = {});
/// Divides `grads` by `scale` (f32, one element) and sets found_inf (i64, one element) to 1 if a quotient is not
/// finite. Writes the quotients to the gradients if `write` is true. All tensors must be on the same device; gradients
/// may have any strides.
void unscale_gradients(TensorSpan grads, const Tensor& found_inf, const Tensor& scale, bool write = true);
/// Returns the sum of the squares of all elements of `grads`, as an f64 tensor without axes on the device of the first
/// gradient. The gradients may have any floating-point dtypes, devices and strides.
Tensor sum_of_squares(TensorSpan grads);
/// Multiplies `grads`, which may have any floating-point dtypes, devices and strides, by `factor` (f64, one element) in
/// place.
void scale_gradients(TensorSpan grads, const Tensor& factor);
/// Computes targets = factor * sources. Each source has the shape, dtype and device of its target, and any strides. The
/// targets are contiguous or channels-last.
void scaled_copies(TensorSpan targets, TensorSpan sources, double factor);

}  // namespace voxgrad
