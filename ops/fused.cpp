// Convolutions, normalization and activation as one operation.
#include "ops/fused.h"

#include "ops/detail/unrecorded.h"

namespace voxgrad {
namespace {

/// Records the bias and the ReLU that a convolution applied to its result y. `bias` (C) may be undefined.
Tensor record_relu(const Tensor& y, const Tensor& bias) {
  const bool with_bias = needs_gradient(bias);
  return record("relu", y.detach(), {y, bias},
                [y = Saved(y), with_bias, dtype = with_bias ? bias.dtype() : f32](const Tensor& grad) -> Tensors {
                  const Tensor dz = activation_gradient({ActivationKind::relu}, grad, y());
                  if (!with_bias) return {dz, Tensor()};
                  return {dz, sum(dz, all_but_channels(dz)).to(dtype)};
                });
}

void check_operations(const NormActivation& operations) {
  constexpr const char* kOp = "norm_activation";
  check_finite(kOp, "negative_slope", operations.activation.negative_slope);
  check(!operations.residual.defined() || !operations.activation_first, kOp,
        "a residual cannot be combined with activation_first");
}

void check_residual(const Tensor& x, const Tensor& residual) {
  check(!residual.defined() || !x.defined() || residual.shape() == x.shape(), "norm_activation",
        "the residual must have the shape of the input, got ", describe(residual), " and ", describe(x));
}

NormActivation without_appended(NormActivation operations) {
  operations.appended = {};
  return operations;
}

/// Number of spatial axes of a convolution with these options.
template <class Options>
constexpr int64_t kAxes = static_cast<int64_t>(std::tuple_size_v<decltype(Options::stride.values)>);

/// Computes a norm together with the activation. `added` and `overwrite`: see normalize_with_activations.
Tensor fused(const Tensor& x, const NormActivation& operations, const Tensor& added, bool overwrite = false) {
  check_residual(x, operations.residual);
  const ActivationArguments none{};
  const bool first = operations.activation_first;
  return normalize_with_activations(x, operations.norm,
                                    {first ? operations.activation : none, first ? none : operations.activation}, added,
                                    overwrite, operations.residual);
}

/// Returns the gradients of `hidden`, bias1, weight and bias, where `grad` is the gradient of
/// conv3d(gelu(hidden), weight, bias). `hidden` (N, E, D, H, W) already includes bias1 (E).
Tensors bottleneck_gradients(const Tensor& grad, const Tensor& hidden, const Tensor& bias1, const Tensor& weight,
                             const Tensor& bias) {
  if (grad_enabled()) {
    const auto composed = [](const Tensors& t) { return conv3d(gelu(record_added(t[0], t[1])), t[2], t[3]); };
    return recorded_gradients(composed, {hidden, bias1, weight, bias}, grad);
  }
  Tensor y, dx, sums;
  if (needs_gradient(hidden) || needs_gradient(bias1)) {
    // The kernel replaces the gradient of GELU's result by the gradient of `hidden`.
    dx = convolve(true, grad, weight, {}, spatial_size(hidden), {}).contiguous(hidden.suggest_memory_format());
    y = empty_like(hidden);
    sums = empty({hidden.size(1)}, hidden.options());
    kernels(hidden.device())
        .gelu_backward(as_rows(hidden, y.view_out()), as_rows(hidden, dx.view_out()), sums.view_out(),
                       as_rows(hidden, dx.view_in()), as_rows(hidden, hidden.view_in()));
  } else if (needs_gradient(weight)) {
    y = gelu(hidden);
  }
  return {needs_gradient(hidden) ? dx : Tensor(), needs_gradient(bias1) ? sums.to(bias1.dtype()) : Tensor(),
          needs_gradient(weight) ? convolve_weight(false, y, grad, form_of(weight), {}) : Tensor(),
          needs_gradient(bias) ? sum(grad, all_but_channels(grad)) : Tensor()};
}

}  // namespace

Tensor norm_activation(const Tensor& x, const NormActivation& operations) {
  check_operations(operations);
  if (operations.appended.defined())
    return cat({norm_activation(x, without_appended(operations)), operations.appended}, 1);
  if (operations.norm.kind != NormKind::none) return fused(x, operations, {});
  check_residual(x, operations.residual);
  return activation(operations.activation, operations.residual.defined() ? x + operations.residual : x);
}

Tensor inverted_bottleneck(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2,
                           const Tensor& bias2) {
  constexpr const char* kOp = "inverted_bottleneck";
  for (const auto& [name, weight] : {Operand{"weight1", weight1}, Operand{"weight2", weight2}}) {
    check_defined(kOp, name, weight);
    check(weight.dim() == 5 && spatial_size(weight) == Triple{1}, kOp, name,
          " must have the shape (out, in, 1, 1, 1), got ", weight.shape());
  }
  const bool batched = x.defined() && x.dim() == 5 && is_floating(x.dtype()) && !sharing_ranks(5);
  if (!batched) return conv3d(gelu(conv3d(x, weight1, bias1)), weight2, bias2);
  const Tensor hidden = conv(x, weight1, bias1, ConvOptions<3>(), {.bias_recorded = false});
  const Tensor weight = autocasted("conv3d", weight2), bias = autocasted("conv3d", bias2);
  // Save the operands before the last kernel runs: autograd::recompute() then omits it if this is its last operation.
  const auto gradient = [hidden = Saved(hidden), bias1 = Saved(bias1), weight = Saved(weight),
                         bias = Saved(bias)](const Tensor& grad) {
    return bottleneck_gradients(grad, hidden(), bias1(), weight(), bias());
  };
  const Tensor out = [&] {
    const NoGradGuard no_grad;
    return conv3d(gelu(hidden), weight.detach(), bias);
  }();
  return record(kOp, out, {hidden, bias1, weight, bias}, gradient);
}

template <class Options>
Tensor conv_norm_activation(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const NormActivation& operations) {
  check_operations(operations);
  if (operations.appended.defined()) {
    const bool plain = operations.norm.kind == NormKind::none && operations.activation.kind == ActivationKind::none;
    if (plain && !operations.residual.defined())
      return conv(x, weight, bias, options, {.appended = operations.appended});
    const Tensor y = conv_norm_activation(x, weight, bias, options, without_appended(operations));
    return cat({y, operations.appended}, y.dim() - kAxes<Options> - 1);
  }
  const bool batched = x.defined() && x.dim() == kAxes<Options> + 2 && is_floating(x.dtype());
  if (batched && operations.norm.kind != NormKind::none)
    return fused(conv(x, weight, bias, options, {.bias_recorded = false}), operations, bias, true);
  if (batched && operations.activation.kind == ActivationKind::relu && !operations.residual.defined())
    return record_relu(conv(x, weight, bias, options, {.relu = true, .bias_recorded = false}), bias);
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
