// Tests operators on bf16 and f16 tensors. In most tests, intermediate values exceed the range of f16, or sums need
// more digits than bf16 and f16 have.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

class HalfOps : public testing::TestWithParam<DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceType::cuda && !cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  }
  TensorOptions like(DType dtype) const { return {dtype, {GetParam(), 0}}; }
};

TEST_P(HalfOps, MeansAndVariancesDoNotOverflow) {
  const Tensor x = full({4, 1000}, 1000, like(f16));
  EXPECT_EQ(mean(x).item(), 1000);
  EXPECT_EQ(mean(x, {1}).to_vector(), (std::vector<double>(4, 1000)));
  const Tensor spread = cat({x, zeros({4, 1000}, like(f16))}, 1);
  EXPECT_EQ(mse_loss(spread * 0.25, zeros_like(spread)).item(), 31248);  // 31250 rounded to f16
  const Tensor outlier = cat({full({1}, 300, like(f16)), zeros({9999}, like(f16))}, 0);
  EXPECT_NEAR(var(outlier, {}, 1).item(), 9, 0.01);
  EXPECT_EQ(mean(x).dtype(), f16);
}

TEST_P(HalfOps, LossesAndGradientsKeepInputDtype) {
  for (const DType dtype : {bf16, f16}) {
    const Tensor x = full({2, 3, 40}, 500, like(dtype)).requires_grad_(), y = zeros_like(x);
    const auto bce = [](const Tensor& input, const Tensor& target, Reduction r) {
      return binary_cross_entropy_with_logits(input, target, r);
    };
    using Loss = Tensor (*)(const Tensor&, const Tensor&, Reduction);
    for (const Loss loss : {Loss(mse_loss), Loss(l1_loss), Loss(bce)}) {
      const Tensor value = loss(x, y, Reduction::mean);
      EXPECT_EQ(value.dtype(), dtype);
      const Tensor dx = grad({mean(value)}, {x})[0];
      EXPECT_EQ(dx.dtype(), dtype);
      EXPECT_TRUE(std::isfinite(sum(dx.to(f32)).item()));
    }
    const Tensor target = zeros({2, 40}, like(i64)), entropy = cross_entropy(x, target);
    EXPECT_EQ(entropy.dtype(), dtype);
    EXPECT_NEAR(entropy.item(), std::log(3.0), 0x1p-7);
  }
}

TEST_P(HalfOps, LogSoftmaxGradientSumsInFloat32) {
  const Tensor x = zeros({1, 2048}, like(f16)).requires_grad_();
  const Tensor dx = grad({log_softmax(x, 1)}, {x}, {full({1, 2048}, 100, like(f16))})[0];
  EXPECT_LT(amax(abs(dx)).item(), 0.1);  // each gradient is 100 - 204800 / 2048 = 0; 204800 exceeds the range of f16
}

TEST_P(HalfOps, AvgPoolWithDivisorDoesNotOverflow) {
  const Tensor x = full({1, 1, 4, 4, 4}, 40000, like(f16));
  const Tensor y = avg_pool3d(x, {.kernel_size = 4, .divisor_override = 64});
  EXPECT_NEAR(y.item(), 40000, 64);
}

TEST_P(HalfOps, MaxPoolReturnsI64IndicesAndSupportsSecondGradients) {
  const Tensor x = reshape(arange(0, 64, 1, like(bf16)), {1, 1, 4, 4, 4}).requires_grad_();
  const MaxPoolResult result = max_pool3d_with_indices(x, {.kernel_size = 2});
  EXPECT_EQ(result.indices.dtype(), i64);
  EXPECT_EQ(result.indices.at({0, 0, 1, 1, 1}), 63);
  const Tensor y = max_pool3d(x, {.kernel_size = 2}), g = ones_like(y).requires_grad_();
  const Tensor dx = grad({y}, {x}, {g}, true, true)[0];
  EXPECT_EQ(sum(dx).item(), 8);
  EXPECT_EQ(grad({dx}, {g}, {full_like(dx, 3)})[0].to_vector(), (std::vector<double>(8, 3)));
}

TEST_P(HalfOps, DropoutKeepsExpectedShareAndRoundsOnce) {
  for (const DType dtype : {bf16, f16}) {
    const Tensor x = ones({1 << 18}, like(dtype)), y = dropout(x, 0.999);
    EXPECT_EQ(y.dtype(), dtype);
    // About 0.1 % of 2^18 elements remain. Random numbers in bf16 would leave no element, because bf16 has no value in
    // [0.999, 1).
    EXPECT_NEAR(static_cast<double>(sum(ne(y, 0)).item<int64_t>()), 262, 80);
    EXPECT_EQ(amax(y).item(), full({}, 1 / (1 - 0.999), like(dtype)).item());
  }
}

TEST_P(HalfOps, LinearRoundsOnce) {
  const Tensor x = ones({8, 3000}, like(bf16)), w = ones({4, 3000}, like(bf16));
  EXPECT_EQ(linear(x, w, zeros({4}, like(bf16))).at({7, 3}), 3008);  // 3000 rounded to bf16
}

std::string device_name(const testing::TestParamInfo<DeviceType>& device) {
  return device.param == DeviceType::cpu ? "on_CPU" : "on_CUDA";
}
INSTANTIATE_TEST_SUITE_P(All, HalfOps, testing::Values(DeviceType::cpu, DeviceType::cuda), device_name);

}  // namespace
}  // namespace voxgrad
