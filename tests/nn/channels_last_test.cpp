// Tests of modules and operators in channels_last: results keep the format, match the contiguous results, and need no
// layout copies.
#include "core/autocast.h"
#include "core/autograd.h"
#include "core/profiler.h"
#include "nn/layers.h"
#include "nn/optim/clip.h"
#include "nn/optim/ema.h"
#include "nn/optim/grad_scaler.h"
#include "nn/optim/optimizers.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/loss.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

nn::Sequential block(int64_t in, int64_t out, int64_t stride) {
  return nn::Sequential{
      nn::Conv3d{{.in_channels = in, .out_channels = out, .kernel_size = 3, .stride = stride, .padding = 1}},
      nn::InstanceNorm3d{out, {.affine = true}}, nn::LeakyReLU{0.01}};
}

struct UNet : nn::Module {
  nn::Sequential first = block(2, 8, 1), down = block(8, 16, 2), join = block(16, 8, 1);
  nn::ConvTranspose3d up{{.in_channels = 16, .out_channels = 8, .kernel_size = 2, .stride = 2}};
  nn::Conv3d head{{.in_channels = 8, .out_channels = 3, .kernel_size = 1}};
  VG_MODULE(first, down, join, up, head)

  Tensor forward(const Tensor& x) const {
    const Tensor skip = first(x);
    return head(join(cat({up(down(skip)), skip}, 1)));
  }
};

bool is_channels_last(const Tensor& t) { return t.is_contiguous(MemoryFormat::channels_last); }

/// Expects all 5-D parameters and their gradients to be channels_last.
void expect_channels_last(const nn::Module& model) {
  for (const auto& [name, p] : model.named_parameters()) {
    if (p.dim() != 5) continue;
    EXPECT_TRUE(is_channels_last(p)) << name << ": " << p.strides();
    EXPECT_TRUE(is_channels_last(p.grad())) << name << ": " << p.grad().strides();
  }
}

/// Trains for three steps. After the first step, which allocates the optimizer's state, no tensor may be copied to a
/// different memory format.
void expect_training_without_copies(UNet& model, const Tensor& x, const Tensor& target, std::optional<DType> low) {
  optim::SGD optimizer(model.parameters(), {.lr = 1e-3, .momentum = 0.9});
  optim::ExponentialMovingAverage average(model);
  optim::GradScaler scaler({.init_scale = 4});
  for (int step = 0; step < 3; ++step) {
    profiler::Session profile;
    optimizer.zero_grad();
    for (int part = 0; part < 2; ++part) {
      const autocast mixed(low.value_or(bf16), low.has_value());
      scaler.scale(dice_ce_loss(model.forward(x), target)).backward();
    }
    expect_channels_last(model);
    scaler.unscale_(optimizer);
    optim::clip_grad_norm_(model.parameters(), 1);
    scaler.step(optimizer);
    scaler.update();
    average.update();
    profile.stop();
    if (step > 0) {
      EXPECT_TRUE(layout_copies(profile).empty()) << layout_copies(profile).front();
    }
  }
}

void expect_unet_without_copies(Device device) {
  manual_seed(3);
  UNet model;
  model.to(device);
  const Tensor target = affine(rand({2, 8, 8, 8}, {f32, device}), 3, 0).to(i64);
  const auto gradients = [&](const Tensor& x) {
    model.zero_grad();
    const Tensor y = model.forward(x);
    dice_ce_loss(y, target).backward();
    Tensors all{y.detach()};
    for (const Tensor& p : model.parameters()) all.push_back(p.grad().clone());
    return all;
  };
  const Tensor x = randn({2, 2, 8, 8, 8}, {f32, device});
  const Tensors plain = gradients(x);
  model.to(MemoryFormat::channels_last);
  EXPECT_TRUE(is_channels_last(model.forward(x)));
  profiler::Session profile;
  const Tensor inner = x.contiguous(MemoryFormat::channels_last);
  const Tensors last = gradients(inner);
  profile.stop();
  EXPECT_EQ(layout_copies(profile).size(), 1u) << layout_copies(profile).back();
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_LE(amax(abs(plain[i] - last[i])).item(), 3e-5 * amax(abs(plain[i])).item() + 2e-6) << i;
  for (const std::optional<DType> low : {std::optional<DType>(), std::optional(bf16)})
    expect_training_without_copies(model, inner, target, low);
}

TEST(ChannelsLast, UNetNeedsNoLayoutCopies) { expect_unet_without_copies(Device::cpu()); }
TEST(ChannelsLast, UNetNeedsNoLayoutCopiesOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_unet_without_copies(Device::cuda());
}

TEST(ChannelsLast, OperatorsKeepTheFormatWithoutCopies) {
  const Tensor x = randn({2, 8, 4, 4, 4}).contiguous(MemoryFormat::channels_last).requires_grad_();
  const Tensor bias = rand({8, 1, 1, 1}).requires_grad_();
  const std::pair<const char*, std::function<Tensor()>> operators[] = {
      {"cat",
       [&] {
         return cat({x, x * 2.0}, 1);
       }},
      {"max_pool3d", [&] { return max_pool3d(x, {.kernel_size = 2}); }},
      {"avg_pool3d", [&] { return avg_pool3d(x, {.kernel_size = 2}); }},
      {"nearest", [&] { return interpolate(x, {.scale_factor = 2}); }},
      {"trilinear", [&] { return interpolate(x, {.scale_factor = 2, .mode = InterpolateMode::trilinear}); }},
      {"softmax", [&] { return softmax(x, 1); }},
      {"bias", [&] { return x + bias; }},
      {"dropout", [&] { return dropout(x, 0.5, true); }},
      {"slice", [&] { return relu(slice(x, 2, 0, 2)); }},
      {"pad",
       [&] {
         return pad(x, {1, 1});
       }},
      {"where", [&] { return where(gt(x, 0), x, 0.0); }},
  };
  for (const auto& [name, run] : operators) {
    profiler::Session profile;
    const Tensor y = run();
    EXPECT_TRUE(is_channels_last(y)) << name << ": " << y.strides();
    sum(y * y).backward();
    profile.stop();
    EXPECT_TRUE(layout_copies(profile).empty()) << name << ": " << layout_copies(profile).front();
    EXPECT_TRUE(is_channels_last(x.grad())) << name << ": " << x.grad().strides();
    x.set_grad({});
  }
}

TEST(ChannelsLast, TheProfilerRecordsLayoutCopies) {
  const Tensor x = randn({2, 8, 4, 4, 4}).requires_grad_();
  profiler::Session profile;
  sum(exp(x).contiguous(MemoryFormat::channels_last)).backward();
  profile.stop();
  const std::vector<std::string> copies = layout_copies(profile);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0], "[2, 8, 4, 4, 4] f32 on cpu to channels_last, made by 'exp'");
}

/// A tensor with one channel has the same element order in both formats, but its strides show which format was
/// requested. Results have the requested format.
TEST(ChannelsLast, SingleChannelTensorsKeepTheRequestedFormat) {
  manual_seed(5);
  const Tensor x = randn({2, 1, 4, 6, 5}).requires_grad_();
  EXPECT_EQ(x.suggest_memory_format(), MemoryFormat::contiguous);
  const Tensor last = x.contiguous(MemoryFormat::channels_last), again = last.contiguous(MemoryFormat::channels_last);
  EXPECT_EQ(last.suggest_memory_format(), MemoryFormat::channels_last);
  EXPECT_TRUE(last.is_contiguous() && is_channels_last(last));
  EXPECT_EQ(last.storage(), x.storage());
  EXPECT_TRUE(again.is_same(last));
  EXPECT_EQ(last.contiguous().suggest_memory_format(), MemoryFormat::contiguous);
  EXPECT_EQ(x.contiguous().is_same(x), true);
  EXPECT_EQ((last * 2).suggest_memory_format(), MemoryFormat::channels_last);
  sum(last * 3).backward();
  EXPECT_EQ(x.grad().to_vector(), std::vector<double>(240, 3));
  EXPECT_EQ(zeros({3}).suggest_memory_format(), MemoryFormat::contiguous);
  const Tensor voxel = zeros({2, 1, 1, 1, 1});  // the strides of both formats are equal
  EXPECT_TRUE(voxel.contiguous(MemoryFormat::channels_last).is_same(voxel));

  nn::Conv3d conv{{.in_channels = 1, .out_channels = 8, .kernel_size = 3, .padding = 1}};
  EXPECT_EQ(conv(x).suggest_memory_format(), MemoryFormat::contiguous);
  EXPECT_EQ(conv(last).suggest_memory_format(), MemoryFormat::channels_last);
  const Tensor y = conv(x);
  conv.to(MemoryFormat::channels_last);
  EXPECT_EQ(conv(x).suggest_memory_format(), MemoryFormat::channels_last);
  EXPECT_LT(sum(abs(conv(x) - y)).item(), 1e-3);
  sum(conv(x)).backward();
  EXPECT_EQ(conv.weight.grad().shape(), conv.weight.shape());
}

/// The result of a convolution is channels_last if the input or the weight is channels_last.
TEST(ChannelsLast, WeightsDetermineTheFormatOfResults) {
  nn::Conv3d conv{{.in_channels = 3, .out_channels = 4, .kernel_size = 3}};
  nn::ConvTranspose3d up{{.in_channels = 4, .out_channels = 2, .kernel_size = 2, .stride = 2}};
  const Tensor x = randn({1, 3, 5, 5, 5}), w = conv.weight.contiguous(MemoryFormat::channels_last);
  EXPECT_EQ(conv3d(x, conv.weight).suggest_memory_format(), MemoryFormat::contiguous);
  EXPECT_EQ(conv3d(x, w).suggest_memory_format(), MemoryFormat::channels_last);
  const Tensor y = conv3d(x, conv.weight), v = up.weight.contiguous(MemoryFormat::channels_last);
  EXPECT_EQ(conv_transpose3d(y, v).suggest_memory_format(), MemoryFormat::channels_last);
}

}  // namespace
}  // namespace voxgrad
