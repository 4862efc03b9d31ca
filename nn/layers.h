// All layers. Those here are the small ones: linear, activations.
#pragma once

#include "nn/conv_layers.h"
#include "nn/module.h"
#include "nn/norm_layers.h"
#include "nn/pool_layers.h"
#include "nn/sequential.h"
#include "ops/elementwise.h"

namespace voxgrad::nn {

struct LinearOptions {
  bool bias = true;
};

/// x (..., in_features) to (..., out_features). weight (out_features, in_features) and bias (out_features), both
/// from U(-b, b) with b = 1 / sqrt(in_features).
class Linear : public Layer {
 public:
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& given = {});
  Tensor forward(const Tensor& x) const override;

  Tensor weight, bias;
  VG_MODULE(weight, bias)
};

/// A function of each element that has no options.
template <Tensor (*function)(const Tensor&)>
class Activation : public Layer {
 public:
  Tensor forward(const Tensor& x) const override { return function(x); }
};

using ReLU = Activation<relu>;
using Sigmoid = Activation<sigmoid>;
using Tanh = Activation<tanh>;
using GELU = Activation<gelu>;
using SiLU = Activation<silu>;

class LeakyReLU : public Layer {
 public:
  explicit LeakyReLU(double negative_slope = 0.01);
  Tensor forward(const Tensor& x) const override { return leaky_relu(x, negative_slope_); }
  double negative_slope() const { return negative_slope_; }

 private:
  double negative_slope_;
};

class Softplus : public Layer {
 public:
  explicit Softplus(double beta = 1, double threshold = 20);
  Tensor forward(const Tensor& x) const override { return softplus(x, beta_, threshold_); }

 private:
  double beta_, threshold_;
};

/// Zeroes elements with probability p while training, from the default generator; the identity in eval().
class Dropout : public Layer {
 public:
  explicit Dropout(double p = 0.5);
  Tensor forward(const Tensor& x) const override { return dropout(x, p_, is_training()); }

 private:
  double p_;
};

/// Makes the axes start .. end one; by default all but the batch.
class Flatten : public Layer {
 public:
  explicit Flatten(int64_t start_axis = 1, int64_t end_axis = -1);
  Tensor forward(const Tensor& x) const override { return x.flatten(start_axis_, end_axis_); }

 private:
  int64_t start_axis_, end_axis_;
};

}  // namespace voxgrad::nn
