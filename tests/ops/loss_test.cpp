// Tests the classification losses: large inputs, ignored voxels and invalid options. For large inputs, the fused
// kernels, which take class indices, must agree with composed operators, which take one-hot probabilities.
#include "ops/loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

Tensor class_map(const Shape& voxels, int64_t classes) {
  return clamp(rand(voxels) * static_cast<double>(classes), 0, static_cast<double>(classes - 1)).to(i64);
}

Tensor one_hot(const Tensor& target, int64_t classes, DType dtype) {
  const Tensor all = reshape(arange(0, static_cast<double>(classes), 1, {i64, target.device()}), {classes, 1});
  return eq(unsqueeze(target, 1), all).to(dtype);
}

struct Result {
  Tensor loss;
  Tensor dx;
};

/// Returns loss(x) and its gradient with respect to x for the upstream gradient 2.
template <class F>
Result with_gradient(const Tensor& x, const F& loss) {
  const Tensor leaf = x.detach().requires_grad_(), value = loss(leaf);
  return {value, grad({value}, {leaf}, {full_like(value, 2)})[0]};
}

/// Expects |a - b| <= tolerance * max |b|.
void expect_near(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  const Tensor want = b.to(f64);
  EXPECT_LE(amax(abs(a.to(f64) - want)).item(), tolerance * amax(abs(want)).item()) << what;
}

TEST(ClassLosses, KernelsMatchComposedOperators) {
  manual_seed(5);
  for (const Device device : devices())
    for (const auto& [classes, voxels] : {std::pair<int64_t, int64_t>{2, 70001},
                                          {3, 9001},
                                          {4, 20000},
                                          {5, 4097},
                                          {9, 5000},
                                          {12, 3001},
                                          {13, 4099},
                                          {40, 2051},
                                          {130, 600}})
      for (const DType dtype : {f64, f32, bf16, f16})
        for (const bool last : {false, true}) {
          const Tensor target = class_map({2, voxels}, classes).to(device);
          Tensor x = (randn({2, classes, voxels}) * 3.0 + 40.0).to(device, dtype);
          if (last) x = x.contiguous(MemoryFormat::channels_last);
          const DiceCEOptions options{.dice = {.batch = voxels % 2 == 0, .squared_pred = last, .ignore_index = -1},
                                      .label_smoothing = 0.1};
          const Tensor soft = one_hot(target, classes, f64);
          const Result got = with_gradient(x, [&](const Tensor& t) { return dice_ce_loss(t, target, options); });
          const Result want = with_gradient(x.to(f64), [&](const Tensor& t) { return dice_ce_loss(t, soft, options); });
          const double rounding = dtype == f64 ? 1e-11 : dtype == f32 ? 2e-5 : dtype == bf16 ? 0x1p-8 : 0x1p-10;
          const std::string what = concat(classes, " classes, ", dtype, last ? ", channels last, " : ", ", device);
          expect_near(got.loss, want.loss, rounding, what);
          // These f16 gradients are subnormal numbers, which have few significant digits.
          expect_near(got.dx, want.dx, dtype == f16 ? 0.05 : 2 * rounding, what);
          EXPECT_TRUE(got.dx.is_contiguous(x.suggest_memory_format())) << what << got.dx.strides();
        }
}

// Ignored voxels contribute nothing to sums and gradients, even if their logits are NaN.
TEST(ClassLosses, SkipIgnoredVoxels) {
  for (const Device device : devices())
    for (const auto& [numbers, classes] : {std::pair<DType, int64_t>{i64, 3}, {i32, 3}, {u8, 3}, {i64, 14}, {u8, 14}}) {
      const Tensor x = randn({2, classes, 50}).to(device), target = class_map({2, 50}, classes).to(device);
      const Tensor padded_target = cat({target, full({2, 7}, 200, {i64, device})}, 1).to(numbers);
      const Tensor padded_x = cat({x, full({2, classes, 7}, NAN, {f32, device})}, 2);
      const auto losses = [](const Tensor& logits, const Tensor& map) {
        return stack({cross_entropy(logits, map, {.ignore_index = 200, .label_smoothing = 0.2}),
                      dice_ce_loss(logits, map, {.dice = {.ignore_index = 200}}),
                      dice_loss(logits, map, {.softmax = false, .ignore_index = 200}),
                      nll_loss(logits, map, {.ignore_index = 200})});
      };
      const auto total = [&](const Tensor& logits, const Tensor& map) {
        return with_gradient(logits, [&](const Tensor& t) { return sum(losses(t, map)); });
      };
      const Result want = total(x, target), got = total(padded_x, padded_target);
      EXPECT_FLOAT_EQ(got.loss.item<float>(), want.loss.item<float>());
      EXPECT_EQ(got.dx.narrow(2, 50, 7).contiguous().to_vector(), std::vector<double>(14 * classes, 0.0));
      expect_near(got.dx.narrow(2, 0, 50), want.dx, 1e-6, "gradient");
      EXPECT_TRUE(
          std::isnan(cross_entropy(padded_x, full({2, 57}, 200, {numbers, device}), {.ignore_index = 200}).item()));
    }
}

// If all voxels are ignored or have a class of weight 0, cross_entropy returns NaN, as in PyTorch. The cross-entropy
// term of dice_ce_loss is 0 instead, as in nnU-Net. This also holds for each level of deep_supervision_loss.
TEST(ClassLosses, DiceCEIsFiniteWithoutLabeledVoxels) {
  for (const Device device : devices())
    for (const int64_t classes : {3, 14}) {
      const Tensor x = randn({2, classes, 4, 6}).to(device), none = full({2, 4, 6}, 200, {u8, device});
      const Tensor weight = zeros({classes}, {.device = device});
      const DiceOptions batch{.batch = true, .ignore_index = 200}, samples{.ignore_index = 200};
      for (const DiceCEOptions& options : {DiceCEOptions{.dice = batch}, DiceCEOptions{.dice = samples},
                                           DiceCEOptions{.dice = batch, .label_smoothing = 0.1}}) {
        const Result got = with_gradient(x, [&](const Tensor& t) { return dice_ce_loss(t, none, options); });
        EXPECT_EQ(got.loss.item(), 0) << classes;
        EXPECT_EQ(amax(abs(got.dx)).item(), 0) << classes;
      }
      // Every class has weight 0, so only the Dice loss remains.
      const Tensor target = class_map({2, 4, 6}, classes).to(device);
      EXPECT_EQ(dice_ce_loss(x, target, {.weight = weight}).item(), dice_loss(x, target).item()) << classes;
      EXPECT_TRUE(std::isnan(cross_entropy(x, target, {.weight = weight}).item()));
      // Downsampling the target for the second level removes the only labeled voxel.
      Tensor one = none.clone();
      one.narrow(0, 0, 1).narrow(1, 0, 1).narrow(2, 0, 1).fill_(1);
      const Tensors levels{x, slice(slice(x, 2, 0, 4, 2), 3, 0, 6, 2), x};
      const Result deep = with_gradient(x, [&](const Tensor& t) {
        return deep_supervision_loss({t, levels[1], levels[2]}, one, {.dice = batch});
      });
      EXPECT_NEAR(deep.loss.item(), dice_ce_loss(x, one, {.dice = batch}).item() * 2 / 3, 1e-6);
      EXPECT_TRUE(std::isfinite(amax(abs(deep.dx)).item()));
    }
}

TEST(ClassLosses, RejectInvalidOptions) {
  const Tensor x = zeros({2, 3, 4}), target = zeros({2, 4}, {.dtype = i64});
  EXPECT_ERROR(cross_entropy(x, target, {.weight = ones({2})}), "cross_entropy: weight must have shape [3]");
  EXPECT_ERROR(cross_entropy(x, target, {.label_smoothing = 1.5}), "label_smoothing must lie in [0, 1], got 1.5");
  EXPECT_ERROR(dice_loss(x, target, {.smooth_dr = -1}),
               "smooth_nr and smooth_dr must be finite and at least 0, got 1e-05");
  EXPECT_ERROR(dice_ce_loss(x, target, {.lambda_dice = NAN}), "dice_ce_loss: lambda_dice must be finite, got nan");
  EXPECT_ERROR(cross_entropy(x, zeros({2, 3, 4}), {.ignore_index = 1}),
               "ignore_index 1 cannot be used if the target holds prob");
  EXPECT_ERROR(cross_entropy(x, zeros({2, 4}, {.dtype = b8})), "target must hold class indices");
  EXPECT_ERROR(dice_loss(x, target + 3), "dice_loss: target class 3 is outside [0, 3)");
  EXPECT_ERROR(dice_loss(x, full({2, 4}, 9, {.dtype = u8})), "dice_loss: target class 9 is outside [0, 3)");
  EXPECT_ERROR(dice_loss(zeros({2, 13, 4}), target + 13), "dice_loss: target class 13 is outside [0, 13)");
  EXPECT_ERROR(dice_loss(zeros({2, 1, 4}), target, {.include_background = false}), "no class except the background");
  EXPECT_ERROR(dice_ce_loss(x, target, {.dice = {.softmax = false}}), "dice_ce_loss: requires logits");
  EXPECT_ERROR(dice_ce_loss(x, target, {.dice = {.reduction = Reduction::none}}), "reduction must be mean or sum");
  EXPECT_ERROR(nll_loss(x, x), "nll_loss: target must hold class indices");
}

}  // namespace
}  // namespace voxgrad
