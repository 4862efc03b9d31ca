#include "nn/sequential.h"

#include <typeinfo>

#include "nn/conv_layers.h"
#include "nn/layers.h"
#include "ops/fused.h"

namespace voxgrad::nn {
namespace {

/// `module` as a T; null if it is anything else, also if it is of a class derived from T, whose forward() may differ.
template <class T>
const T* exactly(const Module* module) {
  return module && typeid(*module) == typeid(T) ? static_cast<const T*>(module) : nullptr;
}

/// A norm, and the numbers of channels and axes that it takes; 0 for any.
struct Norm {
  NormArguments arguments{};
  int64_t channels = 0, axes = 0;

  bool takes(int64_t x_channels, int64_t x_axes) const {
    return arguments.kind != NormKind::none && (channels == 0 || channels == x_channels) &&
           (axes == 0 || axes == x_axes);
  }
};
Norm norm_of(const Module* module) {
  if (const auto* norm = exactly<GroupNorm>(module)) return {norm->arguments(), norm->num_channels()};
  if (const auto* norm = exactly<InstanceNorm3d>(module)) return {norm->arguments(), norm->num_features(), 5};
  if (const auto* norm = exactly<BatchNorm1d>(module)) return {norm->arguments(), norm->num_features(), 3};
  if (const auto* norm = exactly<BatchNorm2d>(module)) return {norm->arguments(), norm->num_features(), 4};
  if (const auto* norm = exactly<BatchNorm3d>(module)) return {norm->arguments(), norm->num_features(), 5};
  if (const auto* norm = exactly<LayerNorm>(module)) return {norm->arguments()};
  return {};
}

ActivationArguments activation_of(const Module* module) {
  if (exactly<ReLU>(module)) return {ActivationKind::relu};
  if (const auto* leaky = exactly<LeakyReLU>(module)) return {ActivationKind::leaky_relu, leaky->negative_slope()};
  if (exactly<GELU>(module)) return {ActivationKind::gelu};
  if (exactly<SiLU>(module)) return {ActivationKind::silu};
  return {};
}

/// What two modules, or the first alone, are to the tensor before them, and how many modules that is: 0 if they are
/// neither norm nor activation. A norm that does not take such a tensor has an error of its own.
struct Followers {
  NormActivation what;
  int count = 0;
};
Followers followers(const Module* first, const Module* second, int64_t channels, int64_t axes) {
  const bool norm_first = norm_of(first).arguments.kind != NormKind::none;
  const Norm norm = norm_of(norm_first ? first : second);
  const ActivationArguments activation = activation_of(norm_first ? second : first);
  const bool has_norm = norm.takes(channels, axes);
  const bool has_activation = activation.kind != ActivationKind::none;
  if (norm_first && !has_norm) return {};
  if (!norm_first && !has_activation) return {};
  return {{has_norm ? norm.arguments : NormArguments(), activation, !norm_first}, has_norm + has_activation};
}

/// A convolution with what follows it; undefined if `module` is not one of Convs, or nothing follows.
template <class... Convs>
Tensor run_conv(const Module* module, const Module* second, const Module* third, const Tensor& x, int& count) {
  Tensor result;
  const auto run = [&](const auto* conv) {
    if (!conv) return;
    const bool batched = x.defined() && x.dim() == conv->weight.dim();
    const Followers behind = followers(second, third, batched ? conv->options().out_channels : -1, conv->weight.dim());
    if (behind.count == 0) return;
    result = conv->forward(x, behind.what);
    count = 1 + behind.count;
  };
  (run(exactly<Convs>(module)), ...);
  return result;
}

template <class... BatchNorms>
void count_batch(const Module* module) {
  const auto count = [](const auto* norm) {
    if (norm) norm->count_batch();
  };
  (count(exactly<BatchNorms>(module)), ...);
}

/// Runs modules[i] with those behind it that it can be taken together with, and moves i behind them; undefined, and i
/// as it was, if there are none.
template <class Modules>
Tensor run_fused(const Modules& module, size_t& i, const Tensor& x) {
  int count = 0;
  Tensor result = run_conv<Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d>(
      module(i), module(i + 1), module(i + 2), x, count);
  if (!result.defined()) {
    const Followers here =
        followers(module(i), module(i + 1), x.defined() && x.dim() > 1 ? x.size(1) : -1, x.defined() ? x.dim() : 0);
    if (here.count < 2) return {};
    result = norm_activation(x, here.what);
    count = here.count;
  }
  for (const size_t behind = i + static_cast<size_t>(count); i < behind; ++i)
    count_batch<BatchNorm1d, BatchNorm2d, BatchNorm3d>(module(i));
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
    const auto scope = detail::module_scope(*module(i));  // what follows in one kernel counts with the first
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
