// Tests of weights in channels_last: module.to(MemoryFormat) converts weights in place, gradients and optimizer states
// follow the format of the weights, and results do not depend on the format.
#include <algorithm>
#include <array>
#include <memory>

#include "core/autocast.h"
#include "core/autograd.h"
#include "nn/layers.h"
#include "nn/optim/ema.h"
#include "nn/optim/optimizers.h"
#include "nn/weight_norm.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr MemoryFormat kContiguous = MemoryFormat::contiguous, kChannelsLast = MemoryFormat::channels_last;

struct Mixed : nn::Module {
  nn::Conv1d line{{.in_channels = 3, .out_channels = 4, .kernel_size = 3}};
  nn::Conv2d plane{{.in_channels = 3, .out_channels = 4, .kernel_size = 3}};
  nn::Conv3d volume{{.in_channels = 6, .out_channels = 4, .kernel_size = {3, 2, 1}, .groups = 2}};
  nn::ConvTranspose3d up{{.in_channels = 4, .out_channels = 3, .kernel_size = 2, .stride = 2}};
  nn::Buffer grid{randn({1, 3, 2, 2, 2})}, labels{zeros({2, 3, 4, 5}, {.dtype = i64})};
  VG_MODULE(line, plane, volume, up, grid, labels)
};

std::vector<double> values_of(const TensorMap& state) {
  std::vector<double> values;
  for (const auto& [name, tensor] : state)
    for (const double value : tensor.to_vector()) values.push_back(value);
  return values;
}

bool has_format(const Tensor& t, MemoryFormat format) {
  return t.is_contiguous(t.dim() == 4 || t.dim() == 5 ? format : kContiguous);
}

TEST(WeightFormat, ToConvertsInPlaceAndBack) {
  for (const Device device : devices()) {
    Mixed model;
    model.to(device);
    for (const Tensor& p : model.parameters()) p.set_grad(randn(p.shape(), p.options()));
    const TensorMap state = model.state_dict();
    const std::vector<double> before = values_of(state);
    const Tensor handle = model.volume.weight, grad = handle.grad(), gradient_values = grad.clone();
    for (const MemoryFormat format : {kChannelsLast, kContiguous}) {
      model.to(format);
      for (const auto& [name, tensor] : model.state_dict()) EXPECT_TRUE(has_format(tensor, format)) << name;
      for (const auto& [name, p] : model.named_parameters()) EXPECT_TRUE(has_format(p.grad(), format)) << name;
      EXPECT_EQ(values_of(model.state_dict()), before);
      EXPECT_TRUE(handle.is_same(model.volume.weight) && grad.is_same(handle.grad()) && handle.is_leaf());
      EXPECT_EQ(grad.to_vector(), gradient_values.to_vector());
    }
    EXPECT_EQ(values_of(state), before);  // detached handles keep the old values
    model.to(kChannelsLast);
    model.to(f16);
    EXPECT_TRUE(model.volume.weight.is_contiguous(kChannelsLast) && !model.volume.weight.is_contiguous());
    model.load_state_dict(state);
    EXPECT_TRUE(model.volume.weight.is_contiguous(kChannelsLast));
    EXPECT_EQ(model.labels.dtype(), i64);
  }
}

TEST(WeightFormat, RejectsGraphsRecordedBeforeAConversion) {
  nn::Conv3d conv{{.in_channels = 2, .out_channels = 3, .kernel_size = 2}};
  const Tensor y = sum(conv(randn({1, 2, 3, 3, 3}).requires_grad_()));
  conv.to(kChannelsLast);
  EXPECT_ERROR(y.backward(), "written to");
}

TEST(WeightFormat, GradientsHaveTheFormatOfTheirWeights) {
  for (const Device device : devices())
    for (const bool mixed : {false, true})
      for (const bool create_graph : {false, true}) {
        Mixed model;
        model.to(device);
        model.to(kChannelsLast);
        const Tensor plane = randn({2, 3, 5, 5}, {f32, device}), volume = randn({2, 6, 3, 3, 3}, {f32, device});
        const autocast low(bf16, mixed);
        for (int step = 0; step < 2; ++step)
          (sum(model.up(model.volume(volume))) + sum(model.plane(plane))).backward({}, false, create_graph);
        for (const nn::NamedTensors named = model.named_parameters(); const auto& [name, p] : named)
          EXPECT_TRUE(!p.grad().defined() || has_format(p.grad(), kChannelsLast)) << name;
        if (mixed) {
          EXPECT_TRUE(model.volume.weight.body()->autograd->converted.values.is_contiguous(kChannelsLast));
        }
        EXPECT_FALSE(model.volume.weight.grad().is_contiguous() || model.plane.weight.grad().is_contiguous());
        for (const Tensor& p : model.parameters()) p.set_grad({});  // breaks cycles between leaves and gradient graphs
      }
}

TEST(WeightFormat, CpuConvolutionsAreBitwiseEqual) {
  for (const int64_t groups : {1, 2})
    for (const bool transposed : {false, true}) {
      const int64_t channels = 19 * groups;
      const Tensor x = randn({2, channels, 4, 3, 5}).requires_grad_();
      const Shape shape{transposed ? channels : 34, (transposed ? 34 : channels) / groups, 3, 2, 3};
      const Tensor values = randn(shape);
      const auto run = [&](MemoryFormat format) {
        const Tensor weight = values.clone().contiguous(format).requires_grad_();
        x.set_grad({});
        const Tensor y = transposed ? conv_transpose3d(x, weight, {}, {.stride = 2, .groups = groups})
                                    : conv3d(x, weight, {}, {.padding = 1, .groups = groups});
        sum(y * y).backward();
        EXPECT_TRUE(weight.grad().is_contiguous(format));
        return std::array{y.to_vector(), x.grad().to_vector(), weight.grad().to_vector()};
      };
      EXPECT_EQ(run(kChannelsLast), run(kContiguous));
    }
}

/// Trains with fixed gradients and toggles the memory format before each step in `toggle_steps`. Returns the final
/// values of the model, the optimizer state and the average.
template <class Options>
std::vector<double> trained(Device device, DType dtype, const Options& options, const std::vector<int>& toggle_steps) {
  using Optimizer = optim::OptimizerOf<Options>;
  manual_seed(5);
  Mixed model;
  model.to(device);
  model.to(dtype);
  auto optimizer = std::make_unique<Optimizer>(model.parameters(), options);
  optim::ExponentialMovingAverage average(model, {.decay = 0.75});
  MemoryFormat format = kContiguous;
  for (int step = 0; step < 5; ++step) {
    if (std::count(toggle_steps.begin(), toggle_steps.end(), step))
      model.to(format = format == kContiguous ? kChannelsLast : kContiguous);
    if (step == 3) {  // continue with a new optimizer that loads the state
      const TensorMap state = optimizer->state_dict();
      optimizer = std::make_unique<Optimizer>(model.parameters(), options);
      optimizer->load_state_dict(state);
    }
    for (const Tensor& p : model.parameters()) p.set_grad(randn(p.shape()).to(device, dtype));
    optimizer->step();
    average.update();
    for (const auto& [name, tensor] : optimizer->state_dict())
      EXPECT_TRUE(tensor.dim() < 4 || has_format(tensor, format)) << name;
    for (const auto& [name, tensor] : average.values())
      EXPECT_TRUE(!name.ends_with("weight") || has_format(tensor, format)) << name;
  }
  std::vector<double> values = values_of(model.state_dict());
  for (const TensorMap& state : {optimizer->state_dict(), average.state_dict()})
    for (const double value : values_of(state)) values.push_back(value);
  return values;
}

template <class Options>
void expect_same_training(const Options& options) {
  for (const Device device : devices())
    for (const DType dtype : {f32, bf16}) {
      const auto plain = trained(device, dtype, options, {});
      for (const std::vector<int>& toggle_steps :
           {std::vector{0}, std::vector{2}, std::vector{0, 3}, std::vector{1, 2, 4}})
        EXPECT_EQ(trained(device, dtype, options, toggle_steps), plain) << Options::kName;
    }
}

TEST(WeightFormat, OptimizersAndAveragesFollowTheWeights) {
  expect_same_training(optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
  expect_same_training(optim::AdamOptions{.lr = 0.1, .amsgrad = true});
  expect_same_training(optim::RmspropOptions{.lr = 0.1, .momentum = 0.9, .centered = true});
  expect_same_training(optim::AdagradOptions{.lr = 0.1});
  expect_same_training(optim::LionOptions{.lr = 0.1});
}

template <class L>
void expect_same_results(L layer) {
  layer.eval();
  const Tensor x = randn({2, 4, 3, 3, 3});
  const auto run = [&] {
    layer.zero_grad();
    const Tensor y = layer(x);
    sum(y * y).backward();
    Tensors all{y.detach()};
    for (const Tensor& p : layer.parameters()) all.push_back(p.grad().clone());
    return all;
  };
  const Tensors plain = run();
  layer.to(kChannelsLast);
  EXPECT_FALSE(layer.weight().is_contiguous());
  EXPECT_TRUE(layer.weight().is_contiguous(kChannelsLast));
  const Tensors last = run();
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_LE(amax(abs(plain[i] - last[i])).item(), 3e-5 * amax(abs(plain[i])).item()) << i;
}

TEST(WeightFormat, ConvertsReparametrizedWeights) {
  const nn::Conv3d::Options options{.in_channels = 4, .out_channels = 6, .kernel_size = 2};
  expect_same_results(nn::WeightNorm{nn::Conv3d{options}});
  expect_same_results(nn::SpectralNorm{nn::Conv3d{options}});
}

}  // namespace
}  // namespace voxgrad
