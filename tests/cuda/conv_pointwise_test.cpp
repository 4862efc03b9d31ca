// Tests the 1x1x1 convolutions with few channels on one side (pointwise.cu and pointwise_planes.cu in
// cuda/conv/direct): the choice of the planner, which needs no GPU, and the results against the CPU.
#include <cmath>

#include "core/error.h"
#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/pointwise.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

constexpr ConvPass kPasses[] = {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad};

/// Returns the problem of a 1x1x1 convolution of dense channels-last tensors.
ConvProblem head(ConvPass pass, int64_t in, int64_t out, DType dtype = bf16, Triple size = {96}) {
  return {.pass = pass,
          .dtype = dtype,
          .batch = 2,
          .in_channels = in,
          .out_channels = out,
          .in_size = size,
          .out_size = size,
          .in_channels_last = true,
          .out_channels_last = true,
          .in_dense = true,
          .out_dense = true};
}
bool uses_pointwise(const ConvProblem& p) { return std::holds_alternative<PointwisePlan>(choose(p)->family); }

TEST(ConvPointwisePlan, SupportsFewChannelsOnOneSide) {
  for (const ConvPass pass : kPasses)
    for (const DType dtype : {f32, bf16, f16})
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>(32, 3),
                                    {48, 5},
                                    {64, 14},
                                    {320, 3},
                                    {3, 32},
                                    {8, 8},
                                    {1, 16},
                                    {16, 1},
                                    {320, 16}}) {
        SCOPED_TRACE(concat(dtype, ", ", in, " -> ", out));
        const bool supported = std::min(in, out) <= max_narrow_channels(pass, item_size(dtype), false);
        EXPECT_EQ(plan_pointwise(head(pass, in, out, dtype)).has_value(), supported);
        if (!supported) continue;
        ConvProblem forced = head(pass, in, out, dtype);
        forced.choice.kernel = ConvKernel::pointwise;
        EXPECT_NE(explain(forced).plan.find("pointwise"), std::string::npos);
      }
}

TEST(ConvPointwisePlan, RejectsUnsupportedProblems) {
  for (const ConvPass pass : kPasses)
    for (auto change : {+[](ConvProblem& p) { p.out_channels = 17; }, +[](ConvProblem& p) { p.in_channels = 36; },
                        +[](ConvProblem& p) { p.in_channels = 4096; }, +[](ConvProblem& p) { p.dtype = f64; },
                        +[](ConvProblem& p) { p.in_dense = false; }, +[](ConvProblem& p) { p.out_dense = false; },
                        +[](ConvProblem& p) { p.in_aligned = false; }, +[](ConvProblem& p) { p.kernel[1] = 3; },
                        +[](ConvProblem& p) { p.geometry.stride[0] = 2; },
                        +[](ConvProblem& p) { p.geometry.padding[2] = 1; }, +[](ConvProblem& p) { ++p.out_size[1]; },
                        +[](ConvProblem& p) { p.groups = 2; }, +[](ConvProblem& p) { p.batch = 0; }}) {
      ConvProblem p = head(pass, 32, 3);
      change(p);
      EXPECT_FALSE(plan_pointwise(p));
    }
  ConvProblem p = head(ConvPass::fprop, 32, 3);
  p.out_aligned = false;  // the tensor with few channels needs no alignment
  EXPECT_TRUE(plan_pointwise(p));
}

TEST(ConvPointwisePlan, OrderOfSumsDoesNotDependOnTheGpu) {
  for (const int64_t size : {8, 40, 400})
    for (const int64_t wide : {8, 48, 320}) {
      ConvProblem p = head(ConvPass::wgrad, wide, 5, f32, {size});
      const auto plan = plan_pointwise(p).value();
      p.multiprocessors = 78;
      EXPECT_EQ(plan_pointwise(p)->blocks, plan.blocks);
      EXPECT_EQ(plan_pointwise(p)->groups, plan.groups);
      const int64_t warps = kPointwiseWgradWarps / plan.groups, tile = pointwise_wgrad_voxels(plan.narrow);
      ASSERT_GE(warps, 1);
      EXPECT_GE(plan.groups * plan.grid_rows * kPointwiseLanes * 4, wide);
      EXPECT_LE(static_cast<double>(plan.voxels) / static_cast<double>(plan.blocks * warps * tile), 256);
    }
}

/// If the kernel is as wide as its stride, the planner views the width as channels (ConvRewrite::width_as_channels).
TEST(ConvPointwisePlan, PrefersARewriteForStridedWidth) {
  ConvProblem p = head(ConvPass::dgrad, 32, 8);
  p.kernel = p.geometry.stride = {1, 1, 2};
  p.out_size[2] *= 2;
  p.out_stride = {96 * 192 * 8, 192 * 8, 8};
  p.weight_channels_last = true;
  EXPECT_EQ(choose(p)->rewrite, ConvRewrite::width_as_channels);
  EXPECT_TRUE(std::holds_alternative<FpropDgradPlan>(choose(p)->family));
}

bool planned(const Tensor& x, const Tensor& y) {
  const Tensor w = empty({y.size(1), x.size(1), 1, 1, 1}, x.options());
  return plan_pointwise(conv_problem(ConvPass::fprop, x.view_in(), y.view_in(), w.view_in(), {})).has_value();
}

TEST(ConvPointwisePlan, RequiresDenseVoxels) {
  const auto last = [](const Shape& shape) { return empty(shape, {}, MemoryFormat::channels_last); };
  const Tensor x = last({4, 32, 6, 7, 8}), y = last({4, 3, 6, 7, 8});
  EXPECT_TRUE(planned(x, y));
  EXPECT_TRUE(planned(x.narrow(0, 1, 2), y.narrow(0, 1, 2)));
  for (int axis = 2; axis < 5; ++axis)
    EXPECT_FALSE(planned(x.narrow(axis, 0, 2), last({4, 3, 6, 7, 8}).narrow(axis, 0, 2)));
  EXPECT_FALSE(planned(last({4, 64, 6, 7, 8}).narrow(1, 0, 32), y));
  EXPECT_FALSE(planned(empty({4, 32, 6, 7, 8}), y));
}

TEST(ConvPointwisePlan, RequiresWholeVectorsOfContiguousTensors) {
  const Tensor x = empty({4, 20, 6, 7, 8}), y = empty({4, 3, 6, 7, 8});
  EXPECT_TRUE(planned(x, y));
  EXPECT_TRUE(planned(x.narrow(1, 1, 16), y.narrow(1, 0, 2)));
  EXPECT_TRUE(planned(x.narrow(0, 0, 1).expand({4, 20, 6, 7, 8}), y));
  EXPECT_TRUE(planned(empty({4, 20, 2, 3, 8}, {.dtype = bf16}), empty({4, 16, 2, 3, 8}, {.dtype = bf16})));
  EXPECT_FALSE(planned(empty({4, 20, 3, 3, 4}, {.dtype = bf16}), empty({4, 3, 3, 3, 4}, {.dtype = bf16})));
  EXPECT_FALSE(planned(empty({4, 20, 3, 3, 3}), empty({4, 3, 3, 3, 3})));
  EXPECT_FALSE(planned(x, empty({4, 17, 6, 7, 8})));
  EXPECT_FALSE(planned(x.narrow(4, 0, 4), y.narrow(4, 0, 4)));
  EXPECT_FALSE(planned(x, empty({4, 3, 6, 7, 8}, {}, MemoryFormat::channels_last)));
  const Tensor shifted = empty({4 * 20 * 336 + 1}).narrow(0, 1, 4 * 20 * 336);
  EXPECT_FALSE(planned(reshape(shifted, {4, 20, 6, 7, 8}), y));
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
  bool biased;        // true if the kernels add the biases
  bool relu;          // true if conv_forward and conv_backward_data apply ReLU to their results

  /// `narrow` is the layout of the tensor with fewer channels, and `wide` that of the other one.
  Operands(const Problem& p, DType dtype, Layout narrow, Random& random, Layout wide = Layout::dense_channels_last)
      : x(dtype, p.x_shape(), p.in < p.out ? narrow : wide, random),
        y(dtype, p.y_shape(), p.in < p.out ? wide : narrow, random),
        w(dtype, p.w_shape(), any_layout(random, true), random),
        x_bias(dtype, {p.in}, Layout::spaced, random),
        y_bias(dtype, {p.out}, Layout::spaced, random),
        out(dtype, p.y_shape(), p.in < p.out ? wide : narrow, random),
        dx(dtype, p.x_shape(), p.in < p.out ? narrow : wide, random),
        dw(dtype, p.w_shape(), any_layout(random, false), random),
        biased(random.chance(0.7)),
        relu(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &x_bias, &y_bias}) input->fill(random, -8, 8);
    for (RandomView* result : {&out, &dx, &dw}) result->poison();
  }
  void run(Device device) const {
    const View x_bias_view = x_bias.on(device), y_bias_view = y_bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &y_bias_view : nullptr, relu}, {});
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), {biased ? &x_bias_view : nullptr, relu}, {});
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), {});
  }
  void check() {
    const Device gpu = Device::cuda();
    for (const ConvPass pass : kPasses) {
      const bool dgrad = pass == ConvPass::dgrad;
      const ConvProblem p = conv_problem(pass, (dgrad ? y : x).on(gpu), (dgrad ? dx : y).on(gpu), w.on(gpu), {});
      EXPECT_EQ(uses_pointwise(p), std::min(p.in_channels, p.out_channels) <=
                                       max_narrow_channels(pass, item_size(p.dtype), p.in_planes && p.out_planes));
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

class CudaConvPointwise : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvPointwise, testing::ValuesIn(kModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

TEST_P(CudaConvPointwise, IsExact) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::pointwise});
  const Triple sizes[] = {{1}, {3, 5, 7}, {4, 8, 16}, {5, 13, 17}};
  Random random(kFirstSeed);
  int number = 0;
  for (int64_t narrow = 1; narrow <= 16; ++narrow)
    for (const int64_t wide : {16, 24, 64, 320})
      for (const bool widens : {false, true}) {
        const Problem p(1 + number % 2, widens ? narrow : wide, widens ? wide : narrow, sizes[number % 4], {1}, {});
        SCOPED_TRACE(concat(GetParam(), ": ", p));
        number += 1 + widens;
        const Layout layout = number / 4 % 2 ? Layout::dense_channels_last : Layout::channels_last;
        Operands(p, GetParam().dtype, layout, random).check();
        if (HasFailure()) return;
      }
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>(8, 8), {8, 1}, {1, 8}, {8, 5}}) {
    const Problem p(2, in, out, {5, 6, 7}, {1}, {});
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Operands(p, GetParam().dtype, Layout::channels_last, random).check();
  }
}

TEST_P(CudaConvPointwise, IsExactForContiguousTensors) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::pointwise});
  const Triple sizes[] = {{1, 1, 8}, {3, 5, 8}, {4, 8, 16}, {5, 13, 24}};
  Random random(kFirstSeed);
  int number = 0;
  for (int64_t narrow = 1; narrow <= 16; ++narrow)
    for (const int64_t wide : {16, 17, 25, 64, 100, 300})
      for (const bool widens : {false, true}) {
        const Problem p(1 + number % 3, widens ? narrow : wide, widens ? wide : narrow, sizes[number % 4], {1}, {});
        SCOPED_TRACE(concat(GetParam(), ": ", p));
        number += 1 + widens;
        Operands(p, GetParam().dtype, Layout::aligned_contiguous, random, Layout::aligned_contiguous).check();
        if (HasFailure()) return;
      }
}

/// Views of contiguous tensors: some of the channels, one sample as several, and an axis of size 1 with a stride that
/// is no whole vector.
TEST_P(CudaConvPointwise, IsExactForViewsOfContiguousTensors) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::pointwise});
  manual_seed(kFirstSeed);
  const auto integers = [](const Shape& shape) {
    return (rand(shape, {.device = Device::cuda()}) * 16.0 - 8.0).to(i32).to(GetParam().dtype);
  };
  const Tensor whole = integers({2, 40, 4, 6, 8});
  for (const Tensor& x : {whole.narrow(1, 3, 33), whole.narrow(0, 1, 1).expand({3, 40, 4, 6, 8}),
                          permute(integers({40, 4, 6, 8, 1}), {4, 0, 1, 2, 3})}) {
    SCOPED_TRACE(concat(GetParam(), ": ", x.shape()));
    const Tensor w = integers({3, x.size(1), 1, 1, 1}), y = integers({x.size(0), 3, 4, 6, 8});
    EXPECT_TRUE(uses_pointwise(conv_problem(ConvPass::fprop, x.view_in(), y.view_in(), w.view_in(), {})));
    const auto results = [&](Device device) {
      const Tensor from[] = {x.to(device), w.to(device), y.to(device)};
      const Tensors to{empty_like(from[2]), empty_like(from[1])};
      const Kernels& k = kernels(device);
      k.conv_forward(to[0].view_out(), from[0].view_in(), from[1].view_in(), nullptr, {});
      k.conv_backward_weight(to[1].view_out(), from[0].view_in(), from[2].view_in(), {});
      return to;
    };
    const Tensors expected = results(Device::cpu()), got = results(Device::cuda());
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(got[i].to_vector(), expected[i].to_vector()) << "result " << i;
  }
}

/// Each warp processes several tiles.
TEST_P(CudaConvPointwise, IsExactForManyVoxels) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::pointwise});
  Random random(kFirstSeed);
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>(32, 3), {7, 24}}) {
    const Problem p(2, in, out, {53, 55, 57}, {1}, {});
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Operands(p, GetParam().dtype, Layout::dense_channels_last, random).check();
    const Problem whole(2, in, out, {53, 55, 56}, {1}, {});
    Operands(whole, GetParam().dtype, Layout::aligned_contiguous, random, Layout::aligned_contiguous).check();
  }
}

/// Infinities and NaN must appear at the same positions as on the CPU: they must not spread to other tiles, and the
/// padding of a partial tile must not create them.
TEST_P(CudaConvPointwise, KeepsInfinitiesAndNaN) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::pointwise});
  Random random(kFirstSeed);
  for (const auto& [narrow, wide] : {std::pair{Layout::channels_last, Layout::dense_channels_last},
                                     {Layout::aligned_contiguous, Layout::aligned_contiguous}}) {
    Operands operands({1, 40, 6, {30, 60, 76}, {1}, {}}, GetParam().dtype, narrow, random, wide);
    const auto put = [](RandomView& view, int64_t channel, int64_t voxel, double value) {
      view.cpu.set({view.start + channel * view.view.stride[1] + voxel * view.view.stride[4]}, value);
      view.gpu = view.cpu.to(Device::cuda());
    };
    put(operands.x, 3, 20, std::numeric_limits<double>::quiet_NaN());
    put(operands.x, 4, 30, std::numeric_limits<double>::infinity());
    put(operands.y, 5, 1000, std::numeric_limits<double>::quiet_NaN());
    put(operands.y, 1, 2000, -std::numeric_limits<double>::infinity());
    if (GetParam().dtype == f32) put(operands.x, 6, 40, -std::numeric_limits<float>::max());
    operands.check();
  }
}

/// Systematic rounding errors do not cancel in sums of positive numbers.
TEST_P(CudaConvPointwise, IsAccurateForPositiveNumbers) {
  const Mode& mode = GetParam();
  const ScopedSetting setting(mode.precision, {.kernel = ConvKernel::pointwise});
  manual_seed(kFirstSeed);
  const Tensor numbers[] = {rand({2, 48, 40, 51, 52}), rand({5, 48, 1, 1, 1}), rand({2, 5, 40, 51, 52})};
  const auto results = [&](Device device, DType dtype, MemoryFormat format) {
    Tensors from;
    for (const Tensor& x : numbers) from.push_back(x.to(mode.dtype).contiguous(format).to(device, dtype));
    const Tensors to{empty_like(from[2]), empty_like(from[0]), empty_like(from[1])};
    const ConvProblem p = conv_problem(ConvPass::wgrad, from[0].view_in(), from[2].view_in(), from[1].view_in(), {});
    EXPECT_EQ(uses_pointwise(p), dtype != f64);
    const Kernels& k = kernels(device);
    k.conv_forward(to[0].view_out(), from[0].view_in(), from[1].view_in(), nullptr, {});
    k.conv_backward_data(to[1].view_out(), from[2].view_in(), from[1].view_in(), nullptr, {});
    k.conv_backward_weight(to[2].view_out(), from[0].view_in(), from[2].view_in(), {});
    return to;
  };
  const Tensors exact = results(Device::cpu(), f64, MemoryFormat::contiguous);
  const double rounding = mode.dtype == bf16 ? 0x1p-8 : mode.dtype == f16 ? 0x1p-11 : 0;
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    const Tensors got = results(Device::cuda(), mode.dtype, format);
    for (size_t i = 0; i < 3; ++i)  // the f16 weight gradient does not overflow for these sizes
      EXPECT_LE(amax(abs(got[i].to(Device::cpu(), f64) / exact[i] - 1)).item(), rounding + 1e-6) << "result " << i;
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
