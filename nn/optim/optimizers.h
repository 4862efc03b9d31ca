// The optimizers SGD, Adam, AdamW, RMSprop, Adagrad and Lion, and their options.
#pragma once

#include <cmath>

#include "optimizer.h"

namespace voxgrad::optim {

/// Options of SGD.
struct SgdOptions {
  double lr = 1e-3;         ///< learning rate
  double momentum = 0;      ///< factor by which each step multiplies the momentum buffer; 0: no momentum
  double dampening = 0;     ///< the momentum buffer accumulates (1 - dampening) * gradient
  double weight_decay = 0;  ///< weight_decay * parameter is added to the gradient
  bool nesterov = false;    ///< uses Nesterov momentum; requires momentum > 0 and dampening = 0
  bool maximize = false;    ///< maximizes the loss instead of minimizing it

  static constexpr const char* kName = "SGD";
  void validate() const {
    check_options(kName, {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}});
    check(std::isfinite(dampening), kName, "dampening must be finite, got ", dampening);
    check(!nesterov || (momentum > 0 && dampening == 0), kName,
          "nesterov needs momentum and no dampening, got momentum ", momentum, " and dampening ", dampening);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, momentum, dampening, weight_decay, nesterov, maximize",  //
                            lr, momentum, dampening, weight_decay, nesterov, maximize);
  }
  BufferSpecs buffers() const { return {{"momentum_buffer", momentum != 0}}; }
  void step(const Update& u) const {
    u.run(SgdStep{lr, momentum, dampening, weight_decay, nesterov, maximize, u.step});
  }
};
/// Stochastic gradient descent, optionally with momentum (Sutskever et al., "On the importance of initialization and
/// momentum in deep learning", ICML 2013), in the form that PyTorch uses.
using SGD = OptimizerOf<SgdOptions>;

/// Options of Adam and AdamW. If `decoupled` is true, as in AdamW, weight decay multiplies the parameter by 1 - lr *
/// weight_decay. Otherwise, weight_decay * parameter is added to the gradient.
template <bool decoupled>
struct AdamOptionsOf {
  double lr = 1e-3;                            ///< learning rate
  std::array<double, 2> betas{0.9, 0.999};     ///< decay of the averages of the gradient and of its square
  double eps = 1e-8;                           ///< added to the square root of the average squared gradient
  double weight_decay = decoupled ? 1e-2 : 0;  ///< strength of the weight decay
  bool amsgrad = false;                        ///< uses the largest average squared gradient of all steps so far
  bool maximize = false;                       ///< maximizes the loss instead of minimizing it

  static constexpr const char* kName = decoupled ? "AdamW" : "Adam";
  void validate() const {
    check_options(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}});
    check_betas(kName, betas);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, beta1, beta2, eps, weight_decay, amsgrad, maximize",  //
                            lr, betas[0], betas[1], eps, weight_decay, amsgrad, maximize);
  }
  BufferSpecs buffers() const { return {{"exp_avg", true}, {"exp_avg_sq", true}, {"max_exp_avg_sq", amsgrad}}; }
  void step(const Update& u) const {
    u.run(AdamStep{lr, betas[0], betas[1], eps, weight_decay, decoupled, amsgrad, maximize, u.step});
  }
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;
/// Adam (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; amsgrad: Reddi et al., "On the
/// convergence of Adam and beyond", ICLR 2018).
using Adam = OptimizerOf<AdamOptions>;
/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019).
using AdamW = OptimizerOf<AdamWOptions>;

/// Options of RMSprop.
struct RmspropOptions {
  double lr = 1e-2;         ///< learning rate
  double alpha = 0.99;      ///< decay of the average squared gradient
  double eps = 1e-8;        ///< added to the number by which the gradient is divided
  double weight_decay = 0;  ///< weight_decay * parameter is added to the gradient
  double momentum = 0;      ///< factor by which each step multiplies the momentum buffer; 0: no momentum
  bool centered = false;    ///< divides by the standard deviation of the gradient instead of its root mean square
  bool maximize = false;    ///< maximizes the loss instead of minimizing it

  static constexpr const char* kName = "RMSprop";
  void validate() const {
    check_options(
        kName,
        {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}, {"momentum", momentum}, {"alpha", alpha, 0, 1}});
  }
  nn::Fields fields() {
    return nn::named_fields("lr, alpha, eps, weight_decay, momentum, centered, maximize",  //
                            lr, alpha, eps, weight_decay, momentum, centered, maximize);
  }
  BufferSpecs buffers() const {
    return {{"square_avg", true}, {"momentum_buffer", momentum != 0}, {"grad_avg", centered}};
  }
  void step(const Update& u) const { u.run(RmspropStep{lr, alpha, eps, weight_decay, momentum, centered, maximize}); }
};
/// RMSprop (Hinton, "Neural networks for machine learning", lecture 6e, 2012; centered: Graves, "Generating sequences
/// with recurrent neural networks", arXiv:1308.0850).
using RMSprop = OptimizerOf<RmspropOptions>;

/// Options of Adagrad.
struct AdagradOptions {
  double lr = 1e-2;                      ///< learning rate of the first step
  double lr_decay = 0;                   ///< the learning rate of step n is lr / (1 + (n - 1) * lr_decay)
  double weight_decay = 0;               ///< weight_decay * parameter is added to the gradient
  double initial_accumulator_value = 0;  ///< initial value of the sum of squared gradients
  double eps = 1e-10;                    ///< added to the square root of the sum of squared gradients
  bool maximize = false;                 ///< maximizes the loss instead of minimizing it

  static constexpr const char* kName = "Adagrad";
  void validate() const {
    check_options(kName, {{"lr", lr},
                          {"lr_decay", lr_decay},
                          {"weight_decay", weight_decay},
                          {"initial_accumulator_value", initial_accumulator_value},
                          {"eps", eps}});
  }
  nn::Fields fields() {
    return nn::named_fields("lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize",  //
                            lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize);
  }
  BufferSpecs buffers() const { return {{.name = "sum", .used = true, .initial = initial_accumulator_value}}; }
  void step(const Update& u) const { u.run(AdagradStep{lr, lr_decay, weight_decay, eps, maximize, u.step}); }
};
/// Adagrad (Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
/// JMLR 2011).
using Adagrad = OptimizerOf<AdagradOptions>;

/// Options of Lion.
struct LionOptions {
  double lr = 1e-4;                        ///< learning rate
  std::array<double, 2> betas{0.9, 0.99};  ///< weight of the average gradient in a step, and decay of the average
  double weight_decay = 0;                 ///< decoupled: multiplies the parameter by 1 - lr * weight_decay
  bool maximize = false;                   ///< maximizes the loss instead of minimizing it

  static constexpr const char* kName = "Lion";
  void validate() const {
    check_options(kName, {{"lr", lr}, {"weight_decay", weight_decay}});
    check_betas(kName, betas);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, beta1, beta2, weight_decay, maximize", lr, betas[0], betas[1], weight_decay, maximize);
  }
  BufferSpecs buffers() const { return {{"exp_avg", true}}; }
  void step(const Update& u) const { u.run(LionStep{lr, betas[0], betas[1], weight_decay, maximize}); }
};
/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023). A step is the sign of an average
/// of gradients, times lr. Compared to AdamW, the authors recommend a learning rate that is 3 to 10 times smaller, and
/// a weight decay that is larger by the same factor.
using Lion = OptimizerOf<LionOptions>;

}  // namespace voxgrad::optim
