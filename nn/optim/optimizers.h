// SGD, Adam, AdamW, RMSprop, Adagrad and Lion: the options of each, with what OptimizerOf asks of them.
#pragma once

#include <cmath>

#include "optimizer.h"

namespace voxgrad::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< needs momentum and no dampening
  bool maximize = false;

  static constexpr const char* kName = "SGD";
  void validate() const {
    check_not_negative(kName, {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}});
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
    sgd_step(u.params, u.grads, u.buffers[0], {lr, momentum, dampening, weight_decay, nesterov, maximize, u.step},
             u.scaling());
  }
};
/// With momentum as in Sutskever et al., "On the importance of initialization and momentum in deep learning",
/// ICML 2013, in PyTorch's form.
using SGD = OptimizerOf<SgdOptions>;

/// `decoupled`: weight decay shrinks the parameter itself; it is added to the gradient otherwise.
template <bool decoupled>
struct AdamOptionsOf {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = decoupled ? 1e-2 : 0;
  bool amsgrad = false;
  bool maximize = false;

  static constexpr const char* kName = decoupled ? "AdamW" : "Adam";
  void validate() const {
    check_not_negative(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}});
    check_betas(kName, betas);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, beta1, beta2, eps, weight_decay, amsgrad, maximize",  //
                            lr, betas[0], betas[1], eps, weight_decay, amsgrad, maximize);
  }
  BufferSpecs buffers() const {
    return {{"exp_avg", true},
            {.name = "exp_avg_sq", .used = true, .squares = true},
            {.name = "max_exp_avg_sq", .used = amsgrad, .squares = true}};
  }
  void step(const Update& u) const {
    adam_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2],
              {lr, betas[0], betas[1], eps, weight_decay, decoupled, amsgrad, maximize, u.step}, u.scaling());
  }
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;
/// Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; amsgrad: Reddi et al., "On the
/// convergence of Adam and beyond", ICLR 2018.
using Adam = OptimizerOf<AdamOptions>;
/// Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
using AdamW = OptimizerOf<AdamWOptions>;

struct RmspropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;

  static constexpr const char* kName = "RMSprop";
  void validate() const {
    check_not_negative(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}, {"momentum", momentum}});
    check(alpha >= 0 && alpha <= 1, kName, "alpha must lie in [0, 1], got ", alpha);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, alpha, eps, weight_decay, momentum, centered, maximize",  //
                            lr, alpha, eps, weight_decay, momentum, centered, maximize);
  }
  BufferSpecs buffers() const {
    return {{.name = "square_avg", .used = true, .squares = true},
            {"momentum_buffer", momentum != 0},
            {"grad_avg", centered}};
  }
  void step(const Update& u) const {
    rmsprop_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2],
                 {lr, alpha, eps, weight_decay, momentum, centered, maximize}, u.scaling());
  }
};
/// Hinton, "Neural networks for machine learning", lecture 6e, 2012; centered: Graves, "Generating sequences with
/// recurrent neural networks", arXiv:1308.0850.
using RMSprop = OptimizerOf<RmspropOptions>;

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;  ///< step n has the rate lr / (1 + (n - 1) * lr_decay)
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;

  static constexpr const char* kName = "Adagrad";
  void validate() const {
    check_not_negative(kName, {{"lr", lr},
                               {"lr_decay", lr_decay},
                               {"weight_decay", weight_decay},
                               {"initial_accumulator_value", initial_accumulator_value},
                               {"eps", eps}});
  }
  nn::Fields fields() {
    return nn::named_fields("lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize",  //
                            lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize);
  }
  BufferSpecs buffers() const {
    return {{.name = "sum", .used = true, .squares = true, .initial = initial_accumulator_value}};
  }
  void step(const Update& u) const {
    adagrad_step(u.params, u.grads, u.buffers[0], {lr, lr_decay, weight_decay, eps, maximize, u.step}, u.scaling());
  }
};
/// Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
using Adagrad = OptimizerOf<AdagradOptions>;

struct LionOptions {
  double lr = 1e-4;
  std::array<double, 2> betas{0.9, 0.99};
  double weight_decay = 0;  ///< shrinks the parameter itself
  bool maximize = false;

  static constexpr const char* kName = "Lion";
  void validate() const {
    check_not_negative(kName, {{"lr", lr}, {"weight_decay", weight_decay}});
    check_betas(kName, betas);
  }
  nn::Fields fields() {
    return nn::named_fields("lr, beta1, beta2, weight_decay, maximize", lr, betas[0], betas[1], weight_decay, maximize);
  }
  BufferSpecs buffers() const { return {{"exp_avg", true}}; }
  void step(const Update& u) const {
    lion_step(u.params, u.grads, u.buffers[0], {lr, betas[0], betas[1], weight_decay, maximize}, u.scaling());
  }
};
/// Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023: steps by the sign of an average.
/// Learning rates are 3 to 10 times smaller than AdamW's, weight decay as much larger.
using Lion = OptimizerOf<LionOptions>;

}  // namespace voxgrad::optim
