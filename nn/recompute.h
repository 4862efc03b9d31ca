// Recomputation in place of memory.
#pragma once

#include <concepts>

#include "../core/autograd.h"
#include "module.h"

namespace voxgrad::nn {

/// module.forward(x), of which the backward pass computes again what it needs: see autograd::checkpoint. Between the
/// two only x is kept. `module` must live until then.
template <std::derived_from<Module> M>
Tensor checkpoint(M& module, const Tensor& x) {
  return autograd::checkpoint([&module](const Tensors& t) { return Tensors{detail::forward(module, t[0])}; }, {x})[0];
}
/// The same for any function of one tensor.
inline Tensor checkpoint(std::function<Tensor(const Tensor&)> function, const Tensor& x) {
  check(static_cast<bool>(function), "checkpoint", "the function is empty");
  return autograd::checkpoint([f = std::move(function)](const Tensors& t) { return Tensors{f(t[0])}; }, {x})[0];
}

}  // namespace voxgrad::nn
