#include "nn/optim/adagrad.h"

namespace voxgrad::optim {

void AdagradOptions::validate() const {
  check_not_negative(kName, {{"lr", lr},
                             {"lr_decay", lr_decay},
                             {"weight_decay", weight_decay},
                             {"initial_accumulator_value", initial_accumulator_value},
                             {"eps", eps}});
}

nn::Fields AdagradOptions::fields() {
  return {{"lr", &lr},
          {"lr_decay", &lr_decay},
          {"weight_decay", &weight_decay},
          {"initial_accumulator_value", &initial_accumulator_value},
          {"eps", &eps},
          {"maximize", &maximize}};
}

void Adagrad::update(size_t group, const Update& u) {
  const AdagradOptions& o = options(group);
  adagrad_step(u.params, u.grads, u.buffers[0],
               {.lr = o.lr,
                .lr_decay = o.lr_decay,
                .weight_decay = o.weight_decay,
                .eps = o.eps,
                .maximize = o.maximize,
                .step = u.step},
               u.scaling());
}

}  // namespace voxgrad::optim
