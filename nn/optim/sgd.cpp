#include "nn/optim/sgd.h"

#include <cmath>

namespace voxgrad::optim {

void SgdOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"momentum", momentum}, {"weight_decay", weight_decay}});
  check(std::isfinite(dampening), kName, "dampening must be finite, got ", dampening);
  check(!nesterov || (momentum > 0 && dampening == 0), kName, "nesterov needs momentum and no dampening, got momentum ",
        momentum, " and dampening ", dampening);
}

nn::Fields SgdOptions::fields() {
  return {{"lr", &lr},
          {"momentum", &momentum},
          {"dampening", &dampening},
          {"weight_decay", &weight_decay},
          {"nesterov", &nesterov},
          {"maximize", &maximize}};
}

void SGD::update(size_t group, const Update& u) {
  const SgdOptions& o = options(group);
  sgd_step(u.params, u.grads, u.buffers[0],
           {.lr = o.lr,
            .momentum = o.momentum,
            .dampening = o.dampening,
            .weight_decay = o.weight_decay,
            .nesterov = o.nesterov,
            .maximize = o.maximize,
            .step = u.step},
           u.scaling());
}

}  // namespace voxgrad::optim
