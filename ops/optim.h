// The steps of optimizers: in place, on lists of parameters with their gradients and their state. What a step does to
// one element stands in ops/detail/optim_step.h.
//
// All: the lists run in parallel, and one that the options do not use is empty. Gradients and state have their
// parameter's shape and device, gradients its dtype (a floating one), state too, but f32 for halves; these need not be
// the same for all parameters. Parameters are contiguous or channels_last, state lies as its parameter. Nothing is
// recorded by autograd. They throw Error, before anything is changed, for what does not fit.
#pragma once

#include <cstdint>
#include <span>
#include <variant>

namespace voxgrad {

class Tensor;

/// Options of a step; what each member means is PyTorch's definition.
struct SgdStep {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  int64_t step = 1;  ///< 1 for the first: the momentum buffer starts as the gradient
};
struct AdamStep {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< weight decay as in AdamW
  bool amsgrad = false, maximize = false;
  int64_t step = 1;  ///< 1 for the first
};
struct RmspropStep {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
};
struct AdagradStep {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, eps = 1e-10;
  bool maximize = false;
  int64_t step = 1;
};
struct LionStep {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool maximize = false;
};
/// average = decay * average + (1 - decay) * parameter; the parameter is only read.
struct EmaStep {
  double decay = 0.999;
};
/// Gradients take the parameters' place: *found_inf becomes 1 if an element divided by the step's scale is not finite.
/// With `write` the quotients replace the gradients.
struct UnscaleStep {
  int64_t* found_inf = nullptr;
  bool write = false;
};
/// Gradients take the parameters' place: they are multiplied by *factor, on their device.
struct ScaleStep {
  const double* factor = nullptr;
};
/// parameter = factor * gradient: copies of a list.
struct CopyStep {
  double factor = 1;
};
using AnyStep =
    std::variant<SgdStep, AdamStep, RmspropStep, AdagradStep, LionStep, EmaStep, UnscaleStep, ScaleStep, CopyStep>;

/// Gradient scaling (nn/optim/grad_scaler.h): tensors of one element on the parameters' device, or null. Only the
/// device looks at them.
struct StepScaling {
  const Tensor* scale = nullptr;      ///< f32: gradients are divided by it
  const Tensor* found_inf = nullptr;  ///< i64: where it is not 0, nothing is changed
  const Tensor* skipped = nullptr;    ///< i64: of the steps counted, so many were skipped
};

using TensorSpan = std::span<const Tensor>;

/// momentum_buffers: if step.momentum is not 0.
void sgd_step(TensorSpan params, TensorSpan grads, TensorSpan momentum_buffers, const SgdStep& step,
              const StepScaling& scaling = {});
/// max_exp_avg_sqs: if step.amsgrad.
void adam_step(TensorSpan params, TensorSpan grads, TensorSpan exp_avgs, TensorSpan exp_avg_sqs,
               TensorSpan max_exp_avg_sqs, const AdamStep& step, const StepScaling& scaling = {});
/// momentum_buffers: if step.momentum is not 0; grad_avgs: if step.centered.
void rmsprop_step(TensorSpan params, TensorSpan grads, TensorSpan square_avgs, TensorSpan momentum_buffers,
                  TensorSpan grad_avgs, const RmspropStep& step, const StepScaling& scaling = {});
void adagrad_step(TensorSpan params, TensorSpan grads, TensorSpan sums, const AdagradStep& step,
                  const StepScaling& scaling = {});
void lion_step(TensorSpan params, TensorSpan grads, TensorSpan exp_avgs, const LionStep& step,
               const StepScaling& scaling = {});
void ema_step(TensorSpan params, TensorSpan averages, const EmaStep& step);
/// Sets found_inf (i64, one element) to 1 if a quotient of `grads`, which have its device and any strides, and `scale`
/// (f32, one element) is not finite. With `write` the quotients replace the gradients.
void unscale_gradients(TensorSpan grads, const Tensor& found_inf, const Tensor& scale, bool write = true);
/// The sum of the squares of all elements of `grads`, floating and with any strides: f64 without axes, on the device of
/// the first one.
Tensor sum_of_squares(TensorSpan grads);
/// Multiplies `grads`, floating and with any strides, by `factor` (f64, one element), in place.
void scale_gradients(TensorSpan grads, const Tensor& factor);
/// targets = factor * sources, which have their shapes, dtypes and devices and any strides; targets are contiguous or
/// channels_last.
void scaled_copies(TensorSpan targets, TensorSpan sources, double factor);

}  // namespace voxgrad
