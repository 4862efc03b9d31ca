// Convolution, normalization and activation as one operation.
#include "ops/fused.h"

#include "core/autograd.h"
#include "ops/detail/checks.h"
#include "ops/detail/unrecorded.h"
#include "ops/detail/volume.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

/// Records the bias and the ReLU that unrecorded_conv applied to its result y. `bias` (C) may be undefined.
Tensor record_relu(const Tensor& y, const Tensor& bias) {
  const bool with_bias = needs_gradient(bias);
  return record("relu", y.detach(), {y, bias},
                [y = Saved(y), with_bias, dtype = with_bias ? bias.dtype() : f32](const Tensor& grad) -> Tensors {
                  const Tensor dz = activation_gradient({ActivationKind::relu}, grad, y());
                  if (!with_bias) return {dz, Tensor()};
                  return {dz, sum(dz, all_but_channels(dz)).to(dtype)};
                });
}

/// Number of spatial axes of a convolution with these options.
template <class Options>
constexpr int64_t kAxes = static_cast<int64_t>(std::tuple_size_v<decltype(Options::stride.values)>);

/// Computes a norm together with the activation. `added` and `overwrite`: see normalize_with_activations.
Tensor fused(const Tensor& x, const NormActivation& operations, const Tensor& added, bool overwrite = false) {
  const ActivationArguments none{};
  const bool first = operations.activation_first;
  return normalize_with_activations(x, operations.norm,
                                    {first ? operations.activation : none, first ? none : operations.activation}, added,
                                    overwrite);
}

}  // namespace

Tensor norm_activation(const Tensor& x, const NormActivation& operations) {
  check_finite("norm_activation", "negative_slope", operations.activation.negative_slope);
  if (operations.norm.kind == NormKind::none) return activation(operations.activation, x);
  return fused(x, operations, {});
}

template <class Options>
Tensor conv_norm_activation(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const NormActivation& operations) {
  check_finite("norm_activation", "negative_slope", operations.activation.negative_slope);
  const bool batched = x.defined() && x.dim() == kAxes<Options> + 2 && is_floating(x.dtype());
  if (batched && operations.norm.kind != NormKind::none)
    return fused(unrecorded_conv(x, weight, bias, options, false), operations, bias, true);
  if (batched && operations.activation.kind == ActivationKind::relu)
    return record_relu(unrecorded_conv(x, weight, bias, options, true), bias);
  return norm_activation(conv(x, weight, bias, options), operations);
}

#define VG_INSTANTIATE(Options)                                                                     \
  template Tensor conv_norm_activation(const Tensor&, const Tensor&, const Tensor&, const Options&, \
                                       const NormActivation&);
VG_INSTANTIATE(ConvOptions<1>)
VG_INSTANTIATE(ConvOptions<2>)
VG_INSTANTIATE(ConvOptions<3>)
VG_INSTANTIATE(ConvTransposeOptions<1>)
VG_INSTANTIATE(ConvTransposeOptions<2>)
VG_INSTANTIATE(ConvTransposeOptions<3>)
#undef VG_INSTANTIATE

}  // namespace voxgrad
