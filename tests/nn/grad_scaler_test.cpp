// Tests of GradScaler: steps with infinite gradients against PyTorch (see optim_reference.py), errors and state.
#include "nn/optim/grad_scaler.h"

#include <cmath>
#include <functional>
#include <map>

#include "nn/optim/clip.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

#include "tests/nn/optim_reference.inc"

using namespace optim;

constexpr int kSteps = 50;
const std::vector<double> kStart{0.5, -1.25, 2.0, 0.0, -0.75};

/// Returns the gradients of one step, computed as in run_scaler() of optim_reference.py.
Tensor weight(int step, Device device) {
  std::vector<double> values = kStart;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto place = static_cast<double>(i);
    values[i] = (place + 1) * 0.5 * values[i] + std::sin(1.7 * step + place) * 3 / (step + 1);
  }
  if (step % 9 == 0 || step == 31) values[static_cast<size_t>(step % 5)] = step % 2 ? INFINITY : std::nan("");
  return from_span<double>(values, {5}).to(device, f32);
}

struct Case {
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> make;
  bool clips;
};
template <class O, class Options>
auto make(Options options) {
  return [=](const Tensors& params) { return std::make_unique<O>(params, options); };
}
const std::map<std::string, Case> kCases{
    {"adam", {make<Adam>(AdamOptions{.lr = 0.05}), false}},
    {"adam_clips", {make<Adam>(AdamOptions{.lr = 0.05}), true}},
    {"sgd", {make<SGD>(SgdOptions{.lr = 0.02, .momentum = 0.9, .dampening = 0.5}), false}},
    {"adagrad", {make<Adagrad>(AdagradOptions{.lr = 0.1, .lr_decay = 0.1}), true}},
};

/// Takes one training step with the loss sum(p * w).
void train(GradScaler& scaler, Optimizer& optimizer, const Tensor& p, const Tensor& w, bool clips) {
  optimizer.zero_grad();
  scaler.scale(sum(p * w)).backward();
  if (clips) {
    scaler.unscale_(optimizer);
    clip_grad_norm_({p}, 0.5);
  }
  scaler.step(optimizer);
  scaler.update();
}

void expect_reference(const std::string& name, const Tensor& p) {
  const std::vector<double>& reference = kScalerReference.at(name);
  const std::vector<double> values = p.to_vector();
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], reference[kSteps + i], 2e-5) << name << ' ' << i;
}

TEST(GradScaler, AgreesWithPyTorch) {
  for (const Device device : devices())
    for (const auto& [name, test] : kCases) {
      const Tensor p = from_span<double>(kStart, {5}).to(device, f32).requires_grad_();
      const auto optimizer = test.make({p});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 6});
      for (int step = 0; step < kSteps; ++step) {
        train(scaler, *optimizer, p, weight(step, device), test.clips);
        EXPECT_EQ(scaler.get_scale(), kScalerReference.at(name)[static_cast<size_t>(step)]) << name << ' ' << step;
      }
      expect_reference(name, p);
      EXPECT_EQ(optimizer->state_dict().at("state.0.step").item(), kSteps - 7);  // seven steps were skipped
    }
}

TEST(GradScaler, CapturedStepsAgreeWithPyTorchOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  const Device device = Device::cuda();
  for (const auto& [name, test] : kCases) {
    const Tensor p = from_span<double>(kStart, {5}).to(device, f32).requires_grad_(), w = weight(0, device);
    const auto optimizer = test.make({p});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 6});
    train(scaler, *optimizer, p, w, test.clips);
    cuda::CUDAGraph graph;
    graph.capture([&, clips = test.clips] { train(scaler, *optimizer, p, w, clips); });
    for (int step = 1; step < kSteps; ++step) {
      w.copy_(weight(step, device));
      graph.replay();
      EXPECT_EQ(scaler.get_scale(), kScalerReference.at(name)[static_cast<size_t>(step)]) << name << ' ' << step;
    }
    expect_reference(name, p);
    EXPECT_EQ(optimizer->state_dict().at("state.0.step").item(), kSteps - 7);
  }
}

TEST(GradScaler, FindsOneInfiniteElementInAnyDtype) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16, f16})
      for (const int64_t place : {-1, 0, 8191, 8192, 30000}) {
        Tensors grads;
        for (const int64_t size : {0, 5, 30001}) grads.push_back(full({size}, 3, {.dtype = dtype, .device = device}));
        grads.push_back(full({3, 2}, 3, grads[0].options()).transpose(0, 1));
        if (place >= 0) grads[2].set({place}, -INFINITY);
        const Tensor found = zeros({}, {.dtype = i64, .device = device});
        const Tensor scale = full({}, 4, {.dtype = f32, .device = device});
        unscale_gradients(grads, found, full({}, 1, {.dtype = f32, .device = device}), false);
        EXPECT_EQ(found.item(), place >= 0) << dtype << ' ' << place;
        EXPECT_EQ(grads[1].at({4}), 3);
        unscale_gradients(grads, found, scale);
        EXPECT_EQ(grads[3].to_vector(), std::vector<double>(6, 0.75));
        EXPECT_EQ(grads[2].at({1}), 0.75);
      }
}

TEST(GradScaler, CountsStepsPerParameter) {
  const Tensor a = ones({2}, {.requires_grad = true}), b = ones({2}, {.requires_grad = true});
  Adam both({a, b}, 0.1);
  GradScaler scaler;
  const auto step = [&](const Tensors& params, double grad) {
    both.zero_grad();
    for (const Tensor& param : params) param.set_grad(full({2}, grad));
    scaler.scale(a);
    scaler.step(both);
    scaler.update();
  };
  step({a, b}, 1e5);
  step({a}, INFINITY);
  step({b}, 1e5);
  EXPECT_EQ(both.state_dict().at("state.0.step").item(), 1);
  EXPECT_EQ(both.state_dict().at("state.1.step").item(), 2);
}

TEST(GradScaler, CountsStepsOfParametersThatJoinLater) {
  for (const Device device : devices()) {
    const auto parameter = [&] { return full({2}, 1, {.device = device}).requires_grad_(); };
    const Tensor a = parameter(), b = parameter(), alone = parameter();
    Adam both({a, b}, 0.1), single({alone}, 0.1);
    GradScaler scaler;
    const auto step = [&](const Tensors& params, double grad) {
      both.zero_grad();
      for (const Tensor& param : params) param.set_grad(full({2}, grad, a.options()));
      scaler.scale(a);
      scaler.step(both);
      scaler.update();
    };
    step({a}, INFINITY);
    step({a}, 1e5);
    step({b}, 1e5);
    step({a, b}, INFINITY);
    step({a, b}, 2e5);  // the second step that is not skipped, for both a and b
    both.zero_grad();
    b.set_grad(full({2}, 1, a.options()));
    both.step();  // does not use the scaler
    EXPECT_EQ(both.state_dict().at("state.0.step").item(), 2);
    EXPECT_EQ(both.state_dict().at("state.1.step").item(), 3);
    // Each of the two infinite gradients halved the scale.
    for (const double grad : {1e5 / 32768, 2e5 / 16384, 1.0}) {
      alone.set_grad(full({2}, grad, a.options()));
      single.step();
    }
    for (int i = 0; i < 2; ++i) EXPECT_NEAR(b.at({i}), alone.at({i}), 1e-6);
  }
}

TEST(GradScaler, ResumesFromASavedState) {
  const Tensor p = from_span<double>(kStart, {5}).to(f32).requires_grad_();
  Adam adam({p}, {.lr = 0.05});
  auto scaler = std::make_unique<GradScaler>(GradScalerOptions{.init_scale = 1024, .growth_interval = 6});
  for (int step = 0; step < kSteps; ++step) {
    if (step % 7 == 3) {
      const TensorMap state = scaler->state_dict(), optimizer = adam.state_dict();
      scaler = std::make_unique<GradScaler>();
      scaler->load_state_dict(state);
      adam.load_state_dict(optimizer);
    }
    train(*scaler, adam, p, weight(step, Device::cpu()), false);
  }
  expect_reference("adam", p);
  EXPECT_EQ(scaler->get_scale(), kScalerReference.at("adam")[kSteps - 1]);
  TensorMap bad = scaler->state_dict();
  bad.erase("scale");
  EXPECT_ERROR(scaler->load_state_dict(bad), "GradScaler: the state has no scale");
}

TEST(GradScaler, RejectsStatesWithInvalidNumbers) {
  GradScaler scaler;
  const auto expect_rejected = [&](const char* name, double value, DType dtype, const char* message) {
    TensorMap bad = scaler.state_dict();
    bad[name] = full({}, value, {.dtype = dtype});
    EXPECT_ERROR(scaler.load_state_dict(bad), message);
    EXPECT_ERROR(scaler.check_state_dict(bad), message);
    EXPECT_EQ(scaler.get_scale(), 65536);
  };
  expect_rejected("scale", std::nan(""), f64, "GradScaler: scale must not be NaN");
  expect_rejected("scale", 0, f64, "GradScaler: the scale must lie in [2^-126, 2^126], got 0");
  expect_rejected("growth_factor", 0.5, f64, "GradScaler: growth_factor must be above 1, got 0.5");
  expect_rejected("backoff_factor", -1, f64, "GradScaler: backoff_factor must lie in (0, 1), got -1");
  expect_rejected("growth_interval", 0, i64, "GradScaler: growth_interval must be positive, got 0");
  expect_rejected("growth_tracker", -1, i64, "GradScaler: growth_tracker must lie in [0, 2^62], got -1");
  expect_rejected("growth_tracker", 2000, i64,
                  "GradScaler: growth_tracker must be below growth_interval 2000, got 2000");
}

TEST(GradScaler, RejectsCallsInTheWrongOrder) {
  const Tensor p = ones({2}, {.requires_grad = true}), half = ones({2}, {.dtype = f16, .requires_grad = true});
  SGD sgd({p}, 0.5), halves({half}, 0.5);
  GradScaler scaler;
  const char* const no_loss = "GradScaler: no loss was scaled yet: call scale(loss).backward() before unscale_()";
  EXPECT_ERROR(scaler.step(sgd), no_loss);
  EXPECT_ERROR(scaler.unscale_(sgd), no_loss);
  EXPECT_EQ(scaler.scale(sum(p)).item(), 131072);
  EXPECT_ERROR(scaler.step(sgd), "GradScaler: the optimizer has no gradients to check");
  EXPECT_ERROR(scaler.update(), "GradScaler: call step() or unscale_() before update()");
  p.set_grad(full({2}, 65536));
  half.set_grad(full({2}, 32768, half.options()));
  scaler.unscale_(sgd);
  EXPECT_EQ(p.grad().to_vector(), (std::vector<double>{1, 1}));
  EXPECT_ERROR(scaler.unscale_(sgd), "unscale_() was already called on this optimizer since the last update()");
  scaler.step(sgd);
  EXPECT_EQ(p.to_vector(), (std::vector<double>{0.5, 0.5}));
  EXPECT_ERROR(scaler.unscale_(sgd), "unscale_() must be called before step()");
  EXPECT_ERROR(scaler.step(sgd), "step() was already called on this optimizer since the last update()");
  EXPECT_ERROR(scaler.unscale_(halves), "unscale_() rejects f16 gradients");
  scaler.step(halves);
  EXPECT_EQ(half.to_vector(), (std::vector<double>{0.75, 0.75}));
  scaler.update(16);
  EXPECT_EQ(scaler.get_scale(), 16);
  for (const double scale : {0.0, 1e-40, 1e39, 1e300}) {
    EXPECT_ERROR(scaler.update(scale), "the scale must lie in [2^-126, 2^126], got ");
    EXPECT_ERROR(GradScaler({.init_scale = scale}), "the scale must lie in [2^-126, 2^126], got ");
  }
  EXPECT_ERROR(GradScaler({.growth_factor = 1}), "growth_factor must be above 1");
  EXPECT_ERROR(GradScaler({.backoff_factor = 1}), "backoff_factor must lie in (0, 1), got 1");
  EXPECT_ERROR(GradScaler({.growth_interval = 0}), "growth_interval must be positive, got 0");
}

TEST(GradScaler, RejectsMissingLossesAndOtherDevices) {
  for (const Device device : devices()) {
    const Tensor p = ones({2}, {.device = device, .requires_grad = true});
    SGD sgd({p}, 0.5);
    p.set_grad(ones({2}, {.device = device}));
    GradScaler scaler;
    EXPECT_ERROR(scaler.unscale_(sgd), "GradScaler: no loss was scaled yet");
    EXPECT_ERROR(scaler.step(sgd), "GradScaler: no loss was scaled yet");
    if (device.is_cpu()) continue;
    scaler.scale(ones({}));
    EXPECT_ERROR(
        scaler.unscale_(sgd),
        "GradScaler: losses and gradients must be on one device: the losses are on cpu, a gradient is [2] f32 on cuda");
    EXPECT_ERROR(scaler.scale(sum(p)),
                 "GradScaler: all losses must be on one device: the first loss was on cpu, this loss is ");
  }
}

TEST(GradScaler, ScaleStaysWithinItsBounds) {
  for (const Device device : devices()) {
    const Tensor p = full({2}, 4, {.device = device}).requires_grad_();
    SGD sgd({p}, 0.5);
    GradScaler scaler({.growth_interval = 1});
    const auto step = [&](double grad) {
      scaler.scale(sum(p));
      p.set_grad(full({2}, grad, p.options()));
      scaler.step(sgd);
      scaler.update();
    };
    for (int i = 0; i < 200; ++i) step(INFINITY);
    EXPECT_EQ(scaler.get_scale(), GradScaler::kMinScale);
    EXPECT_EQ(p.to_vector(), (std::vector<double>{4, 4}));
    step(1);  // the unscaled gradient is 2^126, which fits float32
    EXPECT_EQ(p.to_vector(), (std::vector<double>{4 - 0x1p125, 4 - 0x1p125}));
    p.detach().fill_(4);
    scaler.update(GradScaler::kMinScale);
    step(100);  // the gradient is finite, but the unscaled gradient overflows, so the step is skipped
    EXPECT_EQ(p.to_vector(), (std::vector<double>{4, 4}));
    scaler.update(GradScaler::kMaxScale);
    step(1);
    EXPECT_EQ(scaler.get_scale(), GradScaler::kMaxScale);
    EXPECT_EQ(p.to_vector(), (std::vector<double>{4, 4}));
    scaler.load_state_dict(scaler.state_dict());
  }
}

TEST(GradScaler, DoesNothingIfDisabled) {
  const Tensor p = ones({2}, {.requires_grad = true});
  SGD sgd({p}, 0.5);
  GradScaler scaler({.enabled = false});
  EXPECT_TRUE(scaler.scale(p).is_same(p));
  p.set_grad(ones({2}));
  scaler.unscale_(sgd);
  scaler.step(sgd);
  scaler.update();
  EXPECT_EQ(p.to_vector(), (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(scaler.get_scale(), 1);
  scaler.load_state_dict(GradScaler().state_dict());
  EXPECT_EQ(scaler.state_dict().size(), 1u);
}

}  // namespace
}  // namespace voxgrad
