// Tests of layers against PyTorch (keys, shapes, results; see layers_reference.py) and of their options.
#include "nn/layers.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

struct LayerReference {
  Shape input;
  std::vector<std::pair<std::string, Shape>> state;
  Shape output;
  std::vector<double> projections;
};
#include "tests/nn/layers_reference.inc"

using MakeLayer = std::function<std::unique_ptr<nn::Layer>()>;

template <class L, class... Args>
MakeLayer make(Args... args) {
  return [=] { return std::make_unique<L>(args...); };
}

std::map<std::string, MakeLayer> layers() {
  using namespace nn;
  return {
      {"conv3d", make<Conv3d>(Conv3d::Options{.in_channels = 4,
                                              .out_channels = 6,
                                              .kernel_size = {3, 2, 1},
                                              .stride = {2, 1, 2},
                                              .padding = {1, 0, 2},
                                              .dilation = {1, 2, 1},
                                              .groups = 2})},
      {"conv2d", make<Conv2d>(Conv2d::Options{
                     .in_channels = 3, .out_channels = 2, .kernel_size = 3, .padding = 1, .bias = false})},
      {"conv1d", make<Conv1d>(Conv1d::Options{.in_channels = 2, .out_channels = 4, .kernel_size = 2, .stride = 2})},
      {"conv_transpose3d", make<ConvTranspose3d>(ConvTranspose3d::Options{.in_channels = 4,
                                                                          .out_channels = 6,
                                                                          .kernel_size = {3, 4, 2},
                                                                          .stride = {2, 3, 1},
                                                                          .padding = {1, 0, 2},
                                                                          .output_padding = {1, 2, 1},
                                                                          .groups = 2,
                                                                          .dilation = {1, 1, 3}})},
      {"conv_transpose2d", make<ConvTranspose2d>(ConvTranspose2d::Options{
                               .in_channels = 3, .out_channels = 2, .kernel_size = 4, .stride = 2, .padding = 1})},
      {"conv_transpose1d", make<ConvTranspose1d>(ConvTranspose1d::Options{
                               .in_channels = 2, .out_channels = 4, .kernel_size = 3, .stride = 2, .bias = false})},
      {"group_norm", make<GroupNorm>(2, 6, GroupNormOptions{.eps = 1e-3})},
      {"instance_norm3d", make<InstanceNorm3d>(3)},
      {"instance_norm3d_affine", make<InstanceNorm3d>(3, InstanceNormOptions{.eps = 1e-2, .affine = true})},
      {"layer_norm", make<LayerNorm>(Shape{3, 4})},
      {"linear", make<Linear>(5, 3)},
      {"relu", make<ReLU>()},
      {"leaky_relu", make<LeakyReLU>(0.2)},
      {"sigmoid", make<Sigmoid>()},
      {"tanh", make<Tanh>()},
      {"gelu", make<GELU>()},
      {"silu", make<SiLU>()},
      {"identity", make<Identity>()},
      {"softmax", make<Softmax>(1)},
      {"log_softmax", make<LogSoftmax>(-1)},
      {"elu", make<ELU>(0.7)},
      {"selu", make<SELU>()},
      {"mish", make<Mish>()},
      {"hardsigmoid", make<Hardsigmoid>()},
      {"hardswish", make<Hardswish>()},
      {"prelu", make<PReLU>(3)},
      {"batch_norm1d", make<BatchNorm1d>(3, BatchNorm1d::Options{.momentum = 0.3})},
      {"batch_norm1d_plain", make<BatchNorm1d>(3, BatchNorm1d::Options{.affine = false, .track_running_stats = false})},
      {"batch_norm2d", make<BatchNorm2d>(3, BatchNorm2d::Options{.eps = 1e-2, .momentum = {}})},
      {"batch_norm3d", make<BatchNorm3d>(3)},
      {"weight_norm_linear", [] { return std::make_unique<WeightNorm<Linear>>(Linear(5, 3)); }},
      {"weight_norm_linear_whole",
       [] { return std::make_unique<WeightNorm<Linear>>(Linear(5, 3), WeightNormOptions{.dim = {}}); }},
      {"weight_norm_conv_transpose",
       [] {
         return std::make_unique<WeightNorm<ConvTranspose2d>>(
             ConvTranspose2d{{.in_channels = 3, .out_channels = 2, .kernel_size = 3}}, WeightNormOptions{.dim = 1});
       }},
      {"spectral_norm_conv",
       [] {
         return std::make_unique<SpectralNorm<Conv3d>>(Conv3d{{.in_channels = 2, .out_channels = 3, .kernel_size = 2}},
                                                       SpectralNormOptions{.n_power_iterations = 2});
       }},
      {"spectral_norm_conv_transpose",
       [] {
         return std::make_unique<SpectralNorm<ConvTranspose1d>>(
             ConvTranspose1d{{.in_channels = 3, .out_channels = 2, .kernel_size = 3}});
       }},
      {"softplus", make<Softplus>(2.0, 1.0)},
      {"max_pool3d", make<MaxPool3d>(MaxPoolOptions<3>{.kernel_size = 3, .stride = 2, .padding = 1})},
      {"avg_pool3d",
       make<AvgPool3d>(AvgPoolOptions<3>{.kernel_size = 2, .stride = 1, .padding = 1, .count_include_pad = false})},
      {"max_pool2d", make<MaxPool2d>(2)},
      {"max_pool1d", make<MaxPool1d>(3, 2, 1)},
      {"avg_pool3d_ceil", [] { return std::make_unique<AvgPool3d>(2, AvgPoolOptions<3>{.ceil_mode = true}); }},
      {"avg_pool2d",
       [] {
         return std::make_unique<AvgPool2d>(Extent<2>{2, 3}, 1);
       }},
      {"adaptive_avg_pool3d", make<AdaptiveAvgPool3d>(Triple(2, 1, 3))},
      {"adaptive_max_pool3d", make<AdaptiveMaxPool3d>(2)},
      {"reflection_pad3d", make<ReflectionPad3d>(std::vector<int64_t>{1, 2, 0, 1, 2, 0})},
      {"replication_pad3d", make<ReplicationPad3d>(2)},
      {"constant_pad3d", make<ConstantPad3d>(1, -0.5)},
      {"upsample_bicubic", make<Upsample>(InterpolateOptions{.scale_factor = 2, .mode = InterpolateMode::bicubic})},
      {"upsample", make<Upsample>(InterpolateOptions{.scale_factor = 2, .mode = InterpolateMode::trilinear})},
      {"flatten", make<Flatten>()},
      {"sequential",
       [] {
         return std::make_unique<Sequential>(
             ConvTranspose3d{{.in_channels = 2, .out_channels = 4, .kernel_size = 4, .stride = 2, .padding = 1}},
             ReLU{}, GroupNorm{2, 4});
       }},
  };
}

/// Returns an f64 tensor whose element i is function(i * step + phase). Equals pattern() in layers_reference.py.
template <class F>
Tensor pattern(const Shape& shape, double step, double phase, F function) {
  std::vector<double> values(static_cast<size_t>(numel(shape)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = function(static_cast<double>(i) * step + phase);
  return from_span<double>(values, shape);
}
double sine(double x) { return std::sin(x); }
double cosine(double x) { return std::cos(x); }

/// Returns the sum of x[i] * cos(0.11 i).
double projection(const Tensor& x) {
  double sum = 0, i = 0;
  for (double value : x.to_vector()) sum += value * std::cos(0.11 * i++);
  return sum;
}

class LayerTest : public testing::TestWithParam<std::pair<const std::string, MakeLayer>> {};

TEST_P(LayerTest, AgreesWithPyTorch) {
  const LayerReference& reference = kLayerReference.at(GetParam().first);
  for (Device device : devices()) {
    const std::unique_ptr<nn::Layer> layer = GetParam().second();
    layer->to(f64);
    nn::NamedTensors members = layer->named_parameters();
    const size_t parameters = members.size();
    for (const auto& buffer : layer->named_buffers()) members.push_back(buffer);
    ASSERT_EQ(members.size(), reference.state.size());
    TensorMap state;
    for (size_t k = 0; k < members.size(); ++k) {
      const auto& [name, shape] = reference.state[k];
      EXPECT_EQ(members[k].first, name);
      EXPECT_EQ(members[k].second.shape(), shape) << name;
      EXPECT_EQ(members[k].second.requires_grad(), k < parameters) << name;
      const Tensor values = pattern(shape, 0.37, static_cast<double>(k), sine);
      state[name] = k < parameters ? values : values * 0.5 + 1.0;
      if (!is_floating(members[k].second.dtype())) state[name] = members[k].second;
    }
    layer->load_state_dict(state);
    layer->to(device);
    layer->eval();
    const Tensor x = pattern(reference.input, 0.23, 0, cosine).to(device), result = (*layer)(x);
    ASSERT_EQ(result.shape(), reference.output);
    std::vector<double> projections{projection(result)};
    if (members.size() > parameters) {
      layer->train();
      for (const Tensor& input : {x, x * 2.0 + 1.0}) projections.push_back(projection((*layer)(input)));
      for (const Tensor& buffer : layer->buffers())
        if (is_floating(buffer.dtype())) projections.push_back(projection(buffer));
    }
    ASSERT_EQ(projections.size(), reference.projections.size());
    for (size_t i = 0; i < projections.size(); ++i)
      EXPECT_NEAR(projections[i], reference.projections[i], 1e-10 * std::abs(reference.projections[i]) + 1e-11) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, LayerTest, testing::ValuesIn(layers()),
                         [](const auto& test) { return test.param.first; });

TEST(Layers, EveryReferenceIsTested) { EXPECT_EQ(layers().size(), kLayerReference.size()); }

TEST(Layers, ConvTransposeAcceptsAnOutputSize) {
  const nn::ConvTranspose3d up{{.in_channels = 1, .out_channels = 1, .kernel_size = 3, .stride = 2, .padding = 1}};
  EXPECT_EQ(up(ones({1, 1, 4, 4, 4})).shape(), (Shape{1, 1, 7, 7, 7}));
  EXPECT_EQ(up(ones({1, 1, 4, 4, 4}), {8, 7, 8}).shape(), (Shape{1, 1, 8, 7, 8}));
}

TEST(Layers, DropoutAppliesOnlyInTraining) {
  manual_seed(3);
  nn::Dropout dropout(0.25);
  const std::vector<double> values = dropout(ones({10000})).to_vector();
  const auto zeros = static_cast<double>(std::count(values.begin(), values.end(), 0.0));
  EXPECT_NEAR(zeros, 2500, 5 * std::sqrt(10000 * 0.25 * 0.75));
  dropout.eval();
  EXPECT_EQ(dropout(ones({8})).to_vector(), std::vector<double>(8, 1.0));
}

TEST(Layers, Dropout3dDropsWholeChannels) {
  for (const Device device : devices()) {
    manual_seed(3);
    nn::Dropout3d dropout(0.25);
    const Tensor x = ones({50, 40, 2, 3, 2}, {.device = device});
    const Tensor y = reshape(dropout(x), {2000, 12});
    EXPECT_EQ(y.amin(1).to_vector(), y.amax(1).to_vector());
    double dropped = 0;
    for (const double value : y.amin(1).to_vector()) {
      EXPECT_TRUE(value == 0 || value == 1 / 0.75F) << value;
      dropped += value == 0;
    }
    EXPECT_NEAR(dropped, 500, 5 * std::sqrt(2000 * 0.25 * 0.75));
    const Tensor one = dropout3d(ones({30, 2, 2, 2}, {.device = device}), 0.5);  // without a batch
    EXPECT_EQ(one.amin({1, 2, 3}).to_vector(), one.amax({1, 2, 3}).to_vector());
    EXPECT_EQ(dropout3d(x, 1).amax().item(), 0);
    dropout.eval();
    EXPECT_TRUE(dropout(x).is_same(x));
  }
  EXPECT_ERROR(dropout3d(ones({2, 3, 4})), "dropout3d: input must be (N, C, D, H, W) or (C, D, H, W), got [2, 3, 4]");
  EXPECT_ERROR(nn::Dropout3d(-1), "p must lie in [0, 1], got -1");
}

TEST(Layers, SavesAndLoadsState) {
  const auto path = std::filesystem::path(testing::TempDir()) / "voxgrad_layers_test.safetensors";
  const auto make_model = [] {
    return nn::Sequential{nn::Conv3d{{.in_channels = 1, .out_channels = 4, .kernel_size = 3}}, nn::SiLU{},
                          nn::GroupNorm{2, 4}, nn::Sequential{nn::Flatten{}, nn::Linear{4, 2}}};
  };
  const nn::Sequential saved = make_model();
  nn::Sequential loaded = make_model();
  save_safetensors(path, saved.state_dict());
  loaded.load_state_dict(load_safetensors(path));
  std::filesystem::remove(path);
  const Tensor x = rand({2, 1, 3, 3, 3});
  EXPECT_EQ(loaded(x).to_vector(), saved(x).to_vector());
  EXPECT_TRUE(loaded.state_dict().contains("3.1.weight"));
}

struct Twice : nn::Module {
  Tensor factor = full({}, 2, {.requires_grad = true});
  VG_MODULE(factor)
  Tensor forward(const Tensor& x) { return x * factor; }
};

TEST(Sequential, AcceptsAnyModuleWithForward) {
  auto shared = std::make_shared<Twice>();
  nn::Sequential model{Twice{}};
  model.push_back(shared);
  model.push_back(nn::ReLU{});
  EXPECT_EQ(model.size(), 3u);
  EXPECT_EQ(&model[1], shared.get());
  EXPECT_NE(dynamic_cast<nn::ReLU*>(&model[2]), nullptr);
  EXPECT_EQ(model(ones({1})).item(), 4);
  EXPECT_EQ(model.named_parameters()[1].first, "1.factor");
  EXPECT_EQ(nn::Sequential()(ones({1})).item(), 1);
  EXPECT_ERROR(model[3], "Sequential: module index 3 is out of range: size() is 3");
  EXPECT_ERROR(model.push_back(std::shared_ptr<Twice>()), "Sequential: module 3 is null");
}

TEST(Layers, ConvolutionArgumentsHavePyTorchsOrder) {
  const auto a = nn::Conv2d(4, 8, {3, 5}, 2, {1, 0}, 2, 4, false).options();
  EXPECT_EQ(a.kernel_size, (Extent<2>(3, 5)));
  EXPECT_EQ(a.stride, Extent<2>(2));
  EXPECT_EQ(a.padding, (Extent<2>(1, 0)));
  EXPECT_EQ(a.dilation, Extent<2>(2));
  EXPECT_EQ(a.groups, 4);
  EXPECT_FALSE(a.bias);
  const auto b = nn::ConvTranspose1d(4, 8, 3, 2, 1, 1, 4, false, 2).options();
  EXPECT_EQ(b.output_padding, Extent<1>(1));
  EXPECT_EQ(b.groups, 4);
  EXPECT_EQ(b.dilation, Extent<1>(2));
  EXPECT_FALSE(b.bias);
  EXPECT_EQ(nn::Conv3d(1, 8, 3).weight.shape(), (Shape{8, 1, 3, 3, 3}));
  EXPECT_EQ(nn::ConvTranspose3d(8, 4, 2, 2)(ones({1, 8, 2, 2, 2})).shape(), (Shape{1, 4, 4, 4, 4}));
}

TEST(Layers, RejectBadOptions) {
  using namespace nn;
  EXPECT_ERROR(Conv3d({.in_channels = 0, .out_channels = 1, .kernel_size = 1}),
               "Conv3d: in_channels and out_channels must be positive, got 0 and 1");
  EXPECT_ERROR(Conv2d({.in_channels = 4, .out_channels = 6, .kernel_size = 1, .groups = 4}),
               "Conv2d: groups = 4 must be positive and divide in_channels = 4 and out_channels = 6");
  EXPECT_ERROR(Conv3d({.in_channels = 1, .out_channels = 1}), "Conv3d: kernel_size must be positive, got [0, 0, 0]");
  EXPECT_ERROR(Conv1d({.in_channels = 1, .out_channels = 1, .kernel_size = 1, .stride = 0}),
               "Conv1d: stride must lie in [1, 2^31), got [0]");
  EXPECT_ERROR(Conv3d({.in_channels = 1, .out_channels = 1, .kernel_size = 1, .padding = {0, -1, 0}}),
               "Conv3d: padding must lie in [0, 2^31), got [0, -1, 0]");
  EXPECT_ERROR(ConvTranspose3d({.in_channels = 1, .out_channels = 1, .kernel_size = 3, .output_padding = 1}),
               "ConvTranspose3d: output_padding must be smaller than stride or dilation");
  EXPECT_ERROR(GroupNorm(3, 8), "GroupNorm: num_groups = 3 must be positive and divide num_channels = 8");
  EXPECT_ERROR(GroupNorm(-2, 8), "GroupNorm: num_groups = -2 must be positive and divide num_channels = 8");
  EXPECT_ERROR(GroupNorm(2, 8, {.eps = -1}), "GroupNorm: eps must be finite and not negative, got -1");
  EXPECT_ERROR(GroupNorm(2, 8)(ones({2, 4, 3})), "GroupNorm: expects (N, 8, ...), got [2, 4, 3]");
  EXPECT_ERROR(InstanceNorm3d(0), "InstanceNorm3d: the number of channels must be positive, got 0");
  EXPECT_ERROR(InstanceNorm3d(2)(ones({1, 3, 2, 2, 2})), "InstanceNorm3d: expects (N, 2, D, H, W)");
  EXPECT_ERROR(BatchNorm3d(0), "BatchNorm3d: the number of channels must be positive, got 0");
  EXPECT_ERROR(BatchNorm1d(2, {.momentum = NAN}), "BatchNorm1d: momentum must lie in [0, 1], got nan");
  EXPECT_ERROR(BatchNorm3d(2, {.momentum = -1}), "BatchNorm3d: momentum must lie in [0, 1], got -1");
  EXPECT_ERROR(PReLU(1, NAN), "PReLU: init must be finite, got nan");
  EXPECT_ERROR(BatchNorm2d(2)(ones({1, 2, 3})), "BatchNorm2d: expects (N, 2, H, W), got [1, 2");
  EXPECT_ERROR(BatchNorm3d(2)(ones({1, 2, 1, 1, 1})), "batch_norm: expected more than 1 value per channel in training");
  EXPECT_ERROR(ELU(INFINITY), "ELU: alpha must be finite");
  EXPECT_ERROR(SpectralNorm(Linear(2, 2), {.n_power_iterations = 0}), "SpectralNorm: n_power_iterations must be pos");
  EXPECT_ERROR(SpectralNorm(Linear(2, 2), {.eps = -1}), "SpectralNorm: eps must be finite and not negative, got -1");
  EXPECT_ERROR(SpectralNorm(Linear(2, 2), {.eps = NAN}), "SpectralNorm: eps must be finite and not negative, got nan");
  EXPECT_ERROR(WeightNorm(Linear(2, 2), {.dim = 2}), "WeightNorm: axis 2");
  EXPECT_ERROR(LayerNorm(Shape{}), "LayerNorm: normalized_shape is empty");
  EXPECT_ERROR(Linear(0, 3), "Linear: in_features and out_features must be positive");
  EXPECT_ERROR(Dropout(1.5), "Dropout: p must lie in [0, 1], got 1.5");
  EXPECT_ERROR(Dropout(std::nan("")), "Dropout: p must lie in [0, 1]");
  EXPECT_ERROR(LeakyReLU(INFINITY), "LeakyReLU: negative_slope must be finite");
  EXPECT_ERROR(Softplus(0.0), "Softplus: beta must be finite and not 0");
}

TEST(Layers, RMSNormAppliesItsWeight) {
  const nn::RMSNorm norm(Shape{3, 4}, {.eps = 0.5}), plain(4, {.elementwise_affine = false});
  EXPECT_EQ(norm.weight.shape(), (Shape{3, 4}));
  EXPECT_FALSE(plain.weight.defined());
  const Tensor x = randn({2, 3, 4});
  norm.weight.detach().mul_(2);
  EXPECT_EQ(norm(x).to_vector(), rms_norm(x, {3, 4}, norm.weight, 0.5).to_vector());
  EXPECT_EQ(plain(x).to_vector(), rms_norm(x, {4}).to_vector());
  EXPECT_ERROR(nn::RMSNorm(Shape{2, 0}), "RMSNorm: the sizes in normalized_shape must be positive, got [2, 0]");
  EXPECT_ERROR(nn::RMSNorm(2, {.eps = -1}), "RMSNorm: eps must be finite and not negative, got -1");
}

TEST(Layers, PoolingAndPaddingCheckOptionsAndShapes) {
  using namespace nn;
  EXPECT_ERROR(MaxPool3d({.kernel_size = -1}), "MaxPool3d: kernel_size must lie in [1, 2^31), got [-1, -1, -1]");
  EXPECT_ERROR(MaxPool3d({.kernel_size = 2, .stride = -1}), "MaxPool3d: stride must lie in [1, 2^31)");
  EXPECT_ERROR(MaxPool3d({.kernel_size = 2, .padding = -1}), "MaxPool3d: padding must lie between 0 and half");
  EXPECT_ERROR(MaxPool3d({.kernel_size = 2, .dilation = -1}), "MaxPool3d: dilation must lie in [1, 2^31)");
  EXPECT_ERROR(AvgPool3d({.kernel_size = {1, 0, 1}}), "AvgPool3d: kernel_size must lie in [1, 2^31), got [1, 0, 1]");
  EXPECT_ERROR(AvgPool3d({.kernel_size = 3, .padding = 2}), "AvgPool3d: padding must lie between 0 and half");
  EXPECT_ERROR(AvgPool3d({.kernel_size = 1, .divisor_override = 0}), "AvgPool3d: divisor_override must not be zero");
  EXPECT_ERROR(Upsample({}), "Upsample: exactly one of size and scale_factor must be given");
  EXPECT_ERROR(Upsample({.size = 0}), "Upsample: size must be positive, got [0]");
  EXPECT_ERROR(Upsample({.scale_factor = -2}), "Upsample: scale_factor must be finite and positive, got -2");
  EXPECT_ERROR(Upsample({.size = 4, .align_corners = true}), "Upsample: align_corners must be false for mode nearest");
  const Tensor x = ones({1, 8, 4, 4, 6});
  EXPECT_EQ(MaxPool3d(Triple(2, 2, 3)).forward(x).shape(), (Shape{1, 8, 2, 2, 2}));
  EXPECT_EQ(AvgPool3d(2, Triple(2, 4, 1)).forward(x).shape(), (Shape{1, 8, 2, 1, 5}));
  EXPECT_EQ(MaxPool3d(3, 2, 1).forward(x).shape(), (Shape{1, 8, 2, 2, 3}));
  EXPECT_EQ(MaxPool3d(2, {.stride = 1, .ceil_mode = true}).forward(x).shape(), (Shape{1, 8, 3, 3, 5}));
  EXPECT_EQ(PixelShuffle3d(2).forward(x).shape(), (Shape{1, 1, 8, 8, 12}));
  EXPECT_EQ(PixelUnshuffle3d(2).forward(x).shape(), (Shape{1, 64, 2, 2, 3}));
  EXPECT_EQ(ZeroPad3d({1, 0, 0, 0, 0, 2}).forward(x).shape(), (Shape{1, 8, 6, 4, 7}));
  EXPECT_ERROR(MaxPool2d(2, {.stride = 0}), "MaxPool2d: stride must lie in [1, 2^31), got [0, 0]");
  EXPECT_ERROR(AdaptiveAvgPool3d(0), "AdaptiveAvgPool3d: output_size must be positive, got [0, 0, 0]");
  EXPECT_ERROR(ReflectionPad3d({1, 1, 1}), "ReflectionPad3d: takes 6 amounts, got 3");
  EXPECT_ERROR(PixelShuffle3d(0), "PixelShuffle3d: upscale_factor must be positive, got 0");
  EXPECT_ERROR(PixelUnshuffle3d(0), "PixelUnshuffle3d: downscale_factor must be positive, got 0");
  EXPECT_ERROR(Flatten(2, 1), "Flatten: start_axis 2 comes after end_axis 1");
  EXPECT_ERROR(Flatten(-1, -2), "Flatten: start_axis -1 comes after end_axis -2");
  EXPECT_ERROR(Flatten(0, 8), "Flatten: axes must lie in [-8, 8), got 0 and 8");
}

TEST(Layers, RejectUndefinedInputs) {
  EXPECT_ERROR(nn::GroupNorm(2, 8)(Tensor()), "GroupNorm: expects (N, 8, ...), got undefined");
  EXPECT_ERROR(nn::BatchNorm1d(2)(Tensor()), "BatchNorm1d: expects (N, 2, L) or (N, C), got undefined");
  for (const auto& [name, make_layer] : layers()) {
    if (name == "identity") continue;
    EXPECT_ERROR((*make_layer())(Tensor()), "undefined");
  }
}

}  // namespace
}  // namespace voxgrad
