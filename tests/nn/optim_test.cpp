// Tests of optimizers against PyTorch (see optim_reference.py), of their state and options, and of gradient clipping.
#include <cmath>
#include <functional>
#include <map>

#include "core/autograd.h"
#include "nn/optim/clip.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/optim.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

#include "tests/nn/optim_reference.inc"

using optim::Adagrad;
using optim::Adam;
using optim::AdamW;
using optim::Lion;
using optim::Optimizer;
using optim::RMSprop;
using optim::SGD;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const Tensors&)>;

template <class O, class Options>
MakeOptimizer make(Options options) {
  return [=](const Tensors& params) { return std::make_unique<O>(params, options); };
}

const std::map<std::string, MakeOptimizer>& optimizers() {
  using namespace optim;
  static const std::map<std::string, MakeOptimizer> table{
      {"sgd", make<SGD>(SgdOptions{.lr = 0.1})},
      {"sgd_decay", make<SGD>(SgdOptions{.lr = 0.1, .weight_decay = 0.05})},
      {"sgd_momentum", make<SGD>(SgdOptions{.lr = 0.05, .momentum = 0.9})},
      {"sgd_dampening", make<SGD>(SgdOptions{.lr = 0.05, .momentum = 0.8, .dampening = 0.3, .weight_decay = 0.02})},
      {"sgd_nesterov", make<SGD>(SgdOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true})},
      {"sgd_maximize", make<SGD>(SgdOptions{.lr = 0.01, .momentum = 0.5, .weight_decay = 0.1, .maximize = true})},
      {"adam", make<Adam>(AdamOptions{.lr = 0.05})},
      {"adam_betas", make<Adam>(AdamOptions{.lr = 0.02, .betas = {0.8, 0.95}, .eps = 1e-3})},
      {"adam_decay", make<Adam>(AdamOptions{.lr = 0.05, .weight_decay = 0.1})},
      {"adam_amsgrad", make<Adam>(AdamOptions{.lr = 0.05, .betas = {0.9, 0.5}, .amsgrad = true})},
      {"adam_maximize", make<Adam>(AdamOptions{.lr = 0.05, .weight_decay = 0.1, .maximize = true})},
      {"adamw", make<AdamW>(AdamWOptions{.lr = 0.05})},
      {"adamw_amsgrad",
       make<AdamW>(AdamWOptions{.lr = 0.05, .betas = {0.9, 0.5}, .weight_decay = 0.3, .amsgrad = true})},
      {"adamw_maximize", make<AdamW>(AdamWOptions{.lr = 0.05, .weight_decay = 0.3, .maximize = true})},
      {"rmsprop", make<RMSprop>(RmspropOptions{})},
      {"rmsprop_alpha", make<RMSprop>(RmspropOptions{.lr = 0.02, .alpha = 0.9, .eps = 1e-4, .weight_decay = 0.1})},
      {"rmsprop_momentum", make<RMSprop>(RmspropOptions{.lr = 0.005, .momentum = 0.9})},
      {"rmsprop_centered",
       make<RMSprop>(RmspropOptions{.lr = 0.005, .weight_decay = 0.1, .momentum = 0.5, .centered = true})},
      {"adagrad", make<Adagrad>(AdagradOptions{.lr = 0.1})},
      {"adagrad_decay",
       make<Adagrad>(AdagradOptions{
           .lr = 0.2, .lr_decay = 0.1, .weight_decay = 0.05, .initial_accumulator_value = 0.3, .eps = 1e-3})},
      {"adagrad_maximize", make<Adagrad>(AdagradOptions{.lr = 0.05, .maximize = true})},
      {"lion", make<Lion>(LionOptions{.lr = 0.02})},
      {"lion_decay", make<Lion>(LionOptions{.lr = 0.01, .betas = {0.8, 0.95}, .weight_decay = 0.2})},
  };
  return table;
}

constexpr int kSteps = 20;

Tensor start(DType dtype = f64, Device device = Device::cpu()) {
  return tensor({0.5, -1.25, 2.0, 0.0, -0.75}, {.dtype = dtype, .device = device}).requires_grad_();
}

/// Sets the gradient that gradient() of optim_reference.py computes.
void set_gradient(const Tensor& param, int step) {
  std::vector<double> values = param.to_vector();
  for (size_t i = 0; i < values.size(); ++i) {
    const auto place = static_cast<double>(i);
    values[i] = (place + 1) * 0.5 * values[i] + std::sin(1.7 * step + place) * 3 / (step + 1);
  }
  param.set_grad(from_span<double>(values, param.shape()).to(param.device(), param.dtype()));
}

void run(Optimizer& optimizer, const Tensor& param, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradient(param, step);
    optimizer.step();
  }
}

class OptimizerTest : public testing::TestWithParam<std::pair<const std::string, MakeOptimizer>> {};

TEST_P(OptimizerTest, AgreesWithPyTorch) {
  const std::vector<double>& reference = kOptimizerReference.at(GetParam().first);
  for (Device device : devices()) {
    for (auto [dtype, tolerance] : {std::pair(f64, 1e-12), std::pair(f32, 5e-6)}) {
      const Tensor param = start(dtype, device);
      const auto optimizer = GetParam().second({param});
      run(*optimizer, param, 0, kSteps);
      const std::vector<double> values = param.to_vector();
      for (size_t i = 0; i < values.size(); ++i)
        EXPECT_NEAR(values[i], reference[i], tolerance * (1 + std::abs(reference[i]))) << i << ' ' << dtype;
    }
  }
}

TEST_P(OptimizerTest, ResumesBitwiseFromASavedState) {
  for (Device device : devices()) {
    const Tensor straight = start(f32, device), first = start(f32, device);
    const auto a = GetParam().second({straight});
    run(*a, straight, 0, kSteps);

    const auto b = GetParam().second({first});
    run(*b, first, 0, 7);
    const Tensor second = first.detach().clone().requires_grad_();
    const auto c = GetParam().second({second});
    c->set_lr(123);  // loading the state restores the learning rate
    c->load_state_dict(b->state_dict());
    run(*b, first, 7, 9);  // must not affect c, which loaded a copy
    run(*c, second, 7, kSteps);
    EXPECT_EQ(second.to_vector(), straight.to_vector());
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerTest, testing::ValuesIn(optimizers()),
                         [](const auto& test) { return test.param.first; });

TEST(Optimizer, EveryReferenceIsTested) { EXPECT_EQ(optimizers().size(), kOptimizerReference.size()); }

TEST(Optimizer, SkipsParametersWithoutGradient) {
  const Tensor a = start(), b = start();
  Adam optimizer({a, b}, {.lr = 0.1, .weight_decay = 0.5});
  set_gradient(a, 0);
  optimizer.step();
  EXPECT_EQ(b.to_vector(), start().to_vector());
  EXPECT_NE(a.to_vector(), start().to_vector());
  const TensorMap state = optimizer.state_dict();
  EXPECT_TRUE(state.contains("state.0.exp_avg"));
  EXPECT_FALSE(state.contains("state.1.exp_avg"));
  optimizer.zero_grad();
  EXPECT_FALSE(a.grad().defined());
}

TEST(Optimizer, GroupsHaveTheirOwnOptions) {
  const Tensor a = start(), b = start(), alone = start();
  SGD grouped({{{a}, {.lr = 0.1}}, {{b}, {.lr = 0.01, .momentum = 0.5}}});
  SGD single({alone}, {.lr = 0.01, .momentum = 0.5});
  EXPECT_EQ(grouped.num_groups(), 2u);
  EXPECT_EQ(grouped.lr(0), 0.1);
  EXPECT_EQ(grouped.options(1).momentum, 0.5);
  for (int step = 0; step < 3; ++step) {
    set_gradient(a, step), set_gradient(b, step), set_gradient(alone, step);
    grouped.step(), single.step();
  }
  EXPECT_EQ(b.to_vector(), alone.to_vector());
  EXPECT_NE(a.to_vector(), b.to_vector());
  grouped.set_lr(1, 0.5);
  EXPECT_EQ(grouped.lr(0), 0.1);
  EXPECT_EQ(grouped.lr(1), 0.5);
  grouped.set_lr(0.2);
  EXPECT_EQ(grouped.lr(0), 0.2);
  grouped.set_options(1, {.lr = 1, .momentum = 0.9});
  EXPECT_EQ(grouped.options(1).momentum, 0.9);
  EXPECT_ERROR(grouped.set_options(0, {.momentum = 0.9}), "SGD: options that change which buffers are kept");
  EXPECT_ERROR(grouped.set_lr(2, 0.5), "SGD: parameter group 2 is out of range: num_groups() is 2");
  EXPECT_ERROR(grouped.set_lr(-1), "SGD: lr must be finite and at least 0, got -1");
  EXPECT_EQ(grouped.lr(0), 0.2);
}

TEST(Optimizer, ReadsGradientsOfAnyStride) {
  const Tensor p = zeros({2, 3}, {.requires_grad = true});
  p.set_grad(tensor({{1, 2}, {3, 4}, {5, 6}}).transpose(0, 1));
  SGD({p}, {.lr = 1}).step();
  EXPECT_EQ(p.to_vector(), (std::vector<double>{-1, -3, -5, -2, -4, -6}));
}

TEST(Optimizer, RejectsBadParameters) {
  const Tensor p = start();
  EXPECT_ERROR(SGD(Tensors{}), "SGD: parameter group 0 is empty");
  EXPECT_ERROR(SGD(std::vector<SGD::Group>{}), "SGD: there are no parameters to optimize");
  EXPECT_ERROR(Adam({p, p}), "Adam: parameter 1 appears twice");
  const Tensor whole = zeros({10});
  const auto part = [&](int64_t start, int64_t length) {
    return whole.narrow(0, start, length).detach().requires_grad_();
  };
  EXPECT_ERROR(Adam({part(5, 5), p, part(0, 6)}), "Adam: parameters 0 and 2 share memory");
  EXPECT_ERROR(Adam({part(0, 10), part(3, 1)}), "Adam: parameters 0 and 1 share memory");
  EXPECT_EQ(Adam({part(5, 5), part(0, 5), zeros({0}).requires_grad_()}).num_groups(), 1u);
  EXPECT_ERROR(Adam({p, Tensor()}), "Adam: parameter 1 is undefined");
  EXPECT_ERROR(Adam(Tensors{p.reshape({5, 1})}), "Adam: parameter 0 is the result of an operation");
  EXPECT_ERROR(Adam(Tensors{zeros({2}, {.dtype = i32})}),
               "Adam: parameters must have a floating-point dtype, but parameter 0 is [2] i32");
  EXPECT_ERROR(Adam(Tensors{zeros({2, 3}).transpose(0, 1)}),
               "Adam: parameter 0 is neither contiguous nor channels_last");
}

TEST(Optimizer, RejectsBadOptions) {
  const Tensors p{start()};
  EXPECT_ERROR(SGD(p, {.lr = -0.1}), "SGD: lr must be finite and at least 0, got -0.1");
  EXPECT_ERROR(SGD(p, {.lr = std::nan("")}), "SGD: lr must be finite");
  EXPECT_ERROR(SGD(p, {.momentum = -1}), "SGD: momentum must be finite and at least 0");
  EXPECT_ERROR(SGD(p, {.dampening = INFINITY}), "SGD: dampening must be finite");
  EXPECT_ERROR(SGD(p, {.nesterov = true}), "SGD: nesterov needs momentum and no dampening");
  EXPECT_ERROR(SGD(p, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), "SGD: nesterov needs momentum");
  EXPECT_ERROR(Adam(p, {.betas = {0.9, 1.0}}), "Adam: betas must lie in [0, 1), got 0.9 and 1");
  EXPECT_ERROR(Adam(p, {.betas = {-0.1, 0.9}}), "Adam: betas must lie in [0, 1)");
  EXPECT_ERROR(AdamW(p, {.eps = -1}), "AdamW: eps must be finite and at least 0");
  EXPECT_ERROR(AdamW(p, {.weight_decay = INFINITY}), "AdamW: weight_decay must be finite");
  EXPECT_ERROR(Adagrad(p, {.lr_decay = -1}), "Adagrad: lr_decay must be finite and at least 0, got -1");
  EXPECT_ERROR(Lion(p, {.betas = {0.9, 1}}), "Lion: betas must lie in [0, 1), got 0.9 and 1");
  EXPECT_ERROR(Adam(p, -1e-3), "Adam: lr must be finite and at least 0, got -0.001");
  EXPECT_EQ(RMSprop(p, 0.25).options().lr, 0.25);
  EXPECT_EQ(Adam({start()}, 0.5).options().betas[0], 0.9);
  EXPECT_ERROR(RMSprop(p, {.alpha = 1.5}), "RMSprop: alpha must lie in [0, 1], got 1.5");
  EXPECT_ERROR(RMSprop(p, {.momentum = -1}), "RMSprop: momentum must be finite");
}

TEST(Optimizer, RejectsGradientsThatDoNotFit) {
  const Tensor a = start(), b = start();
  SGD optimizer({a, b}, {.lr = 0.1});
  set_gradient(a, 0);
  b.set_grad(zeros({5}, {.dtype = f64}));
  optimizer.step();
  const std::vector<double> before = a.to_vector();
  // The parameter changes its dtype, but its gradient does not.
  b.body()->dtype = i64;
  EXPECT_ERROR(optimizer.step(), "SGD: parameter 1 is [5] i64 on cpu, its gradient is [5] f64 on cpu");
  EXPECT_EQ(a.to_vector(), before);
  b.body()->dtype = f64;
}

TEST(Optimizer, RejectsStatesThatDoNotFit) {
  const Tensor p = start();
  Adam adam({p});
  run(adam, p, 0, 2);
  const TensorMap good = adam.state_dict();
  const auto expect_rejected = [&](const char* message, const std::function<void(TensorMap&)>& spoil) {
    TensorMap bad = good;
    spoil(bad);
    EXPECT_ERROR(adam.load_state_dict(bad), message);
    EXPECT_ERROR(adam.check_state_dict(bad), message);
    EXPECT_EQ(adam.lr(), 1e-3);
  };
  expect_rejected("the state has no state.0.exp_avg_sq", [](TensorMap& s) { s.erase("state.0.exp_avg_sq"); });
  expect_rejected("state.0.exp_avg is [4] f64",
                  [](TensorMap& s) { s["state.0.exp_avg"] = zeros({4}, {.dtype = f64}); });
  expect_rejected("the state has no param_groups.0.eps", [](TensorMap& s) { s.erase("param_groups.0.eps"); });
  expect_rejected("must be a scalar f64, got [] f32", [](TensorMap& s) { s["param_groups.0.lr"] = ones({}); });
  expect_rejected("Adam: class.Adam must be version 1, got 2",
                  [](TensorMap& s) { s["class.Adam"] = full({}, 2, {.dtype = i64}); });
  expect_rejected("must contain exactly the parameters 0 to 0",
                  [](TensorMap& s) { s["param_groups.0.params"] = arange(0, 2, 1, {.dtype = i64}); });
  expect_rejected("the state has 13 entries, but these parameters and options use only 12",
                  [](TensorMap& s) { s["state.1.step"] = ones({}, {.dtype = i64}); });
  expect_rejected("the state has 13 entries, but these parameters and options use only 12",
                  [](TensorMap& s) { s["state.0.momentum_buffer"] = ones({5}, {.dtype = f64}); });
  const auto scalar = [](double value, DType dtype) { return full({}, value, {.dtype = dtype}); };
  expect_rejected("Adam: param_groups.0.lr must not be NaN",
                  [&](TensorMap& s) { s["param_groups.0.lr"] = scalar(std::nan(""), f64); });
  expect_rejected("Adam: lr must be finite and at least 0, got -1",
                  [&](TensorMap& s) { s["param_groups.0.lr"] = scalar(-1, f64); });
  expect_rejected("Adam: betas must lie in [0, 1), got 0.9 and 1",
                  [&](TensorMap& s) { s["param_groups.0.beta2"] = scalar(1, f64); });
  expect_rejected("Adam: state.0.step must lie in [0, 2^62], got -1",
                  [&](TensorMap& s) { s["state.0.step"] = scalar(-1, i64); });
  expect_rejected("Adam: state.0.step must lie in [0, 2^62], got 4611686018427388928",
                  [&](TensorMap& s) { s["state.0.step"] = scalar(0x1p62 + 1024, i64); });
  EXPECT_ERROR(AdamW({start()}).load_state_dict(good), "AdamW: this is not the state of an AdamW");

  Adam amsgrad({start()}, {.lr = 7, .amsgrad = true});
  amsgrad.load_state_dict(good);  // the state includes the options
  EXPECT_FALSE(amsgrad.options().amsgrad);
  EXPECT_EQ(amsgrad.lr(), 1e-3);
}

TEST(Optimizer, LoadsExtremeButValidStates) {
  const Tensor p = start();
  Adam adam({p});
  run(adam, p, 0, 1);
  adam.set_lr(0);
  TensorMap state = adam.state_dict();
  state["state.0.step"] = full({}, 0x1p62, {.dtype = i64});
  state["state.0.exp_avg_sq"] = zeros(p.shape(), p.options());
  adam.load_state_dict(state);
  const std::vector<double> before = p.to_vector();
  run(adam, p, 1, 2);
  EXPECT_EQ(p.to_vector(), before);
}

TEST(Optimizer, StateOfF16AndBf16ParametersIsF32) {
  for (const Device device : devices())
    for (const DType dtype : {f16, bf16}) {
      const Tensor p = zeros({3}, {.dtype = dtype, .device = device, .requires_grad = true});
      Adam adam({p}, 0.1), loaded({p}, 0.1);
      p.set_grad(full({3}, 3e4, p.options()));  // its square exceeds the range of f16
      adam.step();
      for (const double value : p.to_vector()) EXPECT_NEAR(value, -0.1, 1e-3);
      const TensorMap state = adam.state_dict();
      EXPECT_EQ(state.at("state.0.exp_avg_sq").dtype(), f32);
      loaded.load_state_dict(state);
      EXPECT_EQ(loaded.state_dict().at("state.0.exp_avg_sq").to_vector(), state.at("state.0.exp_avg_sq").to_vector());
      TensorMap narrow = state;
      narrow["state.0.exp_avg"] = state.at("state.0.exp_avg").to(dtype);
      EXPECT_ERROR(loaded.load_state_dict(narrow), "the state of an f16 or bf16 parameter must be f32");
    }
}

TEST(Optimizer, RejectsParametersThatNoModuleHolds) {
  Tensor member = start();
  Adam adam({member}, 0.1);
  set_gradient(member, 0);
  adam.step();
  member = start();  // like an assignment to the member of a module
  set_gradient(member, 0);
  EXPECT_ERROR(adam.step(),
               "Adam: parameter 0, [5] f64 on cpu, is no longer used by any module: its module was destroyed");
}

TEST(Optimizer, RejectsStateOnAnotherDevice) {
  if (!cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  const Tensor p = start(f32);
  Adam adam({p});
  run(adam, p, 0, 1);
  const Tensor moved = p.detach().to(Device::cuda());
  *p.body() = TensorBody{moved.storage(), 0, moved.shape(), moved.strides(), f32, std::move(p.body()->autograd)};
  set_gradient(p, 1);
  EXPECT_ERROR(adam.step(), "create the optimizer after moving the model");
}

// ---- clipping

double total_norm(const Tensors& params) {
  double sum = 0;
  for (const Tensor& p : params)
    for (double g : p.grad().to_vector()) sum += g * g;
  return std::sqrt(sum);
}

TEST(Clip, ClipsByTheNormOfAllGradients) {
  for (Device device : devices()) {
    const Tensor a = zeros({2}, {.device = device}), b = zeros({2, 2}, {.device = device}), c = zeros({3});
    const auto set = [&] {
      a.set_grad(tensor({3, 0}, {.device = device}));
      b.set_grad(tensor({{0, 4}, {0, 12}}, {.device = device}));
    };
    set();
    EXPECT_FLOAT_EQ(optim::grad_norm({a, b, c}).item<float>(), 13);
    EXPECT_EQ(optim::grad_norm({a, b}, INFINITY).item(), 12);
    const Tensor norm = optim::clip_grad_norm_({a, b, c}, 6.5);
    EXPECT_EQ(norm.device(), device);
    EXPECT_EQ(norm.dim(), 0);
    EXPECT_FLOAT_EQ(norm.item<float>(), 13);
    EXPECT_NEAR(total_norm({a, b}), 6.5, 1e-5);
    EXPECT_NEAR(a.grad().at({0}), 1.5, 1e-6);
    optim::clip_grad_norm_({a, b, c}, 100);
    EXPECT_NEAR(a.grad().at({0}), 1.5, 1e-6);  // clipping never increases gradients
    set();
    EXPECT_EQ(optim::clip_grad_norm_({a, b}, 1, {.norm_type = INFINITY}).item(), 12);
    EXPECT_NEAR(b.grad().at({1, 1}), 1, 1e-6);
    set();
    EXPECT_FLOAT_EQ(optim::clip_grad_norm_({a, b}, 1, {.norm_type = 1}).item<float>(), 19);
  }
  EXPECT_EQ(optim::clip_grad_norm_({}, 1).item(), 0);
}

TEST(Clip, ErrorIfNonfiniteRejectsNonfiniteNorms) {
  const Tensor a = zeros({2});
  a.set_grad(tensor({1, INFINITY}));
  EXPECT_ERROR(optim::clip_grad_norm_({a}, 1, {.error_if_nonfinite = true}), "the norm of the gradients is inf");
  EXPECT_EQ(a.grad().at({0}), 1);
  EXPECT_ERROR(optim::clip_grad_norm_({a}, -1), "clip_grad_norm_: max_norm must be finite and at least 0");
  EXPECT_ERROR(optim::clip_grad_norm_({a}, 1, {.norm_type = 0}), "clip_grad_norm_: norm_type must be positive");
}

TEST(Clip, ChangesNothingIfOneGradientCannotBeClipped) {
  const Tensor a = zeros({2}), b = zeros({2});
  a.set_grad(tensor({3, 4}));
  b.set_grad(full({}, 2).expand({2}));
  const auto norm = [](const Tensors& params) { optim::clip_grad_norm_(params, 1); };
  const auto value = [](const Tensors& params) { optim::clip_grad_value_(params, 1); };
  EXPECT_ERROR(norm({a, b}), "clip_grad_norm_: the gradient of parameter 1 is an expanded view: [2] f32 on cpu");
  EXPECT_ERROR(value({a, b}), "clip_grad_value_: the gradient of parameter 1 is an expanded view: [2] f32 on cpu");
  EXPECT_FLOAT_EQ(optim::grad_norm({a, b}).item<float>(), std::sqrt(33.0F));  // grad_norm only reads gradients
  EXPECT_ERROR(optim::grad_norm({a}, -1), "grad_norm: norm_type must be positive, got -1");
  EXPECT_ERROR(norm({a, Tensor()}), "clip_grad_norm_: parameter 1 is undefined");
  EXPECT_ERROR(value({Tensor()}), "clip_grad_value_: parameter 0 is undefined");
  EXPECT_EQ(a.grad().to_vector(), (std::vector<double>{3, 4}));
}

/// Clips more gradients than one kernel launch handles. The gradients have many different sizes, dtypes and strides.
TEST(Clip, ClipsManyGradientsOfAnyDtypeAndStride) {
  for (const Device device : devices()) {
    manual_seed(7);
    Tensors params;
    double squares = 0;
    for (int i = 0; i < 150; ++i) {
      const DType dtype = i < 90 ? f32 : i < 120 ? bf16 : f64;
      const int64_t size = i == 3 ? 20011 : i == 70 ? 0 : 1 + i * 7 % 50;
      params.push_back(zeros({size, 2}, {dtype, device}));
      const Tensor grad = randn({2, size}, {dtype, device});
      for (const double g : grad.to_vector()) squares += g * g;
      params.back().set_grad(i % 3 ? transpose(grad, 0, 1) : transpose(grad, 0, 1).contiguous());
    }
    EXPECT_NEAR(sum_of_squares(std::vector{params[3].grad(), params[140].grad()}).item(),
                std::pow(total_norm({params[3], params[140]}), 2), 1e-7 * squares);
    const std::vector<double> before = params[140].grad().to_vector();
    EXPECT_NEAR(optim::clip_grad_norm_(params, 10).item(), std::sqrt(squares), 1e-5 * std::sqrt(squares));
    EXPECT_NEAR(total_norm(params), 10, 1e-2);  // some gradients are bf16
    const double factor = 10 / (std::sqrt(squares) + 1e-6);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(params[140].grad().to_vector()[i], before[i] * factor, 1e-6);
    params[5].set_grad(full(params[5].shape(), INFINITY, {f32, device}));
    EXPECT_EQ(optim::clip_grad_norm_(params, 10).item(), INFINITY);
    EXPECT_EQ(params[6].grad().at({0, 0}), 0);
  }
}

TEST(Clip, ClipsF16GradientsWhoseNormExceedsF16) {
  const Tensor a = zeros({2}, {.dtype = f16}), b = zeros({2}, {.dtype = bf16});
  a.set_grad(tensor({48000, 0}, {.dtype = f16}));
  b.set_grad(tensor({0, 64000}, {.dtype = bf16}));
  EXPECT_EQ(optim::clip_grad_norm_({a, b}, 40000).item(), 80000);
  EXPECT_EQ(a.grad().to_vector(), (std::vector<double>{24000, 0}));
  EXPECT_EQ(b.grad().to_vector(), (std::vector<double>{0, 32000}));
}

TEST(Clip, ClipsByValue) {
  const Tensor a = zeros({3});
  a.set_grad(tensor({-5, 0.25, 7}));
  optim::clip_grad_value_({a, zeros({1})}, 0.5);
  EXPECT_EQ(a.grad().to_vector(), (std::vector<double>{-0.5, 0.25, 0.5}));
  EXPECT_ERROR(optim::clip_grad_value_({a}, std::nan("")), "clip_grad_value_: clip_value must be finite");
}

}  // namespace
}  // namespace voxgrad
