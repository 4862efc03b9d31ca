// Implements the initializers of parameters.
#include "nn/init.h"

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/halves.h"
#include "ops/elementwise.h"

namespace voxgrad::nn::init {
namespace {

thread_local ScopedValue<bool>* skipping = nullptr;

void require_floating(const Tensor& tensor, const char* op) {
  check(tensor.defined() && is_floating(tensor.dtype()), op, "the tensor must be floating-point, got ",
        describe(tensor));
}

double kaiming_std(const Tensor& tensor, const KaimingOptions& options) {
  const Fans fans = calculate_fans(tensor);
  const auto fan = static_cast<double>(options.mode == Fan::in ? fans.in : fans.out);
  check(fan > 0, "kaiming", "the fan is zero for ", describe(tensor));
  return calculate_gain(options.nonlinearity, options.a) / std::sqrt(fan);
}

double xavier_std(const Tensor& tensor, double gain) {
  const Fans fans = calculate_fans(tensor);
  check(fans.in + fans.out > 0, "xavier", "both fans are zero for ", describe(tensor));
  return gain * std::sqrt(2.0 / static_cast<double>(fans.in + fans.out));
}

/// Fills the tensor with transform(numbers). `from` is the function that draws the numbers: rand or randn.
template <class F>
const Tensor& draw(const Tensor& tensor, decltype(rand)* from, Generator* generator, const F& transform) {
  Generator& source = generator ? *generator : default_generator();
  NoGradGuard no_grad;
  const TensorOptions options{.dtype = widened(tensor.dtype()), .device = tensor.device()};
  if (!skipping) return tensor.copy_(transform(from(tensor.shape(), options, &source)));
  source.reserve(tensor.numel(), options.dtype);
  return tensor;
}

}  // namespace

SkipInit::SkipInit() : ScopedValue(skipping, true) {}

Fans calculate_fans(const Tensor& tensor) {
  check(tensor.dim() >= 2, "calculate_fans", "the tensor must have at least two axes, got ", describe(tensor));
  int64_t receptive_field = 1;
  for (int64_t axis = 2; axis < tensor.dim(); ++axis) receptive_field *= tensor.size(axis);
  return {tensor.size(1) * receptive_field, tensor.size(0) * receptive_field};
}

double calculate_gain(Nonlinearity nonlinearity, double slope) {
  const double gains[] = {1, 1, 5.0 / 3, std::sqrt(2.0), std::sqrt(2 / (1 + slope * slope)), 0.75};  // by Nonlinearity
  return gains[static_cast<size_t>(nonlinearity)];
}

const Tensor& uniform_(const Tensor& tensor, double low, double high, Generator* generator) {
  require_floating(tensor, "uniform_");
  check(std::isfinite(low) && std::isfinite(high) && low <= high, "uniform_", "the interval [", low, ", ", high,
        ") is empty or not finite");
  return draw(tensor, rand, generator, [&](const Tensor& u) { return affine(u, high - low, low); });
}

const Tensor& normal_(const Tensor& tensor, double mean, double std, Generator* generator) {
  require_floating(tensor, "normal_");
  check(std::isfinite(mean) && std::isfinite(std) && std >= 0, "normal_",
        "mean and std must be finite and std at least 0, got ", mean, " and ", std);
  return draw(tensor, randn, generator, [&](const Tensor& z) { return affine(z, std, mean); });
}

const Tensor& constant_(const Tensor& tensor, double value) {
  NoGradGuard no_grad;
  return tensor.fill_(value);
}
const Tensor& zeros_(const Tensor& tensor) { return constant_(tensor, 0); }
const Tensor& ones_(const Tensor& tensor) { return constant_(tensor, 1); }

// The standard deviation of U(-b, b) is b / sqrt(3).
const Tensor& kaiming_uniform_(const Tensor& tensor, const KaimingOptions& options, Generator* generator) {
  const double bound = std::sqrt(3.0) * kaiming_std(tensor, options);
  return uniform_(tensor, -bound, bound, generator);
}

const Tensor& kaiming_normal_(const Tensor& tensor, const KaimingOptions& options, Generator* generator) {
  return normal_(tensor, 0, kaiming_std(tensor, options), generator);
}

const Tensor& xavier_uniform_(const Tensor& tensor, double gain, Generator* generator) {
  const double bound = std::sqrt(3.0) * xavier_std(tensor, gain);
  return uniform_(tensor, -bound, bound, generator);
}

const Tensor& xavier_normal_(const Tensor& tensor, double gain, Generator* generator) {
  return normal_(tensor, 0, xavier_std(tensor, gain), generator);
}

}  // namespace voxgrad::nn::init
