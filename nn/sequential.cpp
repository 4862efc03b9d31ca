// Implements Sequential, which runs convolutions, norms and activations as fused operations.
#include "nn/sequential.h"

#include <typeinfo>

#include "nn/conv_layers.h"
#include "nn/layers.h"
#include "ops/fused.h"

namespace voxgrad::nn {
namespace {

/// Casts `module` to Base. Returns null unless the class of `module` is one of Classes, because forward() of a derived
/// class may differ.
template <class Base, class... Classes>
const Base* one_of(const Module* module) {
  return module && ((typeid(*module) == typeid(Classes)) || ...) ? static_cast<const Base*>(module) : nullptr;
}
template <class T>
const T* exactly(const Module* module) {
  return one_of<T, T>(module);
}
const ChannelNorm* norm_of(const Module* module) {
  return one_of<ChannelNorm, GroupNorm, InstanceNorm3d, BatchNorm1d, BatchNorm2d, BatchNorm3d>(module);
}

/// Returns the activation that `module` computes. The kind is none if `module` is not an activation.
ActivationArguments activation_of(const Module* module) {
  if (exactly<ReLU>(module)) return {ActivationKind::relu};
  if (const auto* leaky = exactly<LeakyReLU>(module)) return {ActivationKind::leaky_relu, leaky->negative_slope()};
  if (exactly<GELU>(module)) return {ActivationKind::gelu};
  if (exactly<SiLU>(module)) return {ActivationKind::silu};
  return {};
}

/// A norm, an activation or both, run as one operation.
struct FusionMatch {
  const ChannelNorm* norm = nullptr;
  ActivationArguments activation{};
  bool activation_first = false;

  /// Returns the number of modules that the operation replaces, or 0 if there is nothing to fuse.
  size_t count() const { return size_t{norm != nullptr} + size_t{activation.kind != ActivationKind::none}; }
  /// Calls `function` with the arguments of the fused operation. Then calls count_batch() of the norm, if there is one:
  /// a batch norm in training mode increments num_batches_tracked.
  template <class F>
  Tensor run(const F& function) const {
    const Tensor y = function({norm ? norm->arguments() : NormArguments(), activation, activation_first});
    if (norm) norm->count_batch();
    return y;
  }
};
/// Matches a norm, an activation or both at the beginning of (first, second). Does not match a norm that rejects
/// `channels` or `axes`, so that forward() of the norm throws the error.
FusionMatch match_norm_activation(const Module* first, const Module* second, int64_t channels, int64_t axes) {
  const ChannelNorm* const norm = norm_of(first) ? norm_of(first) : norm_of(second);
  const bool norm_first = norm_of(first) != nullptr, has_norm = norm && norm->accepts(channels, axes);
  const FusionMatch match{has_norm ? norm : nullptr, activation_of(norm_first ? second : first), !norm_first};
  const bool starts = norm_first ? has_norm : match.activation.kind != ActivationKind::none;
  return starts ? match : FusionMatch();
}

/// Runs a convolution together with the norm and the activation that follow, and sets `count` to the number of modules
/// that were run. Returns an undefined tensor if the class of `module` is not one of Convs, or if nothing can be fused.
template <class... Convs>
Tensor run_conv(const Module* module, const Module* second, const Module* third, const Tensor& x, size_t& count) {
  Tensor result;
  const auto run = [&](const auto* conv) {
    if (!conv) return;
    const bool batched = x.defined() && x.dim() == conv->weight.dim();
    const FusionMatch match =
        match_norm_activation(second, third, batched ? conv->options().out_channels : -1, conv->weight.dim());
    if (match.count() == 0) return;
    result = match.run([&](const NormActivation& operation) { return conv->forward(x, operation); });
    count = 1 + match.count();
  };
  (run(exactly<Convs>(module)), ...);
  return result;
}

/// Runs module(i) and the modules that follow as one operation, and advances i to the first module that was not run.
/// Returns an undefined tensor and leaves i unchanged if module(i) cannot be fused.
template <class Modules>
Tensor run_fused(const Modules& module, size_t& i, const Tensor& x) {
  size_t count = 0;
  Tensor result = run_conv<Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d>(
      module(i), module(i + 1), module(i + 2), x, count);
  if (!result.defined()) {
    const FusionMatch match = match_norm_activation(
        module(i), module(i + 1), x.defined() && x.dim() > 1 ? x.size(1) : -1, x.defined() ? x.dim() : 0);
    count = match.count();
    if (count < 2) return {};
    result = match.run([&](const NormActivation& operation) { return norm_activation(x, operation); });
  }
  i += count;
  return result;
}

}  // namespace

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

}  // namespace voxgrad::nn
