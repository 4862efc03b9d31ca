// Tests convolutions of bf16 and f16 tensors, forward and backward, on every device. Results must equal the float64
// result of the same inputs, rounded once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/autograd.h"
#include "cuda/cuda.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/detail/unrecorded.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

struct Case {
  const char* name;
  bool transposed;
  Shape x;
  Shape w;
  Triple stride{1};
  Triple padding{0};
  Triple dilation{1};
  int64_t groups = 1;
  Triple output_padding{0};
};

const Case kCases[] = {
    {"plain", false, {2, 5, 6, 7, 8}, {9, 5, 3, 3, 3}},
    {"strided", false, {1, 16, 9, 8, 11}, {24, 16, 3, 2, 4}, {2, 1, 3}, {1, 0, 2}},
    {"dilated_grouped", false, {2, 16, 7, 8, 9}, {24, 8, 3, 3, 2}, {1}, {2, 1, 0}, {2, 1, 3}, 2},
    {"transposed", true, {2, 7, 4, 5, 6}, {7, 33, 3, 3, 3}, {1}, {1}},
    {"transposed_strided", true, {1, 24, 5, 6, 4}, {24, 8, 3, 4, 3}, {2}, {1}, {1}, 1, {1, 0, 1}},
    {"transposed_wide", true, {3, 40, 4, 5, 6}, {40, 33, 3, 4, 3}, {2, 2, 3}, {1}},
    {"phases_without_taps", true, {1, 3, 3, 2, 4}, {3, 4, 1, 2, 1}, {3, 4, 2}, {0}, {1}, 1, {2, 0, 1}},
    {"depthwise", true, {1, 6, 6, 6, 6}, {6, 1, 3, 3, 3}, {2}, {1}, {1}, 6},
    // Stride 10 divides the outputs into ten phases, or the inputs into ten residues, by their position modulo 10. The
    // tensor-core kernels support at most eight per axis.
    {"ten_phases", true, {1, 3, 3, 2, 3}, {3, 5, 10, 1, 10}, {10, 1, 10}, {2, 0, 3}},
    {"ten_residues", false, {1, 3, 30, 4, 40}, {5, 3, 10, 1, 10}, {10, 1, 10}},
};

Tensor apply(const Case& c, const Tensor& x, const Tensor& w, const Tensor& bias) {
  if (!c.transposed) return conv3d(x, w, bias, {c.stride, c.padding, c.dilation, c.groups});
  return conv_transpose3d(x, w, bias, {c.stride, c.padding, c.output_padding, c.groups, c.dilation});
}

/// Computes the convolution with a ReLU fused into the kernel.
Tensor apply_with_relu(const Case& c, const Tensor& x, const Tensor& w, const Tensor& bias) {
  const FusedEpilogue epilogue{.relu = true, .bias_recorded = false};
  if (!c.transposed) return conv(x, w, bias, ConvOptions<3>{c.stride, c.padding, c.dilation, c.groups}, epilogue);
  return conv(x, w, bias, ConvTransposeOptions<3>{c.stride, c.padding, c.output_padding, c.groups, c.dilation},
              epilogue);
}

/// Returns y, its gradients dx, dw and dbias, and the gradient of dx with respect to w. `inputs` holds x, w, the bias,
/// and the upstream gradients of y and dx.
Tensors results(const Case& c, const Tensors& inputs, Device device, DType dtype) {
  Tensors t;
  for (const Tensor& input : inputs) t.push_back(input.to(device, dtype));
  const Tensors leaves{t[0].detach().requires_grad_(), t[1].detach().requires_grad_(), t[2].detach().requires_grad_()};
  const Tensor y = apply(c, leaves[0], leaves[1], leaves[2]);
  Tensors all{y};
  for (const Tensor& g : grad({y}, leaves, {t[3]}, true, true)) all.push_back(g);
  all.push_back(grad({all[1]}, {leaves[1]}, {t[4]})[0]);
  return all;
}

class HalfConv : public testing::TestWithParam<std::tuple<Case, DType, DeviceType>> {};

TEST_P(HalfConv, MatchesFloat64RoundedOnce) {
  const Case& c = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  const DeviceType type = std::get<2>(GetParam());
  if (type == DeviceType::cuda && !cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  manual_seed(1);
  const auto numbers = [&](const Shape& shape) { return affine(rand(shape), 2, -1).to(dtype); };
  const int64_t channels = c.transposed ? c.w[1] * c.groups : c.w[0];
  Tensors inputs{numbers(c.x), numbers(c.w), numbers({channels})};
  inputs.push_back(numbers(apply(c, inputs[0], inputs[1], {}).shape()));
  inputs.push_back(numbers(c.x));
  const Tensors expected = results(c, inputs, Device::cpu(), f64), got = results(c, inputs, {type, 0}, dtype);
  const double rounding = dtype == bf16 ? 0x1p-8 : 0x1p-11;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].dtype(), dtype);
    ASSERT_EQ(got[i].shape(), expected[i].shape());
    const auto values = got[i].to_vector<double>(), exact = expected[i].to_vector<double>();
    double largest = 0;
    for (const double value : exact) largest = std::max(largest, std::abs(value));
    for (size_t k = 0; k < exact.size(); ++k)
      ASSERT_NEAR(values[k], exact[k], rounding * std::abs(exact[k]) + 4e-6 * largest) << "result " << i << " at " << k;
  }
}

TEST_P(HalfConv, FusedReluMatchesSeparateRelu) {
  const auto& [c, dtype, type] = GetParam();
  if (type == DeviceType::cuda && !cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  manual_seed(2);
  const auto numbers = [&, half = dtype, device = Device{type, 0}](const Shape& shape) {
    return affine(rand(shape), 2, -1).to(device, half);
  };
  const Tensor x = numbers(c.x), w = numbers(c.w), bias = numbers({c.transposed ? c.w[1] * c.groups : c.w[0]});
  for (const Tensor& b : {bias, Tensor()}) {
    const auto plain = apply(c, x, w, b).to_vector<double>(), got = apply_with_relu(c, x, w, b).to_vector<double>();
    ASSERT_EQ(got.size(), plain.size());
    size_t negative = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_EQ(got[i], std::max(plain[i], 0.0)) << i;
      negative += plain[i] < 0;
    }
    EXPECT_GT(negative, 0u);
  }
}

TEST_P(HalfConv, GradientsDoNotDependOnCreateGraph) {
  const auto& [c, dtype, type] = GetParam();
  if (type == DeviceType::cuda && !cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  manual_seed(3);
  const auto numbers = [&, half = dtype, device = Device{type, 0}](const Shape& shape) {
    return affine(rand(shape), 2, -1).to(device, half);
  };
  const Tensor x = numbers(c.x).requires_grad_(), w = numbers(c.w).requires_grad_(), y = apply(c, x, w, {});
  const Tensor g = numbers(y.shape());
  const Tensors recorded = grad({y}, {x, w}, {g}, true, true), got = grad({y}, {x, w}, {g});
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].shape(), recorded[i].shape());
    EXPECT_EQ(got[i].to_vector<double>(), recorded[i].to_vector<double>()) << "gradient " << i;
  }
}

std::string case_name(const testing::TestParamInfo<HalfConv::ParamType>& info) {
  return concat(std::get<0>(info.param).name, '_', std::get<1>(info.param), '_', name(std::get<2>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(All, HalfConv,
                         testing::Combine(testing::ValuesIn(kCases), testing::Values(bf16, f16),
                                          testing::Values(DeviceType::cpu, DeviceType::cuda)),
                         case_name);

TEST(HalfConvOptions, AcceptsEmptyBatchAndRejectsMixedDtypes) {
  const Tensor w = zeros({3, 2, 2, 2, 2}, {.dtype = bf16});
  EXPECT_EQ(conv3d(zeros({0, 2, 4, 4, 4}, {.dtype = bf16}), w).shape(), (Shape{0, 3, 3, 3, 3}));
  EXPECT_THROW(conv3d(zeros({1, 2, 4, 4, 4}), w), Error);
}

}  // namespace
}  // namespace voxgrad
