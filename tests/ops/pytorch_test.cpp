// Compares values and gradients of functions with results of PyTorch, which pytorch_reference.py wrote. Also tests
// grid_sample and binary_cross_entropy_with_logits on extreme inputs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/grid_sample.h"
#include "ops/loss.h"
#include "ops/norm.h"
#include "ops/pad.h"
#include "ops/pixel_shuffle.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/sort.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

/// The results of a PyTorch function, written by pytorch_reference.py.
struct Known {
  Shape shape;
  double value;     ///< projection of the result
  double gradient;  ///< projection of the gradient of `value`
};
#include "tests/ops/pytorch_reference.inc"

/// Returns a tensor whose element i is cos(step * i).
Tensor pattern(const Shape& shape, double step, Device device) {
  return cos(reshape(arange(0, static_cast<double>(numel(shape)), 1, {f64, device}), shape) * step);
}

Tensor projection(const Tensor& x) { return sum(flatten(x) * pattern({x.numel()}, 0.11, x.device())); }

/// Returns x where x > limit, and 0 with gradient 0 elsewhere.
Tensor above(const Tensor& x, double limit) { return x * gt(x, limit).to(f64); }

/// Rounds x to whole numbers. The derivative is 1, as for the identity.
Tensor rounded(const Tensor& x) { return (x.detach() + 100.5).to(i64).to(f64) - 100.0 + (x - x.detach()); }

struct Function {
  std::string name;
  Shape input;
  std::function<Tensor(const Tensor& x)> call;
};

std::vector<Function> functions() {
  const Shape volume{2, 4, 5, 6, 7}, grid{3, 4, 5};
  constexpr auto kTrilinear = InterpolateMode::trilinear;
  const Triple kernel{3, 2, 2}, stride{2, 3, 3}, padding{1, 0, 1};
  const auto unit = [=](const Tensor& x) { return pattern(grid, 0.31, x.device()) * 0.5 + 0.5; };
  const auto factors = [=](const Tensor& x) { return select(unit(x)[0], 1, 0); };
  const auto classes = [](const Tensor& x) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < 15; ++i) numbers.push_back(i % 4);
    return from_span<int64_t>(numbers, {3, 5}, x.device());
  };
  const auto interpolated = [=](const char* name, InterpolateOptions options) {
    return Function{name, volume, [=](const Tensor& x) { return interpolate(x, options); }};
  };
  const auto averaged = [=](const char* name, bool count_include_pad, std::optional<int64_t> divisor) {
    return Function{name, volume, [=](const Tensor& x) {
                      return avg_pool3d(x, {kernel, stride, padding, true, count_include_pad, divisor});
                    }};
  };
  return {
      interpolated("nearest_size", {.size = Triple{7, 3, 10}}),
      interpolated("nearest_scale", {.scale_factor = 1.7}),
      interpolated("trilinear_size", {.size = Triple{7, 3, 10}, .mode = kTrilinear}),
      interpolated("trilinear_scale", {.scale_factor = 1.7, .mode = kTrilinear}),
      interpolated("nearest_scales", {.scale_factor = ScaleFactor(2, 1, 1.7)}),
      interpolated("trilinear_scales", {.scale_factor = ScaleFactor(1, 2.5, 1.3), .mode = kTrilinear}),
      interpolated("trilinear_same_size", {.scale_factor = 1.1, .mode = kTrilinear}),
      interpolated("trilinear_aligned", {.size = Triple{7, 1, 10}, .mode = kTrilinear, .align_corners = true}),
      interpolated("nearest_exact_size", {.size = Triple{7, 3, 10}, .mode = InterpolateMode::nearest_exact}),
      interpolated("nearest_exact_scale", {.scale_factor = 1.7, .mode = InterpolateMode::nearest_exact}),
      {"max_pool", volume,
       [=](const Tensor& x) {
         return max_pool3d(x, {kernel, Triple{2, 1, 3}, padding, {1, 2, 1}, true});
       }},
      averaged("avg_pool", true, {}),
      averaged("avg_pool_inside", false, {}),
      averaged("avg_pool_divisor", true, 5),
      {"group_norm", volume,
       [](const Tensor& x) {
         const Tensor weight = pattern({4}, 0.7, x.device());
         return group_norm(x, 2, weight, weight * 0.3, 1e-3);
       }},
      {"layer_norm", grid,
       [](const Tensor& x) {
         return layer_norm(x, {4, 5});
       }},
      {"softmax", grid, [](const Tensor& x) { return softmax(x, 1); }},
      {"log_softmax", grid, [](const Tensor& x) { return log_softmax(x, -1); }},
      {"mse_loss", grid, [=](const Tensor& x) { return mse_loss(x, unit(x)); }},
      {"l1_loss", grid, [=](const Tensor& x) { return l1_loss(x, unit(x), Reduction::sum); }},
      {"smooth_l1_loss", grid, [=](const Tensor& x) { return smooth_l1_loss(x, unit(x), Reduction::mean, 0.6); }},
      {"bce_with_logits", grid,
       [=](const Tensor& x) { return binary_cross_entropy_with_logits(x * 40.0, unit(x), Reduction::none); }},
      {"cross_entropy", grid, [=](const Tensor& x) { return cross_entropy(x, classes(x)); }},
      {"cross_entropy_options", grid,
       [=](const Tensor& x) {
         return cross_entropy(x, classes(x), {.weight = factors(x), .ignore_index = 2, .label_smoothing = 0.2});
       }},
      {"cross_entropy_none", grid,
       [=](const Tensor& x) {
         return cross_entropy(
             x, classes(x),
             {.weight = factors(x), .ignore_index = 2, .label_smoothing = 0.2, .reduction = Reduction::none});
       }},
      {"cross_entropy_soft", grid,
       [=](const Tensor& x) { return cross_entropy(x, unit(x), {.weight = factors(x), .label_smoothing = 0.2}); }},
      {"nll_loss", grid,
       [=](const Tensor& x) { return nll_loss(x, classes(x), {.weight = factors(x), .ignore_index = 1}); }},
      {"kl_div", grid, [=](const Tensor& x) { return kl_div(x, unit(x), Reduction::batchmean); }},
      {"kl_div_log_target", grid, [=](const Tensor& x) { return kl_div(x, unit(x), Reduction::mean, true); }},
      {"batch_norm", volume,
       [](const Tensor& x) {
         const Tensor weight = pattern({4}, 0.7, x.device());
         return batch_norm(x, {}, {}, weight, weight * 0.3, true, 0.1, 1e-3);
       }},
      {"batch_norm_eval", volume,
       [](const Tensor& x) {
         const Tensor weight = pattern({4}, 0.7, x.device());
         return batch_norm(x, weight, weight + 1.0, weight, weight * 0.3);
       }},
      {"var", grid,
       [](const Tensor& x) {
         return var(x, {0, 2});
       }},
      {"std", grid,
       [](const Tensor& x) {
         return x.std({0, 2});
       }},
      {"prod", grid, [](const Tensor& x) { return prod(above(x, -1.5), 1); }},
      {"logsumexp", grid,
       [](const Tensor& x) {
         return logsumexp(x, {0, 2});
       }},
      {"cumsum", grid, [](const Tensor& x) { return cumsum(x, 1); }},
      {"norm_1", grid,
       [](const Tensor& x) {
         return norm(above(x, 0), 1, {0, 2});
       }},
      {"norm_2", grid, [](const Tensor& x) { return norm(above(x, 1.5), 2, 1); }},
      {"norm_3", grid, [](const Tensor& x) { return norm(above(x, 1.5), 3, 1); }},
      {"norm_half", grid,
       [](const Tensor& x) {
         return norm(above(x, 0), 0.5, {1, 2}, true);
       }},
      {"norm_inf", grid, [](const Tensor& x) { return norm(above(x, 1.5), INFINITY, 1); }},
      {"max", grid, [](const Tensor& x) { return max(rounded(x), 1).values; }},
      {"max_indices", grid, [](const Tensor& x) { return max(rounded(x), 1).indices.to(f64) + 0 * sum(x); }},
      {"argmin", grid, [](const Tensor& x) { return argmin(rounded(x)).to(f64) + 0 * sum(x); }},
      {"sort", grid, [](const Tensor& x) { return sort(rounded(x), 1, true).values; }},
      {"topk", grid, [](const Tensor& x) { return topk(x, 3, 0, false).values; }},
      {"prelu", grid, [](const Tensor& x) { return prelu(x, pattern({4}, 0.7, x.device())); }},
  };
}

/// Returns the functions for pooling and interpolation with one or two spatial axes, adaptive pooling, padding, pixel
/// shuffle and grid sampling.
std::vector<Function> sampling_functions() {
  const Shape volume{2, 4, 5, 6, 7}, image{2, 4, 5, 6}, signal{2, 4, 7}, grid_shape{2, 3, 2, 4, 3};
  using enum InterpolateMode;
  const auto interpolated = [](const char* name, const Shape& input, InterpolateOptions options) {
    return Function{name, input, [=](const Tensor& x) { return interpolate(x, options); }};
  };
  const auto padded = [=](const char* name, int64_t depth_begin, PadMode mode) {
    return Function{name, volume, [=](const Tensor& x) { return pad(x, {3, 1, 0, 2, depth_begin, 1}, mode); }};
  };
  std::vector<Function> all{
      interpolated("linear", signal, {.size = 11, .mode = linear}),
      interpolated("bilinear", image, {.scale_factor = ScaleFactor(1.7, 0.6), .mode = bilinear}),
      interpolated("bicubic_size", image, {.size = Dims{7, 3}, .mode = bicubic}),
      interpolated("bicubic_scale", image, {.scale_factor = ScaleFactor(1.1, 2.3), .mode = bicubic}),
      interpolated("bicubic_aligned", image, {.size = Dims{9, 4}, .mode = bicubic, .align_corners = true}),
      {"max_pool2d", image,
       [](const Tensor& x) { return max_pool2d(x, {.kernel_size = 3, .stride = 2, .padding = 1}); }},
      {"avg_pool1d", signal,
       [](const Tensor& x) { return avg_pool1d(x, {.kernel_size = 3, .stride = 2, .padding = 1, .ceil_mode = true}); }},
      {"adaptive_avg", volume,
       [](const Tensor& x) {
         return adaptive_avg_pool3d(x, {3, 4, 9});
       }},
      {"adaptive_max", volume,
       [](const Tensor& x) {
         return adaptive_max_pool3d(x, {3, 4, 9});
       }},
      padded("pad_reflect", 4, PadMode::reflect),
      padded("pad_replicate", 9, PadMode::replicate),
      padded("pad_circular", 5, PadMode::circular),
      {"pixel_shuffle", image, [](const Tensor& x) { return pixel_shuffle(x, 2); }},
      {"affine_grid",
       {2, 3, 4},
       [](const Tensor& x) {
         return affine_grid(x, {2, 3, 3, 1, 4});
       }},
      {"affine_grid_aligned",
       {2, 2, 3},
       [](const Tensor& x) {
         return affine_grid(x, {2, 3, 3, 4}, true);
       }},
  };
  const char* paddings[] = {"zeros", "border", "reflection"};
  for (const bool aligned : {false, true})
    for (size_t i = 0; i < 3; ++i) {
      const std::string suffix = std::string(paddings[i]) + (aligned ? "_aligned" : "");
      const auto padding = static_cast<GridSampleOptions::Padding>(i);
      for (const bool nearest_voxel : {false, true})
        all.push_back(
            {"grid_sample_" + suffix + (nearest_voxel ? "_nearest" : "_bilinear"), volume, [=](const Tensor& x) {
               return grid_sample(x, pattern(grid_shape, 0.17, x.device()) * 1.9, {nearest_voxel, padding, aligned});
             }});
      all.push_back({"grid_of_" + suffix, grid_shape, [=](const Tensor& g) {
                       return grid_sample(pattern(volume, 0.3, g.device()), g * 0.8, {false, padding, aligned});
                     }});
    }
  return all;
}

TEST(PyTorch, ValuesAndGradientsMatch) {
  std::vector<Function> all = functions();
  for (const Function& function : sampling_functions()) all.push_back(function);
  ASSERT_EQ(all.size(), kKnown.size());
  for (const Device device : devices())
    for (const Function& function : all) {
      SCOPED_TRACE(concat(function.name, " on ", device));
      const Known& known = kKnown.at(function.name);
      const Tensor x = (pattern(function.input, 0.23, device) * 2.0).requires_grad_();
      const Tensor y = function.call(x);
      EXPECT_EQ(y.shape(), known.shape);
      const Tensor value = projection(y);
      EXPECT_NEAR(value.item(), known.value, 1e-11 * (1 + std::fabs(known.value)));
      EXPECT_NEAR(projection(grad({value}, {x})[0]).item(), known.gradient, 1e-11 * (1 + std::fabs(known.gradient)));
    }
}

// Small changes of the grid do not change the nearest voxel, so the gradient of the grid is zero, even if the input is
// infinite.
TEST(GridSample, NearestModeHasZeroGridGradient) {
  for (const Device device : devices())
    for (const bool image : {false, true})
      for (const bool of_input : {false, true}) {
        const Tensor volume = full({2, 3, 4, 5, 6}, INFINITY, {f32, device});
        const Tensor positions = rand({2, 2, 3, 4, 3}, {f32, device}) * 2.0 - 1.0;
        const Tensor x = (image ? select(volume, 2, 0) : volume).detach().requires_grad_(of_input);
        const Tensor grid = (image ? narrow(select(positions, 1, 0), 3, 0, 2) : positions).detach().requires_grad_();
        const Tensor y = grid_sample(x, grid, {.nearest = true});
        const Tensor gradient = grad({y}, {grid}, {ones_like(y)})[0];
        EXPECT_EQ(gradient.to_vector(), zeros_like(grid).to_vector());
      }
}

// Large logits do not overflow. Small losses keep their digits, which PyTorch 1.13 loses below 1e-6.
TEST(BinaryCrossEntropy, AcceptsExtremeLogits) {
  for (const Device device : devices()) {
    const Tensor x = tensor({-200, -30, 0, 10, 30, 200}, {f32, device});
    const auto loss = [&](double target) {
      return binary_cross_entropy_with_logits(x, full_like(x, target), Reduction::none).to_vector();
    };
    const double as_zero[] = {0, 9.3576229688401746e-14, 0.69314718, 10.0000453989, 30, 200};
    const double as_one[] = {200, 30, 0.69314718, 4.5398899217e-05, 9.3576229688401746e-14, 0};
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_NEAR(loss(0)[i], as_zero[i], 1e-6 * as_zero[i]) << i;
      EXPECT_NEAR(loss(1)[i], as_one[i], 1e-6 * as_one[i]) << i;
    }
  }
}

}  // namespace
}  // namespace voxgrad
