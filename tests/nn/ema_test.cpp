// Tests of ExponentialMovingAverage: values, swapping, state and captured updates.
#include "nn/optim/ema.h"

#include <algorithm>
#include <cmath>

#include "core/capture.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using optim::ExponentialMovingAverage;

struct Model : nn::Module {
  Tensor weight = zeros({3, 2}, {.requires_grad = true}), shared = weight;
  nn::Linear linear{2, 3};
  nn::Buffer count{zeros({}, {.dtype = i64})};
  VG_MODULE(weight, shared, linear, count)
};

void set(Model& model, double value) {
  for (const Tensor& parameter : model.parameters()) parameter.detach().fill_(value);
  model.count.fill_(value);
}

TEST(ExponentialMovingAverage, AveragesParametersAndCopiesBuffers) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16, f16})
      for (const double warmup : {0.0, 10.0}) {
        Model model;
        model.to(device);
        model.to(dtype);
        set(model, 1);
        ExponentialMovingAverage ema(model, {.decay = 0.75, .warmup = warmup});
        double expected = 1;
        for (int n = 0; n < 30; ++n) {
          set(model, n);
          ema.update();
          const double decay = warmup == 0 ? 0.75 : std::min(0.75, (1.0 + n) / (10 + n));
          expected = decay * expected + (1 - decay) * n;
        }
        EXPECT_EQ(ema.updates(), 30);
        EXPECT_EQ(ema.values().at("weight").dtype(), dtype == f64 ? f64 : f32);
        for (const char* name : {"weight", "shared", "linear.weight", "linear.bias"})
          for (const double value : ema.values().at(name).to_vector()) EXPECT_NEAR(value, expected, 1e-4) << name;
        EXPECT_EQ(ema.values().at("count").item(), 29);
        Model other;
        ema.apply_to(other);
        EXPECT_NEAR(other.linear.bias.at({2}), expected, 1e-4);
        EXPECT_EQ(other.count.item(), 29);
      }
}

TEST(ExponentialMovingAverage, SwapExchangesValuesUntilItsGuardEnds) {
  Model model;
  set(model, 2);
  ExponentialMovingAverage ema(model);
  set(model, 5);
  {
    const auto swapped = ema.swap();
    EXPECT_EQ(model.weight.at({0, 0}), 2);
    EXPECT_EQ(model.count.item(), 2);
  }
  EXPECT_EQ(model.weight.at({0, 0}), 5);
  EXPECT_EQ(model.linear.bias.at({0}), 5);
  EXPECT_EQ(model.count.item(), 5);
  EXPECT_EQ(ema.values().at("weight").at({0, 0}), 2);
}

TEST(ExponentialMovingAverage, SwapsMayBeNested) {
  Model model;
  set(model, 2);
  const ExponentialMovingAverage first(model);
  set(model, 3);
  const ExponentialMovingAverage second(model);
  set(model, 5);
  {
    const auto outer = first.swap();
    {
      const auto inner = second.swap();
      EXPECT_EQ(model.weight.at({0, 0}), 3);
    }
    EXPECT_EQ(model.weight.at({0, 0}), 2);
  }
  EXPECT_EQ(model.weight.at({0, 0}), 5);
  EXPECT_EQ(model.count.item(), 5);
}

TEST(ExponentialMovingAverage, ResumesFromASavedState) {
  Model model, other;
  ExponentialMovingAverage ema(model, {.decay = 0.5, .warmup = 3}), loaded(other);
  set(model, 3);
  ema.update();
  loaded.load_state_dict(ema.state_dict());
  EXPECT_EQ(loaded.updates(), 1);
  set(other, 7);
  set(model, 7);
  ema.update();
  loaded.update();
  for (const auto& [name, value] : ema.values()) EXPECT_EQ(loaded.values().at(name).to_vector(), value.to_vector());
  const auto expect_rejected = [&](const std::string& name, const Tensor& value, const char* message) {
    TensorMap bad = ema.state_dict();
    bad[name] = value;
    EXPECT_ERROR(loaded.load_state_dict(bad), message);
  };
  expect_rejected("values.weight", ones({2}), "values.weight is [2] f32 on cpu, expected [3, 2] f32 on cpu");
  expect_rejected("more", ones({2}), "the state must have 9 entries, 5 of which begin with \"values.\", got 10 and 5");
  expect_rejected("decay", full({}, 2, {.dtype = f64}), "decay must lie in [0, 1], got 2");
  expect_rejected("warmup", full({}, 0.5, {.dtype = f64}), "warmup must be 0 or at least 1, got 0.5");
  expect_rejected("updates", full({}, -1, {.dtype = i64}), "updates must lie in [0, 2^62], got -1");
  EXPECT_ERROR(ExponentialMovingAverage(model, {.decay = -1}), "decay must lie in [0, 1], got -1");
  EXPECT_ERROR(ExponentialMovingAverage(model, {.warmup = 0.5}), "warmup must be 0 or at least 1, got 0.5");
}

TEST(ExponentialMovingAverage, CapturedUpdatesMatchEagerUpdatesOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  Model eager, captured;
  for (Model* model : {&eager, &captured}) model->to(Device::cuda());
  for (Model* model : {&eager, &captured}) set(*model, 1);
  ExponentialMovingAverage a(eager, {.warmup = 10}), b(captured, {.warmup = 10});
  cuda::CUDAGraph graph;
  graph.capture([&] { b.update(); });
  for (int n = 0; n < 5; ++n) {
    for (Model* model : {&eager, &captured}) set(*model, n * 3);
    a.update();
    graph.replay();
    for (const auto& [name, value] : a.values()) EXPECT_EQ(b.values().at(name).to_vector(), value.to_vector()) << n;
  }
  EXPECT_EQ(b.updates(), 5);
}

}  // namespace
}  // namespace voxgrad
