#include "nn/optim/rmsprop.h"

namespace voxgrad::optim {

void RmspropOptions::validate() const {
  check_not_negative(kName, {{"lr", lr}, {"eps", eps}, {"weight_decay", weight_decay}, {"momentum", momentum}});
  check(alpha >= 0 && alpha <= 1, kName, "alpha must lie in [0, 1], got ", alpha);
}

nn::Fields RmspropOptions::fields() {
  return {{"lr", &lr},
          {"alpha", &alpha},
          {"eps", &eps},
          {"weight_decay", &weight_decay},
          {"momentum", &momentum},
          {"centered", &centered},
          {"maximize", &maximize}};
}

void RMSprop::update(size_t group, const Update& u) {
  const RmspropOptions& o = options(group);
  rmsprop_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2],
               {.lr = o.lr,
                .alpha = o.alpha,
                .eps = o.eps,
                .weight_decay = o.weight_decay,
                .momentum = o.momentum,
                .centered = o.centered,
                .maximize = o.maximize},
               u.scaling());
}

}  // namespace voxgrad::optim
