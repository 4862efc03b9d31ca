// Tests that gradcheck and gradgradcheck find wrong gradients, report their positions, and skip kinks, which are points
// where the function has no derivative.
#include "ops/gradcheck.h"

#include <gtest/gtest.h>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

Tensor input(const Shape& shape, Device device = Device::cpu()) {
  Generator generator(3);
  return randn(shape, {f64, device}, &generator).requires_grad_();
}

/// Returns x^3 with a custom gradient: 3 x^2, multiplied by `factor` at the elements whose index is at least `from`.
Tensor cube(const Tensor& x, double factor, int64_t from) {
  Tensor wrong = ones_like(x);
  wrong.slice(0, from, wrong.size(0)).fill_(factor);
  return custom_function(
      "cube", {x}, [](const Tensors& in) { return Tensors{pow(in[0], 3)}; },
      [x = Saved(x), wrong](const Tensors& g) { return Tensors{g[0] * pow(x(), 2) * 3.0 * wrong}; })[0];
}

TEST(Gradcheck, ReportsPositionOfWrongGradient) {
  for (const Device device : devices()) {
    const auto right = [](const Tensors& t) { return Tensors{cube(t[0], 1, 0)}; };
    const auto wrong = [](const Tensors& t) { return Tensors{cube(t[0], 1.01, 4)}; };
    EXPECT_TRUE(gradcheck(right, {input({5}, device)}));
    const GradcheckReport report = gradcheck(wrong, {input({5}, device)});
    EXPECT_FALSE(report.passed);
    EXPECT_EQ(report.checked, 5);
    EXPECT_NE(report.message.find("input 0 at [4]: analytic "), std::string::npos) << report.message;
    EXPECT_NE(report.message.find("(1 of 5 derivatives differ)"), std::string::npos) << report.message;
    EXPECT_FALSE(gradcheck(wrong, {input({5}, device)}, {.projections = 3}));
    EXPECT_TRUE(gradcheck(right, {input({500}, device)}, {.projections = 3}));
  }
}

TEST(Gradcheck, FindsWrongSecondGradient) {
  // The first gradient is right, but the second gradient is missing, because the saved tensor is detached from the
  // graph.
  const auto detached = [](const Tensors& t) {
    return custom_function(
        "cube", {t[0]}, [](const Tensors& in) { return Tensors{pow(in[0], 3)}; },
        [x = Saved(t[0].detach())](const Tensors& g) { return Tensors{g[0] * pow(x(), 2) * 3.0}; });
  };
  EXPECT_TRUE(gradcheck(detached, {input({4})}));
  const GradcheckReport report = gradgradcheck(detached, {input({4})});
  EXPECT_FALSE(report.passed);
  EXPECT_NE(report.message.find("gradgradcheck: input 0 at "), std::string::npos) << report.message;
  EXPECT_TRUE(gradgradcheck([](const Tensors& t) { return Tensors{pow(t[0], 3) * t[1]}; }, {input({4}), input({4})}));
}

TEST(Gradcheck, FindsGradientThatDependsOnRecording) {
  // The gradient is wrong by a constant factor only while the backward pass is recorded. gradcheck does not record the
  // backward pass and therefore passes.
  const auto function = [](const Tensors& t) {
    return custom_function(
        "cube", {t[0]}, [](const Tensors& in) { return Tensors{pow(in[0], 3)}; },
        [x = Saved(t[0])](const Tensors& g) { return Tensors{g[0] * pow(x(), 2) * (grad_enabled() ? 3.1 : 3.0)}; });
  };
  EXPECT_TRUE(gradcheck(function, {input({4})}));
  EXPECT_FALSE(gradgradcheck(function, {input({4})}));
}

TEST(Gradcheck, SkipsAndCountsKinks) {
  const Tensor x = tensor({-1, 0, 2}, {.dtype = f64}).requires_grad_();
  const auto function = [](const Tensors& t) { return Tensors{relu(t[0])}; };
  const GradcheckReport report = gradcheck(function, {x});
  EXPECT_TRUE(report.passed) << report.message;
  EXPECT_EQ(report.kinks, 1);
  EXPECT_EQ(report.checked, 2);
  EXPECT_FALSE(gradcheck(function, {x}, {.skip_kinks = false}));
  // The check fails if all derivatives are at kinks, because nothing was compared.
  EXPECT_FALSE(gradcheck(function, {zeros({1}, {.dtype = f64, .requires_grad = true})}));
}

TEST(Gradcheck, RejectsInvalidArguments) {
  const auto identity = [](const Tensors& t) { return Tensors{t[0] * 1.0}; };
  EXPECT_ERROR(gradcheck(identity, {zeros({2}, {.requires_grad = true})}), "input 0 must be f64");
  EXPECT_ERROR(gradcheck(identity, {zeros({2}, {.dtype = f64})}), "none of the inputs requires grad");
  EXPECT_ERROR(gradcheck({}, {input({2})}), "the function is empty");
  EXPECT_ERROR(gradcheck(identity, {input({2})}, {.eps = 0}), "eps must be finite and positive");
  const auto random = [](const Tensors& t) { return Tensors{dropout(t[0], 0.5)}; };
  EXPECT_ERROR(gradcheck(random, {input({50})}), "changed between two identical calls");
}

}  // namespace
}  // namespace voxgrad
