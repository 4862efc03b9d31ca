#include "nn/optim/optimizers.h"

#include <cmath>

namespace voxgrad::optim {
namespace {

/// Throws unless both lie in [0, 1).
void check_betas(const char* optimizer, const std::array<double, 2>& betas) {
  for (const double beta : betas)
    check(beta >= 0 && beta < 1, optimizer, "betas must lie in [0, 1), got ", betas[0], " and ", betas[1]);
}

}  // namespace

void SgdOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}});
  check(std::isfinite(dampening), kName, "dampening must be finite, got ", dampening);
  check(!nesterov || (momentum > 0 && dampening == 0), kName, "nesterov needs momentum and no dampening, got momentum ",
        momentum, " and dampening ", dampening);
}
nn::Fields SgdOptions::fields() {
  return nn::named_fields("lr, momentum, dampening, weight_decay, nesterov, maximize",  //
                          lr, momentum, dampening, weight_decay, nesterov, maximize);
}
void SgdOptions::step(const Update& u) const {
  sgd_step(u.params, u.grads, u.buffers[0], {lr, momentum, dampening, weight_decay, nesterov, maximize, u.step},
           u.scaling());
}

template <bool decoupled>
void AdamOptionsOf<decoupled>::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}});
  check_betas(kName, betas);
}
template <bool decoupled>
nn::Fields AdamOptionsOf<decoupled>::fields() {
  return nn::named_fields("lr, beta1, beta2, eps, weight_decay, amsgrad, maximize",  //
                          lr, betas[0], betas[1], eps, weight_decay, amsgrad, maximize);
}
template <bool decoupled>
void AdamOptionsOf<decoupled>::step(const Update& u) const {
  adam_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2],
            {lr, betas[0], betas[1], eps, weight_decay, decoupled, amsgrad, maximize, u.step}, u.scaling());
}
template struct AdamOptionsOf<false>;
template struct AdamOptionsOf<true>;

void RmspropOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}, {"momentum", momentum}});
  check(alpha >= 0 && alpha <= 1, kName, "alpha must lie in [0, 1], got ", alpha);
}
nn::Fields RmspropOptions::fields() {
  return nn::named_fields("lr, alpha, eps, weight_decay, momentum, centered, maximize",  //
                          lr, alpha, eps, weight_decay, momentum, centered, maximize);
}
void RmspropOptions::step(const Update& u) const {
  rmsprop_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2],
               {lr, alpha, eps, weight_decay, momentum, centered, maximize}, u.scaling());
}

void AdagradOptions::validate() const {
  check_not_negative(kName, {{"lr", lr},
                             {"lr_decay", lr_decay},
                             {"weight_decay", weight_decay},
                             {"initial_accumulator_value", initial_accumulator_value},
                             {"eps", eps}});
}
nn::Fields AdagradOptions::fields() {
  return nn::named_fields("lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize",  //
                          lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize);
}
void AdagradOptions::step(const Update& u) const {
  adagrad_step(u.params, u.grads, u.buffers[0], {lr, lr_decay, weight_decay, eps, maximize, u.step}, u.scaling());
}

void LionOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"weight_decay", weight_decay}});
  check_betas(kName, betas);
}
nn::Fields LionOptions::fields() {
  return nn::named_fields("lr, beta1, beta2, weight_decay, maximize", lr, betas[0], betas[1], weight_decay, maximize);
}
void LionOptions::step(const Update& u) const {
  lion_step(u.params, u.grads, u.buffers[0], {lr, betas[0], betas[1], weight_decay, maximize}, u.scaling());
}

}  // namespace voxgrad::optim
