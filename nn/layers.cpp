#include "nn/layers.h"

#include <cmath>

#include "nn/init.h"
#include "ops/linalg.h"

namespace voxgrad::nn {

Linear::Linear(int64_t in_features, int64_t out_features, const LinearOptions& given) {
  check(in_features > 0 && out_features > 0, "Linear", "in_features and out_features must be positive, got ",
        in_features, " and ", out_features);
  weight = empty({out_features, in_features}, {.requires_grad = true});
  init::kaiming_uniform_(weight, {.a = std::sqrt(5.0)});
  if (!given.bias) return;
  bias = empty({out_features}, {.requires_grad = true});
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  init::uniform_(bias, -bound, bound);
}

Tensor Linear::forward(const Tensor& x) const { return linear(x, weight, bias); }

LeakyReLU::LeakyReLU(double negative_slope) : negative_slope_(negative_slope) {
  check(std::isfinite(negative_slope), "LeakyReLU", "negative_slope must be finite, got ", negative_slope);
}

Softplus::Softplus(double beta, double threshold) : beta_(beta), threshold_(threshold) {
  check(std::isfinite(beta) && beta != 0 && std::isfinite(threshold), "Softplus",
        "needs finite beta other than 0 and finite threshold, got ", beta, " and ", threshold);
}

Dropout::Dropout(double p) : p_(p) { check(p >= 0 && p <= 1, "Dropout", "p must lie in [0, 1], got ", p); }

Upsample::Upsample(const InterpolateOptions& given) : options_(given) {
  check(given.size.has_value() != given.scale_factor.has_value(), "Upsample",
        "needs exactly one of size and scale_factor");
}

}  // namespace voxgrad::nn
