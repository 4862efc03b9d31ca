// Tests that operators other than convolutions reject invalid calls.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/fused.h"
#include "ops/grid_sample.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/norm.h"
#include "ops/pad.h"
#include "ops/pixel_shuffle.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/sort.h"
#include "tests/ops/bad_call.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(OpErrors, ElementwiseOpsRejectInvalidArguments) {
  const Tensor x = floats({2, 3});
  const BadCall table[] = {
      {[&] { add(x, floats({4})); }, "add: shapes [2, 3] and [4] do not broadcast"},
      {[&] { exp(integers({2})); }, "exp has no CPU kernel for i64"},
      {[&] { relu(Tensor()); }, "relu: input is undefined"},
      {[&] { where(x, x, x); }, "condition must be bool"},
      {[&] { clamp(x, 1, 0); }, "needs low <= high"},
      {[&] { clamp(x, kNan, 0); }, "needs low <= high"},
      {[&] { pow(x, kNan); }, "exponent must be finite"},
      {[&] { leaky_relu(x, INFINITY); }, "negative_slope must be finite"},
      {[&] { softplus(x, 0); }, "beta must be finite and not zero"},
      {[&] { dropout(x, 1.5); }, "p must lie in [0, 1]"},
      {[&] { dropout(x, kNan); }, "p must lie in [0, 1]"},
      {[&] { ge(integers({2}).to(u8), -1); }, "ge: -1 does not fit u8"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, UndefinedTensorsAreNamed) {
  const Tensor x = floats({2, 3}), undefined;
  const BadCall table[] = {
      {[&] { add(x, undefined); }, "add: the second operand is undefined"},
      {[&] { where(gt(x, 0), x, undefined); }, "where: y is undefined"},
      {[&] { matmul(x, undefined); }, "matmul: the second operand is undefined"},
      {[&] { scaled_dot_product_attention(x, x, undefined); }, "scaled_dot_product_attention: value is undefined"},
      {[&] { gather(x, 0, undefined); }, "gather: index is undefined"},
      {[&] { softmax(undefined, 0); }, "softmax: input is undefined"},
      {[&] { group_norm(undefined, 1); }, "group_norm: input is undefined"},
      {[&] { max_pool3d(undefined, {.kernel_size = 2}); }, "max_pool3d: input is undefined"},
      {[&] {
         affine_grid(undefined, {1, 1, 2, 2});
       },
       "affine_grid: theta is undefined"},
      {[&] { mse_loss(x, undefined); }, "mse_loss: target is undefined"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, IntegerTensorsRejectScalarsThatDoNotFit) {
  const Tensor x = full({3}, 1, {.dtype = i32});
  constexpr int64_t kLarge = 1'000'000'000'000'000;  // int64_t, because a double scalar would make the result f32
  const BadCall table[] = {
      {[&] { x + kLarge; }, "1e+15 does not fit i32"},
      {[&] { kLarge + x; }, "1e+15 does not fit i32"},
      {[&] { x - kLarge; }, "sub: 1e+15 does not fit i32"},
      {[&] { kLarge - x; }, "1e+15 does not fit i32"},
      {[&] { x * -kLarge; }, "-1e+15 does not fit i32"},
      {[&] { x / kLarge; }, "1e+15 does not fit i32"},
      {[&] { affine(x, 1, 0x1p31); }, "affine: 2.14748e+09 does not fit i32"},
      {[&] { affine(integers({3}), INFINITY, 0); }, "affine: inf does not fit i64"},
      {[&] { affine(x, kNan, 0); }, "an integer tensor takes integer constants, got nan"},
      {[&] { x.add_(x, 1e15); }, "add_: 1e+15 does not fit i32"},
      {[&] { x.mul_(1e15); }, "mul_: 1e+15 does not fit i32"},
      {[&] { clamp(x, 0, 1e15); }, "clamp: 1e+15 does not fit i32"},
      {[&] { clamp(x, -1e15, 0); }, "clamp: -1e+15 does not fit i32"},
      {[&] { clamp(x, 0.5, 2); }, "clamp: an integer tensor takes integer constants, got 0.5"},
      {[&] { clamp(x, INFINITY, INFINITY); }, "clamp: inf does not fit i32"},
      {[&] { eq(x, kLarge); }, "eq: 1e+15 does not fit i32"},
      {[&] { full({3}, 1e15, {.dtype = i32}); }, "full: 1e+15 does not fit i32"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
  EXPECT_EQ(x.to_vector(), (std::vector<double>{1, 1, 1}));  // the failed in-place calls wrote nothing
  EXPECT_EQ((x + 1e15).to_vector(), std::vector<double>(3, static_cast<double>(1e15f)));
}

TEST(OpErrors, ReductionsAndProductsRejectInvalidArguments) {
  const Tensor x = floats({2, 3});
  const BadCall table[] = {
      {[&] { sum(x, {2}); }, "axis 2 is out of range for 2 axes"},
      {[&] {
         sum(x, {0, -2});
       },
       "contain an axis twice"},
      {[&] { mean(integers({2})); }, "needs a floating-point dtype"},
      {[&] {
         amax(floats({0, 3}), {0});
       },
       "nothing to reduce"},
      {[&] { var(floats({1})); }, "the number of reduced elements must exceed correction = 1, got 1"},
      {[&] { x.std({}, 6); }, "std: the number of reduced elements must exceed correction = 6, got 6"},
      {[&] { norm(x, 0); }, "norm: p must be positive, got 0"},
      {[&] {
         norm(floats({0, 3}), kInf, 0);
       },
       "norm: nothing to reduce"},
      {[&] { norm(integers({2})); }, "norm: needs a floating-point dtype"},
      {[&] { cumsum(x, 2); }, "cumsum: axis 2 is out of range"},
      {[&] { argmax(x, 2); }, "argmax: axis 2 is out of range"},
      {[&] {
         argmin(floats({0, 3}));
       },
       "argmin: no elements in [0, 3]"},
      {[&] {
         max(floats({3, 0}), -1);
       },
       "max: no elements along axis 1 of [3, 0]"},
      {[&] { topk(x, 4); }, "topk: k 4 is out of range for axis 1 of [2, 3]"},
      {[&] { topk(x, -1); }, "topk: k must not be negative"},
      {[&] { sort({}, 0); }, "sort: input is undefined"},
      {[&] { softmax(x, 5); }, "softmax: axis 5 is out of range"},
      {[&] { softmax(integers({2}), 0); }, "softmax: needs a floating-point dtype"},
      {[&] { matmul(x, x); }, "matmul: inner sizes 3 and 2 differ (shapes [2, 3] and [2, 3])"},
      {[&] { matmul(x, floats({})); }, "matmul: needs vectors or matrices, got shapes [2, 3] and []"},
      {[&] {
         linear(x, floats({4, 2}));
       },
       "linear: weight expects 2 input features (input [2, 3], weight [4, 2])"},
      {[&] {
         linear(x, floats({4, 3}), floats({3}));
       },
       "linear: bias must have shape [4], got [3]"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, ShapeOpsRejectInvalidShapesAndIndices) {
  const Tensor x = floats({2, 3});
  const BadCall table[] = {
      {[&] {
         reshape(x, {-1, -1});
       },
       "only one size may be -1"},
      {[&] {
         reshape(x, {4, 2});
       },
       "cannot reshape [2, 3] to [4, 2]"},
      {[&] { cat({}); }, "the list of tensors is empty"},
      {[&] {
         cat({x, floats({2, 4})}, 0);
       },
       "differ in axes other than 0"},
      {[&] {
         split(x, {1, 1}, 1);
       },
       "split: the sizes do not add up to the size of axis 1 of [2, 3]"},
      {[&] {
         split(x, {-1, 4}, 1);
       },
       "split: sizes must not be negative, got -1"},
      {[&] { split(x, 0); }, "split: size must be positive, got 0"},
      {[&] { chunk(x, 0); }, "chunk: the number of parts must be positive"},
      {[&] { one_hot(x); }, "one_hot: index must be i64"},
      {[&] { one_hot(integers({0})); }, "one_hot: an empty index"},
      {[&] {
         inverted_bottleneck(floats({1, 2, 3, 3, 3}), floats({4, 2, 1, 1, 1}), {}, floats({2, 4, 3, 1, 1}), {});
       },
       "inverted_bottleneck: weight2 must have the shape (out, in, 1, 1, 1), got [2, 4, 3, 1, 1]"},
      {[&] {
         inverted_bottleneck(floats({1, 2, 3, 3, 3}), floats({4, 2, 1, 1, 1}), {}, floats({2, 3, 1, 1, 1}), {});
       },
       "conv3d: "},
      {[&] { prelu(x, floats({2})); }, "prelu: weight must have one element or one per channel (C is 3), got [2]"},
      {[&] { prelu(x, integers({1})); }, "prelu: dtypes differ"},
      {[&] {
         stack({x, floats({3, 2})});
       },
       "differ"},
      {[&] { pad(x, {1}); }, "does not fit shape"},
      {[&] {
         pad(x, {-2, -2});
       },
       "leave a negative size"},
      {[&] {
         flip(x, {0, 0});
       },
       "contain an axis twice"},
      {[&] { slice(x, 0, 0, 2, 0); }, "step must be positive"},
      {[&] { select(x, 0, 2); }, "out of range"},
      {[&] { gather(x, 0, x); }, "index must be i64"},
      {[&] {
         gather(x, 0, integers({2, 2}));
       },
       "must match [2, 3] in all axes except axis 0"},
      {[&] { index_select(x, 0, full({1}, 5, {.dtype = i64})); },
       "index_select: index 5 is out of range for axis 0 of size 2"},
      {[&] { index_select(x, 0, full({1}, -1, {.dtype = i64})); }, "index_select: index -1 is"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, VolumeOpsAndLossesRejectInvalidArguments) {
  const Tensor x = floats({2, 6, 4, 4, 4});
  const BadCall table[] = {
      {[&] { group_norm(x, 4); }, "group_norm: num_groups 4 does not divide the channel count 6"},
      {[&] { group_norm(x, 0); }, "group_norm: num_groups must be positive, got 0"},
      {[&] { group_norm(x, -2); }, "group_norm: num_groups must be positive, got -2"},
      {[&] {
         group_norm(floats({1, 4, 1, 1}), 4);
       },
       "group_norm: expected more than 1 value per channel, got input [1, 4, 1, 1] in 4 groups"},
      {[&] {
         instance_norm(floats({2, 3, 1, 1, 1}));
       },
       "instance_norm: expected more than 1 value per channel, got input [2, 3, 1, 1, 1]"},
      {[&] { instance_norm(x, floats({6}).to(f64)); },
       "dtypes differ: input [2, 6, 4, 4, 4] f32 on cpu and weight [6]"},
      {[&] {
         group_norm(floats({2, 0, 3}), 1);
       },
       "num_groups 1 does not divide the channel count 0 of input [2, 0, 3]"},
      {[&] { group_norm(x, 3, floats({5})); }, "weight must have shape [6]"},
      {[&] { group_norm(x, 3, {}, {}, -1); }, "eps must be finite and not negative"},
      {[&] {
         layer_norm(x, {4, 5});
       },
       "does not match the last axes"},
      {[&] { instance_norm(floats({3})); }, "input must be (N, C, spatial...)"},
      {[&] { max_pool3d(x, {.kernel_size = 2, .padding = 2}); },
       "max_pool3d: padding must lie between 0 and half of kernel_size"},
      {[&] { max_pool3d(x, {.kernel_size = 0}); }, "max_pool3d: kernel_size must lie in [1, 2^31), got [0, 0, 0]"},
      {[&] {
         max_pool3d(floats({1, 1, 1, 1, 1}).expand({1, 1, 1, 1, INT64_MAX}), {.kernel_size = 1});
       },
       "max_pool3d: input has an axis of more than 2^62"},
      {[&] { max_pool3d(x, {.kernel_size = 9}); },
       "max_pool3d: the window is larger than the padded input [2, 6, 4, 4, 4]: the result would have 0 elements along "
       "axis 2 with kernel_size [9, 9, 9], stride [9, 9, 9], padding [0, 0, 0], dilation [1, 1, 1]"},
      {[&] {
         max_pool3d(floats({6, 4, 4, 4}), {.kernel_size = {1, 1, 3}, .stride = Triple(1), .dilation = 4});
       },
       "padded input [6, 4, 4, 4]: the result would have -4 elements along axis 3"},
      {[&] {
         avg_pool3d(floats({6, 4, 4}), {.kernel_size = 2});
       },
       "avg_pool3d: input must be (N, C, D, H, W) or (C, D, H, W), got [6, 4, 4]"},
      {[&] {
         max_pool3d(floats({1, 1, 2, 4, 4}), {.kernel_size = 2, .padding = 1, .dilation = 3});
       },
       "a window along axis 2 contains only padding"},
      {[&] {
         max_pool3d(floats({2, 0, 4, 4, 4}), {.kernel_size = 2});
       },
       "input has an empty axis other than the batch"},
      {[&] { avg_pool3d(x, {.kernel_size = 2, .stride = 0}); },
       "avg_pool3d: stride must lie in [1, 2^31), got [0, 0, 0]"},
      {[&] { avg_pool3d(x, {.kernel_size = 2, .divisor_override = 0}); }, "divisor_override must not be zero"},
      {[&] { interpolate(x, {}); }, "exactly one of size and scale_factor"},
      {[&] { interpolate(x, {.size = 4, .scale_factor = 2.0}); }, "exactly one of size and scale_factor"},
      {[&] { interpolate(x, {.scale_factor = kNan}); }, "scale_factor must be finite and positive"},
      {[&] { interpolate(x, {.scale_factor = ScaleFactor(1, 0, 2)}); }, "must be finite and positive, got [1, 0, 2]"},
      {[&] { interpolate(x, {.size = Triple(2, 0, 2)}); }, "interpolate: size must be positive, got [2, 0, 2]"},
      {[&] { interpolate(x, {.scale_factor = 0.1}); }, "at least one voxel along each axis"},
      {[&] { interpolate(x, {.size = 4, .align_corners = true}); }, "align_corners must be false for mode nearest"},
      {[&] {
         interpolate(floats({2, 2}), {.size = 2});
       },
       "interpolate: input must be (N, C, L), (N, C, H, W) or (N, C, D, H, W), got [2, 2]"},
      {[&] {
         interpolate(floats({2, 3, 4, 4}), {.size = 4, .mode = InterpolateMode::trilinear});
       },
       "interpolate: mode trilinear requires an input (N, C, D, H, W), got shape [2, 3, 4, 4]"},
      {[&] { interpolate(x, {.size = 4, .mode = InterpolateMode::bicubic}); },
       "mode bicubic requires an input (N, C, H, W), got shape [2, 6, 4, 4, 4]"},
      {[&] {
         interpolate(x, {.size = Dims{4, 4}});
       },
       "interpolate: size has 2 values, but the number of spatial axes of input [2, 6, 4, 4, 4] is 3"},
      {[&] { max_pool2d(x, {.kernel_size = 2}); },
       "max_pool2d: input must be (N, C, H, W) or (C, H, W), got [2, 6, 4, 4, 4]"},
      {[&] { avg_pool3d(x, {.kernel_size = 2, .padding = 2}); },
       "avg_pool3d: padding must lie between 0 and half of kernel_size [2, 2, 2], got [2, 2, 2]"},
      {[&] {
         adaptive_avg_pool3d(x, {2, 0, 2});
       },
       "output_size must lie in [1, 2^31), got [2, 0, 2]"},
      {[&] {
         pad(x, {4, 0}, PadMode::reflect);
       },
       "pad: the number of amounts, 2, does not fit shape [2, 6, 4, 4, 4]"},
      {[&] {
         pad(x, {4, 0, 0, 0, 0, 0}, PadMode::reflect);
       },
       "pad: an axis of size 4 can be padded by at most 3, got 4 and 0"},
      {[&] {
         pad(x, {0, 0, 0, 5, 0, 0}, PadMode::circular);
       },
       "can be padded by at most 4, got 0 and 5"},
      {[&] {
         pad(x, {-2, -2, 0, 0, 0, 0}, PadMode::replicate);
       },
       "amounts -2 and -2 remove all elements of an axis of size 4"},
      {[&] {
         grid_sample(x, floats({2, 4, 4, 4, 2}));
       },
       "grid_sample: grid must be (2, ..., 3) for input"},
      {[&] {
         grid_sample(x, floats({2, 4, 4, 3}));
       },
       "grid_sample: requires input (N, C, D, H, W) and grid"},
      {[&] {
         grid_sample(x, floats({2, 4, 4, 4, 3}).to(f64));
       },
       "grid_sample: dtypes differ: input"},
      {[&] {
         affine_grid(floats({2, 2, 3}), {2, 1, 4, 4, 4});
       },
       "affine_grid: requires theta (N, 3, 4)"},
      {[&] { pixel_shuffle(x, 2); }, "pixel_shuffle: the channel count 6 of [2, 6, 4, 4, 4] is not a multiple of 2^3"},
      {[&] { mse_loss(x, floats({2})); }, "mse_loss: input [2, 6, 4, 4, 4] and target [2] differ in shape"},
      {[&] {
         cross_entropy(floats({2, 3}), floats({2}));
       },
       "cross_entropy: a floating-point target must hold probabilities of shape [2, 3]; class indices must have shape "
       "[2] and dtype i64, i32 or u8; got [2] f32 on cpu"},
      {[&] {
         dice_loss(floats({2, 1, 3}), floats({2, 1, 3}));
       },
       "dice_loss: softmax over the one channel of input [2, 1, 3] is always 1"},
      {[&] {
         dice_ce_loss(floats({2, 1, 3}), full({2, 3}, 0, {.dtype = i64}));
       },
       "dice_ce_loss: softmax over the one channel"},
      {[&] {
         binary_cross_entropy_with_logits(floats({2, 3}), floats({2, 3}), Reduction::mean, floats({2, 2, 3}));
       },
       "pos_weight must be on the device of the input and broadcast to its shape [2, 3], got [2, 2, 3] f32 on cpu"},
      {[&] { one_hot(full({1}, 0x1p62, {.dtype = i64}) + (full({1}, 0x1p62, {.dtype = i64}) - 1)); },
       "one_hot: index 9223372036854775807 is too large for a class"},
      {[&] {
         roll(x, {1, 2}, 0);
       },
       "roll: shifts [1, 2] and axes [0] differ in number"},
      {[&] {
         roll(x, {1, 2});
       },
       "roll: requires exactly one shift if no axes are given, got [1, 2]"},
      {[&] {
         repeat(x, {2, 2});
       },
       "repeat: repeats [2, 2] must have a value for each axis of [2, 6, 4, 4, 4]"},
      {[&] { repeat(floats({2}), Dims{-1}); }, "repeat: repeats must not be negative, got [-1]"},
      {[&] { repeat(floats({2}), Dims{INT64_MAX}); },
       "repeat: the size 2 * 9223372036854775807 does not fit in 64 bits"},
      {[&] { pixel_unshuffle(x, 3); }, "pixel_unshuffle: spatial sizes of [2, 6, 4, 4, 4] must be multiples of down"},
      {[&] { pixel_unshuffle(x, 0); }, "pixel_unshuffle: downscale_factor must lie in [1, 2^20), got 0"},
      {[&] {
         scaled_dot_product_attention(floats({3, 4}), floats({5, 3}), floats({5, 2}));
       },
       "takes query (..., L, E), key (..., S, E) and value (..., S, V), got query [3, 4] f32 on cpu"},
      {[&] {
         scaled_dot_product_attention(floats({3, 4}), floats({5, 4}), floats({5, 2}), floats({3, 5}), 0, true);
       },
       "takes attn_mask or is_causal, got both"},
      {[&] {
         scaled_dot_product_attention(floats({3, 4}), floats({5, 4}), floats({5, 2}), floats({2, 5}));
       },
       "do not broadcast"},
      {[&] {
         rms_norm(x, {4, 5});
       },
       "rms_norm: normalized_shape [4, 5] does not match the last axes"},
      {[&] {
         cross_entropy(floats({2, 3}), full({2}, 3, {.dtype = i64}));
       },
       "cross_entropy: target class 3 is outside [0, 3)"},
      {[&] {
         cross_entropy(floats({2, 3}), integers({3}));
       },
       "target must have shape [2] for input [2, 3], got [3]"},
      {[&] { smooth_l1_loss(x, x, Reduction::mean, -1); }, "beta must be finite and not negative"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

}  // namespace
}  // namespace voxgrad
