// All layers. Those here are the small ones: linear, activations.
#pragma once

#include "../ops/elementwise.h"
#include "../ops/reduce.h"
#include "conv_layers.h"
#include "module.h"
#include "norm_layers.h"
#include "pool_layers.h"
#include "sequential.h"
#include "weight_norm.h"

namespace voxgrad::nn {

struct LinearOptions {
  bool bias = true;
};

/// x (..., in_features) to (..., out_features). weight (out_features, in_features) and bias (out_features), both
/// from U(-b, b) with b = 1 / sqrt(in_features).
class Linear : public Layer {
 public:
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& given = {});
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// With another weight in place of the layer's.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight) const;
  std::string extra_repr() const override {
    return concat("in_features=", in_features_, ", out_features=", out_features_, bias.defined() ? "" : ", bias=false");
  }

  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  int64_t in_features_, out_features_;  // of the weight, which wrappers take away
};

class Identity : public Layer {
 public:
  Tensor forward(const Tensor& x) const override { return x; }
};

/// A function of each element that has no options.
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

/// See voxgrad::prelu; weight (num_parameters), 1 or the number of channels, starts at `init`. Throws Error unless
/// num_parameters is positive.
class PReLU : public Layer {
 public:
  explicit PReLU(int64_t num_parameters = 1, double init = 0.25);
  Tensor forward(const Tensor& x) const override { return prelu(x, weight); }
  std::string extra_repr() const override { return concat("num_parameters=", weight.numel()); }

  Tensor weight;
  VG_MODULE(weight)
};

/// A function along one axis.
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

class ELU : public Layer {
 public:
  explicit ELU(double alpha = 1);
  Tensor forward(const Tensor& x) const override { return elu(x, alpha_); }
  std::string extra_repr() const override { return concat("alpha=", alpha_); }

 private:
  double alpha_;
};

class LeakyReLU : public Layer {
 public:
  explicit LeakyReLU(double negative_slope = 0.01);
  Tensor forward(const Tensor& x) const override { return leaky_relu(x, negative_slope_); }
  double negative_slope() const { return negative_slope_; }
  std::string extra_repr() const override { return concat("negative_slope=", negative_slope_); }

 private:
  double negative_slope_;
};

class Softplus : public Layer {
 public:
  explicit Softplus(double beta = 1, double threshold = 20);
  Tensor forward(const Tensor& x) const override { return softplus(x, beta_, threshold_); }
  std::string extra_repr() const override { return concat("beta=", beta_, ", threshold=", threshold_); }

 private:
  double beta_, threshold_;
};

/// Zeroes elements with probability p while training, from the default generator; the identity in eval().
class Dropout : public Layer {
 public:
  explicit Dropout(double p = 0.5);
  Tensor forward(const Tensor& x) const override { return dropout(x, p_, is_training()); }
  bool depends_on_training() const override { return true; }
  std::string extra_repr() const override { return concat("p=", p_); }

 protected:
  double p_;
};

/// Zeroes whole channels instead: see voxgrad::dropout3d.
class Dropout3d : public Dropout {
 public:
  using Dropout::Dropout;
  Tensor forward(const Tensor& x) const override { return dropout3d(x, p_, is_training()); }
};

/// Makes the axes start .. end one; by default all but the batch.
class Flatten : public Layer {
 public:
  explicit Flatten(int64_t start_axis = 1, int64_t end_axis = -1);
  Tensor forward(const Tensor& x) const override { return x.flatten(start_axis_, end_axis_); }
  std::string extra_repr() const override { return concat("start_dim=", start_axis_, ", end_dim=", end_axis_); }

 private:
  int64_t start_axis_, end_axis_;
};

}  // namespace voxgrad::nn
