// Tests of nn::recompute: gradients are bitwise equal to those of an ordinary call, and the graph keeps less memory.
#include "nn/recompute.h"

#include <map>
#include <thread>

#include "core/autocast.h"
#include "core/profiler.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/fused.h"
#include "ops/gradcheck.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

nn::Sequential block() {
  return nn::Sequential{
      nn::Conv3d{{.in_channels = 3, .out_channels = 8, .kernel_size = 3, .padding = 1}},
      nn::InstanceNorm3d{8, {.affine = true}},
      nn::LeakyReLU{0.01},
      nn::Dropout{0.3},
      nn::MaxPool3d{{.kernel_size = 2}},
      nn::ConvTranspose3d{{.in_channels = 8, .out_channels = 3, .kernel_size = 2, .stride = 2}},
      nn::Sigmoid{},
      nn::GELU{},
  };
}

/// Runs a forward and a backward pass. Returns the result, the gradients of the input and the parameters, and random
/// numbers drawn after each pass.
std::vector<std::vector<double>> results(const nn::Sequential& model, const std::function<Tensor(const Tensor&)>& run,
                                         const Tensor& input) {
  manual_seed(7);
  model.zero_grad();
  const Tensor x = input.detach().requires_grad_();
  const Tensor y = run(x);
  const std::vector<double> drawn = rand({3}).to_vector();  // shows the generator's state after the forward pass
  sum(y * sin(y)).backward();
  std::vector<std::vector<double>> all{y.to_vector(), drawn, x.grad().to_vector(), rand({3}).to_vector()};
  for (const Tensor& p : model.parameters()) all.push_back(p.grad().to_vector());
  return all;
}

void expect_same_bits(Device device) {
  nn::Sequential model = block();
  model.to(device);
  const Tensor x = randn({2, 3, 4, 6, 4}, {f32, device});
  const auto plain = [&](const Tensor& t) { return model(t); };
  const auto whole = [&](const Tensor& t) { return nn::recompute(model, t); };
  const auto nested = [&](const Tensor& t) {
    return nn::recompute([&](const Tensor& u) { return nn::recompute(model, u * 1.5) * 2.0; }, t);
  };
  const auto nested_plain = [&](const Tensor& t) { return model(t * 1.5) * 2.0; };
  for (const bool low : {false, true}) {
    const autocast guard(bf16, low);
    EXPECT_EQ(results(model, whole, x), results(model, plain, x)) << low;
    EXPECT_EQ(results(model, nested, x), results(model, nested_plain, x)) << low;
  }
}

TEST(Recompute, MatchesAnOrdinaryCallBitwise) { expect_same_bits(Device::cpu()); }
TEST(Recompute, MatchesAnOrdinaryCallBitwiseOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_same_bits(Device::cuda());
}

TEST(Recompute, BackwardUsesTheAutocastStateOfTheForwardPass) {
  const nn::Sequential model = block();
  const Tensor x = randn({1, 3, 2, 2, 2}).requires_grad_();
  const auto gradient = [&](bool recompute) {
    manual_seed(1);
    Tensor y;
    {
      const autocast guard(f16);
      y = recompute ? nn::recompute(model, x) : model(x);
    }
    return grad({sum(y)}, {x})[0].to_vector();
  };
  EXPECT_EQ(gradient(true), gradient(false));
}

TEST(Recompute, PassesGradcheckAndGradgradcheck) {
  const Tensor x = randn({2, 3}, {.dtype = f64, .requires_grad = true});
  const Tensor w = randn({3}, {.dtype = f64, .requires_grad = true});
  const auto function = [](const Tensors& t) {
    return Tensors{nn::recompute([w = t[1]](const Tensor& u) { return sigmoid(exp(u * 0.5) * w * w); }, t[0] * t[0])};
  };
  EXPECT_TRUE(gradcheck(function, {x, w}));
  EXPECT_TRUE(gradgradcheck(function, {x, w}));
}

TEST(Recompute, KeepsNoIntermediateTensors) {
  const nn::Sequential model = block();
  const Tensor x = randn({2, 3, 16, 16, 16}).requires_grad_();
  const auto kept = [&](bool recompute) {
    const int64_t before = memory::stats(Device::cpu()).current;
    const Tensor y = recompute ? nn::recompute(model, x) : model(x);
    return memory::stats(Device::cpu()).current - before;
  };
  EXPECT_GT(kept(false), 6 * x.numel() * 4);
  EXPECT_LE(kept(true), x.numel() * 4 + 4096);  // only the result
}

TEST(Recompute, CallsTheFunctionOnceMoreInBackward) {
  int calls = 0;
  const Tensor x = rand({3}).requires_grad_();
  const Tensor y = nn::recompute(
      [&](const Tensor& t) {
        ++calls;
        return exp(t) * sin(t);
      },
      x);
  EXPECT_EQ(calls, 1);
  sum(y).backward({}, true);
  EXPECT_EQ(calls, 2);
  sum(y).backward();
  EXPECT_EQ(calls, 2);  // the second pass uses the tensors that the first pass recomputed
  NoGradGuard no_grad;
  nn::recompute([&](const Tensor& t) { return ++calls, t; }, x);
  EXPECT_EQ(calls, 3);
}

TEST(Recompute, DoesNotRepeatAConvolutionAtTheEnd) {
  const nn::Sequential model{nn::GELU{}, nn::Conv3d{2, 64, 3}};
  const Tensor x = rand({1, 2, 6, 6, 6}).requires_grad_();
  profiler::Session profile;
  sum(nn::recompute(model, x)).backward();
  profile.stop();
  std::map<std::string, int64_t> calls;
  for (const profiler::Row& row : profile.rows()) calls[row.name] += row.calls;
  EXPECT_EQ(calls["conv_forward"], 1) << profile.table();
  EXPECT_EQ(calls["gelu"], 2) << profile.table();
}

TEST(Recompute, InvertedBottleneckKeepsNoResultOfGelu) {
  const Tensor x = rand({1, 4, 8, 8, 8}), w1 = rand({16, 4, 1, 1, 1}).requires_grad_(), b1 = rand({16}),
               w2 = rand({4, 16, 1, 1, 1}).requires_grad_(), b2 = rand({4});
  const int64_t before = memory::stats(Device::cpu()).current;
  const Tensor y = inverted_bottleneck(x, w1, b1, w2, b2);
  EXPECT_LE(memory::stats(Device::cpu()).current - before, 5 * x.numel() * 4 + 4096);  // y and the hidden tensor
}

TEST(Recompute, RejectsFunctionsThatCannotBeRecomputed) {
  EXPECT_ERROR(nn::recompute(std::function<Tensor(const Tensor&)>(), rand({3})), "recompute: the function is empty");
  const Tensor leaf = rand({3}).requires_grad_();
  const Tensor x = leaf * 2.0;
  const Tensor y = nn::recompute([](const Tensor& t) { return exp(t); }, x);
  x.detach().fill_(1);
  EXPECT_ERROR(sum(y).backward(), "was written to in place");
  EXPECT_ERROR(nn::recompute([](const Tensor& t) { return grad({sum(exp(t))}, {t}, {}, true, true)[0]; }, leaf),
               "recompute: a recomputed function cannot compute gradients of its own results");
}

TEST(Recompute, RejectsASecondCallThatDiffers) {
  const Tensor leaf = rand({3}).requires_grad_();
  int calls = 0;
  const Tensor y = nn::recompute([&](const Tensor& t) { return calls++ ? t * 1.0 : exp(t); }, leaf);
  EXPECT_ERROR(sum(y).backward({}, true),
               "recompute: the number of tensors that the function's operations saved is 1 in the first call");
  EXPECT_ERROR(sum(y).backward(),
               "recompute: the number of tensors that the function's operations saved is 1 in the first call");
  int64_t length = 2;
  const Tensor z = nn::recompute([&](const Tensor& t) { return sin(narrow(t, 0, 0, length)); }, leaf);
  length = 3;
  EXPECT_ERROR(sum(z).backward({}, true), "saved a tensor [2] f32 on cpu with strides [1] in the first call");
  length = 2;
  sum(z).backward();
  const auto overwrites = [](const Tensor& t) {
    const Tensor h = t * 2.0, product = h * h;
    h.detach().zero_();
    return exp(product);
  };
  EXPECT_ERROR(sum(nn::recompute(overwrites, leaf)).backward(), "was written to in place");
}

TEST(Recompute, UpdatesRunningStatisticsOnce) {
  nn::Sequential model{nn::Conv3d{1, 4, 1}, nn::BatchNorm3d{4}, nn::ReLU{},
                       nn::SpectralNorm<nn::Conv3d>{nn::Conv3d{4, 2, 1}}};
  const Tensor x = randn({2, 1, 3, 3, 3}).requires_grad_();
  const TensorMap start = [&] {
    TensorMap copy;
    for (const auto& [name, tensor] : model.state_dict()) copy[name] = tensor.clone();
    return copy;
  }();
  const auto run = [&](const std::function<Tensor(const Tensor&)>& forward) {
    model.load_state_dict(start);
    model.zero_grad();
    sum(sin(forward(x))).backward();
    std::map<std::string, std::vector<double>> all;
    for (const auto& [name, tensor] : model.state_dict()) all[name] = tensor.to_vector();
    for (const auto& [name, tensor] : model.named_parameters()) all["d" + name] = tensor.grad().to_vector();
    return all;
  };
  const auto plain = run([&](const Tensor& t) { return model(t); });
  const auto recomputed = [&](const Tensor& t) { return nn::recompute(model, t); };
  EXPECT_EQ(run(recomputed), plain);
  EXPECT_EQ(run([&](const Tensor& t) { return nn::recompute(recomputed, t); }), plain);  // nested
}

TEST(Recompute, TwoThreadsGetEqualGradientsFromOneGraph) {
  const nn::Sequential model = block();
  const Tensor x = randn({1, 3, 4, 4, 4}).requires_grad_();
  const Tensor y = sum(nn::recompute(model, x));
  std::vector<double> results[2];
  const auto run = [&](int i) { results[i] = grad({y}, {x}, {}, true)[0].to_vector(); };
  std::thread first(run, 0), second(run, 1);
  first.join();
  second.join();
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace voxgrad
