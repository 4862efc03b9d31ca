// Tests normalization: the CPU kernels of group normalization in all floating-point dtypes, half-precision inputs with
// f32 parameters, and batch and RMS normalization.
#include <array>
#include <cmath>
#include <vector>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/fused.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/ops/cpu_kernels_support.h"

namespace voxgrad {
namespace {

using namespace kerneltest;

/// Returns an (N, C, L) array that is contiguous or has the channels innermost.
template <class T>
Array<T> rows_array(int64_t n, int64_t c, int64_t l, bool channels_inner) {
  if (!channels_inner) return Array<T>({n, c, l});
  Array<T> array({n, l, c});
  std::swap(array.view.size[1], array.view.size[2]);
  std::swap(array.view.stride[1], array.view.stride[2]);
  return array;
}

/// Returns the sum of f(index) over all samples and voxels of one channel of an (N, C, L) array.
template <class F>
double channel_sum(const View& view, int64_t channel, const F& f) {
  double total = 0;
  for (int64_t n = 0; n < view.size[0]; ++n)
    for (int64_t l = 0; l < view.size[2]; ++l) total += f(Dims{n, channel, l});
  return total;
}

constexpr double kEps = 1e-5;

/// Returns the tolerance for a few roundings in compute_t<T>, the type in which kernels compute, and one rounding to
/// Stored.
template <class T, class Stored = T>
double norm_tolerance() {
  const double half = std::is_same_v<Stored, BFloat16> ? 0x1p-8 : std::is_same_v<Stored, Float16> ? 0x1p-11 : 0;
  return half + (sizeof(T) == 8 ? 1e-11 : 3e-6);
}

template <class T, class Parameter>
void check_group_norm() {
  for (const Shape& s : {Shape{2, 6, 35, 3}, Shape{3, 4, 1, 2}, Shape{1, 8, 2501, 2}, Shape{2, 5, 7, 5},
                         Shape{2, 3, 101, 1}, Shape{1, 24, 77, 12}, Shape{2, 32, 33, 32}, Shape{1, 320, 33, 160}})
    for (int variant = 0; variant < 8; ++variant) {
      const int64_t n = s[0], c = s[1], l = s[2], groups = s[3], group_channels = c / groups;
      const bool affine = variant & 2, inner = variant & 1, other_inner = inner != ((variant & 4) != 0);
      const double shift = 300;  // so large that E[x^2] - E[x]^2 would lose all digits in float
      Array<T> x = rows_array<T>(n, c, l, inner), y = rows_array<T>(n, c, l, inner);
      Array<T> dy = rows_array<T>(n, c, l, other_inner), dx = rows_array<T>(n, c, l, inner);
      Array<double> statistics({n, groups, 2}), grad_means({n, groups, 2});
      Array<Parameter> gamma({c}), beta({c}), dgamma({c}), dbeta({c});
      x.random(shift - 3, shift + 3);
      dy.random(-1, 1, 2);
      gamma.random(0.5, 1.5, 3);
      beta.random(-1, 1, 4);
      cpu_table.group_norm(y.view, statistics.view, x.view, affine ? &gamma.view : nullptr,
                           affine ? &beta.view : nullptr, nullptr, kEps, {}, nullptr);
      cpu_table.group_norm_backward({dx.view, &dgamma.view, &dbeta.view}, grad_means.view, dy.view, x.view,
                                    statistics.view, affine ? &gamma.view : nullptr, nullptr, {}, nullptr);

      const auto group_of = [&](const Dims& i) { return static_cast<size_t>(i[0] * groups + i[1] / group_channels); };
      const auto group_means = [&](auto f) {
        std::vector<double> means(static_cast<size_t>(n * groups));
        x.visit([&](const Dims& i) { means[group_of(i)] += f(i) / static_cast<double>(group_channels * l); });
        return means;
      };
      const auto value = [&](const Dims& i) { return static_cast<double>(x(i)); };
      const auto means = group_means(value);
      const auto centered = [&](const Dims& i) { return value(i) - means[group_of(i)]; };
      const auto variances = group_means([&](const Dims& i) { return centered(i) * centered(i); });
      const auto scale = [&](const Dims& i) { return 1 / std::sqrt(variances[group_of(i)] + kEps); };
      const auto normal = [&](const Dims& i) { return centered(i) * scale(i); };
      const auto weight = [&](const Dims& i) { return affine ? static_cast<double>(gamma({i[1]})) : 1.0; };
      const auto grad = [&](const Dims& i) { return static_cast<double>(dy(i)); };
      const auto mean_grad = group_means([&](const Dims& i) { return grad(i) * weight(i); });
      const auto mean_grad_normal = group_means([&](const Dims& i) { return grad(i) * weight(i) * normal(i); });
      const auto group_start = [&](const Dims& i) { return Dims{i[0], i[1] * group_channels, 0}; };
      const double tol = norm_tolerance<T, compute_t<T>>(), rounded = norm_tolerance<T>();
      expect_close<double>(
          statistics,
          [&](const Dims& i) { return i[2] == 0 ? means[group_of(group_start(i))] : scale(group_start(i)); }, 1e-9);
      const auto expected_y = [&](const Dims& i) {
        return normal(i) * weight(i) + (affine ? static_cast<double>(beta({i[1]})) : 0.0);
      };
      expect_close<T>(y, expected_y, rounded);
      const auto expected_dx = [&](const Dims& i) {
        return scale(i) * (grad(i) * weight(i) - mean_grad[group_of(i)] - normal(i) * mean_grad_normal[group_of(i)]);
      };
      expect_close<T>(dx, expected_dx, tol * 10 + rounded);
      const auto term = [&](const Dims& i) { return grad(i) * normal(i); };
      const double parameter_tolerance = norm_tolerance<T, Parameter>();
      expect_close<Parameter>(
          dgamma, [&](const Dims& i) { return channel_sum(x.view, i[0], term); }, parameter_tolerance);
      expect_close<Parameter>(
          dbeta, [&](const Dims& i) { return channel_sum(x.view, i[0], grad); }, parameter_tolerance);
    }
}

TEST(CpuKernels, GroupNormMatchesReference) {
  for_all_floats([]<class T>() { check_group_norm<T, T>(); });
  check_group_norm<BFloat16, float>();
  check_group_norm<Float16, float>();
}

template <class T, class Parameter>
void check_bias_before_relu() {
  for (const bool inner : {false, true}) {
    Array<T> y = rows_array<T>(2, 6, 3001, inner), dy = rows_array<T>(2, 6, 3001, inner);
    Array<T> dz = rows_array<T>(2, 6, 3001, inner), dx = rows_array<T>(2, 6, 3001, inner);
    Array<Parameter> dbias({6});
    y.random(-1, 1);
    y.visit([&](const Dims& i) { y(i) = static_cast<double>(y(i)) > 0 ? y(i) : T(0); });  // y is the output of a ReLU
    dy.random(-1, 1, 2);
    // dz, the gradient of the input of the ReLU, must equal dx where y > 0 and 0 elsewhere.
    Array<double> statistics({2, 1, 2}), means({2, 1, 2});
    statistics.random(0.05, 1.5);
    cpu_table.group_norm_backward({dx.view}, means.view, dy.view, y.view, statistics.view, nullptr, nullptr, {},
                                  nullptr);
    cpu_table.group_norm_backward({dz.view, nullptr, nullptr, &dbias.view}, means.view, dy.view, y.view,
                                  statistics.view, nullptr, nullptr, {.before = {ActivationKind::relu}}, nullptr);
    const auto masked_dx = [&](const Dims& i) {
      return static_cast<double>(y(i)) > 0 ? static_cast<double>(dx(i)) : 0.0;
    };
    expect_close<T>(dz, masked_dx, norm_tolerance<T, T>());
    expect_close<Parameter>(
        dbias, [&](const Dims& i) { return channel_sum(y.view, i[0], masked_dx); }, norm_tolerance<T, Parameter>());
  }
}

TEST(CpuKernels, GroupNormBackwardIncludesPrecedingBiasAndRelu) {
  for_all_floats([]<class T>() { check_bias_before_relu<T, T>(); });
  check_bias_before_relu<BFloat16, float>();
  check_bias_before_relu<Float16, float>();
}

/// Returns whether |a - b| <= relative * |b| + absolute for all elements.
bool close(const Tensor& a, const Tensor& b, double relative, double absolute) {
  return amax(abs(a.to(f64) - b) - relative * abs(b)).item() <= absolute;
}

// Tests both forms of the gradient: the fused kernel, and the composed operators, which create_graph = true selects.
TEST(GroupNorm, AcceptsFloatParametersForHalfPrecisionInputs) {
  for (const Device device : devices())
    for (const DType dtype : {bf16, f16}) {
      const auto variable = [&](const Tensor& values, DType to) {
        return values.to(device, to).detach().requires_grad_(true);
      };
      const Tensor x32 = randn({2, 6, 5, 4}) + 2.0, weight32 = randn({6}), bias32 = randn({6});
      const Tensor dy = randn({2, 6, 5, 4}).to(device, dtype);
      for (const DType parameters : {f32, dtype})
        for (const bool composed : {false, true}) {
          const Tensor x = variable(x32, dtype), weight = variable(weight32, parameters);
          const Tensor bias = variable(bias32, parameters);
          const Tensor y = group_norm(x, 3, weight, bias);
          ASSERT_EQ(y.dtype(), dtype);
          const Tensors got = grad({y}, {x, weight, bias}, {dy}, false, composed);
          const Tensor exact_x = variable(x, f64), exact_weight = variable(weight, f64);
          const Tensor exact_bias = variable(bias, f64), exact = group_norm(exact_x, 3, exact_weight, exact_bias);
          Tensors want = grad({exact}, {exact_x, exact_weight, exact_bias}, {dy.to(f64)});
          EXPECT_TRUE(close(y, exact, dtype == bf16 ? 0x1p-8 : 0x1p-11, 1e-5));
          for (size_t i = 0; i < got.size(); ++i) {
            const DType stored = i == 0 ? dtype : parameters;
            EXPECT_EQ(got[i].dtype(), stored);
            EXPECT_TRUE(close(got[i], want[i],
                              stored == f32    ? 1e-5
                              : stored == bf16 ? 0x1p-8
                                               : 0x1p-11,
                              2e-5))
                << i << ' ' << dtype << ' ' << parameters << ' ' << composed;
          }
        }
      EXPECT_ERROR(group_norm(x32.to(device, dtype), 3, weight32.to(device, f64)), "dtypes differ");
      EXPECT_ERROR(group_norm(x32.to(device), 3, weight32.to(device, dtype)), "dtypes differ");
    }
}

// Batch normalization equals instance normalization of one sample that contains the voxels of all samples.
TEST(BatchNorm, MatchesInstanceNormOverAllSamples) {
  manual_seed(2);
  for (const Device device : devices())
    for (const DType dtype : {f64, f32, bf16, f16})
      for (const auto& [n, c, l] : {std::array<int64_t, 3>{1, 16, 70},
                                    {2, 3, 5001},
                                    {40, 8, 33},
                                    {300, 16, 1},
                                    {5, 40, 3},
                                    {2, 32, 2049},
                                    {3, 5, 20000}})
        for (const bool last : {false, true}) {
          const auto format = last ? MemoryFormat::channels_last : MemoryFormat::contiguous;
          const auto variable = [&](const Tensor& values) { return values.to(device, dtype).contiguous(format); };
          const auto joined = [&, rows = c](const Tensor& t) {
            return t.to(f64).permute({1, 0, 2}).reshape({1, rows, -1});
          };
          const Tensor x = variable(randn({n, c, l}) * 2.0 + 30.0).requires_grad_(), dy = variable(randn({n, c, l}));
          const Tensor weight = randn({c}).to(device, dtype).requires_grad_();
          const Tensor bias = randn({c}).to(device, dtype).requires_grad_();
          const Tensor y = batch_norm(x, {}, {}, weight, bias, true);
          const Tensors got = grad({y}, {x, weight, bias}, {dy});
          const Tensor wide_x = joined(x.detach()).requires_grad_();
          const Tensor wide_weight = weight.detach().to(f64).requires_grad_();
          const Tensor wide_bias = bias.detach().to(f64).requires_grad_();
          const Tensor wide_y = instance_norm(wide_x, wide_weight, wide_bias);
          const Tensors want = grad({wide_y}, {wide_x, wide_weight, wide_bias}, {joined(dy)});
          const double half = dtype == bf16 ? 0x1p-8 : dtype == f16 ? 0x1p-11 : 0, rest = dtype == f64 ? 1e-10 : 1e-4;
          const std::string what = concat(x.shape(), ' ', dtype, last ? " channels last on " : " on ", device);
          EXPECT_TRUE(close(joined(y), wide_y, half, rest)) << what;
          EXPECT_TRUE(close(joined(got[0]), want[0], half, rest)) << what;
          EXPECT_TRUE(close(got[1].to(f64), want[1], half, rest * static_cast<double>(n * l))) << what;
          EXPECT_TRUE(close(got[2].to(f64), want[2], half, rest * static_cast<double>(n * l))) << what;
          // Evaluation with the same statistics gives the same result.
          const Tensor mean = voxgrad::mean(x.detach().to(f64), {0, 2}), variance = var(x.detach().to(f64), {0, 2}, 0);
          if (dtype == f32 || dtype == f64) {
            const Tensor evaluated = batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias);
            EXPECT_TRUE(close(joined(evaluated), wide_y, half, rest)) << what;
            EXPECT_EQ(evaluated.strides(), x.strides());
          }
        }
}

// The squares of these values overflow float, so the statistics must be summed in double.
TEST(Norms, HandleValuesWhoseSquaresOverflowFloat) {
  for (const Device device : devices())
    for (const DType dtype : {f32, bf16})
      for (const double size : {1e30, 1e38})
        for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const Tensor signs = affine(one_hot(arange(0, 2, 1, {i64, device}), 2).to(f32), 2, -1);  // {{1, -1}, {-1, 1}}
          const Tensor whole = repeat(reshape(signs, {1, 1, 2, 1, 2}), {2, 16, 3, 5, 7});
          const Tensor x = affine(whole, size, 0).to(dtype).contiguous(format);
          const Shape volume{16, 6, 5, 14};
          const Tensor weight = ones({16}, {dtype, device}).requires_grad_();
          const Tensor results[] = {group_norm(x, 4, weight, {}, 0), instance_norm(x, weight, {}, 0),
                                    batch_norm(x, {}, {}, weight, {}, true, 0.1, 0), layer_norm(x, volume, {}, {}, 0)};
          for (const Tensor& y : results)
            EXPECT_TRUE(close(y, whole.to(f64), 0.01, 0)) << dtype << ' ' << size << ' ' << device;
          if (size > 1e37) continue;  // the sums of dy * x would overflow
          // The normalized values have the signs of dy, so the gradient of the weight is the sum of |dy|.
          const Tensor dy = whole.to(dtype);
          for (size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(close(grad({results[i]}, {weight}, {dy})[0], full({16}, 840, {f64, device}), 0.01, 0))
                << dtype << ' ' << size << ' ' << device << ' ' << i;
        }
}

TEST(RMSNorm, DefaultEpsilonDependsOnDtype) {
  for (const Device device : devices())
    for (const auto& [dtype, eps] : {std::pair{f64, 0x1p-52}, {f32, 0x1p-23}, {bf16, 0x1p-7}, {f16, 0x1p-10}}) {
      const Tensor x = full({1, 8}, 0.5 * std::sqrt(eps), {dtype, device});
      const Tensor wide = x.to(f64), expected = wide * rsqrt(wide * wide + eps);
      EXPECT_TRUE(close(rms_norm(x, {8}), expected, 0.01, 0)) << dtype;
      EXPECT_EQ(rms_norm(x, {8}).dtype(), dtype);
      EXPECT_EQ(rms_norm(x, {8}, ones({8}, {f32, device}).to(dtype == f64 ? f64 : f32)).dtype(), dtype);
    }
}

// create_graph = true selects the composed operators, which must not count the gradient of a shared or dependent
// parameter, or call its hook, twice.
TEST(FusedOperators, RecordedGradientsOfDependentParametersMatchTheKernels) {
  const Tensor x = randn({2, 4, 2, 3, 2}, {f64}), first = randn({4, 4, 1, 1, 1}, {f64}).requires_grad_();
  const Tensor p = randn({4}, {f64}).requires_grad_(), second = p.reshape({4, 1, 1, 1, 1}).expand({4, 4, 1, 1, 1});
  int calls = 0;
  const HookHandle hook = p.register_hook([&](const Tensor& g) {
    ++calls;
    return g * 2.0;
  });
  for (const Tensor& y : {group_norm(x, 2, p, p), inverted_bottleneck(x, first, p, second, p)}) {
    const Tensor dy = randn(y.shape(), {f64});
    const Tensor want = grad({y}, {p}, {dy}, true)[0], got = grad({y}, {p}, {dy}, false, true)[0];
    EXPECT_TRUE(close(got.detach(), want, 1e-10, 1e-10));
  }
  EXPECT_EQ(calls, 4);
}

TEST(FusedOperators, OnlyTheResidualNeedsAGradient) {
  const Tensor x = rand({2, 3, 4, 2, 2}), residual = randn(x.shape(), {.requires_grad = true});
  for (const ActivationKind kind : {ActivationKind::none, ActivationKind::leaky_relu})
    for (const bool create_graph : {false, true}) {
      const Tensor y =
          norm_activation(x, {.norm = {.kind = NormKind::instance}, .activation = {kind, 0.25}, .residual = residual});
      const Tensor slope = where(gt(y.detach(), 0), ones_like(y), kind == ActivationKind::none ? 1.0 : 0.25);
      EXPECT_TRUE(close(grad({sum(y)}, {residual}, {}, false, create_graph)[0], slope, 0, 0));
    }
}

TEST(FusedOperators, AppendsATensorWithoutChannels) {
  const Tensor x = rand({1, 2, 3, 3, 3}), w = rand({4, 2, 1, 1, 1}),
               none = empty({1, 0, 3, 3, 3}, {.requires_grad = true});
  const Tensor y = conv_norm_activation(x, w, {}, ConvOptions<3>(), {.appended = none});
  EXPECT_TRUE(close(y, conv3d(x, w), 0, 0));
  EXPECT_EQ(grad({sum(y)}, {none})[0].shape(), none.shape());
}

TEST(FusedOperators, ChecksTheResidual) {
  const Tensor x = rand({2, 3, 4});
  EXPECT_ERROR(norm_activation(x, {.residual = rand({2, 3, 1})}), "the residual must have the shape of the input");
  EXPECT_ERROR(norm_activation(x, {.norm = {.kind = NormKind::instance}, .residual = rand({2, 1, 4})}),
               "the residual must have the shape of the input");
  EXPECT_ERROR(norm_activation(x, {.activation_first = true, .residual = x}), "combined with activation_first");
}

TEST(FusedOperators, InvertedBottleneckSupportsFrozenInputs) {
  for (const Device device : devices())
    for (int mask = 1; mask < 32; ++mask) {
      Tensors t{randn({2, 3, 2, 3, 2}, {f64}), randn({8, 3, 1, 1, 1}, {f64}), randn({8}, {f64}),
                randn({2, 8, 1, 1, 1}, {f64}), randn({2}, {f64})};
      Tensors active;
      for (size_t i = 0; i < t.size(); ++i) {
        t[i] = t[i].to(device).requires_grad_(mask >> i & 1);
        if (mask >> i & 1) active.push_back(t[i]);
      }
      const Tensor composed = conv3d(gelu(conv3d(t[0], t[1], t[2])), t[3], t[4]), dy = randn_like(composed);
      const Tensors want = grad({composed}, active, {dy}),
                    got = grad({inverted_bottleneck(t[0], t[1], t[2], t[3], t[4])}, active, {dy});
      for (size_t i = 0; i < active.size(); ++i) EXPECT_TRUE(close(got[i], want[i], 1e-10, 1e-10)) << mask << ' ' << i;
    }
}

// Training updates the running mean and the running unbiased variance in place. Evaluation, an empty batch and invalid
// calls do not change them.
TEST(BatchNorm, OnlyTrainingUpdatesRunningStatistics) {
  for (const Device device : devices()) {
    const Tensor x = (randn({3, 4, 50}) * 2.0 + 100.0).to(device);
    const Tensor running_mean = full({4}, 5, {f32, device}), running_var = full({4}, 7, {f32, device});
    batch_norm(x, running_mean, running_var, {}, {}, true, 0.25);
    EXPECT_TRUE(close(running_mean, mean(x.to(f64), {0, 2}) * 0.25 + 5 * 0.75, 1e-6, 0));
    EXPECT_TRUE(close(running_var, var(x.to(f64), {0, 2}) * 0.25 + 7 * 0.75, 1e-6, 0));
    const std::vector<double> before = running_var.to_vector();
    batch_norm(x, running_mean, running_var);
    batch_norm(zeros({0, 4, 3}, {f32, device}), running_mean, running_var, {}, {}, true);
    EXPECT_EQ(running_var.to_vector(), before);
    EXPECT_ERROR(batch_norm(x, expand(full({1}, 5, {f32, device}), {4}), running_var, {}, {}, true), "share memory");
    EXPECT_EQ(running_var.to_vector(), before);
    const Tensor nan = full({3, 4, 50}, std::nan(""), {f32, device});
    batch_norm(nan, {}, running_var, {}, {}, true);
    EXPECT_TRUE(std::isnan(running_var.to_vector()[0]));
    EXPECT_ERROR(batch_norm(x, running_mean, {}), "running_mean and running_var are required if training is false");
    EXPECT_ERROR(batch_norm(x, {}, {}, {}, {}, true, -1), "batch_norm: momentum must lie in [0, 1], got -1");
    EXPECT_ERROR(batch_norm(x, zeros({3}, {f32, device}), running_var), "running_mean must have shape [4], got [3]");
    EXPECT_ERROR(batch_norm(x.narrow(0, 0, 1).narrow(2, 0, 1), {}, {}, {}, {}, true), "more than 1 value per channel");
  }
}

}  // namespace
}  // namespace voxgrad
