// Gradient checkpointing: recomputation in the backward pass, which saves memory.
#pragma once

#include <concepts>

#include "../core/autograd.h"
#include "module.h"

namespace voxgrad::nn {

/// Computes module.forward(x) and keeps only x for the backward pass, which runs forward() again, as
/// torch.utils.checkpoint does. See autograd::recompute for the conditions. `module` must outlive the backward pass.
template <std::derived_from<Module> M>
Tensor recompute(M& module, const Tensor& x) {
  return autograd::recompute([&module](const Tensors& t) { return Tensors{detail::forward(module, t[0])}; }, {x})[0];
}
/// Computes function(x) in the same way, for any function of one tensor. Throws Error if `function` is empty.
inline Tensor recompute(std::function<Tensor(const Tensor&)> function, const Tensor& x) {
  check(static_cast<bool>(function), "recompute", "the function is empty");
  return autograd::recompute([f = std::move(function)](const Tensors& t) { return Tensors{f(t[0])}; }, {x})[0];
}

}  // namespace voxgrad::nn
