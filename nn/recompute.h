// Recomputation in place of memory.
#pragma once

#include <concepts>

#include "../core/autograd.h"
#include "module.h"

namespace voxgrad::nn {

/// module.forward(x), of which the backward pass computes again what it needs: see autograd::recompute. Between the
/// two only x is kept. `module` must live until then.
template <std::derived_from<Module> M>
Tensor recompute(M& module, const Tensor& x) {
  return autograd::recompute([&module](const Tensors& t) { return Tensors{detail::forward(module, t[0])}; }, {x})[0];
}
/// The same for any function of one tensor.
inline Tensor recompute(std::function<Tensor(const Tensor&)> function, const Tensor& x) {
  check(static_cast<bool>(function), "recompute", "the function is empty");
  return autograd::recompute([f = std::move(function)](const Tensors& t) { return Tensors{f(t[0])}; }, {x})[0];
}

}  // namespace voxgrad::nn
