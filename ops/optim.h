// The steps of optimizers: in place, on lists of parameters with their gradients and their state. What a step does to
// one element stands in ops/optim_step.h.
//
// All three: the lists run in parallel, and one that the options do not use is empty. Gradients and state have their
// parameter's shape, dtype (a floating one) and device, which need not be the same for all parameters; parameters and
// state are contiguous. Nothing is recorded by autograd. They throw Error, before anything is changed, for what does
// not fit.
#pragma once

#include <cstdint>
#include <span>

namespace voxgrad {

class Tensor;

/// Options of a step; what each member means is PyTorch's definition.
struct SgdStep {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  bool first = false;  ///< the momentum buffer starts as the gradient
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

/// momentum_buffers: if step.momentum is not 0.
void sgd_step(std::span<const Tensor> params, std::span<const Tensor> grads, std::span<const Tensor> momentum_buffers,
              const SgdStep& step);
/// max_exp_avg_sqs: if step.amsgrad.
void adam_step(std::span<const Tensor> params, std::span<const Tensor> grads, std::span<const Tensor> exp_avgs,
               std::span<const Tensor> exp_avg_sqs, std::span<const Tensor> max_exp_avg_sqs, const AdamStep& step);
/// momentum_buffers: if step.momentum is not 0; grad_avgs: if step.centered.
void rmsprop_step(std::span<const Tensor> params, std::span<const Tensor> grads, std::span<const Tensor> square_avgs,
                  std::span<const Tensor> momentum_buffers, std::span<const Tensor> grad_avgs, const RmspropStep& step);

}  // namespace voxgrad
