// Recomputation in place of memory.
#pragma once

#include "core/autograd.h"
#include "nn/module.h"

namespace voxgrad::nn {

/// layer(x), of which the backward pass computes again what it needs: see autograd::checkpoint. Between the two only x
/// is kept. `layer` must live until then.
inline Tensor checkpoint(const Layer& layer, const Tensor& x) {
  return autograd::checkpoint([&layer](const Tensors& t) { return Tensors{layer.forward(t[0])}; }, {x})[0];
}
/// The same for any function of one tensor.
inline Tensor checkpoint(std::function<Tensor(const Tensor&)> function, const Tensor& x) {
  check(static_cast<bool>(function), "checkpoint", "the function is empty");
  return autograd::checkpoint([f = std::move(function)](const Tensors& t) { return Tensors{f(t[0])}; }, {x})[0];
}

}  // namespace voxgrad::nn
