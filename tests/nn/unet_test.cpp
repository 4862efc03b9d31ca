// Tests of UNet against nnU-Net's networks and loss (recorded by nnunet_models.py), and of deep supervision.
#include "nn/unet.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/profiler.h"
#include "core/random.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/gradcheck.h"
#include "ops/loss.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

/// Returns the options of the networks in nnunet_models.py.
nn::UNetOptions small(bool residual) {
  return {.in_channels = 2,
          .num_classes = 3,
          .stages = {{.features = 4, .kernel_size = {1, 3, 3}, .convs = residual ? 1 : 2, .decoder_convs = 1},
                     {.features = 6, .stride = {1, 2, 2}, .convs = residual ? 2 : 1, .decoder_convs = residual ? 1 : 2},
                     {.features = 8, .stride = 2, .convs = 2}},
          .residual = residual};
}

double largest(const Tensor& x) { return amax(abs(x.detach().to(Device::cpu(), f64))).item(); }

void expect_close(const char* what, const Tensor& actual, const Tensor& expected, double tolerance = 4e-5) {
  ASSERT_EQ(actual.shape(), expected.shape()) << what;
  const Tensor difference = actual.detach().to(Device::cpu(), f64) - expected.to(f64);
  EXPECT_LE(largest(difference), tolerance * largest(expected)) << what;
}

void expect_matches_nnunet(bool residual, Device device) {
  const TensorMap all = load_safetensors(TESTS_DIR "/nn/nnunet_models.safetensors");
  const TensorMap recorded = nn::with_prefix(all, residual ? "residual." : "plain.");
  nn::UNet model(small(residual));
  model.load_state_dict(nn::with_prefix(recorded, "model."));
  model.to(device);
  const Tensor x = recorded.at("input").clone().to(device).requires_grad_(), target = recorded.at("target").to(device);
  Tensors levels = model.levels(x);
  ASSERT_EQ(levels.size(), 2u);
  expect_close("full resolution", levels[0], recorded.at("logits.0"));
  expect_close("half resolution", levels[1], recorded.at("logits.1"));
  EXPECT_EQ(model.forward(x).to_vector(), levels[0].to_vector());

  // nnU-Net's Dice loss is minus the Dice coefficient; dice_ce_loss uses one minus the coefficient.
  const DiceCEOptions options{.dice = {.batch = true, .include_background = false}};
  expect_close("loss of two levels", deep_supervision_loss(levels, target, options) - 1.0, recorded.at("single_loss"));
  levels.push_back(avg_pool3d(levels[0], {.kernel_size = 2}));
  const Tensor loss = deep_supervision_loss(levels, target, options);
  expect_close("loss of three levels", loss - 1.0, recorded.at("loss"));
  loss.backward();
  expect_close("gradient", x.grad(), recorded.at("grad"), 2e-4);
}

TEST(UNet, MatchesNnUNetWithItsWeights) {
  for (const bool residual : {false, true}) expect_matches_nnunet(residual, Device::cpu());
}
TEST(UNet, MatchesNnUNetWithItsWeightsOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  for (const bool residual : {false, true}) expect_matches_nnunet(residual, Device::cuda());
}

TEST(UNet, PassesGradcheck) {
  manual_seed(4);
  for (const bool residual : {false, true}) {
    nn::UNet model({.stages = {{.features = 2, .convs = 1, .decoder_convs = 1}, {.features = 3, .stride = 2}},
                    .residual = residual});
    model.to(f64);
    Tensors inputs = model.parameters();
    for (const Tensor& p : inputs)
      if (p.dim() == 1) nn::init::normal_(p, 0.5);
    inputs.push_back(randn({2, 1, 4, 4, 4}, {.dtype = f64, .requires_grad = true}));
    const auto run = [&](const Tensors& t) { return model.levels(t.back()); };
    const GradcheckReport report = gradcheck(run, inputs, {.projections = 5});
    EXPECT_TRUE(report) << report.message;
  }
}

TEST(UNet, InitializesWeightsAsNnUNet) {
  manual_seed(1);
  nn::UNetOptions options = small(true);
  options.stages[2].features = 64;
  const nn::UNet model(options);
  for (const auto& [name, p] : model.named_parameters()) {
    const Tensor values = p.detach().to(f64);
    if (p.dim() == 1) {
      const bool one = name.ends_with("norm.weight") && !name.ends_with("conv2.norm.weight");
      EXPECT_EQ(largest(values - (one ? 1.0 : 0.0)), 0) << name;
    } else if (p.numel() > 10000) {
      const double std = std::sqrt(2 / (1 + 1e-4) / static_cast<double>(nn::init::calculate_fans(p).in));
      EXPECT_NEAR(std::sqrt(mean(values * values).item()) / std, 1, 0.02) << name;
      EXPECT_GT(largest(values), 3 * std) << name;  // normal, not uniform
    }
  }
  const Tensor x = randn({1, 2, 4, 8, 8});
  EXPECT_GT(largest(model(x)), 0);
}

/// Returns the logits of all levels and the gradients of all parameters.
std::vector<std::vector<double>> results(const nn::UNet& model, const Tensor& x, const Tensor& target) {
  model.zero_grad();
  const Tensors levels = model.levels(x);
  deep_supervision_loss(levels, target).backward();
  std::vector<std::vector<double>> all;
  for (const Tensor& level : levels) all.push_back(level.to_vector());
  for (const auto& [name, p] : model.named_parameters()) {
    EXPECT_EQ(p.grad().defined(), !name.starts_with("decoder.seg_layers.0")) << name;  // the lowest level has weight 0
    if (p.grad().defined()) all.push_back(p.grad().to_vector());
  }
  return all;
}

void expect_same_bits_recomputed(Device device) {
  for (const bool residual : {false, true})
    for (const bool low : {false, true}) {
      nn::UNetOptions options = small(residual);
      const nn::UNet plain(options);
      options.recompute = true;
      nn::UNet recomputed(options);
      recomputed.load_state_dict(plain.state_dict());
      const Tensor x = randn({2, 2, 4, 8, 8}, {f32, device}), target = (rand({2, 4, 8, 8}, {f32, device}) * 3.0).to(u8);
      nn::UNet moved = std::move(recomputed);
      for (nn::Module* model : {const_cast<nn::UNet*>(&plain), &moved}) model->to(device);
      const autocast guard(bf16, low);
      EXPECT_EQ(results(moved, x, target), results(plain, x, target)) << residual << low;
    }
}

TEST(UNet, RecomputeIsBitwiseEqual) { expect_same_bits_recomputed(Device::cpu()); }
TEST(UNet, RecomputeIsBitwiseEqualOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_same_bits_recomputed(Device::cuda());
}

TEST(UNet, RecomputeKeepsLessMemory) {
  nn::UNetOptions options = small(false);
  options.stages[0].convs = options.stages[0].decoder_convs = 4;
  const auto kept = [&](bool recompute) {
    options.recompute = recompute;
    const nn::UNet model(options);
    const Tensor x = randn({1, 2, 16, 16, 16});
    const int64_t before = memory::stats(Device::cpu()).current;
    const Tensor y = model(x);
    return memory::stats(Device::cpu()).current - before;
  };
  EXPECT_LT(static_cast<double>(kept(true)), 0.6 * static_cast<double>(kept(false)));
}

void expect_no_layout_copies(Device device) {
  for (const bool residual : {false, true}) {
    nn::UNet model(small(residual));
    model.to(device);
    const Tensor x = randn({2, 2, 4, 8, 8}, {f32, device});
    const Tensor target = (rand({2, 4, 8, 8}, {f32, device}) * 3.0).to(i64);
    const Tensor y = model(x);
    model.to(MemoryFormat::channels_last);
    const Tensor inner = x.contiguous(MemoryFormat::channels_last);
    for (const bool low : {false, true}) {
      profiler::Session profile;
      const autocast guard(bf16, low);
      const Tensors levels = model.levels(inner);
      for (const Tensor& level : levels) EXPECT_TRUE(level.is_contiguous(MemoryFormat::channels_last));
      expect_close("logits", levels[0], y.detach().to(Device::cpu()), low ? 0.1 : 1e-4);
      model.zero_grad();
      deep_supervision_loss(levels, target).backward();
      for (const auto& [name, p] : model.named_parameters())
        EXPECT_TRUE(p.dim() == 1 || !p.grad().defined() || p.grad().is_contiguous(MemoryFormat::channels_last)) << name;
      profile.stop();
      EXPECT_TRUE(layout_copies(profile).empty()) << layout_copies(profile).front();
    }
  }
}

TEST(UNet, ChannelsLastNeedsNoLayoutCopies) { expect_no_layout_copies(Device::cpu()); }
TEST(UNet, ChannelsLastNeedsNoLayoutCopiesOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  expect_no_layout_copies(Device::cuda());
}

TEST(UNet, RejectsInvalidInputsAndOptions) {
  const nn::UNet model(small(false));
  EXPECT_EQ(model.total_stride(), Triple(2, 4, 4));
  EXPECT_ERROR(
      model(zeros({1, 2, 4, 6, 8})),
      "UNet: D, H and W must be multiples of [2, 4, 4], the product of the strides; the input is [1, 2, 4, 6, 8]");
  EXPECT_ERROR(model(zeros({1, 3, 4, 4, 4})), "UNet: input must be (N, 2, D, H, W)");
  EXPECT_ERROR(model(zeros({2, 4, 4, 4})), "UNet: input must be (N, 2, D, H, W)");
  EXPECT_ERROR(model(zeros({1, 2, 0, 4, 4})), "multiples of");
  EXPECT_ERROR(model(Tensor()), "UNet: input must be");
  const auto expect_rejected = [](const std::vector<nn::UNetStage>& stages, const char* message) {
    EXPECT_ERROR(nn::UNet({.stages = stages}), message);
  };
  expect_rejected({{}}, "UNet: needs at least two stages, got 1");
  expect_rejected({{.stride = 2}, {}}, "UNet: the first stage must have stride 1, got [2, 2, 2]");
  expect_rejected({{}, {.kernel_size = 2}},
                  "UNet: stage 1 must have odd kernel sizes and positive strides, got [2, 2, 2]");
  expect_rejected({{}, {.stride = {1, 0, 1}}}, "got [3, 3, 3] and [1, 0, 1]");
  expect_rejected({{}, {.convs = 0}},
                  "UNet: features, convs and decoder_convs of stage 1 must be positive, got 32, 0 and 2");
  EXPECT_ERROR(nn::UNet({.num_classes = 0, .stages = {{}, {}}}), "in_channels and num_classes must be positive");
  const nn::UNetStage wide{.features = 1, .stride = int64_t{1} << 30};
  EXPECT_ERROR(nn::UNet({.stages = {{}, wide, wide, wide}}), "UNet: the product of the strides up to stage 2 must be");
}

// ---- deep supervision

TEST(DeepSupervisionLoss, DownsamplesTheTargetToTheNearestVoxel) {
  manual_seed(2);
  const Tensors levels{randn({2, 3, 4, 8, 6}), randn({2, 3, 4, 4, 2}), randn({2, 3, 2, 2, 1})};
  const Tensor target = (rand({2, 4, 8, 6}) * 3.0).to(i64);
  // levels[1] has 1/1, 1/2 and 1/3 of the target's size along D, H and W, so the nearest voxels start at index 0, 1
  // and 1.
  const Tensor middle = slice(slice(target, 2, 1, 8, 2), 3, 1, 6, 3);
  const Tensor expected =
      dice_ce_loss(levels[0], target) * (2.0 / 3) + dice_ce_loss(levels[1], middle.contiguous()) * (1.0 / 3);
  for (const DType dtype : {i64, i32, u8})
    EXPECT_NEAR(deep_supervision_loss(levels, target.to(dtype)).item(), expected.item(), 1e-6);
  const Tensor soft = one_hot(target, 3).permute({0, 4, 1, 2, 3}).to(f32);
  EXPECT_NEAR(deep_supervision_loss(levels, soft).item(), expected.item(), 1e-5);
  EXPECT_EQ(deep_supervision_loss({levels[0]}, target).item(), dice_ce_loss(levels[0], target).item());
  const DiceCEOptions options{.dice = {.ignore_index = 2}, .lambda_ce = 0.5};
  EXPECT_EQ(deep_supervision_loss({levels[0], levels[1]}, target, options).item(),
            dice_ce_loss(levels[0], target, options).item());
}

TEST(DeepSupervisionLoss, RejectsInvalidLevelsAndTargets) {
  const Tensor target = zeros({1, 4, 4, 4}, {.dtype = u8}), whole = zeros({1, 2, 4, 4, 4});
  EXPECT_ERROR(deep_supervision_loss({}, target), "deep_supervision_loss: there are no logits");
  EXPECT_ERROR(deep_supervision_loss({whole}, Tensor()), "target");
  EXPECT_ERROR(deep_supervision_loss({whole, Tensor(), whole}, target), "logits");
  EXPECT_ERROR(deep_supervision_loss({whole, zeros({1, 2, 3, 2, 2}), whole}, target),
               "sizes of the logits [1, 2, 3, 2, 2] must divide those of target [1, 4, 4, 4]");
  // The last level has weight 0, but is checked too.
  EXPECT_ERROR(deep_supervision_loss({whole, zeros({1, 2, 3, 2, 2})}, target),
               "sizes of the logits [1, 2, 3, 2, 2] must divide those of target [1, 4, 4, 4]");
  EXPECT_ERROR(deep_supervision_loss({whole, Tensor()}, target), "logits");
  EXPECT_ERROR(deep_supervision_loss({whole, zeros({2, 2, 2, 2, 2})}, target),
               "deep_supervision_loss: target must have shape [2, 2, 2, 2]");
  EXPECT_ERROR(deep_supervision_loss({whole, zeros({1, 2, 2, 2, 2}, {.dtype = i64})}, target), "deep_supervision_loss");
  EXPECT_ERROR(deep_supervision_loss({whole}, zeros({1, 4}, {.dtype = u8})), "target (N, ...)");
  EXPECT_ERROR(deep_supervision_loss({zeros({2, 2, 4, 4, 4})}, target), "dice_ce_loss: target must have shape");
}

}  // namespace
}  // namespace voxgrad
