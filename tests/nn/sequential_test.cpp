// Tests of the layers that Sequential fuses. Their results, gradients and hooks must match those of separate layers,
// and fused layers must not need more memory.
#include "nn/sequential.h"

#include <algorithm>
#include <map>

#include "core/autograd.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/gradcheck.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using Chain = std::vector<std::shared_ptr<nn::Layer>>;

/// Runs the layers one after another, without fusion.
Tensor run_unfused(const Chain& chain, Tensor x) {
  for (const auto& layer : chain) x = layer->forward(x);
  return x;
}

nn::Sequential make_sequential(const Chain& chain) {
  nn::Sequential model;
  for (const auto& layer : chain) model.push_back(layer);
  return model;
}

template <class L, class... Args>
std::shared_ptr<nn::Layer> layer(Args&&... args) {
  return std::make_shared<L>(std::forward<Args>(args)...);
}

std::shared_ptr<nn::Layer> up(bool bias = true) {
  return layer<nn::ConvTranspose3d>(nn::ConvTranspose3d::Options{
      .in_channels = 4, .out_channels = 8, .kernel_size = 3, .stride = 2, .padding = 1, .bias = bias});
}
std::shared_ptr<nn::Layer> conv(bool bias = true) {
  return layer<nn::Conv3d>(
      nn::Conv3d::Options{.in_channels = 4, .out_channels = 8, .kernel_size = 3, .padding = 1, .bias = bias});
}
std::shared_ptr<nn::Layer> conv_of(int64_t in) {
  return layer<nn::Conv3d>(nn::Conv3d::Options{.in_channels = in, .out_channels = 8, .kernel_size = 1});
}
std::shared_ptr<nn::Layer> relu() { return layer<nn::ReLU>(); }
std::shared_ptr<nn::Layer> norm(int64_t groups = 2) { return layer<nn::GroupNorm>(groups, 8); }

struct ChainCase {
  const char* name;
  std::function<Chain()> make;
  const char* last;  // name of the graph node that computes the result
};

const std::vector<ChainCase>& chains() {
  static const std::vector<ChainCase> table{
      {"up_relu_norm",
       [] {
         return Chain{up(), relu(), norm()};
       },
       "norm_activation"},
      {"up_relu_norm_without_bias",
       [] {
         return Chain{up(false), relu(), norm()};
       },
       "norm_activation"},
      {"up_relu",
       [] {
         return Chain{up(), relu()};
       },
       "relu"},
      {"up_relu_without_bias",
       [] {
         return Chain{up(false), relu()};
       },
       "relu"},
      {"conv_relu_norm",
       [] {
         return Chain{conv(), relu(), norm(8)};
       },
       "norm_activation"},
      {"conv_relu",
       [] {
         return Chain{conv(), relu()};
       },
       "relu"},
      {"relu_norm",
       [] {
         return Chain{layer<nn::Conv3d>(nn::Conv3d::Options{4, 8, 1}), layer<nn::Tanh>(), relu(), norm()};
       },
       "norm_activation"},
      {"conv_norm",
       [] {
         return Chain{conv(), norm()};
       },
       "group_norm"},
      {"norm_relu",
       [] {
         return Chain{conv(), norm(), relu()};
       },
       "norm_activation"},
      {"norm_relu_without_bias",
       [] {
         return Chain{conv(false), norm(8), relu()};
       },
       "norm_activation"},
      {"instance_norm_leaky_relu",
       [] {
         return Chain{conv(), layer<nn::InstanceNorm3d>(8, nn::InstanceNormOptions{.affine = true}),
                      layer<nn::LeakyReLU>(0.1)};
       },
       "norm_activation"},
      {"gelu_norm",
       [] {
         return Chain{up(), layer<nn::GELU>(), norm()};
       },
       "norm_activation"},
      {"norm_silu",
       [] {
         return Chain{conv(), norm(4), layer<nn::SiLU>(), conv_of(8)};
       },
       "conv"},
      {"two_blocks",
       [] {
         return Chain{conv(), relu(), norm(), layer<nn::Conv3d>(nn::Conv3d::Options{8, 8, 1}), relu(), relu(), norm()};
       },
       "norm_activation"},
  };
  return table;
}

struct Results {
  Tensor y;
  Tensor dx;      // gradient of the input
  Tensors grads;  // gradients of the parameters
};

Results results(const nn::Module& model, const std::function<Tensor(const Tensor&)>& function, const Tensor& input) {
  const Tensor x = input.detach().requires_grad_();
  model.zero_grad();
  Results r{function(x), {}, {}};
  const Tensor weights = sin(affine(reshape(arange(0, static_cast<double>(r.y.numel()), 1), r.y.shape()), 0.7, 0));
  r.y.backward(weights.to(x.device(), x.dtype()));
  r.dx = x.grad();
  for (const Tensor& p : model.parameters()) r.grads.push_back(p.grad().clone());
  return r;
}

void expect_close(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.shape(), b.shape()) << what;
  const std::vector<double> va = a.to_vector(), vb = b.to_vector();
  double largest = 0, worst = 0;
  for (size_t i = 0; i < va.size(); ++i) {
    largest = std::max(largest, std::abs(vb[i]));
    worst = std::max(worst, std::abs(va[i] - vb[i]));
  }
  EXPECT_LE(worst, tolerance * std::max(largest, 0.1)) << what;
}

void expect_fused_matches_unfused(const ChainCase& c, Device device, DType dtype, MemoryFormat format) {
  manual_seed(5);
  const Chain chain = c.make();
  nn::Sequential model = make_sequential(chain);
  model.to(device);
  model.to(dtype);
  const Tensor x = randn({2, 4, 3, 5, 4}, {dtype, device}).contiguous(format);
  const Results fused = results(
      model, [&](const Tensor& t) { return model(t); }, x);
  const Results unfused = results(
      model, [&](const Tensor& t) { return run_unfused(chain, t); }, x);
  const std::string what = concat(c.name, ' ', dtype, " on ", device);
  EXPECT_EQ(fused.y.grad_fn()->name, c.last) << what;
  EXPECT_EQ(fused.y.strides(), unfused.y.strides()) << what;
  const double tolerance = dtype == f64 ? 1e-12 : 2e-5;
  expect_close(fused.y, unfused.y, tolerance, what);
  expect_close(fused.dx, unfused.dx, tolerance, what + " dx");
  for (size_t i = 0; i < fused.grads.size(); ++i)
    expect_close(fused.grads[i], unfused.grads[i], tolerance, concat(what, " gradient ", i));
}

void expect_all_fused_match_unfused(Device device) {
  for (const ChainCase& c : chains())
    for (const DType dtype : {f32, f64})
      for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
        expect_fused_matches_unfused(c, device, dtype, format);
}

TEST(SequentialFusion, MatchesSeparateLayers) { expect_all_fused_match_unfused(Device::cpu()); }
TEST(SequentialFusion, MatchesSeparateLayersOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_all_fused_match_unfused(Device::cuda());
}

TEST(SequentialFusion, SecondDerivativesMatch) {
  for (const ChainCase& c : chains()) {
    manual_seed(6);
    const Chain chain = c.make();
    nn::Sequential model = make_sequential(chain);
    model.to(f64);
    const Tensor x = randn({1, 4, 2, 3, 2}, {f64, Device::cpu(), true});
    const auto second = [&](const Tensor& y) {
      Tensors inputs = model.parameters();
      inputs.push_back(x);
      const Tensors first = grad({sum(y * y)}, inputs, {}, false, true);
      Tensor total = full({}, 0, {f64});
      for (const Tensor& g : first) total = total + sum(g * g);
      return grad({total}, inputs, {}, false, false, true);
    };
    const Tensors fused = second(model(x)), unfused = second(run_unfused(chain, x));
    for (size_t i = 0; i < fused.size(); ++i) {
      ASSERT_EQ(fused[i].defined(), unfused[i].defined()) << c.name << ' ' << i;
      if (fused[i].defined()) expect_close(fused[i], unfused[i], 1e-9, concat(c.name, " second gradient ", i));
    }
  }
}

TEST(SequentialFusion, BackwardTwiceAccumulates) {
  const Chain chain{up(), relu(), norm()};
  const nn::Sequential model = make_sequential(chain);
  const Tensor x = rand({1, 4, 2, 2, 2});
  const Tensor loss = sum(model(x) * model(x));
  loss.backward({}, true);
  const std::vector<double> once = model.parameters()[0].grad().to_vector();
  loss.backward();
  const std::vector<double> twice = model.parameters()[0].grad().to_vector();
  for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], 2 * once[i]);
}

// Registers hooks on the parameters, the input and the result of the ReLU.
TEST(SequentialFusion, HooksReceiveTheSameGradients) {
  const Chain chain{up(), relu(), norm()};
  const nn::Sequential head = make_sequential({chain[0], chain[1]}), model = make_sequential(chain);
  const auto gradients = [&](bool fused) {
    model.zero_grad();
    const Tensor x = affine(reshape(arange(0, 32, 1), {1, 4, 2, 2, 2}), 0.1, -1).requires_grad_();
    std::map<std::string, std::vector<double>> seen;
    const auto note = [&](const std::string& name) {
      return [&seen, name](const Tensor& g) {
        seen[name] = g.to_vector();
        return affine(g, 0.5, 0);
      };
    };
    std::vector<HookHandle> hooks;
    for (const auto& [name, p] : model.named_parameters()) hooks.push_back(p.register_hook(note(name)));
    hooks.push_back(x.register_hook(note("x")));
    // A hook, the norm and the loss read the result of the ReLU.
    const Tensor y = fused ? head(x) : run_unfused({chain[0], chain[1]}, x);
    hooks.push_back(y.register_hook(note("y")));
    sum(chain[2]->forward(y) * y).backward();
    for (const HookHandle& hook : hooks) hook.remove();
    seen["dx"] = x.grad().to_vector();
    return seen;
  };
  const auto fused = gradients(true), unfused = gradients(false);
  EXPECT_EQ(fused.size(), 7u);
  for (const auto& [name, values] : unfused) {
    ASSERT_EQ(fused.at(name).size(), values.size()) << name;
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(fused.at(name)[i], values[i], 1e-3) << name;
  }
}

TEST(SequentialFusion, FrozenParametersGetNoGradient) {
  for (const size_t trained : {size_t{0}, size_t{1}, size_t{2}, size_t{3}}) {
    const nn::Sequential model = make_sequential({up(), relu(), norm()});
    model.requires_grad_(false);
    const Tensors parameters = model.parameters();
    parameters[trained].requires_grad_();
    sum(model(rand({1, 4, 2, 2, 2}))).backward();
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(parameters[i].grad().defined(), i == trained);
  }
  NoGradGuard no_grad;
  EXPECT_FALSE(make_sequential({up(), relu(), norm()})(rand({1, 4, 2, 2, 2})).requires_grad());
}

// Sequential must not fuse a user-defined class as if it were its base class.
TEST(SequentialFusion, DerivedClassesRunTheirOwnForward) {
  struct Doubled : nn::ReLU {
    Tensor forward(const Tensor& x) const override { return affine(voxgrad::relu(x), 2, 0); }
  };
  struct Shifted : nn::Conv3d {
    explicit Shifted(const Options& given) : nn::Conv3d(given) {}
    Tensor forward(const Tensor& x) const override { return affine(nn::Conv3d::forward(x), 1, 10); }
  };
  const Tensor x = rand({1, 4, 2, 2, 2});
  for (const Chain& chain :
       {Chain{conv(), layer<Doubled>(), norm()}, Chain{layer<Shifted>(nn::Conv3d::Options{4, 8, 1}), relu(), norm()}})
    EXPECT_EQ(make_sequential(chain)(x).to_vector(), run_unfused(chain, x).to_vector());
}

TEST(SequentialFusion, ErrorsMatchSeparateLayers) {
  const nn::Sequential other = make_sequential({up(), relu(), layer<nn::GroupNorm>(2, 6)});
  EXPECT_ERROR(other(rand({1, 4, 2, 2, 2})), "GroupNorm: expects (N, 6, ...)");
  EXPECT_ERROR(make_sequential({relu(), norm()})(rand({1, 4, 2})), "GroupNorm: expects (N, 8, ...)");
  EXPECT_ERROR(make_sequential({up(), relu()})(rand({1, 3, 2, 2, 2})),
               "conv_transpose3d: weight expects 4 input channels");
  EXPECT_ERROR(make_sequential({up(), relu()})(Tensor()), "conv_transpose3d: input is undefined");
  // If the input has no batch axis, GroupNorm treats the first spatial axis of the convolution's result as channels.
  EXPECT_ERROR(make_sequential({up(), relu(), norm()})(rand({4, 2, 2, 2})), "GroupNorm: expects (N, 8, ...)");
}

/// Expects fused and separate layers to match in bf16 and f16, except for the rounding between separate layers.
void expect_low_precision_matches_unfused(Device device) {
  for (const DType dtype : {bf16, f16})
    for (const ChainCase& c : chains()) {
      const Chain chain = c.make();
      nn::Sequential model = make_sequential(chain);
      model.to(device);
      model.to(dtype);
      const Tensor x = rand({1, 4, 4, 4, 4}, {f32, device}).to(dtype).requires_grad_();
      const Tensor y = model(x), unfused = run_unfused(chain, x);
      EXPECT_EQ(y.dtype(), dtype) << c.name;
      const Tensor g = rand(y.shape(), {f32, device}).to(dtype);
      const double bound = dtype == bf16 ? 0x1p-6 : 0x1p-9;
      expect_close(y, unfused, bound, concat(c.name, ' ', dtype));
      expect_close(grad({y}, {x}, {g})[0], grad({unfused}, {x}, {g})[0], bound, concat(c.name, ' ', dtype, " dx"));
    }
}

TEST(SequentialFusion, LowPrecisionMatchesSeparateLayers) { expect_low_precision_matches_unfused(Device::cpu()); }
TEST(SequentialFusion, LowPrecisionMatchesSeparateLayersOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_low_precision_matches_unfused(Device::cuda());
}

/// Returns the peak memory of a forward and backward pass, in bytes above the memory in use before the pass.
int64_t peak_of_step(const nn::Module& model, const std::function<Tensor(const Tensor&)>& function, const Tensor& x) {
  model.zero_grad();
  x.set_grad({});
  memory::reset_peak(x.device());
  const int64_t before = memory::stats(x.device()).current;
  const Tensor y = function(x);
  y.backward(y.detach());
  return memory::stats(x.device()).peak - before;
}

void expect_no_more_memory(Device device) {
  for (const ChainCase& c : chains()) {
    const Chain chain = c.make();
    nn::Sequential model = make_sequential(chain);
    model.to(device);
    const Tensor x = rand({1, 4, 16, 16, 16}, {f32, device, true});
    const auto saved = [&](const std::function<Tensor(const Tensor&)>& function) {
      const int64_t before = memory::stats(device).current;
      const Tensor y = function(x);
      return memory::stats(device).current - before;
    };
    const auto fused = [&](const Tensor& t) { return model(t); };
    const auto unfused = [&](const Tensor& t) { return run_unfused(chain, t); };
    EXPECT_LE(saved(fused), saved(unfused)) << c.name;
    // The margin is for a few sums per channel and for the rounding of workspace sizes.
    EXPECT_LE(peak_of_step(model, fused, x), peak_of_step(model, unfused, x) + 65536) << c.name;
  }
}

TEST(SequentialFusion, NeedsNoMoreMemory) { expect_no_more_memory(Device::cpu()); }
TEST(SequentialFusion, NeedsNoMoreMemoryOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_no_more_memory(Device::cuda());
}

}  // namespace
}  // namespace voxgrad
