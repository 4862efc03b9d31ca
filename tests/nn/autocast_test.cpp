// Tests of autocast: result dtypes, gradients, cached conversions of parameters, and resuming.
#include "core/autocast.h"

#include <thread>

#include "core/autograd.h"
#include "nn/layers.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/fused.h"
#include "ops/gradcheck.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(Autocast, GuardsNest) {
  EXPECT_EQ(autocast::dtype(), std::nullopt);
  {
    const autocast outer(bf16);
    EXPECT_EQ(autocast::dtype(), bf16);
    {
      const autocast inner(f16);
      EXPECT_EQ(autocast::dtype(), f16);
      const autocast off(bf16, false);
      EXPECT_EQ(autocast::dtype(), std::nullopt);
    }
    EXPECT_EQ(autocast::dtype(), bf16);
    std::thread([] { EXPECT_EQ(autocast::dtype(), std::nullopt); }).join();
  }
  EXPECT_EQ(autocast::dtype(), std::nullopt);
  EXPECT_ERROR(autocast(f32), "autocast: dtype must be bf16 or f16, got f32");
  EXPECT_EQ(autocast::dtype(), std::nullopt);
}

TEST(Autocast, ChoosesTheResultDtype) {
  const Tensor x = rand({2, 4, 3, 3, 3}), w = rand({4, 4, 1, 1, 1}), b = rand({4}), half = x.to(bf16);
  const autocast guard(bf16);
  const std::pair<DType, Tensor> results[] = {
      {bf16, conv3d(x, w, b)},
      {bf16, conv_transpose3d(x, w, b)},
      {bf16, conv_norm_activation(x, w, b, ConvOptions<3>(), {{NormKind::instance}, {ActivationKind::leaky_relu}})},
      {bf16, inverted_bottleneck(x, w, b, w, b)},
      {bf16, linear(b.reshape({1, 4}), w.reshape({4, 4}), b)},
      {bf16, matmul(w.reshape({4, 4}), half.reshape({4, 54}))},
      {bf16, relu(half)},
      {bf16, gelu(half)},
      {bf16, group_norm(half, 2, b, b)},
      {bf16, half + half},
      {bf16, mean(half)},
      {f32, half + x},
      {f32, cat({half, x})},
      {f32, relu(x)},
      {f32, instance_norm(x)},
      {f32, exp(half)},
      {f32, pow(half, 2)},
      {f32, sum(half)},
      {f32, softmax(half, 1)},
      {f32, mse_loss(half, x)},
      {f64, conv3d(x.to(f64), w.to(f64))},
  };
  size_t i = 0;
  for (const auto& [dtype, result] : results) EXPECT_EQ(result.dtype(), dtype) << i++;
  EXPECT_ERROR(conv3d(x, w.to(f64)), "dtypes differ");
}

nn::Sequential small_model() {
  return nn::Sequential{nn::Conv3d{{.in_channels = 2, .out_channels = 8, .kernel_size = 3, .padding = 1}},
                        nn::InstanceNorm3d{8, {.affine = true}},
                        nn::LeakyReLU{0.01},
                        nn::ConvTranspose3d{{.in_channels = 8, .out_channels = 3, .kernel_size = 2, .stride = 2}},
                        nn::ReLU{},
                        nn::GroupNorm{1, 3}};
}

TEST(Autocast, GradientsAreF32AndCloseToF32Training) {
  manual_seed(1);
  const nn::Sequential model = small_model();
  const Tensor x = randn({2, 2, 6, 5, 4}), target = randn({2, 3, 12, 10, 8});
  const auto gradients = [&](std::optional<DType> low) {
    model.zero_grad();
    const autocast guard(low.value_or(f32), low.has_value());
    mse_loss(model(x), target).backward();  // the guard does not affect backward passes
    Tensors grads;
    for (const Tensor& p : model.parameters()) grads.push_back(p.grad().clone());
    return grads;
  };
  const Tensors exact = gradients(std::nullopt);
  for (const DType dtype : {bf16, f16}) {
    const Tensors grads = gradients(dtype);
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_EQ(grads[i].dtype(), f32);
      const double bound = (dtype == bf16 ? 0.1 : 0.0125) * amax(abs(exact[i])).item() + 1e-4;
      EXPECT_LE(amax(abs(grads[i] - exact[i])).item(), bound) << dtype << ' ' << i;
      // The gradient of a bias before an instance norm is 0.
      const bool any = amax(abs(exact[i])).item() > 0;
      EXPECT_EQ(amax(abs(grads[i] - exact[i])).item() > 0, any) << "no operation ran in " << dtype << ", " << i;
    }
  }
}

TEST(Autocast, LeavesF64Unchanged) {
  manual_seed(2);
  nn::Sequential model = small_model();
  model.to(f64);
  const autocast guard(bf16);
  EXPECT_TRUE(gradcheck([&](const Tensors& t) { return Tensors{model(t[0])}; },
                        {randn({1, 2, 3, 2, 2}, {.dtype = f64, .requires_grad = true})}));
}

// The model is f16 and autocast is bf16. The gradient of the bias is converted through f32.
TEST(Autocast, F16ModelsUnderBf16ApproximateF32Gradients) {
  manual_seed(4);
  for (const bool norm : {false, true}) {
    nn::Sequential model{nn::Conv3d{2, 8, 3}};
    if (norm) model.push_back(nn::GroupNorm{2, 8, {.affine = false}});
    if (!norm) model.push_back(nn::ReLU{});
    const Tensor x = randn({2, 2, 5, 5, 5});
    const auto bias_gradient = [&](bool low) {
      model.zero_grad();
      const autocast guard(bf16, low);
      const Tensor y = model(low ? x : x.to(model.parameters()[0].dtype()));
      sum(y.to(f32) * sin(y.to(f32))).backward();
      return model.parameters()[1].grad().to(f32);
    };
    const Tensor exact = bias_gradient(false);
    model.to(f16);
    const Tensor got = bias_gradient(true);
    EXPECT_EQ(model.parameters()[1].grad().dtype(), f16);
    EXPECT_LE(amax(abs(got - exact)).item(), 0.1 * amax(abs(exact)).item() + 0.5) << norm;
  }
}

/// Returns the converted copy of w that autocast caches.
Tensor converted(const Tensor& w) { return w.body()->autograd->converted.values; }

TEST(Autocast, ConvertsAParameterOnceUntilItChanges) {
  const Tensor x = rand({1, 2, 3, 3, 3});
  const Tensor w = rand({2, 2, 1, 1, 1}, {.requires_grad = true});
  {
    const autocast guard(bf16);
    const Tensor y = conv3d(conv3d(x, w), w);
    const Tensor kept = converted(w);
    ASSERT_EQ(kept.dtype(), bf16);
    EXPECT_EQ(kept.to_vector(), w.detach().to(bf16).to_vector());
    {
      NoGradGuard no_grad;
      conv3d(x, w);
    }
    EXPECT_TRUE(converted(w).is_same(kept));
    sum(y).backward();  // accumulates the gradients of both uses
    optim::SGD(Tensors{w}, {.lr = 0.5}).step();
    const Tensor after = conv3d(x, w);
    EXPECT_FALSE(converted(w).is_same(kept));
    EXPECT_EQ(after.to_vector(), conv3d(x.to(bf16), w.detach().to(bf16)).to_vector());
    const autocast other(f16);
    EXPECT_EQ(conv3d(x, w).dtype(), f16);
    EXPECT_EQ(conv3d(x, w).to_vector(), conv3d(x.to(f16), w.detach().to(f16)).to_vector());
  }
  EXPECT_EQ(conv3d(x, w).dtype(), f32);
}

TEST(Autocast, ConvertsAgainAfterAModuleConversion) {
  nn::Conv3d conv{{.in_channels = 2, .out_channels = 2, .kernel_size = 1}};
  const Tensor x = rand({1, 2, 3, 3, 3});
  const autocast guard(bf16);
  NoGradGuard no_grad;
  const Tensor before = conv(x);
  conv.to(f64);
  conv.weight.fill_(1);
  conv.to(f32);
  EXPECT_NE(conv(x).to_vector(), before.to_vector());
}

void expect_bits_after_resuming(Device device) {
  const Tensor x = rand({2, 2, 4, 4, 4}, {.device = device}), target = rand({2, 3, 8, 8, 8}, {.device = device});
  nn::Sequential model = small_model(), copy = small_model();
  for (nn::Sequential* m : {&model, &copy}) m->to(device);
  optim::SGD optimizer(model.parameters(), {.lr = 0.1, .momentum = 0.9});
  optim::SGD resumed(copy.parameters(), {.lr = 0.1, .momentum = 0.9});
  const auto step = [&](const nn::Sequential& m, optim::Optimizer& o) {
    const autocast guard(bf16);
    m.zero_grad();
    mse_loss(m(x), target).backward();
    o.step();
  };
  for (int i = 0; i < 3; ++i) step(model, optimizer);
  copy.load_state_dict(model.state_dict());
  resumed.load_state_dict(optimizer.state_dict());
  for (int i = 0; i < 3; ++i) {
    step(model, optimizer);
    step(copy, resumed);
  }
  for (size_t i = 0; i < model.parameters().size(); ++i)
    EXPECT_EQ(model.parameters()[i].to_vector(), copy.parameters()[i].to_vector()) << i;
}

TEST(Autocast, ResumesBitwise) { expect_bits_after_resuming(Device::cpu()); }
TEST(Autocast, ResumesBitwiseOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_bits_after_resuming(Device::cuda());
}

// A replayed graph changes the parameters. Autocast outside of the graph must then convert the parameters again.
TEST(Autocast, ConvertsAgainAfterAGraphReplay) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  const TensorOptions options{f32, Device::cuda()};
  const Tensor x = rand({1, 2, 4, 4, 4}, options), target = rand({1, 3, 8, 8, 8}, options);
  nn::Sequential model = small_model(), eager = small_model();
  for (nn::Sequential* m : {&model, &eager}) m->to(Device::cuda());
  eager.load_state_dict(model.state_dict());
  optim::SGD optimizer(model.parameters(), {.lr = 0.1}), other(eager.parameters(), {.lr = 0.1});
  const auto step = [&](const nn::Sequential& m, optim::Optimizer& o) {
    const autocast guard(bf16);
    m.zero_grad();
    mse_loss(m(x), target).backward();
    o.step();
  };
  const auto evaluate = [&](const nn::Sequential& m) {
    const autocast guard(bf16);
    NoGradGuard no_grad;
    return m(x).to_vector();
  };
  for (int i = 0; i < 2; ++i) {
    step(model, optimizer);
    step(eager, other);
  }
  cuda::CUDAGraph graph;
  graph.capture([&] { step(model, optimizer); });
  for (int i = 0; i < 3; ++i) {
    graph.replay();
    step(eager, other);
    EXPECT_EQ(evaluate(model), evaluate(eager)) << i;
  }
}

}  // namespace
}  // namespace voxgrad
