#include "nn/optim/lion.h"

namespace voxgrad::optim {

void LionOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"weight_decay", weight_decay}});
  check_betas(kName, betas);
}

nn::Fields LionOptions::fields() {
  return {{"lr", &lr},
          {"beta1", &betas[0]},
          {"beta2", &betas[1]},
          {"weight_decay", &weight_decay},
          {"maximize", &maximize}};
}

void Lion::update(size_t group, const Update& u) {
  const LionOptions& o = options(group);
  lion_step(
      u.params, u.grads, u.buffers[0],
      {.lr = o.lr, .beta1 = o.betas[0], .beta2 = o.betas[1], .weight_decay = o.weight_decay, .maximize = o.maximize},
      u.scaling());
}

}  // namespace voxgrad::optim
