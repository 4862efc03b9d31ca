// Tests of layers with reparametrized weights or running statistics. layers_test.cpp compares their values with
// PyTorch.
#include <cmath>

#include "core/autograd.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/gradcheck.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

// Wrapping a layer keeps the values of its weight. First and second derivatives reach the parameters that replace the
// weight.
TEST(Layers, ReparametrizedWeightsKeepValuesAndDifferentiate) {
  for (const Device device : devices()) {
    nn::Conv2d conv{{.in_channels = 2, .out_channels = 3, .kernel_size = 2}};
    const std::vector<double> values = conv.weight.to_vector();
    nn::WeightNorm layer{std::move(conv)};
    const std::vector<double> same = layer.weight().to_vector();
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(same[i], values[i], 1e-6);
    nn::SpectralNorm spectral{nn::Conv2d{{.in_channels = 2, .out_channels = 3, .kernel_size = 2}}};
    spectral.eval();
    for (nn::Layer* each : {static_cast<nn::Layer*>(&layer), static_cast<nn::Layer*>(&spectral)}) {
      each->to(f64);
      each->to(device);
      const Tensor x = randn({1, 2, 3, 3}, {f64, device});
      const auto function = [&](const Tensors&) { return Tensors{(*each)(x)}; };
      const GradcheckReport first = gradcheck(function, each->parameters());
      EXPECT_TRUE(first.passed) << first.message;
      const GradcheckReport second = gradgradcheck(function, each->parameters());
      EXPECT_TRUE(second.passed) << second.message;
    }
    // The second forward pass changes u and v by power iteration. The gradient of the first result must use the vectors
    // from before this change.
    spectral.train();
    const Tensor x = randn({1, 2, 3, 3}, {f64, device}), y = spectral(x) + spectral(x);
    sum(y).backward();
    EXPECT_TRUE(std::isfinite(sum(spectral.original.grad()).item()));
  }
}

TEST(Layers, BatchNormOfF16KeepsLayoutAndF32Statistics) {
  for (const Device device : devices()) {
    nn::BatchNorm3d norm(8);
    norm.to(device);
    const Tensor wide = randn({2, 8, 3, 4, 5}).to(device) + 300.0;
    const Tensor x = wide.to(f16).contiguous(MemoryFormat::channels_last), y = norm(x);
    EXPECT_EQ(y.dtype(), f16);
    EXPECT_TRUE(y.is_contiguous(MemoryFormat::channels_last));
    EXPECT_EQ(norm.running_var.dtype(), f32);
    EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 1);
    const Tensor expected = var(x.to(f64), {0, 2, 3, 4}) * 0.1 + 0.9;
    EXPECT_LT(amax(abs(norm.running_var.to(f64) - expected)).item(), 1e-5);
    norm.eval();
    EXPECT_EQ(norm(x).strides(), x.strides());
    EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 1);
  }
}

}  // namespace
}  // namespace voxgrad
