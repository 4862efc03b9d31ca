// Tests of the models of KernelBench's level 2 that contain a ConvTranspose3d, written as user code. Compares outputs,
// gradients and buffers with PyTorch's results (recorded by kernelbench_models.py).
#include <voxgrad.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>

#include "tests/support.h"

namespace {
namespace vg = voxgrad;
using vg::nn::BatchNorm3d;
using vg::nn::ConvTranspose3d;
using vg::nn::LayerNorm;
using vg::nn::Parameter;
using vg::nn::Sequential;

// An axis of n voxels gets 2 n voxels with kDoubling and 2 n - 1 voxels with kUpsampling.
const ConvTranspose3d::Options kDoubling{
    .in_channels = 4, .out_channels = 8, .kernel_size = 3, .stride = 2, .padding = 1, .output_padding = 1};
const ConvTranspose3d::Options kUpsampling{
    .in_channels = 4, .out_channels = 8, .kernel_size = 3, .stride = 2, .padding = 1};

struct Model3 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  Parameter sum_weight{vg::ones({})};
  LayerNorm norm{8};
  vg::nn::AvgPool3d avg_pool{{.kernel_size = 2}};
  vg::nn::GELU gelu;
  VG_MODULE(conv_transpose, sum_weight, norm, avg_pool, gelu)
  vg::Tensor forward(const vg::Tensor& x) { return gelu(avg_pool(norm(conv_transpose(x) + sum_weight))); }
};

struct Model13 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  Parameter bias{vg::randn({1, 1, 1, 1, 1})};
  VG_MODULE(conv_transpose, bias)
  vg::Tensor forward(const vg::Tensor& x) {
    return 2 * vg::tanh(vg::softmax(vg::mean(conv_transpose(x), 1, true) + bias, 1));
  }
};

struct Model15 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  BatchNorm3d batch_norm{8};
  VG_MODULE(conv_transpose, batch_norm)
  vg::Tensor forward(const vg::Tensor& input) {
    const vg::Tensor x = batch_norm(conv_transpose(input));
    return x - x.mean({2, 3, 4}, true);
  }
};

struct Model20 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  Parameter bias{vg::randn({8, 1, 1, 1})};
  VG_MODULE(conv_transpose, bias)
  vg::Tensor forward(const vg::Tensor& input) {
    vg::Tensor x = conv_transpose(input);
    const vg::Tensor original = x.clone().detach();
    x = x + bias;
    x += original;
    x *= original;
    return x + original;
  }
};

struct Model26 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  Parameter bias{vg::randn({8, 1, 1, 1, 1})};  // forward() does not use the bias, so the bias has no gradient
  VG_MODULE(conv_transpose, bias)
  vg::Tensor forward(const vg::Tensor& input, const vg::Tensor& add_input) {
    const vg::Tensor x = conv_transpose(input) + add_input;
    return x * vg::hardswish(x);
  }
};

struct Model34 : vg::nn::Module {
  ConvTranspose3d conv_transpose{4, 8, 4, 2, 1};
  LayerNorm layer_norm{8};
  VG_MODULE(conv_transpose, layer_norm)
  vg::Tensor forward(const vg::Tensor& x) { return vg::gelu(layer_norm(conv_transpose(x))) * 1.0; }
};

struct Model38 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  VG_MODULE(conv_transpose)
  vg::Tensor forward(const vg::Tensor& x) {
    return vg::softmax(vg::clamp(vg::avg_pool3d(conv_transpose(x), {.kernel_size = 2}), 0, 1), 1) * 2;
  }
};

struct Model50 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  Parameter scale1{vg::tensor(0.5)}, bias{vg::randn({8, 1, 1, 1})}, scale2{vg::tensor(1.0)};
  vg::nn::AvgPool3d avg_pool{{.kernel_size = 2}};
  VG_MODULE(conv_transpose, scale1, bias, scale2, avg_pool)
  vg::Tensor forward(const vg::Tensor& x) { return (avg_pool(conv_transpose(x) * scale1) + bias) * scale2; }
};

struct Model58 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  Parameter bias{vg::randn({1, 1, 1, 1})};
  VG_MODULE(conv_transpose, bias)
  vg::Tensor forward(const vg::Tensor& input) {
    const vg::Tensor x = vg::logsumexp(conv_transpose(input), 1, true);
    return vg::clamp(x * vg::sigmoid(x + 3) / 6 - bias, -1, 1);
  }
};

struct Model74 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  vg::nn::LeakyReLU leaky_relu{0.2};
  Parameter multiplier{vg::randn({8, 1, 1, 1})};
  vg::nn::MaxPool3d max_pool{{.kernel_size = 2}};
  VG_MODULE(conv_transpose, leaky_relu, multiplier, max_pool)
  vg::Tensor forward(const vg::Tensor& x) { return max_pool(leaky_relu(leaky_relu(conv_transpose(x)) * multiplier)); }
};

struct Model77 : vg::nn::Module {
  ConvTranspose3d conv_transpose{4, 8, 5};
  BatchNorm3d batch_norm{8};
  VG_MODULE(conv_transpose, batch_norm)
  vg::Tensor forward(const vg::Tensor& x) { return batch_norm(conv_transpose(x) * 2).mean({2, 3, 4}, true); }
};

struct Model78 : vg::nn::Module {
  ConvTranspose3d conv_transpose{4, 8, 5, 2, 2};
  vg::nn::MaxPool3d max_pool1{{.kernel_size = 2}}, max_pool2{{.kernel_size = 3}};
  VG_MODULE(conv_transpose, max_pool1, max_pool2)
  vg::Tensor forward(const vg::Tensor& x) { return max_pool2(max_pool1(conv_transpose(x))).sum(1, true); }
};

struct Model89 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kDoubling};
  Parameter subtract{vg::randn({1, 8, 1, 1, 1})};
  VG_MODULE(conv_transpose, subtract)
  vg::Tensor forward(const vg::Tensor& input) {
    vg::Tensor x = vg::max_pool3d(conv_transpose(input), {.kernel_size = 2});
    x = vg::softmax(x, 1) - subtract;
    x = vg::sigmoid(x) * x;
    return vg::max(x, 1).values;
  }
};

struct Model96 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  VG_MODULE(conv_transpose)
  vg::Tensor forward(const vg::Tensor& x) {
    return vg::clamp(vg::max_pool3d(conv_transpose(x) * 0.5, {.kernel_size = 2}).mean({2, 3, 4}, true), 0, 1);
  }
};

struct Model100 : vg::nn::Module {
  ConvTranspose3d conv_transpose{kUpsampling};
  VG_MODULE(conv_transpose)
  vg::Tensor forward(const vg::Tensor& x) { return vg::clamp_min(conv_transpose(x), -1) / 2; }
};

/// A model and a function that calls its forward() with a list of inputs.
struct Model {
  std::shared_ptr<vg::nn::Module> module;
  std::function<vg::Tensor(const vg::Tensors&)> forward;
};

template <class M, class... Args>
Model make(Args&&... args) {
  const auto model = std::make_shared<M>(std::forward<Args>(args)...);
  return {model, [model](const vg::Tensors& inputs) {
            if constexpr (requires { model->forward(inputs[0], inputs[1]); })
              return (*model)(inputs[0], inputs[1]);
            else
              return (*model)(inputs[0]);
          }};
}

struct Case {
  const char* number;
  std::function<Model()> make;
  bool layer_norm = false;  // contains a LayerNorm, whose result is contiguous for any input format
};

const Case kCases[] = {
    {"3", make<Model3>, true},
    {"13", make<Model13>},
    {"15", make<Model15>},
    {"20", make<Model20>},
    {"26", make<Model26>},
    {"34", make<Model34>, true},
    {"38", make<Model38>},
    {"49", [] { return make<Sequential>(ConvTranspose3d{kDoubling}, vg::nn::Softmax{1}, vg::nn::Sigmoid{}); }},
    {"50", make<Model50>},
    {"58", make<Model58>},
    {"60",
     [] {
       return make<Sequential>(ConvTranspose3d{kUpsampling}, vg::nn::SiLU{}, vg::nn::GroupNorm{4, 8},
                               vg::nn::Hardswish{});
     }},
    {"61",
     [] {
       return make<Sequential>(ConvTranspose3d{{.in_channels = 4, .out_channels = 8, .kernel_size = 3, .bias = false}},
                               vg::nn::ReLU{}, vg::nn::GroupNorm{4, 8});
     }},
    {"72",
     [] {
       return make<Sequential>(ConvTranspose3d{kUpsampling}, BatchNorm3d{8}, vg::nn::AvgPool3d{{.kernel_size = 2}},
                               vg::nn::AvgPool3d{{.kernel_size = 2}});
     }},
    {"74", make<Model74>},
    {"77", make<Model77>},
    {"78", make<Model78>},
    {"89", make<Model89>},
    {"96", make<Model96>},
    {"100", make<Model100>},
};

/// Returns the recorded tensors of one model. The names do not include the model number: "input", "grad.bias".
vg::TensorMap recorded(const std::string& number) {
  static const vg::TensorMap all =
      vg::load_safetensors(std::filesystem::path(TESTS_DIR "/nn/kernelbench_models.safetensors"));
  vg::TensorMap found;
  for (const auto& [name, value] : all)
    if (name.starts_with(number + '.')) found[name.substr(number.size() + 1)] = value;
  return found;
}

vg::TensorMap part(const vg::TensorMap& all, const std::string& prefix) {
  vg::TensorMap found;
  for (const auto& [name, value] : all)
    if (name.starts_with(prefix)) found[name.substr(prefix.size())] = value;
  return found;
}

/// Runs one forward and backward pass and returns the results under the names that kernelbench_models.py uses.
vg::TensorMap step(const Case& c, const vg::TensorMap& given, vg::Device device, vg::MemoryFormat format, bool low) {
  Model model = c.make();
  model.module->load_state_dict(part(given, "state."));
  model.module->to(device);
  vg::Tensors inputs;
  for (const char* name : {"input", "add_input"})
    if (given.contains(name)) {
      inputs.push_back(given.at(name).to(device).contiguous(format).clone());
      inputs.back().requires_grad_();
    }
  vg::TensorMap found;
  {
    const vg::autocast guard(vg::bf16, low);
    found["output"] = model.forward(inputs);
  }
  EXPECT_TRUE(c.layer_norm || found["output"].dim() < 5 || found["output"].is_contiguous(format));
  found["output"].backward(given.at("grad_output").to(device).to(found["output"].dtype()));
  found["grad.input"] = inputs[0].grad();
  if (inputs.size() > 1) found["grad.add_input"] = inputs[1].grad();
  for (const auto& [name, parameter] : model.module->named_parameters())
    if (parameter.grad().defined()) found["grad." + name] = parameter.grad();
  for (const auto& [name, buffer] : model.module->named_buffers()) found["after." + name] = buffer;
  return found;
}

double largest(const vg::Tensor& x) { return vg::amax(vg::abs(x.to(vg::f64))).item(); }
double length(const vg::Tensor& x) { return vg::norm(x.to(vg::f64)).item(); }

/// Compares with the recorded results. In float32, each element must agree up to the order of summation. In bf16, the
/// norm of the difference must be small: rounding can change the maximum of a pool or the branch of a function such as
/// ReLU, so single elements may differ.
void expect_recorded_results(vg::Device device, vg::MemoryFormat format, bool low = false) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.number);
    const vg::TensorMap expected = recorded(c.number);
    const vg::TensorMap found = step(c, expected, device, format, low);
    EXPECT_EQ(found.size(), part(expected, "grad.").size() + part(expected, "after.").size() + 1);
    double scale = 0;  // the largest gradient; gradients far below it count as 0 up to rounding
    for (const auto& [name, value] : part(expected, "grad.")) scale = std::max(scale, largest(value));
    for (const auto& [name, value] : found) {
      ASSERT_TRUE(expected.contains(name)) << name;
      const vg::Tensor& wanted = expected.at(name);
      ASSERT_EQ(value.shape(), wanted.shape()) << name;
      EXPECT_TRUE(value.dtype() == wanted.dtype() || (low && name == "output")) << name << ' ' << value.dtype();
      const vg::Tensor off = value.to(vg::Device::cpu()).to(vg::f64) - wanted.to(vg::f64);
      const bool zero = largest(wanted) < 1e-6 * scale;
      if (low)
        EXPECT_LE(length(off), (name == "output" ? 0.02 : 0.2) * (zero ? scale : length(wanted))) << name;
      else
        EXPECT_LE(largest(off), zero ? 1e-5 * scale : 4e-5 * largest(wanted)) << name;
    }
  }
}

TEST(KernelBenchModels, MatchPyTorch) { expect_recorded_results(vg::Device::cpu(), vg::MemoryFormat::contiguous); }
TEST(KernelBenchModels, MatchPyTorchInChannelsLast) {
  expect_recorded_results(vg::Device::cpu(), vg::MemoryFormat::channels_last);
}
TEST(KernelBenchModels, ApproximatePyTorchUnderAutocast) {
  expect_recorded_results(vg::Device::cpu(), vg::MemoryFormat::contiguous, true);
}
TEST(KernelBenchModels, MatchPyTorchOnCuda) {
  if (!vg::cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  for (const vg::MemoryFormat format : {vg::MemoryFormat::contiguous, vg::MemoryFormat::channels_last}) {
    expect_recorded_results(vg::Device::cuda(), format);
    expect_recorded_results(vg::Device::cuda(), format, true);
  }
}

}  // namespace
