// Tests of the initial distributions of parameters.
#include "nn/init.h"

#include <algorithm>
#include <cmath>

#include "nn/layers.h"
#include "ops/create.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

struct Moments {
  double mean = 0;
  double std = 0;      // standard deviation
  double largest = 0;  // largest absolute value
};

Moments moments(const Tensor& tensor) {
  Moments m;
  const std::vector<double> values = tensor.to_vector();
  const auto count = static_cast<double>(values.size());
  for (double v : values) m.mean += v / count, m.largest = std::max(m.largest, std::abs(v));
  for (double v : values) m.std += (v - m.mean) * (v - m.mean) / count;
  m.std = std::sqrt(m.std);
  return m;
}

/// Expects values within [-bound, bound] whose mean and standard deviation match U(-bound, bound) up to five standard
/// errors.
void expect_uniform(const Tensor& tensor, double bound) {
  const Moments m = moments(tensor);
  const auto count = static_cast<double>(tensor.numel());
  const double std = bound / std::sqrt(3.0);
  EXPECT_LE(m.largest, bound * (1 + 1e-6));
  EXPECT_GT(m.largest, bound * (1 - 20 / count));
  EXPECT_NEAR(m.mean, 0, 5 * std / std::sqrt(count));
  EXPECT_NEAR(m.std, std, 5 * std * std::sqrt(0.2 / count));
}

/// Expects the mean and the standard deviation of a normal distribution, up to five standard errors.
void expect_normal(const Tensor& tensor, double mean, double std) {
  const Moments m = moments(tensor);
  const auto count = static_cast<double>(tensor.numel());
  EXPECT_NEAR(m.mean, mean, 5 * std / std::sqrt(count));
  EXPECT_NEAR(m.std, std, 5 * std / std::sqrt(2 * count));
}

TEST(Init, InitializesLayersLikePyTorch) {
  manual_seed(1);
  const nn::ConvTranspose3d up{{.in_channels = 48, .out_channels = 64, .kernel_size = {3, 4, 2}, .groups = 2}};
  expect_uniform(up.weight, 1 / std::sqrt(32.0 * 24));  // fan_in uses axis 1: out_channels / groups
  expect_uniform(up.bias, 1 / std::sqrt(32.0 * 24));
  const nn::Conv3d conv{{.in_channels = 32, .out_channels = 300, .kernel_size = 3, .groups = 4}};
  expect_uniform(conv.weight, 1 / std::sqrt(8.0 * 27));
  expect_uniform(conv.bias, 1 / std::sqrt(8.0 * 27));
  const nn::Linear linear(50, 400);
  expect_uniform(linear.weight, 1 / std::sqrt(50.0));
  expect_uniform(linear.bias, 1 / std::sqrt(50.0));
  const nn::GroupNorm norm{8, 32};
  EXPECT_EQ(norm.weight.to_vector(), std::vector<double>(32, 1.0));
  EXPECT_EQ(norm.bias.to_vector(), std::vector<double>(32, 0.0));
}

TEST(Init, DependsOnTheSeed) {
  const auto weight = [](uint64_t seed) {
    manual_seed(seed);
    return nn::Linear(4, 4).weight.to_vector();
  };
  EXPECT_EQ(weight(5), weight(5));
  EXPECT_NE(weight(5), weight(6));
}

TEST(Init, SkipInitOnlyAdvancesTheGenerator) {
  const Tensor w = zeros({4, 3, 5});
  manual_seed(2);
  nn::init::kaiming_normal_(w);
  nn::init::uniform_(w);
  const GeneratorState after = default_generator().state();
  manual_seed(2);
  nn::init::zeros_(w);
  {
    const nn::init::SkipInit skip;
    nn::init::kaiming_normal_(w);
    nn::init::uniform_(w);
  }
  EXPECT_EQ(default_generator().state(), after);
  EXPECT_EQ(w.to_vector(), std::vector<double>(60, 0));
  nn::init::uniform_(w, 1, 2);
  EXPECT_GE(w.amin().item(), 1);
}

TEST(Init, FunctionsDrawTheDocumentedDistributions) {
  using namespace nn::init;
  manual_seed(2);
  const Tensor w = empty({40, 20, 3, 3, 3}, {.requires_grad = true});
  const double in = 20 * 27, out = 40 * 27;
  expect_uniform(kaiming_uniform_(w, {.nonlinearity = Nonlinearity::relu}), std::sqrt(6 / in));
  expect_normal(kaiming_normal_(w, {.a = 0.5, .mode = Fan::out}), 0, std::sqrt(2 / 1.25 / out));
  expect_uniform(xavier_uniform_(w, 2), 2 * std::sqrt(6 / (in + out)));
  expect_normal(xavier_normal_(w), 0, std::sqrt(2 / (in + out)));
  expect_normal(normal_(w, 3, 0.5), 3, 0.5);
  expect_uniform(uniform_(w, -2, 2), 2);
  EXPECT_EQ(constant_(w, 4).at({1, 2, 0, 1, 2}), 4);
  EXPECT_EQ(zeros_(w).at({0, 0, 0, 0, 0}), 0);
  EXPECT_EQ(ones_(w).at({0, 0, 0, 0, 0}), 1);
  EXPECT_TRUE(w.requires_grad() && w.is_leaf());
  const Tensor half = empty({1000}, {.dtype = bf16});
  expect_normal(normal_(half).to(f32), 0, 1);
}

TEST(Init, CalculatesGains) {
  using namespace nn::init;
  EXPECT_EQ(calculate_gain(Nonlinearity::linear), 1);
  EXPECT_EQ(calculate_gain(Nonlinearity::tanh), 5.0 / 3);
  EXPECT_EQ(calculate_gain(Nonlinearity::relu), std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(calculate_gain(Nonlinearity::leaky_relu, 0.2), std::sqrt(2 / 1.04));
  EXPECT_EQ(calculate_gain(Nonlinearity::selu), 0.75);
}

TEST(Init, RejectsInvalidTensorsAndParameters) {
  using namespace nn::init;
  EXPECT_ERROR(kaiming_uniform_(empty({3})), "calculate_fans: the tensor must have at least two axes");
  EXPECT_ERROR(uniform_(empty({3}), 2, 1), "uniform_: the interval [2, 1) is empty");
  EXPECT_ERROR(normal_(empty({3}), 0, -1), "normal_: mean and std must be finite");
  EXPECT_ERROR(uniform_(empty({3}, {.dtype = i64})), "uniform_: the tensor must be floating-point, got [3] i64 on cpu");
  EXPECT_ERROR(normal_({}), "normal_: the tensor must be floating-point, got undefined");
}

}  // namespace
}  // namespace voxgrad
