// Implements the normalization layers.
#include "nn/norm_layers.h"

#include <array>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/checks.h"

namespace voxgrad::nn {
namespace {

void check_normalized_shape(const char* layer, const Shape& shape) {
  check(!shape.empty(), layer, "normalized_shape is empty");
  for (int64_t size : shape) check(size > 0, layer, "the sizes in normalized_shape must be positive, got ", shape);
}

}  // namespace

ChannelNorm::ChannelNorm(const Form& form, int64_t channels, double eps, bool affine)
    : form_(form), channels_(channels), eps_(eps) {
  check(channels > 0, form.name, "the number of channels must be positive, got ", channels);
  check_eps(form.name, eps);
  if (!affine) return;
  weight = ones({channels}, {.requires_grad = true});
  bias = zeros({channels}, {.requires_grad = true});
}

Tensor ChannelNorm::forward(const Tensor& x) const {
  check(x.defined() && x.dim() >= 2 && accepts(x.size(1), x.dim()), form_.name, "expects (N, ", channels_, ", ",
        form_.axes, "), got ", describe(x));
  const Tensor y = norm_activation(x, {.norm = arguments()});
  count_batch();
  return y;
}

template <int N>
BatchNorm<N>::BatchNorm(int64_t num_features, const Options& options)
    : ChannelNorm(std::array<Form, 3>{{{"BatchNorm1d", "L) or (N, C", 2, 3},
                                       {"BatchNorm2d", "H, W", 4, 4},
                                       {"BatchNorm3d", "D, H, W", 5, 5}}}[N - 1],
                  num_features, options.eps, options.affine),
      momentum_(options.momentum) {
  const double momentum = options.momentum.value_or(0);
  check(momentum >= 0 && momentum <= 1, form_.name, "momentum must lie in [0, 1], got ", momentum);
  if (!options.track_running_stats) return;
  running_mean = zeros({num_features});
  running_var = ones({num_features});
  num_batches_tracked = zeros({}, {.dtype = i64});
}

template <int N>
NormArguments BatchNorm<N>::arguments() const {
  const bool tracks = num_batches_tracked.defined(), training = is_training() || !tracks;
  double momentum = momentum_.value_or(0);
  if (training && tracks && !momentum_) momentum = 1 / (num_batches_tracked.item() + 1);
  return {.kind = NormKind::batch,
          .weight = weight,
          .bias = bias,
          .eps = eps_,
          .running_mean = running_mean,
          .running_var = running_var,
          .training = training,
          .momentum = momentum,
          .ranks = process_group_};
}

template <int N>
void BatchNorm<N>::count_batch() const {
  if (is_training() && num_batches_tracked.defined() && !autograd::recomputing())
    num_batches_tracked.add_(ones_like(num_batches_tracked));
}

void convert_sync_batchnorm(Module& module, distributed::Communicator& group) {
  const auto convert = [&](auto* layer) {
    if (layer) layer->set_process_group(&group);
  };
  module.apply([&](Module& part) {
    convert(dynamic_cast<BatchNorm1d*>(&part));
    convert(dynamic_cast<BatchNorm2d*>(&part));
    convert(dynamic_cast<BatchNorm3d*>(&part));
  });
}

template class BatchNorm<1>;
template class BatchNorm<2>;
template class BatchNorm<3>;

LayerNorm::LayerNorm(const Shape& normalized_shape, const LayerNormOptions& options)
    : normalized_shape_(normalized_shape), options_(options) {
  check_normalized_shape("LayerNorm", normalized_shape);
  check_eps("LayerNorm", options.eps);
  if (!options.elementwise_affine) return;
  weight = ones(normalized_shape, {.requires_grad = true});
  if (options.bias) bias = zeros(normalized_shape, {.requires_grad = true});
}

RMSNorm::RMSNorm(const Shape& normalized_shape, const RMSNormOptions& options)
    : normalized_shape_(normalized_shape), options_(options) {
  check_normalized_shape("RMSNorm", normalized_shape);
  check_eps("RMSNorm", options.eps.value_or(0));
  if (options.elementwise_affine) weight = ones(normalized_shape, {.requires_grad = true});
}

}  // namespace voxgrad::nn
