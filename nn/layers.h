// Includes the headers of all layers. Declares Linear, Identity, Flatten, and the activation and dropout layers.
#pragma once

#include <cmath>

#include "../ops/create.h"
#include "../ops/elementwise.h"
#include "../ops/linalg.h"
#include "../ops/reduce.h"
#include "conv_layers.h"
#include "init.h"
#include "module.h"
#include "norm_layers.h"
#include "pool_layers.h"
#include "sequential.h"
#include "weight_norm.h"

namespace voxgrad::nn {

/// Options of Linear.
struct LinearOptions {
  bool bias = true;  ///< adds a trained bias
};

/// A linear map from (..., in_features) to (..., out_features): y = x weight^T + bias. The parameters are weight
/// (out_features, in_features) and bias (out_features). Weight and bias start from the uniform distribution on [-b, b)
/// with b = 1 / sqrt(in_features), as in PyTorch. The constructor throws Error if a size is not positive.
class Linear : public Layer {
 public:
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {})
      : in_features_(in_features), out_features_(out_features) {
    check(in_features > 0 && out_features > 0, "Linear", "in_features and out_features must be positive, got ",
          in_features, " and ", out_features);
    weight = empty({out_features, in_features}, {.requires_grad = true});
    init::kaiming_uniform_(weight, {.a = std::sqrt(5.0)});
    if (!options.bias) return;
    bias = empty({out_features}, {.requires_grad = true});
    const double bound = 1 / std::sqrt(static_cast<double>(in_features));
    init::uniform_(bias, -bound, bound);
  }
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// Computes forward(x) with `other_weight` instead of the layer's weight.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight) const { return linear(x, other_weight, bias); }
  std::string extra_repr() const override {
    return concat("in_features=", in_features_, ", out_features=", out_features_, bias.defined() ? "" : ", bias=false");
  }

  Tensor weight;
  Tensor bias;
  VG_MODULE(weight, bias)

 private:
  // Stored for extra_repr(), because WeightNorm and SpectralNorm remove the weight.
  int64_t in_features_;
  int64_t out_features_;
};

/// Returns its input.
class Identity : public Layer {
 public:
  Tensor forward(const Tensor& x) const override { return x; }
};

/// An elementwise activation without options. ops/elementwise.h declares the functions.
template <LayerName name, Tensor (*function)(const Tensor&)>
class Activation : public Layer {
 public:
  Tensor forward(const Tensor& x) const override { return function(x); }
  std::string class_name() const override { return name.text; }
};

using ReLU = Activation<"ReLU", relu>;
using Sigmoid = Activation<"Sigmoid", sigmoid>;
using Tanh = Activation<"Tanh", tanh>;
using GELU = Activation<"GELU", gelu>;
using SiLU = Activation<"SiLU", silu>;
using SELU = Activation<"SELU", selu>;
using Mish = Activation<"Mish", mish>;
using Hardsigmoid = Activation<"Hardsigmoid", hardsigmoid>;
using Hardswish = Activation<"Hardswish", hardswish>;

/// PReLU: x where x > 0, otherwise weight * x; see voxgrad::prelu. The parameter weight (num_parameters) starts at
/// `init`; num_parameters is 1 or the number of channels. The constructor throws Error unless num_parameters is
/// positive and `init` is finite.
class PReLU : public Layer {
 public:
  explicit PReLU(int64_t num_parameters = 1, double init = 0.25) {
    check(num_parameters > 0, "PReLU", "num_parameters must be positive, got ", num_parameters);
    check(std::isfinite(init), "PReLU", "init must be finite, got ", init);
    weight = full({num_parameters}, init, {.requires_grad = true});
  }
  Tensor forward(const Tensor& x) const override { return prelu(x, weight); }
  std::string extra_repr() const override { return concat("num_parameters=", weight.numel()); }

  Tensor weight;
  VG_MODULE(weight)
};

/// A function along one axis. Negative axes count from the end: Softmax(-1) uses the last axis.
template <LayerName name, Tensor (*function)(const Tensor&, int64_t)>
class AlongAxis : public Layer {
 public:
  explicit AlongAxis(int64_t axis) : axis_(axis) {}
  Tensor forward(const Tensor& x) const override { return function(x, axis_); }
  std::string class_name() const override { return name.text; }
  std::string extra_repr() const override { return concat("dim=", axis_); }

 private:
  int64_t axis_;
};

using Softmax = AlongAxis<"Softmax", softmax>;
using LogSoftmax = AlongAxis<"LogSoftmax", log_softmax>;

/// ELU: x where x > 0, otherwise alpha * (exp(x) - 1). The constructor throws Error unless alpha is finite.
class ELU : public Layer {
 public:
  explicit ELU(double alpha = 1) : alpha_(alpha) {
    check(std::isfinite(alpha), "ELU", "alpha must be finite, got ", alpha);
  }
  Tensor forward(const Tensor& x) const override { return elu(x, alpha_); }
  std::string extra_repr() const override { return concat("alpha=", alpha_); }

 private:
  double alpha_;
};

/// LeakyReLU: x where x > 0, otherwise negative_slope * x. The constructor throws Error unless negative_slope is
/// finite.
class LeakyReLU : public Layer {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope_(negative_slope) {
    check(std::isfinite(negative_slope), "LeakyReLU", "negative_slope must be finite, got ", negative_slope);
  }
  Tensor forward(const Tensor& x) const override { return leaky_relu(x, negative_slope_); }
  double negative_slope() const { return negative_slope_; }
  std::string extra_repr() const override { return concat("negative_slope=", negative_slope_); }

 private:
  double negative_slope_;
};

/// Softplus: x where beta * x > threshold, otherwise log(1 + exp(beta * x)) / beta. The constructor throws Error unless
/// both numbers are finite and beta is not 0.
class Softplus : public Layer {
 public:
  explicit Softplus(double beta = 1, double threshold = 20) : beta_(beta), threshold_(threshold) {
    check(std::isfinite(beta) && beta != 0 && std::isfinite(threshold), "Softplus",
          "beta must be finite and not 0, and threshold finite, got ", beta, " and ", threshold);
  }
  Tensor forward(const Tensor& x) const override { return softplus(x, beta_, threshold_); }
  std::string extra_repr() const override { return concat("beta=", beta_, ", threshold=", threshold_); }

 private:
  double beta_;
  double threshold_;
};

/// In training, zeroes each element with probability p and multiplies the other elements by 1 / (1 - p). Uses the
/// default generator. In evaluation, returns its input. The constructor throws Error unless p lies in [0, 1].
class Dropout : public Layer {
 public:
  explicit Dropout(double p = 0.5) : p_(p) { check(p >= 0 && p <= 1, "Dropout", "p must lie in [0, 1], got ", p); }
  Tensor forward(const Tensor& x) const override { return dropout(x, p_, is_training()); }
  bool depends_on_training() const override { return true; }
  std::string extra_repr() const override { return concat("p=", p_); }

 protected:
  double p_;
};

/// Dropout of whole channels of (N, C, D, H, W); see voxgrad::dropout3d.
class Dropout3d : public Dropout {
 public:
  using Dropout::Dropout;
  Tensor forward(const Tensor& x) const override { return dropout3d(x, p_, is_training()); }
};

/// Merges the axes start_axis to end_axis, inclusive, into one. By default, merges all axes except the batch axis: (N,
/// ...) becomes (N, features).
class Flatten : public Layer {
 public:
  explicit Flatten(int64_t start_axis = 1, int64_t end_axis = -1) : start_axis_(start_axis), end_axis_(end_axis) {
    for (int64_t axis : {start_axis, end_axis})
      check(axis >= -kMaxRank && axis < kMaxRank, "Flatten", "axes must lie in [", -kMaxRank, ", ", kMaxRank, "), got ",
            start_axis, " and ", end_axis);
    // If one axis counts from the beginning and the other axis from the end, their order depends on the rank of the
    // input and is not checked here.
    check((start_axis < 0) != (end_axis < 0) || start_axis <= end_axis, "Flatten", "start_axis ", start_axis,
          " comes after end_axis ", end_axis);
  }
  Tensor forward(const Tensor& x) const override { return x.flatten(start_axis_, end_axis_); }
  std::string extra_repr() const override { return concat("start_dim=", start_axis_, ", end_dim=", end_axis_); }

 private:
  int64_t start_axis_;
  int64_t end_axis_;
};

}  // namespace voxgrad::nn
