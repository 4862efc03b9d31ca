#include "nn/optim/adam.h"

namespace voxgrad::optim {
namespace {

template <class Options>
void validate_options(const Options& o) {
  check_not_negative(Options::kName, {{"lr", o.lr}, {"eps", o.eps}, {"weight_decay", o.weight_decay}});
  check_betas(Options::kName, o.betas);
}

template <class Options>
nn::Fields fields_of(Options& o) {
  return {{"lr", &o.lr},
          {"beta1", &o.betas[0]},
          {"beta2", &o.betas[1]},
          {"eps", &o.eps},
          {"weight_decay", &o.weight_decay},
          {"amsgrad", &o.amsgrad},
          {"maximize", &o.maximize}};
}

template <class Options>
AdamStep step_of(const Options& o, bool decoupled, int64_t step) {
  return {.lr = o.lr,
          .beta1 = o.betas[0],
          .beta2 = o.betas[1],
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .decoupled = decoupled,
          .amsgrad = o.amsgrad,
          .maximize = o.maximize,
          .step = step};
}

}  // namespace

void AdamOptions::validate() const { validate_options(*this); }
void AdamWOptions::validate() const { validate_options(*this); }
nn::Fields AdamOptions::fields() { return fields_of(*this); }
nn::Fields AdamWOptions::fields() { return fields_of(*this); }

void Adam::update(size_t group, const Update& u) {
  adam_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2], step_of(options(group), false, u.step),
            u.scaling());
}

void AdamW::update(size_t group, const Update& u) {
  adam_step(u.params, u.grads, u.buffers[0], u.buffers[1], u.buffers[2], step_of(options(group), true, u.step),
            u.scaling());
}

}  // namespace voxgrad::optim
