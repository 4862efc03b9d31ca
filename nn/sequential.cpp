#include "nn/sequential.h"

#include <typeinfo>

#include "nn/conv_layers.h"
#include "nn/layers.h"

namespace voxgrad::nn {
namespace {

/// `module` as a T; null if it is anything else, also if it is of a class derived from T, whose forward() may differ.
template <class T>
const T* exactly(const Module* module) {
  return module && typeid(*module) == typeid(T) ? static_cast<const T*>(module) : nullptr;
}

/// A convolution with what follows it; undefined if `module` is not one of Convs.
template <class... Convs>
Tensor convolve_with_relu(const Module* module, const Tensor& x, const GroupNorm* norm) {
  Tensor result;
  const auto run = [&](const auto* conv) {
    if (conv) result = conv->forward_relu(x, norm);
  };
  (run(exactly<Convs>(module)), ...);
  return result;
}

/// Runs modules[i] with those behind it that it can be taken together with, and moves i behind them; undefined, and i
/// as it was, if there are none.
template <class Modules>
Tensor run_fused(const Modules& module, size_t& i, const Tensor& x) {
  if (exactly<ReLU>(module(i))) {
    const auto* norm = exactly<GroupNorm>(module(i + 1));
    if (!norm || !x.defined() || x.dim() < 2 || x.size(1) != norm->num_channels()) return {};
    i += 2;
    return relu_group_norm(x, norm->arguments());
  }
  if (!exactly<ReLU>(module(i + 1))) return {};
  const auto* norm = exactly<GroupNorm>(module(i + 2));
  const Tensor result =
      convolve_with_relu<Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d>(module(i), x, norm);
  if (result.defined()) i += norm ? 3 : 2;
  return result;
}

}  // namespace

Module& Sequential::operator[](size_t index) const {
  check(index < size(), "Sequential", "there is no module ", index, " among ", size());
  return *steps_[index].module;
}

Tensor Sequential::forward(const Tensor& x) const {
  const auto module = [&](size_t i) { return i < size() ? steps_[i].module.get() : nullptr; };
  Tensor result = x;
  for (size_t i = 0; i < size();) {
    if (const Tensor fused = run_fused(module, i, result); fused.defined()) {
      result = fused;
    } else {
      result = steps_[i].forward(*steps_[i].module, result);
      ++i;
    }
  }
  return result;
}

Members Sequential::members() {
  Members list;
  for (const Step& step : steps_) list.push_back({std::to_string(list.size()), {}, false, step.module.get()});
  return list;
}

}  // namespace voxgrad::nn
