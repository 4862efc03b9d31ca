// Tests of the autograd graph and engine: accumulation, retention, hooks, versions, long chains, custom functions.
#include "core/autograd.h"

#include <gtest/gtest.h>
#include <cstdlib>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

Tensor leaf(double value) { return full({}, value, {.dtype = f64, .requires_grad = true}); }

TEST(Autograd, AccumulatesOverUsesAndCalls) {
  const Tensor x = leaf(3);
  (x * x + x).backward();
  EXPECT_EQ(x.grad().item(), 7);
  (x * 2.0).backward();
  EXPECT_EQ(x.grad().item(), 9);
}

TEST(Autograd, SumsGradientsOfAThousandUses) {
  const Tensor x = leaf(2);
  Tensors terms;
  for (int i = 0; i < 1000; ++i) terms.push_back(x * static_cast<double>(i));
  stack(terms).sum().backward();
  EXPECT_EQ(x.grad().item(), 999 * 1000 / 2);
  const Tensor y = leaf(1);
  Tensor sum = y;
  for (int i = 1; i < 1000; ++i) sum = sum + y;
  sum.backward();
  EXPECT_EQ(y.grad().item(), 1000);
}

TEST(Autograd, RunsAndFreesAChainOf300000Operations) {
  const int64_t before = memory::stats().current;
  {
    const Tensor x = leaf(1);
    Tensor y = x;
    for (int i = 0; i < 300000; ++i) y = y + 1e-6;
    y.backward();
    EXPECT_EQ(x.grad().item(), 1);
    Tensor z = x;  // a second chain, whose nodes save their inputs; it is freed without a backward pass
    for (int i = 0; i < 300000; ++i) z = sin(z);
  }
  EXPECT_EQ(memory::stats().current, before);
}

TEST(Autograd, FreeingAGraphFreesItsMemory) {
  const Tensor x = rand({1 << 16}, {.requires_grad = true});
  const int64_t before = memory::stats().current;
  {
    const Tensor y = exp(sin(x) * x).sum();
    EXPECT_GT(memory::stats().current, before + (1 << 18));
  }
  EXPECT_EQ(memory::stats().current, before);
  const Tensor y = exp(sin(x) * x).sum();
  y.backward();
  EXPECT_LE(memory::stats().current, before + (1 << 18) + 4096);  // only the gradient remains
}

TEST(Autograd, BackwardFreesTheGraphUnlessRetained) {
  const Tensor x = leaf(2);
  const Tensor y = x * x;
  y.backward({}, /*retain_graph=*/true);
  y.backward();
  EXPECT_EQ(x.grad().item(), 8);
  EXPECT_ERROR(y.backward(), "the graph of 'mul' was freed by an earlier backward");
}

TEST(Autograd, GradDoesNotAccumulateIntoLeaves) {
  const Tensor x = leaf(3), y = leaf(4), unused = leaf(0);
  const Tensor h = x * y;
  const Tensor z = h * h;
  const Tensors grads = grad({z}, {x, h}, {}, /*retain_graph=*/true);
  EXPECT_EQ(grads[0].item(), 2 * 12 * 4);
  EXPECT_EQ(grads[1].item(), 2 * 12);
  EXPECT_FALSE(x.grad().defined());
  EXPECT_ERROR(grad({z}, {unused}, {}, true), "the outputs do not depend on input 0");
  EXPECT_FALSE(grad({z}, {unused}, {}, true, false, /*allow_unused=*/true)[0].defined());
}

TEST(Autograd, ComputesHigherDerivatives) {
  const Tensor x = leaf(2);
  Tensor y = x * x * x * x;
  for (const double expected : {32.0, 48.0, 48.0, 24.0}) {
    y = grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_EQ(y.item(), expected);
  }
}

TEST(Autograd, NoGradGuardDisablesRecording) {
  const Tensor x = leaf(1);
  {
    NoGradGuard no_grad;
    EXPECT_FALSE((x * 2.0).requires_grad());
    EXPECT_FALSE(grad_enabled());
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_FALSE((x.detach() * 2.0).requires_grad());
  EXPECT_FALSE((tensor({1.0}) * 2.0).requires_grad());
}

TEST(Autograd, HooksReceiveAndReplaceGradients) {
  const Tensor x = leaf(1);
  std::vector<double> seen;
  const Tensor y = x * 3.0;
  y.register_hook([&](const Tensor& g) { return seen.push_back(g.item()), g * 10.0; });
  x.register_hook([&](const Tensor& g) { return seen.push_back(g.item()), Tensor(); });
  y.retain_grad();
  (y + y).backward();
  EXPECT_EQ(seen, (std::vector<double>{2, 60}));  // each hook runs once, with the complete sum
  EXPECT_EQ(x.grad().item(), 60);
  EXPECT_EQ(y.grad().item(), 20);
  const Tensor z = leaf(1);
  z.register_hook([](const Tensor&) { return zeros({2}, {.dtype = f64}); });
  EXPECT_ERROR((z * 1.0).backward(), "hook: the returned tensor is [2] f64");
}

TEST(Autograd, HooksMayRegisterAndRemoveHooks) {
  const Tensor x = leaf(1);
  int outer = 0, inner = 0, removed = 0;
  const HookHandle handle = x.register_hook([&](const Tensor&) { return ++removed, Tensor(); });
  HookHandle once;
  const auto resident = std::make_shared<int>();
  once = x.register_hook([&, resident](const Tensor& g) {
    for (int i = 0; i < 100; ++i) x.register_hook([&](const Tensor&) { return ++inner, Tensor(); });
    once.remove();  // the captures of this hook stay valid until the call returns
    return ++outer, g * static_cast<double>(resident.use_count() > 0 ? 2 : 0);
  });
  (x * 1.0).backward();
  EXPECT_EQ(x.grad().item(), 2);
  EXPECT_EQ(inner, 0);  // the new hooks run from the next pass on
  EXPECT_EQ(resident.use_count(), 1);
  handle.remove();
  handle.remove();
  HookHandle().remove();
  (x * 1.0).backward();
  EXPECT_EQ(x.grad().item(), 3);
  EXPECT_EQ(outer, 1);
  EXPECT_EQ(inner, 100);
  EXPECT_EQ(removed, 1);
  HookHandle late;
  {
    const Tensor y = x * 1.0;
    late = y.register_hook([](const Tensor&) { return Tensor(); });
  }
  late.remove();  // the tensor of this hook no longer exists
}

TEST(Autograd, PostAccumulateHooksRunBeforeEarlierNodes) {
  const Tensor first = leaf(2.0), last = leaf(3.0);
  std::vector<std::string> order;
  const auto note = [&](const char* name) {
    return [&order, name](const Tensor& leaf) { order.push_back(concat(name, ' ', leaf.grad().item())); };
  };
  first.register_post_accumulate_grad_hook(note("first"));
  const HookHandle handle = last.register_post_accumulate_grad_hook(note("last"));
  const auto step = [&] {
    order.clear();
    const Tensor early = exp(first * 0);  // the value 1
    early.register_hook([&](const Tensor&) { return order.push_back("early"), Tensor(); });
    (early * last + last * last).backward();  // the hook of `last` runs once, with the sum over both uses
  };
  step();
  EXPECT_EQ(order, (std::vector<std::string>{"last 7", "early", "first 0"}));
  step();
  EXPECT_EQ(order, (std::vector<std::string>{"last 14", "early", "first 0"}));
  handle.remove();
  step();
  EXPECT_EQ(order, (std::vector<std::string>{"early", "first 0"}));

  grad({first * 2}, {first});  // does not accumulate into first.grad()
  EXPECT_EQ(order.size(), 2u);
  const Tensor frozen = leaf(1.0), product = first * frozen;
  frozen.register_post_accumulate_grad_hook(note("frozen"));
  frozen.requires_grad_(false);
  order.clear();
  product.backward();
  EXPECT_EQ(order, (std::vector<std::string>{"first 1"}));
  EXPECT_ERROR(tensor({1.0}).register_post_accumulate_grad_hook(note("none")), "must be a leaf that requires grad");
  EXPECT_ERROR((last * 2).register_post_accumulate_grad_hook(note("none")), "must be a leaf that requires grad");
  EXPECT_ERROR(last.register_post_accumulate_grad_hook(nullptr), "the hook is empty");
}

TEST(Autograd, CallbacksRunAtTheEndOfTheBackwardPass) {
  const Tensor x = leaf(2.0), y = leaf(3.0);
  std::vector<std::string> order;
  bool refuse = false;
  y.register_hook([&](const Tensor&) {
    autograd::queue_callback([&] {
      order.push_back(concat("first callback, ", x.grad().item()));
      autograd::queue_callback([&] { order.push_back("second callback"); });
    });
    const GradModeGuard mode(true);
    exp(leaf(0.0)).backward();  // a nested backward pass
    order.push_back("hook");
    return Tensor();
  });
  x.register_hook([&](const Tensor&) { return check(!refuse, "hook", "refused"), Tensor(); });
  (exp(x * 0) * y + 4 * x).backward();
  EXPECT_EQ(order, (std::vector<std::string>{"hook", "first callback, 4", "second callback"}));
  order.clear();
  refuse = true;
  EXPECT_ERROR((x * y).backward(), "refused");
  EXPECT_EQ(order, (std::vector<std::string>{"hook"}));
  EXPECT_ERROR(autograd::queue_callback([] {}), "no backward pass is running");
}

TEST(Autograd, RetainedGradientsAccumulateAfterHooks) {
  const Tensor x = leaf(1);
  const Tensor y = x * 2.0;
  y.retain_grad();
  y.retain_grad();  // the second call has no effect
  y.register_hook([](const Tensor& g) { return g * 10.0; });
  const Tensor z = y * 3.0;
  z.backward({}, true);
  EXPECT_EQ(y.grad().item(), 30);
  z.backward();
  EXPECT_EQ(y.grad().item(), 60);
  EXPECT_EQ(x.grad().item(), 120);
  y.grad().fill_(0);
  EXPECT_EQ(x.grad().item(), 120);
  EXPECT_ERROR(ones({1}).retain_grad(), "retain_grad: the tensor does not require grad");
  x.retain_grad();  // no effect on a leaf
  EXPECT_EQ(x.grad().item(), 120);
}

TEST(Autograd, HalfPrecisionGradientsAccumulate) {
  for (const Device device : devices())
    for (const DType dtype : {bf16, f16}) {
      const Tensor x = tensor({1, 2}, {dtype, device, true});
      for (int i = 0; i < 3; ++i) (x.to(f32) * 2.0 + x.to(f32)).sum().backward();
      EXPECT_EQ(x.grad().dtype(), dtype);
      EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{9, 9})) << dtype;
    }
}

TEST(Autograd, AccumulatesIntoACopyOfAnExpandedGradient) {
  const Tensor x = ones({3}, {.requires_grad = true});
  const Tensor given = full({1}, 5);
  x.set_grad(given.expand({3}));
  (x * 2.0).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{7, 7, 7}));
  EXPECT_EQ(given.item(), 5);
}

TEST(Autograd, LeavesMayBeFrozenButNotConvertedBeforeBackward) {
  const Tensor x = leaf(2), y = leaf(3);
  const Tensor z = x * y;
  x.requires_grad_(false);
  z.backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(y.grad().item(), 2);
  const Tensor w = y * 1.0;
  const Tensor single = y.detach().to(f32);
  y.body()->storage = single.storage();
  y.body()->dtype = f32;
  EXPECT_ERROR(w.backward(), "a tensor was converted to f32 on cpu after the graph was recorded");
}

TEST(Autograd, DetectsInPlaceWritesToSavedTensors) {
  const Tensor x = leaf(2);
  const Tensor h = x * 1.0;
  const Tensor y = h * h;
  {
    NoGradGuard no_grad;
    h.fill_(5);
  }
  EXPECT_ERROR(y.backward(), "written to in place");
  const Tensor e = exp(x);
  {
    NoGradGuard no_grad;
    e.fill_(5);
  }
  EXPECT_ERROR(e.backward(), "written to in place");
}

TEST(Autograd, GradientsOfTwoLeavesDoNotShareMemory) {
  const Tensor x = zeros({3}, {.requires_grad = true}), y = zeros({3}, {.requires_grad = true});
  const Tensor seed = ones({3});
  (x + y).backward(seed);
  x.grad().mul_(2);
  EXPECT_EQ(y.grad().to_vector(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(seed.to_vector(), (std::vector<double>{1, 1, 1}));
}

TEST(Autograd, CustomFunctionsAreDifferentiableAndChecked) {
  const auto square = [](const Tensor& x) {
    return custom_function(
        "square", {x},
        [](const Tensors& in) {
          return Tensors{in[0] * in[0], in[0] + 0.0};
        },
        [x = Saved(x)](const Tensors& g) { return Tensors{g[0] * x() * 2.0 + g[1]}; });
  };
  const Tensor x = leaf(3);
  const Tensors outs = square(x);
  const Tensor first = grad({outs[0] + outs[1]}, {x}, {}, true, true)[0];
  EXPECT_EQ(first.item(), 7);
  EXPECT_EQ(grad({first}, {x})[0].item(), 2);
  const auto wrong_shape = [&](const Tensors&) { return Tensors{zeros({2}, {.dtype = f64})}; };
  const auto copy = [](const Tensors& in) { return Tensors{in[0].clone()}; };
  EXPECT_ERROR(custom_function("f", {x}, copy, wrong_shape)[0].backward(),
               "the gradient [2] f64 on cpu from 'f' does not match");
  const auto too_many = [](const Tensors& g) { return Tensors{g[0], g[0]}; };
  EXPECT_ERROR(custom_function("f", {x}, copy, too_many)[0].backward(),
               "'f' must return one gradient per input: expected 1, got 2");
  const auto once = [](const Tensors& g) { return autograd::once_differentiable("f"), Tensors{g[0]}; };
  EXPECT_ERROR(custom_function("f", {x}, copy, once)[0].backward({}, false, true), "cannot be differentiated again");
  const auto itself = [](const Tensors& in) { return in; };
  EXPECT_ERROR(custom_function("f", {x}, itself, too_many), "an output is one of the inputs");
  const Tensor outside = x * 2.0;
  const auto captured = [&](const Tensors&) { return Tensors{outside}; };
  EXPECT_ERROR(custom_function("f", {x}, captured, too_many),
               "forward returned an existing tensor, which requires grad");
  const auto nothing = [](const Tensors&) { return Tensors{Tensor()}; };
  EXPECT_ERROR(custom_function("f", {x}, nothing, too_many), "forward returned an undefined tensor");
  EXPECT_ERROR(custom_function("f", {x}, {}, too_many), "forward or backward is empty");
  EXPECT_ERROR(custom_function("f", {x}, copy, {}), "forward or backward is empty");
}

TEST(Autograd, RejectsTensorsWithoutGradients) {
  EXPECT_ERROR(tensor({1.0}).backward(), "does not require grad");
  const Tensor w = ones({}).requires_grad_(), cut = w.detach();
  EXPECT_ERROR(cut.backward(), "it comes from detach()");
  EXPECT_ERROR((w > 0).backward(), "only floating-point tensors have gradients");
  {
    const NoGradGuard no_grad;
    EXPECT_ERROR((w * 2.0).backward(), "recording is off on this thread: a NoGradGuard is in effect");
  }
  EXPECT_ERROR(zeros({2}, {.requires_grad = true}).backward(),
               "only the gradient of a one-element output may be omitted");
  EXPECT_ERROR(zeros({2}, {.dtype = i64}).requires_grad_(), "only floating-point tensors have gradients");
  const Tensor y = leaf(1) * 2.0;
  EXPECT_ERROR(y.requires_grad_(false), "use detach()");
  EXPECT_ERROR(y.backward(ones({2}, {.dtype = f64})), "the gradient [2] f64 on cpu from the caller does not match");
  EXPECT_ERROR(leaf(1).set_grad(ones({2})), "set_grad");
}

TEST(Autograd, GradientsFollowDtypeAndLayoutConversions) {
  const Tensor x = ones({2, 3, 4}, {.requires_grad = true});
  x.to(f64).transpose(0, 2).contiguous().slice(0, 1, 4, 2).sum().backward();
  EXPECT_EQ(x.grad().dtype(), f32);
  EXPECT_EQ(x.grad().sum().item(), 12);
  EXPECT_EQ(x.grad().at({0, 0, 0}), 0);
  EXPECT_EQ(x.grad().at({0, 0, 3}), 1);
}

TEST(AutogradDeathTest, StaticGraphsAreFreedAtExit) {
  const auto keep_one_and_exit = [] {
    const auto graph = [](size_t width) {
      Tensors parts(width);
      for (Tensor& part : parts) part = zeros({1}, {.requires_grad = true}) * 2.0;
      return cat(parts);
    };
    graph(2);
    static const Tensor kept = graph(100);
    std::exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(keep_one_and_exit(), testing::ExitedWithCode(0), "");
}

TEST(Autograd, LeavesDoNotShareRecordedGradients) {
  const Tensor a = ones({2}).requires_grad_(), b = ones({2}).requires_grad_();
  const Tensor s = a + b;
  sum(s * s).backward({}, false, true);
  EXPECT_NE(a.grad().storage(), b.grad().storage());
  NoGradGuard no_grad;
  a.grad().detach().mul_(2);
  EXPECT_EQ(b.grad().to_vector(), std::vector<double>({4, 4}));
  // A gradient with a graph keeps its leaf alive. Break this cycle.
  for (const Tensor& leaf : {a, b}) leaf.set_grad({});
}

}  // namespace
}  // namespace voxgrad
