// WeightNorm and SpectralNorm: wrappers that compute the weight of a layer from other parameters. The wrappers accept
// Linear, Conv, ConvTranspose, and any layer with a member `weight` and a function forward_with(x, weight).
//
//     nn::SpectralNorm layer{nn::Conv3d{{.in_channels = 1, .out_channels = 8, .kernel_size = 3}}};
//
// The new parameters are initialized from the layer's weight. The names in a state_dict are those of
// torch.nn.utils.parametrizations.
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

/// Returns the Euclidean norm of the slice at each index of `axis`. The result has size 1 along all other axes. Without
/// an axis, returns the norm of the whole weight as a scalar.
Tensor weight_norms(const Tensor& weight, std::optional<int64_t> axis);
/// Returns direction * magnitude / weight_norms(direction, axis).
Tensor scaled_direction(const Tensor& direction, const Tensor& magnitude, std::optional<int64_t> axis);

/// Improves the estimates u and v of the singular vectors of the largest singular value, by `steps` steps of power
/// iteration. Axis `axis` of the weight is the row axis of the matrix; the other axes are flattened into columns.
void power_iteration(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v, int64_t steps, double eps);
/// Returns weight / (u^T matrix v), where matrix is the weight with `axis` as its row axis.
Tensor divided_by_singular_value(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v);

}  // namespace detail

/// Options of WeightNorm.
struct WeightNormOptions {
  std::optional<int64_t> dim = 0;  ///< axis with one magnitude per index; nullopt: one magnitude for the whole weight
};

/// Computes the weight as g * v / |v| (Salimans and Kingma, "Weight normalization", 2016). The parameters magnitude (g)
/// and direction (v) replace the layer's weight; their names are parametrizations.weight.original0 and original1. The
/// layer's other parameters remain.
template <class L>
class WeightNorm : public Layer {
 public:
  explicit WeightNorm(L layer, const WeightNormOptions& options = {})
      : direction(std::exchange(layer.weight, {})), layer_(std::move(layer)), dim_(options.dim) {
    magnitude = detail::weight_norms(direction.detach(), dim_).requires_grad_(direction.requires_grad());
  }
  std::string extra_repr() const override { return detail::summary(layer_); }
  /// Returns the weight that forward() uses.
  Tensor weight() const { return detail::scaled_direction(direction, magnitude, dim_); }
  Tensor forward(const Tensor& x) const override { return layer_.forward_with(x, weight()); }
  Members members() override {
    Members all = layer_.members();
    all.push_back({"parametrizations.weight.original0", magnitude});
    all.push_back({"parametrizations.weight.original1", direction});
    return all;
  }

  Tensor magnitude;  ///< g
  Tensor direction;  ///< v, with the shape of the weight

 private:
  L layer_;
  std::optional<int64_t> dim_;
};

/// The axis of a layer's weight that indexes the outputs.
template <class L>
inline constexpr int64_t kOutputAxis = 0;
/// The weights of transposed convolutions have the outputs at axis 1.
template <int N>
inline constexpr int64_t kOutputAxis<ConvTranspose<N>> = 1;

/// Options of SpectralNorm.
struct SpectralNormOptions {
  int64_t n_power_iterations = 1;  ///< steps of power iteration per forward() in training
  std::optional<int64_t> dim{};    ///< row axis of the weight as a matrix; nullopt: the axis of the outputs
  double eps = 1e-12;              ///< lower bound of the norms by which vectors are divided
};

/// Divides the weight by its largest singular value (Miyato et al., "Spectral normalization", ICLR 2018). In training,
/// forward() first improves the singular vectors u and v by power iteration, so only one thread may call forward() at a
/// time. The parameter parametrizations.weight.original replaces the layer's weight. The buffers are
/// parametrizations.weight.0._u and parametrizations.weight.0._v. The constructor throws Error for invalid options.
template <class L>
class SpectralNorm : public Layer {
 public:
  explicit SpectralNorm(L layer, const SpectralNormOptions& options = {})
      : original(std::exchange(layer.weight, {})), layer_(std::move(layer)), options_(options) {
    check(options.n_power_iterations > 0, "SpectralNorm", "n_power_iterations must be positive, got ",
          options.n_power_iterations);
    check(std::isfinite(options.eps) && options.eps >= 0, "SpectralNorm", "eps must be finite and not negative, got ",
          options.eps);
    axis_ = normalize_axis(options.dim.value_or(kOutputAxis<L>), original.dim(), "SpectralNorm");
    u = init::normal_(empty({original.size(axis_)}, original.options()));
    v = init::normal_(empty({original.numel() / original.size(axis_)}, original.options()));
    detail::power_iteration(original, axis_, u, v, 15, options.eps);
  }
  /// Returns the weight that forward() uses.
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

  Tensor original;  ///< the weight before the division
  Buffer u;         ///< left singular vector (rows)
  Buffer v;         ///< right singular vector (columns)

 private:
  L layer_;
  SpectralNormOptions options_;
  int64_t axis_ = 0;
};

}  // namespace voxgrad::nn
