#include "nn/norm_layers.h"

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"

namespace voxgrad::nn {
namespace {

void check_eps(const char* layer, double eps) {
  check(std::isfinite(eps) && eps >= 0, layer, "eps must be finite and not negative, got ", eps);
}

void check_normalized_shape(const char* layer, const Shape& shape) {
  check(!shape.empty(), layer, "normalized_shape is empty");
  for (int64_t size : shape) check(size > 0, layer, "the sizes in normalized_shape must be positive, got ", shape);
}

}  // namespace

GroupNorm::GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& options)
    : num_groups_(num_groups), num_channels_(num_channels), options_(options) {
  check(num_groups > 0 && num_channels > 0, "GroupNorm", "num_groups and num_channels must be positive, got ",
        num_groups, " and ", num_channels);
  check(num_channels % num_groups == 0, "GroupNorm", "num_groups = ", num_groups,
        " does not divide num_channels = ", num_channels);
  check_eps("GroupNorm", options.eps);
  if (!options.affine) return;
  weight = ones({num_channels}, {.requires_grad = true});
  bias = zeros({num_channels}, {.requires_grad = true});
}

Tensor GroupNorm::forward(const Tensor& x) const {
  check(x.defined() && x.dim() >= 2 && x.size(1) == num_channels_, "GroupNorm", "expects (N, ", num_channels_,
        ", ...), got ", describe(x));
  return group_norm(x, num_groups_, weight, bias, options_.eps);
}

InstanceNorm3d::InstanceNorm3d(int64_t num_features, const InstanceNormOptions& options)
    : num_features_(num_features), options_(options) {
  check(num_features > 0, "InstanceNorm3d", "num_features must be positive, got ", num_features);
  check_eps("InstanceNorm3d", options.eps);
  if (!options.affine) return;
  weight = ones({num_features}, {.requires_grad = true});
  bias = zeros({num_features}, {.requires_grad = true});
}

Tensor InstanceNorm3d::forward(const Tensor& x) const {
  check(x.defined() && x.dim() == 5 && x.size(1) == num_features_, "InstanceNorm3d", "expects (N, ", num_features_,
        ", D, H, W), got ", describe(x));
  return instance_norm(x, weight, bias, options_.eps);
}

template <int N>
BatchNorm<N>::BatchNorm(int64_t num_features, const Options& options) : num_features_(num_features), options_(options) {
  const std::string layer = concat("BatchNorm", N, 'd');
  check(num_features > 0, layer.c_str(), "num_features must be positive, got ", num_features);
  check_eps(layer.c_str(), options.eps);
  const double momentum = options.momentum.value_or(0);
  check(momentum >= 0 && momentum <= 1, layer.c_str(), "momentum must lie in [0, 1], got ", momentum);
  if (options.affine) {
    weight = ones({num_features}, {.requires_grad = true});
    bias = zeros({num_features}, {.requires_grad = true});
  }
  if (!options.track_running_stats) return;
  running_mean = zeros({num_features});
  running_var = ones({num_features});
  num_batches_tracked = zeros({}, {.dtype = i64});
}

template <int N>
Tensor BatchNorm<N>::forward(const Tensor& x) const {
  const bool has_rank = x.defined() && (x.dim() == N + 2 || (N == 1 && x.dim() == 2));
  check(!x.defined() || (has_rank && x.size(1) == num_features_), concat("BatchNorm", N, 'd').c_str(), "expects (N, ",
        num_features_, ", spatial...) with ", N, N == 1 ? " spatial axis, or (N, C), got " : " spatial axes, got ",
        describe(x));
  const Tensor y = norm_activation(x, {.norm = arguments()});
  count_batch();
  return y;
}

template <int N>
NormArguments BatchNorm<N>::arguments() const {
  const bool tracks = num_batches_tracked.defined(), training = is_training() || !tracks;
  double momentum = options_.momentum.value_or(0);
  if (training && tracks && !options_.momentum) momentum = 1 / (num_batches_tracked.item() + 1);
  return {.kind = NormKind::batch,
          .weight = weight,
          .bias = bias,
          .eps = options_.eps,
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

Tensor LayerNorm::forward(const Tensor& x) const {
  return layer_norm(x, normalized_shape_, weight, bias, options_.eps);
}

RMSNorm::RMSNorm(const Shape& normalized_shape, const RMSNormOptions& options)
    : normalized_shape_(normalized_shape), options_(options) {
  check_normalized_shape("RMSNorm", normalized_shape);
  check_eps("RMSNorm", options.eps.value_or(0));
  if (options.elementwise_affine) weight = ones(normalized_shape, {.requires_grad = true});
}

}  // namespace voxgrad::nn
