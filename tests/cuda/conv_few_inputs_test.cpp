// Tests the convolutions whose input has few channels (cuda/conv/direct/few_inputs.cu and few_inputs_wgrad.cu): the
// choice of the planner, which needs no GPU, and the results against the CPU.
#include <cmath>
#include <limits>

#include "core/error.h"
#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/common.h"
#include "ops/create.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

constexpr ConvPass kPasses[] = {ConvPass::fprop, ConvPass::wgrad};
constexpr Mode kFewInputsModes[] = {
    {f32, Float32Precision::high}, {bf16, Float32Precision::highest}, {f16, Float32Precision::highest}};

const Problem kFirstLayer{2, 1, 32, {128}, {3}, {{1}, {1}, {1}, 1}};

TEST(ConvFewInputsPlan, IsChosenForFewInputChannels) {
  for (const ConvPass pass : kPasses)
    for (const DType dtype : {f32, bf16, f16})
      for (const int64_t in : {1, 2, 64}) {
        Problem p = kFirstLayer;
        p.in = in;
        const bool few = in <= 2;
        const ConvProblem problem = dense_problem(pass, p, dtype);
        EXPECT_EQ(std::holds_alternative<FewInputsPlan>(choose(problem)->family), few) << dtype << ", " << in;
        EXPECT_EQ(explain(problem).plan.find("few input channels") != std::string::npos, few);
      }
}

TEST(ConvFewInputsPlan, RejectsUnsupportedProblems) {
  for (const ConvPass pass : kPasses)
    for (auto change :
         {+[](ConvProblem& p) { p.pass = ConvPass::dgrad; }, +[](ConvProblem& p) { p.in_channels = 100; },
          +[](ConvProblem& p) { p.out_channels = 36; }, +[](ConvProblem& p) { p.dtype = f64; },
          +[](ConvProblem& p) { p.out_dense = false; }, +[](ConvProblem& p) { p.out_aligned = false; },
          +[](ConvProblem& p) { p.groups = 2; }, +[](ConvProblem& p) { p.batch = 0; },
          +[](ConvProblem& p) { p.in_stride[0] = int64_t{1} << 30; }, +[](ConvProblem& p) { p.batch = 1 << 30; },
          +[](ConvProblem& p) { p.geometry.dilation = {5000}; },
          +[](ConvProblem& p) {
            p.out_size = {1, 100000, 100000};
          },
          +[](ConvProblem& p) {
            p.dtype = f32;
            p.precision = Float32Precision::highest;
          }}) {
      ConvProblem p = dense_problem(pass, kFirstLayer);
      change(p);
      EXPECT_FALSE(plan_few_inputs(p)) << explain(p).plan;
    }
}

/// Also large planes of a channels-last input, and large images, whose stride along the depth is not used.
TEST(ConvFewInputsPlan, SupportsLargePlanes) {
  for (const ConvPass pass : kPasses)
    for (const Problem& p : {Problem(1, 4, 16, {64, 512, 512}, {3}, {{1}, {1}, {1}, 1}),
                             Problem(8, 3, 64, {1, 640, 640}, {1, 7, 7}, {{1, 2, 2}, {0, 3, 3}, {1}, 1}),
                             Problem(1, 1, 16, {64, 1024, 1024}, {3}, {{1}, {1}, {1}, 1})})
      EXPECT_TRUE(plan_few_inputs(dense_problem(pass, p))) << p;
}

TEST(ConvFewInputsPlan, TilesCoverTheResults) {
  Random random(kFirstSeed);
  for (int i = 0; i < 2000; ++i) {
    Problem p = random_problem(random);
    p = {p.batch, random.integer(1, kMaxFewInputs), random.integer(1, 32) * 8, p.x_size, p.kernel, p.geometry};
    p.geometry.groups = 1;
    const ConvPass pass = kPasses[i % 2];
    const ConvProblem problem = dense_problem(pass, p, i % 3 == 0 ? f32 : bf16);
    const auto plan = plan_few_inputs(problem);
    if (!plan) continue;
    int64_t tiles = p.batch, voxels = 1;
    for (int a = 0; a < 3; ++a) {
      EXPECT_EQ(plan->tiles[a], (p.y_size[a] + plan->tile[a] - 1) / plan->tile[a]);
      EXPECT_EQ(plan->box[a],
                (plan->tile[a] - 1) * p.geometry.stride[a] + (p.kernel[a] - 1) * p.geometry.dilation[a] + 1);
      tiles *= plan->tiles[a];
      voxels *= plan->tile[a];
    }
    EXPECT_LE(voxels,
              pass == ConvPass::wgrad ? kFewInputsWgradVoxels : kFewInputsWarps * 16 * few_inputs_m16(plan->channels));
    EXPECT_LE(plan->shared_bytes, problem.shared_limit);
    EXPECT_GE(plan->channels * plan->channel_tiles, p.out);
    EXPECT_LE(plan->ranges, tiles);
    if (pass == ConvPass::wgrad) {
      EXPECT_GE(plan->columns * plan->sets * plan->set_tiles, plan->taps);
      EXPECT_EQ(plan->tile[2] % 8, 0) << "neighboring voxels of a word must lie in one line";
      ConvProblem other = problem;
      other.multiprocessors = 78;
      EXPECT_EQ(plan_few_inputs(other)->ranges, plan->ranges)
          << "the order of sums must not depend on the number of SMs";
      EXPECT_LE(tiles * kFewInputsWgradVoxels * plan->sets / kFewInputsWarps, plan->ranges * 16384);
      EXPECT_LE(workspace_bytes(problem, *plan), kMaxSums);
    }
  }
}

/// Operands and results of conv_forward and conv_backward_weight on both devices. Operands are small integers: every
/// sum is exact in any order, and half-precision results are rounded once.
struct Operands {
  const Problem& problem;
  RandomView x;
  RandomView y;  // gradient of the output
  RandomView w;
  RandomView bias;
  RandomView out;  // result of conv_forward
  RandomView dw;   // result of conv_backward_weight
  bool biased;     // true if conv_forward adds the bias
  bool relu;       // true if conv_forward applies ReLU

  Operands(const Problem& p, DType dtype, Random& random)
      : problem(p),
        x(dtype, p.x_shape(), any_layout(random, true), random),
        y(dtype, p.y_shape(), Layout::dense_channels_last, random),
        w(dtype, p.w_shape(), any_layout(random, true), random),
        bias(dtype, {p.out}, Layout::spaced, random),
        out(dtype, p.y_shape(), Layout::dense_channels_last, random),
        dw(dtype, p.w_shape(), any_layout(random, false), random),
        biased(random.chance(0.7)),
        relu(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &bias}) input->fill(random, -3, 3);
    for (RandomView* result : {&out, &dw}) result->poison();
  }
  bool supported() const {
    const Device gpu = Device::cuda();
    for (const ConvPass pass : kPasses)
      if (!std::holds_alternative<FewInputsPlan>(
              choose(conv_problem(pass, x.on(gpu), y.on(gpu), w.on(gpu), problem.geometry))->family))
        return false;
    return true;
  }
  void run(Device device) const {
    const View bias_view = bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &bias_view : nullptr, relu}, problem.geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), problem.geometry);
  }
  void check() {
    if (!supported()) {
      ConvProblem gpu = conv_problem(ConvPass::fprop, x.on(Device::cuda()), y.on(Device::cuda()), w.on(Device::cuda()),
                                     problem.geometry);
      EXPECT_LT(gpu.shared_limit, kMaxSharedBytes) << "only GPUs with less shared memory do not support the problem";
      return;
    }
    run(Device::cpu());
    for (RandomView* result : {&out, &dw}) result->restore_poison();
    const PoisonedWorkspaces poisoned;
    run(Device::cuda());
    EXPECT_TRUE(out.matches_cpu(0)) << "fprop";
    EXPECT_TRUE(dw.matches_cpu(0)) << "wgrad";
  }
};

class CudaConvFewInputs : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvFewInputs, testing::ValuesIn(kFewInputsModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

TEST_P(CudaConvFewInputs, IsExact) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_inputs});
  for (const Problem& p : std::initializer_list<Problem>{
           {2, 1, 32, {20, 33, 47}, {3}, {{1}, {1}, {1}, 1}},             // one set of pairs
           {2, 2, 64, {20, 33, 47}, {3}, {{1}, {1}, {1}, 1}},             // 64 channels
           {1, 3, 96, {14, 15, 16}, {3}, {{2}, {1}, {1}, 1}},             // two tiles of channels
           {1, 2, 24, {20, 21, 40}, {5}, {{2}, {2}, {1}, 1}},             // several sets of pairs
           {1, 3, 16, {15, 16, 27}, {7}, {{1}, {3}, {1}, 1}},             // several tiles of sets
           {2, 1, 200, {16, 20, 24}, {4}, {{4}, {0}, {1}, 1}},            // a patch embedding
           {2, 3, 32, {9, 20, 33}, {1, 4, 4}, {{1, 4, 4}, {0}, {1}, 1}},  // patches of an image
           {1, 1, 48, {33, 10, 40}, {3, 1, 1}, {{1}, {1, 0, 0}, {1}, 1}},
           {1, 2, 16, {12, 13, 40}, {3}, {{1, 2, 3}, {2}, {3, 1, 2}, 1}},
           {70, 1, 16, {3, 4, 5}, {2}, {{1}, {0}, {1}, 1}},
           {1, 1, 16, {1, 1, 1}, {3}, {{1}, {1}, {1}, 1}},
           {1, 1, 16, {2, 3, 300}, {3}, {{1}, {1}, {1}, 1}},
       }) {
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Random random(kFirstSeed);
    Operands(p, GetParam().dtype, random).check();
    if (HasFailure()) return;
  }
}

TEST_P(CudaConvFewInputs, IsExactOnRandomProblems) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_inputs});
  Random random(kFirstSeed);
  int computed = 0;
  for (int i = 0; i < 150; ++i) {
    const Problem from = random_problem(random);
    ConvGeometry geometry = from.geometry;
    geometry.groups = 1;
    const Problem p(from.batch, random.integer(1, kMaxFewInputs), random.integer(1, 12) * 8, from.x_size, from.kernel,
                    geometry);
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Operands operands(p, GetParam().dtype, random);
    if (!operands.supported()) continue;  // one tap, or a box that does not fit into shared memory
    ++computed;
    operands.check();
    if (HasFailure()) return;
  }
  EXPECT_GT(computed, 50);
}

/// Kernels that are as large as their stride (ConvRewrite::patches_as_channels): data gradients, and with many pairs of
/// a channel and a tap also the other passes.
TEST_P(CudaConvFewInputs, PatchesAreExact) {
  const DType dtype = GetParam().dtype;
  const ScopedSetting setting(GetParam().precision, {.copies = 1});
  Random random(kFirstSeed);
  for (const Problem& p : std::initializer_list<Problem>{
           {2, 1, 96, {16, 20, 24}, {4}, {{4}, {0}, {1}, 1}},
           {1, 3, 40, {8, 32, 64}, {2, 4, 4}, {{2, 4, 4}, {0}, {1}, 1}},
           {3, 8, 24, {8, 12, 5}, {4, 4, 1}, {{4, 4, 1}, {0}, {1}, 1}},
           {1, 2, 33, {6, 9, 12}, {3, 3, 4}, {{3, 3, 4}, {0}, {1}, 1}},
           {2, 3, 48, {1, 48, 80}, {1, 16, 16}, {{1, 16, 16}, {0}, {1}, 1}},
           {1, 1, 24, {24, 16, 32}, {8}, {{8}, {0}, {1}, 1}},
       })
    for (const Layout weights : {Layout::contiguous, Layout::dense_channels_last}) {
      SCOPED_TRACE(concat(GetParam(), ": ", p));
      RandomView x(dtype, p.x_shape(), any_layout(random, true), random), w(dtype, p.w_shape(), weights, random);
      RandomView y(dtype, p.y_shape(), Layout::channels_last, random);
      RandomView bias_x(dtype, {p.in}, Layout::spaced, random), bias_y(dtype, {p.out}, Layout::spaced, random);
      RandomView dx(dtype, p.x_shape(), any_layout(random, false), random), dw(dtype, p.w_shape(), weights, random);
      RandomView out(dtype, p.y_shape(), Layout::channels_last, random);
      for (RandomView* input : {&x, &y, &w, &bias_x, &bias_y}) input->fill(random, -3, 3);
      for (RandomView* result : {&dx, &dw, &out}) result->poison();
      const bool relu = random.chance(0.5), biased = random.chance(0.7);
      const auto run = [&](Device device) {
        const View of_x = bias_x.on(device), of_y = bias_y.on(device);
        const Kernels& k = kernels(device);
        k.conv_backward_data(dx.on(device), y.on(device), w.on(device), {biased ? &of_x : nullptr, relu}, p.geometry);
        k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &of_y : nullptr, relu}, p.geometry);
        k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), p.geometry);
      };
      const Device gpu = Device::cuda();
      const auto rewrites = [&](ConvPass pass, const RandomView& in, const RandomView& result) {
        return choose(conv_problem(pass, in.on(gpu), result.on(gpu), w.on(gpu), p.geometry))->rewrite ==
               ConvRewrite::patches_as_channels;
      };
      EXPECT_TRUE(rewrites(ConvPass::dgrad, y, dx));
      EXPECT_TRUE(rewrites(ConvPass::fprop, x, out));
      EXPECT_TRUE(rewrites(ConvPass::wgrad, x, y));
      run(Device::cpu());
      for (RandomView* result : {&dx, &dw, &out}) result->restore_poison();
      const PoisonedWorkspaces poisoned;
      run(gpu);
      EXPECT_TRUE(dx.matches_cpu(0)) << "dgrad";
      EXPECT_TRUE(out.matches_cpu(0)) << "fprop";
      EXPECT_TRUE(dw.matches_cpu(0)) << "wgrad";
      if (HasFailure()) return;
    }
}

/// No tap reads the last inputs along each axis.
TEST_P(CudaConvFewInputs, WeightGradientIgnoresUnreadInputs) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_inputs});
  const Problem p{1, 1, 16, {7, 9, 11}, {2}, {{2}, {0}, {1}, 1}};
  const Tensor x = ones(p.x_shape());
  for (int axis = 0; axis < 3; ++axis)
    x.select(axis + 2, p.x_size[axis] - 1).fill_(std::numeric_limits<double>::infinity());
  const auto on_gpu = [&](const Tensor& t) {
    return t.to(Device::cuda(), GetParam().dtype).contiguous(MemoryFormat::channels_last);
  };
  const Tensor dw = on_gpu(zeros(p.w_shape()));
  kernels(Device::cuda())
      .conv_backward_weight(dw.view_out(), on_gpu(x).view_in(), on_gpu(ones(p.y_shape())).view_in(), p.geometry);
  for (const float sum : dw.to(Device::cpu(), f32).to_vector<float>())
    EXPECT_EQ(sum, static_cast<float>(p.y_size[0] * p.y_size[1] * p.y_size[2]));
}

/// Results that do not read an infinite input are finite.
TEST_P(CudaConvFewInputs, KeepsInfinitiesLocal) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_inputs});
  const Problem p{1, 2, 16, {8, 9, 40}, {3}, {{1}, {1}, {1}, 1}};
  Random random(kFirstSeed);
  Operands operands(p, GetParam().dtype, random);
  ASSERT_TRUE(operands.supported());
  Tensor x = ones(p.x_shape());
  const int64_t at[] = {4, 5, 20};
  x.select(0, 0).select(0, 1).select(0, at[0]).select(0, at[1]).select(0, at[2]).fill_(
      std::numeric_limits<double>::infinity());
  const Tensor y =
      empty(p.y_shape(), {.dtype = GetParam().dtype, .device = Device::cuda()}, MemoryFormat::channels_last);
  kernels(Device::cuda())
      .conv_forward(y.view_out(), x.to(Device::cuda(), GetParam().dtype).view_in(),
                    ones(p.w_shape()).to(Device::cuda(), GetParam().dtype).view_in(), {}, p.geometry);
  const std::vector<float> results = y.to(Device::cpu(), f32).to_vector<float>();
  size_t i = 0;
  for (int64_t c = 0; c < p.out; ++c)
    for (int64_t d = 0; d < p.y_size[0]; ++d)
      for (int64_t h = 0; h < p.y_size[1]; ++h)
        for (int64_t w = 0; w < p.y_size[2]; ++w, ++i) {
          const bool near = std::abs(d - at[0]) <= 1 && std::abs(h - at[1]) <= 1 && std::abs(w - at[2]) <= 1;
          ASSERT_EQ(std::isfinite(results[i]), !near) << d << " " << h << " " << w;
        }
}

}  // namespace
}  // namespace voxgrad::cudatest
