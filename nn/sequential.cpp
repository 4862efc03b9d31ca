#include "nn/sequential.h"

#include <typeinfo>

#include "nn/conv_layers.h"
#include "nn/layers.h"
#include "ops/fused.h"

namespace voxgrad::nn {
namespace {

/// Casts `module` to T. Returns null unless its class is exactly T, because forward() of a derived class may differ.
template <class T>
const T* exactly(const Module* module) {
  return module && typeid(*module) == typeid(T) ? static_cast<const T*>(module) : nullptr;
}

/// The arguments of a norm, and its requirements on the input.
struct Norm {
  NormArguments arguments{};
  int64_t channels = 0;  // number of channels; 0: any
  int64_t axes = 0;      // number of axes; 0: any

  bool accepts(int64_t x_channels, int64_t x_axes) const {
    return arguments.kind != NormKind::none && (channels == 0 || channels == x_channels) &&
           (axes == 0 || axes == x_axes);
  }
};
/// Returns the norm that `module` computes. The kind is none if `module` is not a norm.
Norm norm_of(const Module* module) {
  if (const auto* norm = exactly<GroupNorm>(module)) return {norm->arguments(), norm->num_channels()};
  if (const auto* norm = exactly<InstanceNorm3d>(module)) return {norm->arguments(), norm->num_features(), 5};
  if (const auto* norm = exactly<BatchNorm1d>(module)) return {norm->arguments(), norm->num_features(), 3};
  if (const auto* norm = exactly<BatchNorm2d>(module)) return {norm->arguments(), norm->num_features(), 4};
  if (const auto* norm = exactly<BatchNorm3d>(module)) return {norm->arguments(), norm->num_features(), 5};
  if (const auto* norm = exactly<LayerNorm>(module)) return {norm->arguments()};
  return {};
}

/// Returns the activation that `module` computes. The kind is none if `module` is not an activation.
ActivationArguments activation_of(const Module* module) {
  if (exactly<ReLU>(module)) return {ActivationKind::relu};
  if (const auto* leaky = exactly<LeakyReLU>(module)) return {ActivationKind::leaky_relu, leaky->negative_slope()};
  if (exactly<GELU>(module)) return {ActivationKind::gelu};
  if (exactly<SiLU>(module)) return {ActivationKind::silu};
  return {};
}

/// A norm, an activation or both, run as one operation, and the number of modules that the operation replaces.
struct FusionMatch {
  NormActivation operation;
  int count = 0;  ///< 0: nothing to fuse
};
/// Matches a norm, an activation or both at the beginning of (first, second). Does not match a norm that rejects
/// `channels` or `axes`, so that forward() of the norm throws the error.
FusionMatch match_norm_activation(const Module* first, const Module* second, int64_t channels, int64_t axes) {
  const bool norm_first = norm_of(first).arguments.kind != NormKind::none;
  const Norm norm = norm_of(norm_first ? first : second);
  const ActivationArguments activation = activation_of(norm_first ? second : first);
  const bool has_norm = norm.accepts(channels, axes);
  const bool has_activation = activation.kind != ActivationKind::none;
  if (norm_first && !has_norm) return {};
  if (!norm_first && !has_activation) return {};
  return {{has_norm ? norm.arguments : NormArguments(), activation, !norm_first}, has_norm + has_activation};
}

/// Runs a convolution together with the norm and the activation that follow, and sets `count` to the number of modules
/// that were run. Returns an undefined tensor if the class of `module` is not one of Convs, or if nothing can be fused.
template <class... Convs>
Tensor run_conv(const Module* module, const Module* second, const Module* third, const Tensor& x, int& count) {
  Tensor result;
  const auto run = [&](const auto* conv) {
    if (!conv) return;
    const bool batched = x.defined() && x.dim() == conv->weight.dim();
    const FusionMatch match =
        match_norm_activation(second, third, batched ? conv->options().out_channels : -1, conv->weight.dim());
    if (match.count == 0) return;
    result = conv->forward(x, match.operation);
    count = 1 + match.count;
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

/// Runs module(i) and the modules that follow as one operation, and advances i to the first module that was not run.
/// Returns an undefined tensor and leaves i unchanged if module(i) cannot be fused.
template <class Modules>
Tensor run_fused(const Modules& module, size_t& i, const Tensor& x) {
  int count = 0;
  Tensor result = run_conv<Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d>(
      module(i), module(i + 1), module(i + 2), x, count);
  if (!result.defined()) {
    const FusionMatch match = match_norm_activation(
        module(i), module(i + 1), x.defined() && x.dim() > 1 ? x.size(1) : -1, x.defined() ? x.dim() : 0);
    if (match.count < 2) return {};
    result = norm_activation(x, match.operation);
    count = match.count;
  }
  for (const size_t end = i + static_cast<size_t>(count); i < end; ++i)
    count_batch<BatchNorm1d, BatchNorm2d, BatchNorm3d>(module(i));
  return result;
}

}  // namespace

Module& Sequential::operator[](size_t index) const {
  check(index < size(), "Sequential", "module index ", index, " is out of range for ", size(), " modules");
  return *steps_[index].module;
}

Tensor Sequential::forward(const Tensor& x) const {
  const auto module = [&](size_t i) { return i < size() ? steps_[i].module.get() : nullptr; };
  Tensor result = x;
  for (size_t i = 0; i < size();) {
    const auto scope = detail::module_scope(*module(i));  // the profiler assigns a fused operation to its first module
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
