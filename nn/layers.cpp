// Implements the layers that layers.h declares.
#include "nn/layers.h"

#include <cmath>

#include "nn/init.h"
#include "ops/create.h"
#include "ops/linalg.h"

namespace voxgrad::nn {

Linear::Linear(int64_t in_features, int64_t out_features, const LinearOptions& options)
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

Tensor Linear::forward_with(const Tensor& x, const Tensor& other_weight) const { return linear(x, other_weight, bias); }

ELU::ELU(double alpha) : alpha_(alpha) { check(std::isfinite(alpha), "ELU", "alpha must be finite, got ", alpha); }

PReLU::PReLU(int64_t num_parameters, double init) {
  check(num_parameters > 0, "PReLU", "num_parameters must be positive, got ", num_parameters);
  check(std::isfinite(init), "PReLU", "init must be finite, got ", init);
  weight = full({num_parameters}, init, {.requires_grad = true});
}

LeakyReLU::LeakyReLU(double negative_slope) : negative_slope_(negative_slope) {
  check(std::isfinite(negative_slope), "LeakyReLU", "negative_slope must be finite, got ", negative_slope);
}

Softplus::Softplus(double beta, double threshold) : beta_(beta), threshold_(threshold) {
  check(std::isfinite(beta) && beta != 0 && std::isfinite(threshold), "Softplus",
        "beta must be finite and not 0, and threshold finite, got ", beta, " and ", threshold);
}

Dropout::Dropout(double p) : p_(p) { check(p >= 0 && p <= 1, "Dropout", "p must lie in [0, 1], got ", p); }

Flatten::Flatten(int64_t start_axis, int64_t end_axis) : start_axis_(start_axis), end_axis_(end_axis) {
  for (int64_t axis : {start_axis, end_axis})
    check(axis >= -kMaxRank && axis < kMaxRank, "Flatten", "axes must lie in [", -kMaxRank, ", ", kMaxRank, "), got ",
          start_axis, " and ", end_axis);
  // If one axis counts from the beginning and the other axis from the end, their order depends on the rank of the input
  // and is not checked here.
  check((start_axis < 0) != (end_axis < 0) || start_axis <= end_axis, "Flatten", "start_axis ", start_axis,
        " comes after end_axis ", end_axis);
}

}  // namespace voxgrad::nn
