// Tests the depthwise convolutions of channels-last tensors (cuda/conv/direct): the choice of the planner, which needs
// no GPU, and the results against the CPU.
#include <cmath>

#include "core/error.h"
#include "cuda/conv/plan/choose.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

constexpr ConvPass kPasses[] = {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad};

Problem depthwise(int64_t batch, int64_t channels, Triple size, int64_t kernel, int64_t stride, Triple padding) {
  return {batch, 1, 1, size, {kernel, kernel, kernel}, {{stride, stride, stride}, padding, {1, 1, 1}, channels}};
}

/// Returns a problem of dense channels-last tensors. The input of the convolution, which is the output of dgrad, has
/// the spatial size `size`.
ConvProblem planned(ConvPass pass, int64_t kernel = 5, int64_t stride = 1, DType dtype = bf16, int64_t channels = 32,
                    Triple size = {64}) {
  const Problem p = depthwise(2, channels, size, kernel, stride, {kernel / 2});
  const bool dgrad = pass == ConvPass::dgrad;
  return {.pass = pass,
          .dtype = dtype,
          .batch = 2,
          .groups = channels,
          .in_size = dgrad ? p.y_size : p.x_size,
          .out_size = dgrad ? p.x_size : p.y_size,
          .kernel = p.kernel,
          .geometry = p.geometry,
          .in_channels_last = true,
          .out_channels_last = true};
}
bool uses_depthwise(const ConvProblem& p) { return std::holds_alternative<DepthwisePlan>(choose(p)->family); }

TEST(ConvDepthwisePlan, SupportsOddCubicKernels) {
  for (const ConvPass pass : kPasses)
    for (const int64_t kernel : {1, 2, 3, 4, 5, 6, 7, 8})
      for (const int64_t stride : {1, 2, 3})
        for (const DType dtype : {f32, bf16, f16, f64}) {
          const bool supported = kernel % 2 == 1 && kernel >= 3 && stride <= 2 && dtype != f64;
          ConvProblem p = planned(pass, kernel, stride, dtype);
          p.choice.kernel = ConvKernel::depthwise;
          EXPECT_EQ(uses_depthwise(p), supported) << kernel << " " << stride << " " << dtype;
          EXPECT_EQ(explain(p).plan.find("depthwise") != std::string::npos, supported);
        }
}

TEST(ConvDepthwisePlan, RejectsUnsupportedProblems) {
  for (const auto& change : std::initializer_list<void (*)(ConvProblem&)>{
           [](ConvProblem& p) { p.in_channels = p.out_channels = 2; },
           [](ConvProblem& p) {
             p.kernel = {3, 5, 5};
           },
           [](ConvProblem& p) {
             p.geometry.stride = {1, 2, 2};
           },
           [](ConvProblem& p) {
             p.geometry.dilation = {1, 1, 2};
           },
           [](ConvProblem& p) { p.wgmma = false; },
           [](ConvProblem& p) { p.in_channels_last = false; },
           [](ConvProblem& p) { p.out_channels_last = false; },
           [](ConvProblem& p) { p.in_aligned = false; },
           [](ConvProblem& p) { p.out_aligned = false; },
           [](ConvProblem& p) { p.groups = 33; },
           [](ConvProblem& p) {
             p = planned(ConvPass::dgrad, 5, 2);
             p.geometry.padding = {1};
           },
       }) {
    ConvProblem p = planned(ConvPass::fprop);
    change(p);
    EXPECT_FALSE(plan_depthwise(p));
  }
}

TEST(ConvDepthwisePlan, TilesCoverTheOutput) {
  for (const ConvPass pass : kPasses)
    for (const int64_t kernel : {3, 5, 7})
      for (const int64_t stride : {1, 2})
        for (const DType dtype : {f32, bf16})
          for (int64_t size = 1; size < 150; size += 1 + size / 3) {
            const int64_t channels = size % 2 == 0 ? 40 : 48;
            const ConvProblem p = planned(pass, kernel, stride, dtype, channels, {size, 7, size + 3});
            const auto plan = plan_depthwise(p);
            ASSERT_TRUE(plan) << size;
            for (int a = 0; a < 3; ++a) {
              const int64_t step = a == 0 ? plan->chunk : plan->tile[a - 1];
              EXPECT_GE(plan->tiles[a] * step, p.out_size[a]);
              EXPECT_LT((plan->tiles[a] - 1) * step, p.out_size[a]);
            }
            EXPECT_LE(plan->shared_bytes, p.shared_limit);
            EXPECT_EQ(plan->channel_blocks, (channels + plan->channels - 1) / plan->channels);
            EXPECT_EQ(plan->ctas, 2 * plan->channel_blocks * plan->tiles[0] * plan->tiles[1] * plan->tiles[2]);
          }
}

TEST(ConvDepthwisePlan, ComputesHalvesWithStride1OnTensorCores) {
  const auto on_tensor_cores = [](const ConvProblem& p) { return plan_depthwise(p)->tensor_cores; };
  for (const ConvPass pass : kPasses) {
    EXPECT_TRUE(on_tensor_cores(planned(pass)));
    EXPECT_TRUE(on_tensor_cores(planned(pass, 5, 1, f16, 48, {1, 12, 16})));
    EXPECT_FALSE(on_tensor_cores(planned(pass, 5, 1, bf16, 32, {64, 8, 8}))) << "most of the tile is outside";
    EXPECT_FALSE(on_tensor_cores(planned(pass, 5, 1, bf16, 40)));
    EXPECT_FALSE(on_tensor_cores(planned(pass, 5, 2)));
    EXPECT_FALSE(on_tensor_cores(planned(pass, 5, 1, f32)));
    EXPECT_TRUE(on_tensor_cores(planned(pass, 3)));
    EXPECT_FALSE(on_tensor_cores(planned(pass, 7)));
  }
}

TEST(ConvDepthwisePlan, BoundsTheSumsOfTensorCores) {
  EXPECT_LE(plan_depthwise(planned(ConvPass::wgrad, 5, 1, bf16, 1024, {2000, 128, 128}))->chunk, 512);
}

TEST(ConvDepthwisePlan, OnlyWeightGradientsNeedAWorkspace) {
  for (const ConvPass pass : kPasses)
    for (const DType dtype : {f32, bf16}) {
      const ConvProblem p = planned(pass, 5, 1, dtype);
      EXPECT_EQ(workspace_bytes(p, *plan_depthwise(p)) > 0, pass == ConvPass::wgrad);
    }
}

TEST(ConvDepthwisePlan, OrderOfSumsDoesNotDependOnTheGpu) {
  for (const int64_t kernel : {3, 5, 7}) {
    ConvProblem p = planned(ConvPass::wgrad, kernel, 1, bf16, 64, {16});
    const auto plan = plan_depthwise(p);
    p.multiprocessors = 20;
    EXPECT_EQ(plan_depthwise(p)->chunk, plan->chunk);
  }
}

/// Operands and results of conv_forward, conv_backward_data and conv_backward_weight on both devices. Operands are
/// small integers: every sum is exact in any order, and half-precision results are rounded once.
struct Operands {
  RandomView x;       // input of conv_forward and conv_backward_weight
  RandomView y;       // gradient of the output: an input of conv_backward_data and conv_backward_weight
  RandomView w;       // weight of conv_forward and conv_backward_data
  RandomView x_bias;  // bias that conv_backward_data adds
  RandomView y_bias;  // bias that conv_forward adds
  RandomView out;     // result of conv_forward
  RandomView dx;      // result of conv_backward_data
  RandomView dw;      // result of conv_backward_weight
  ConvGeometry geometry;
  bool biased;  // true if the kernels add the biases
  bool relu;    // true if conv_forward and conv_backward_data apply ReLU to their results

  Operands(const Problem& p, DType dtype, Layout layout, Random& random)
      : x(dtype, p.x_shape(), layout, random),
        y(dtype, p.y_shape(), layout, random),
        w(dtype, p.w_shape(), any_layout(random, true), random),
        x_bias(dtype, {p.geometry.groups}, Layout::spaced, random),
        y_bias(dtype, {p.geometry.groups}, Layout::spaced, random),
        out(dtype, p.y_shape(), layout, random),
        dx(dtype, p.x_shape(), layout, random),
        dw(dtype, p.w_shape(), any_layout(random, false), random),
        geometry(p.geometry),
        biased(random.chance(0.7)),
        relu(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &x_bias, &y_bias}) input->fill(random, -4, 4);
    for (RandomView* result : {&out, &dx, &dw}) result->poison();
  }
  void run(Device device) const {
    const View x_bias_view = x_bias.on(device), y_bias_view = y_bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &y_bias_view : nullptr, relu}, geometry);
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), {biased ? &x_bias_view : nullptr, relu}, geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), geometry);
  }
  void check() {
    const Device gpu = Device::cuda();
    for (const ConvPass pass : kPasses) {
      const bool dgrad = pass == ConvPass::dgrad;
      const ConvProblem p = conv_problem(pass, (dgrad ? y : x).on(gpu), (dgrad ? dx : y).on(gpu), w.on(gpu), geometry);
      bool supported = has_wgmma(gpu.index) && (pass == ConvPass::wgrad || p.groups % 8 == 0);
      for (int a = 0; a < 3; ++a)
        supported &= !dgrad || geometry.stride[a] == 1 || (geometry.padding[a] - p.kernel[a] / 2) % 2 == 0;
      EXPECT_EQ(uses_depthwise(p), supported);
    }
    run(Device::cpu());
    for (RandomView* result : {&out, &dx, &dw}) result->restore_poison();
    const PoisonedWorkspaces poisoned;
    run(gpu);
    EXPECT_TRUE(out.matches_cpu(0)) << "fprop";
    EXPECT_TRUE(dx.matches_cpu(0)) << "dgrad";
    EXPECT_TRUE(dw.matches_cpu(0)) << "wgrad";
  }
};

class CudaConvDepthwise : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvDepthwise, testing::ValuesIn(kModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

TEST_P(CudaConvDepthwise, IsExact) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::depthwise});
  Random random(kFirstSeed);
  for (const int64_t kernel : {3, 5, 7})
    for (const int64_t stride : {1, 2})
      for (int number = 0; number < 10; ++number) {
        Triple size{1}, padding{0};
        for (int a = 0; a < 3; ++a) {
          padding[a] = random.chance(0.8) ? kernel / 2 : random.integer(0, kernel + 1);
          size[a] = std::max(random.integer(1, 24), kernel - 2 * padding[a]);
        }
        constexpr int64_t kChannels[] = {5, 8, 16, 40, 48, 72};
        const Problem p =
            depthwise(random.integer(1, 2), kChannels[random.integer(0, 5)], size, kernel, stride, padding);
        SCOPED_TRACE(concat(GetParam(), ": ", p));
        Operands(p, GetParam().dtype, Layout::padded_channels_last, random).check();
        if (HasFailure()) return;
      }
}

/// Each CTA moves along many planes. There are more planes than stages of the ring buffer in shared memory. Kernels on
/// tensor cores compute the problems with 48 channels.
TEST_P(CudaConvDepthwise, IsExactForDeepVolumes) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::depthwise});
  Random random(kFirstSeed);
  for (const int64_t kernel : {3, 5, 7})
    for (const int64_t stride : {1, 2})
      for (const int64_t channels : {48, 72}) {
        const Problem p = depthwise(1, channels, {67, 13, 37}, kernel, stride, {kernel / 2});
        SCOPED_TRACE(concat(GetParam(), ": ", p));
        Operands(p, GetParam().dtype, Layout::dense_channels_last, random).check();
      }
}

/// An infinite or NaN input changes only the results that read it.
TEST_P(CudaConvDepthwise, KeepsInfinitiesAndNaNLocal) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::depthwise});
  Random random(kFirstSeed);
  for (const int64_t kernel : {3, 5}) {
    const ConvGeometry geometry{{1}, {kernel / 2}, {1}, 16};
    Tensor x = ones({1, 16, 9, 20, 33});
    for (const double value : {double{INFINITY}, -double{INFINITY}, double{NAN}})
      x.select(1, random.integer(0, 15))
          .select(1, random.integer(0, 8))
          .select(1, random.integer(0, 19))
          .narrow(1, random.integer(0, 32), 1)
          .fill_(value);
    const auto results = [&](Device device) {
      const Tensor from = x.to(device, GetParam().dtype).contiguous(MemoryFormat::channels_last);
      const Tensor w = ones({16, 1, kernel, kernel, kernel}, {GetParam().dtype, device}), y = empty_like(from);
      kernels(device).conv_forward(y.view_out(), from.view_in(), w.view_in(), {}, geometry);
      return y.to(Device::cpu(), f32).contiguous(MemoryFormat::contiguous).to_vector<double>();
    };
    const std::vector<double> cpu = results(Device::cpu()), gpu = results(Device::cuda());
    for (size_t i = 0; i < cpu.size(); ++i)
      ASSERT_TRUE(cpu[i] == gpu[i] || (std::isnan(cpu[i]) && std::isnan(gpu[i])))
          << "element " << i << " is " << gpu[i] << ", expected " << cpu[i];
  }
}

/// An infinite or NaN input changes only the weight gradients of the taps that read its plane.
TEST_P(CudaConvDepthwise, KeepsInfinitiesAndNaNInTheirTaps) {
  if (!has_wgmma(0)) GTEST_SKIP() << "other kernels compute the gradient";
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::depthwise});
  constexpr int64_t kChannel = 3, kDepth = 9;
  for (const int64_t kernel : {3, 5})
    for (const int64_t plane : {int64_t{0}, kDepth - 1})
      for (const double value : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
        Tensor x = ones({1, 16, kDepth, 16, 32});
        x.select(1, kChannel).select(1, plane).select(1, 7).narrow(1, 20, 1).fill_(value);
        const Tensor from = x.to(Device::cuda(), GetParam().dtype).contiguous(MemoryFormat::channels_last);
        const Tensor y = ones_like(from), w = empty({16, 1, kernel, kernel, kernel}, y.options());
        kernels(Device::cuda())
            .conv_backward_weight(w.view_out(), from.view_in(), y.view_in(), {{1}, {kernel / 2}, {1}, 16});
        const std::vector<double> got = w.to(Device::cpu(), f32).to_vector<double>();
        const int64_t taps = kernel * kernel * kernel;
        for (int64_t i = 0; i < 16 * taps; ++i) {
          const int64_t y_plane = plane + kernel / 2 - i % taps / (kernel * kernel);
          const bool reads = i / taps == kChannel && y_plane >= 0 && y_plane < kDepth;
          const double sum = got[static_cast<size_t>(i)];
          EXPECT_TRUE(reads ? sum == value || (std::isnan(sum) && std::isnan(value)) : std::isfinite(sum))
              << "kernel " << kernel << ", plane " << plane << ", value " << value << ", element " << i;
        }
      }
}

/// Systematic rounding errors do not cancel in sums of positive numbers.
TEST_P(CudaConvDepthwise, IsAccurateForPositiveNumbers) {
  const Mode& mode = GetParam();
  const ScopedSetting setting(mode.precision, {.kernel = ConvKernel::depthwise});
  manual_seed(kFirstSeed);
  const auto values = [&](const Shape& shape) {
    return rand(shape).to(mode.dtype).contiguous(MemoryFormat::channels_last);
  };
  const ConvGeometry geometry{{1}, {2}, {1}, 48};  // 48 channels: halves are computed on tensor cores
  const Tensor x = values({1, 48, 24, 20, 30}), w = values({48, 1, 5, 5, 5}), y = values({1, 48, 24, 20, 30});
  const auto results = [&](Device device, DType dtype) {
    const Tensor from[] = {x.to(device, dtype), w.to(device, dtype), y.to(device, dtype)};
    const Tensors to{empty_like(from[2]), empty_like(from[0]), empty_like(from[1])};
    const Kernels& k = kernels(device);
    k.conv_forward(to[0].view_out(), from[0].view_in(), from[1].view_in(), nullptr, geometry);
    k.conv_backward_data(to[1].view_out(), from[2].view_in(), from[1].view_in(), nullptr, geometry);
    k.conv_backward_weight(to[2].view_out(), from[0].view_in(), from[2].view_in(), geometry);
    return to;
  };
  const Tensors exact = results(Device::cpu(), f64), got = results(Device::cuda(), mode.dtype);
  const double rounding = mode.dtype == bf16 ? 0x1p-8 : mode.dtype == f16 ? 0x1p-11 : 0;
  for (size_t i = 0; i < 3; ++i)
    EXPECT_LE(amax(abs(got[i].to(Device::cpu(), f64) / exact[i] - 1)).item(), rounding + 3e-6) << "result " << i;
}

}  // namespace
}  // namespace voxgrad::cudatest
