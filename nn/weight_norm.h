// Layers whose weight is a function of other parameters: wrappers of Linear, Conv, ConvTranspose and any layer with a
// member `weight` and a forward_with(x, weight).
//
//     nn::SpectralNorm layer{nn::Conv3d{{.in_channels = 1, .out_channels = 8, .kernel_size = 3}}};
//
// The weight's values stay as they are, and the keys of a state_dict are those of torch.nn.utils.parametrizations.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "../core/autograd.h"
#include "conv_layers.h"
#include "init.h"
#include "module.h"

namespace voxgrad::nn {

namespace detail {

/// Euclidean norms of what one index of `axis` selects, with the other axes of size 1; of all without an axis, as ().
Tensor weight_norms(const Tensor& weight, std::optional<int64_t> axis);
/// direction * magnitude / weight_norms(direction).
Tensor scaled_direction(const Tensor& direction, const Tensor& magnitude, std::optional<int64_t> axis);

/// Steps of the power method towards the singular vectors u and v of the weight as a matrix with rows along `axis`.
void power_iteration(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v, int64_t steps, double eps);
/// weight / (u^T matrix v).
Tensor divided_by_singular_value(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v);

}  // namespace detail

struct WeightNormOptions {
  std::optional<int64_t> dim = 0;  ///< the axis along which each index has a magnitude; nullopt: one for all
};

/// weight = g * v / |v| (Salimans and Kingma, "Weight normalization", 2016). Parameters beside the layer's other ones:
/// parametrizations.weight.original0 (g) and original1 (v).
template <class L>
class WeightNorm : public Layer {
 public:
  explicit WeightNorm(L layer, const WeightNormOptions& given = {})
      : direction(std::exchange(layer.weight, {})), layer_(std::move(layer)), dim_(given.dim) {
    magnitude = detail::weight_norms(direction.detach(), dim_).requires_grad_(direction.requires_grad());
  }
  std::string extra_repr() const override { return detail::summary(layer_); }
  Tensor weight() const { return detail::scaled_direction(direction, magnitude, dim_); }
  Tensor forward(const Tensor& x) const override { return layer_.forward_with(x, weight()); }
  Members members() override {
    Members all = layer_.members();
    all.push_back({"parametrizations.weight.original0", magnitude});
    all.push_back({"parametrizations.weight.original1", direction});
    return all;
  }

  Tensor magnitude, direction;

 private:
  L layer_;
  std::optional<int64_t> dim_;
};

/// The axis of a weight along which the outputs lie.
template <class L>
inline constexpr int64_t kOutputAxis = 0;
template <int N>
inline constexpr int64_t kOutputAxis<ConvTranspose<N>> = 1;

struct SpectralNormOptions {
  int64_t n_power_iterations = 1;
  std::optional<int64_t> dim{};  ///< the rows' axis of the weight as a matrix; nullopt: that of the outputs
  double eps = 1e-12;            ///< the least norm that a vector is divided by
};

/// weight = original / its largest singular value (Miyato et al., "Spectral normalization", ICLR 2018), from singular
/// vectors that each forward() in training improves by the power method: one thread at a time. Parameter
/// parametrizations.weight.original, buffers parametrizations.weight.0._u and _v.
template <class L>
class SpectralNorm : public Layer {
 public:
  explicit SpectralNorm(L layer, const SpectralNormOptions& given = {})
      : original(std::exchange(layer.weight, {})), layer_(std::move(layer)), options_(given) {
    check(given.n_power_iterations > 0, "SpectralNorm", "n_power_iterations must be positive, got ",
          given.n_power_iterations);
    check(std::isfinite(given.eps) && given.eps >= 0, "SpectralNorm", "eps must be finite and not negative, got ",
          given.eps);
    axis_ = normalize_axis(given.dim.value_or(kOutputAxis<L>), original.dim(), "SpectralNorm");
    u = init::normal_(empty({original.size(axis_)}, original.options()));
    v = init::normal_(empty({original.numel() / original.size(axis_)}, original.options()));
    detail::power_iteration(original, axis_, u, v, 15, given.eps);
  }
  Tensor weight() const { return detail::divided_by_singular_value(original, axis_, u, v); }
  std::string extra_repr() const override { return detail::summary(layer_); }
  Tensor forward(const Tensor& x) const override {
    if (is_training() && !autograd::recomputing())
      detail::power_iteration(original, axis_, u, v, options_.n_power_iterations, options_.eps);
    return layer_.forward_with(x, weight());
  }
  Members members() override {
    Members all = layer_.members();
    all.push_back({"parametrizations.weight.original", original});
    all.push_back({"parametrizations.weight.0._u", u, true});
    all.push_back({"parametrizations.weight.0._v", v, true});
    return all;
  }

  Tensor original;
  Buffer u, v;

 private:
  L layer_;
  SpectralNormOptions options_;
  int64_t axis_ = 0;
};

}  // namespace voxgrad::nn
