// Tests the convolutions whose result has few channels (cuda/conv/direct/few_outputs.cu), and ConvRewrite::mirrored,
// which computes other passes with the kernels for few input and few output channels: the choice of the planner, which
// needs no GPU, and the results against the CPU.
#include <cmath>
#include <limits>

#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/common.h"
#include "ops/create.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

const Problem kFirstLayer{2, 1, 32, {128}, {3}, {{1}, {1}, {1}, 1}};
const Problem kLastLayer{2, 32, 3, {128}, {3}, {{1}, {1}, {1}, 1}};

/// Returns whether the kernels of a family compute the problem with this rewrite.
template <class Family>
bool supports(ConvProblem problem, ConvRewrite rewrite) {
  problem.choice.kernel = std::is_same_v<Family, FewInputsPlan> ? ConvKernel::few_inputs : ConvKernel::few_outputs;
  const auto plan = choose(problem);
  return plan->rewrite == rewrite && std::holds_alternative<Family>(plan->family);
}

TEST(ConvFewOutputsPlan, SupportsFewChannelsInEachPass) {
  for (const DType dtype : {f32, bf16, f16}) {
    EXPECT_TRUE(supports<FewOutputsPlan>(dense_problem(ConvPass::dgrad, kFirstLayer, dtype), ConvRewrite::none));
    EXPECT_TRUE(supports<FewOutputsPlan>(dense_problem(ConvPass::fprop, kLastLayer, dtype), ConvRewrite::mirrored));
    EXPECT_TRUE(supports<FewInputsPlan>(dense_problem(ConvPass::dgrad, kLastLayer, dtype), ConvRewrite::mirrored));
    EXPECT_TRUE(supports<FewInputsPlan>(dense_problem(ConvPass::wgrad, kLastLayer, dtype), ConvRewrite::mirrored));
  }
  EXPECT_NE(explain(dense_problem(ConvPass::fprop, kLastLayer)).plan.find("mirrored kernel, "), std::string::npos);
  EXPECT_NE(explain(dense_problem(ConvPass::fprop, kLastLayer)).plan.find("few output channels"), std::string::npos);
  const Problem upsampling{2, 3, 64, {96}, {4}, {{2}, {1}, {1}, 1}};
  EXPECT_TRUE(supports<FewOutputsPlan>(dense_problem(ConvPass::dgrad, upsampling), ConvRewrite::none));
}

TEST(ConvFewOutputsPlan, RejectsUnsupportedProblems) {
  for (auto change :
       {+[](ConvProblem& p) { p.pass = ConvPass::wgrad; }, +[](ConvProblem& p) { p.in_channels = 7; },
        +[](ConvProblem& p) { p.in_channels = 36; }, +[](ConvProblem& p) { p.dtype = f64; },
        +[](ConvProblem& p) { p.in_channels_last = false; }, +[](ConvProblem& p) { p.in_aligned = false; },
        +[](ConvProblem& p) { p.kernel = {7}; }, +[](ConvProblem& p) { p.groups = 2; },
        +[](ConvProblem& p) { p.wgmma = false; }, +[](ConvProblem& p) { p.geometry.dilation = {2}; },
        +[](ConvProblem& p) { p.geometry.stride = {3}; }, +[](ConvProblem& p) { p.batch = 0; },
        +[](ConvProblem& p) { p.batch = 1 << 30; }, +[](ConvProblem& p) { p.in_stride[2] = int64_t{1} << 30; },
        +[](ConvProblem& p) {
          p.dtype = f32;
          p.precision = Float32Precision::highest;
        }}) {
    ConvProblem p = dense_problem(ConvPass::dgrad, kFirstLayer);
    change(p);
    EXPECT_FALSE(plan_few_outputs(p)) << explain(p).plan;
  }
}

TEST(ConvFewOutputsPlan, DoesNotMirrorOtherProblems) {
  for (auto change : {+[](Problem& p) { p.geometry.stride = {2}; }, +[](Problem& p) { p.geometry.padding = {3}; },
                      +[](Problem& p) { p.geometry.groups = 2; }}) {
    Problem p = kLastLayer;
    change(p);
    for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad})
      EXPECT_TRUE(rewritten_problems(ConvRewrite::mirrored, dense_problem(pass, p)).empty());
  }
}

/// The planes of an image are its rows.
TEST(ConvFewOutputsPlan, MovesAlongTheHeightOfAnImage) {
  const Problem image{8, 1, 32, {1, 512, 512}, {1, 3, 3}, {{1}, {0, 1, 1}, {1}, 1}};
  const auto plan = plan_few_outputs(dense_problem(ConvPass::dgrad, image));
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->exchanged);
  EXPECT_NE(explain(dense_problem(ConvPass::dgrad, image)).plan.find("planes along the height"), std::string::npos);
  EXPECT_FALSE(plan_few_outputs(dense_problem(ConvPass::dgrad, kFirstLayer))->exchanged);
}

TEST(ConvFewOutputsPlan, TilesCoverTheResults) {
  Random random(kFirstSeed);
  int planned_problems = 0;
  for (int i = 0; i < 2000; ++i) {
    Problem p = random_problem(random);
    for (int a = 0; a < 3; ++a) {
      p.geometry.stride[a] = random.integer(1, 2);
      p.geometry.dilation[a] = 1;
    }
    p.geometry.groups = 1;
    p = {p.batch, random.integer(1, 4), random.integer(1, 16) * 8, p.x_size, p.kernel, p.geometry};
    ConvProblem problem = dense_problem(ConvPass::dgrad, p, i % 3 == 0 ? f32 : bf16);
    const auto plan = plan_few_outputs(problem);
    if (!plan) continue;
    ++planned_problems;
    ConvProblem other = problem;
    other.multiprocessors = 78;
    other.batch = 7;
    EXPECT_EQ(plan_few_outputs(other)->exchanged, plan->exchanged) << "the order of sums must not change";
    if (plan->exchanged) problem = exchange_depth_and_height(problem);
    const FewOutputsInstance& kernel = kFewOutputsInstances[plan->instance];
    EXPECT_EQ(kernel.step, problem.geometry.stride[0]);
    EXPECT_GE(kernel.depth, problem.kernel[0]);
    EXPECT_GE(kernel.columns, plan->channels * problem.kernel[1] * problem.kernel[2]);
    EXPECT_LE(plan->inputs[0] * plan->inputs[1], kernel.inputs());
    EXPECT_GE(plan->channels * plan->channel_tiles, p.in);
    EXPECT_LE(plan->shared_bytes, problem.shared_limit);
    for (int a = 0; a < 3; ++a) {
      const int64_t stride = problem.geometry.stride[a], padding = problem.geometry.padding[a];
      EXPECT_GE(plan->tile[a] * plan->tiles[a], plan->count[a]);
      EXPECT_LT((plan->tiles[a] - 1) * plan->tile[a], plan->count[a]);
      EXPECT_LE(plan->first[a] * stride - padding, 0);
      EXPECT_GE((plan->first[a] + plan->count[a]) * stride - padding, problem.out_size[a]);
      EXPECT_GE((plan->reach[a] + 1) * stride, problem.kernel[a]) << "taps of a result";
      if (a > 0) {
        EXPECT_EQ(plan->tile[a] + plan->reach[a], plan->inputs[a - 1]);
      }
    }
  }
  EXPECT_GT(planned_problems, 300);
}

/// Operands and results of all passes of a convolution on both devices. Operands are small integers: every sum is exact
/// in any order, and half-precision results are rounded once.
struct Operands {
  const Problem& problem;
  RandomView x;
  RandomView y;
  RandomView w;
  RandomView biases[2];  // of x and y
  RandomView dx;
  RandomView out;  // result of conv_forward
  RandomView dw;
  bool biased;
  bool relu;

  /// The tensors with many channels are dense and channels-last, because the kernels require this.
  Operands(const Problem& p, DType dtype, Random& random)
      : problem(p),
        x(dtype, p.x_shape(), p.in > 4 ? Layout::dense_channels_last : any_layout(random, true), random),
        y(dtype, p.y_shape(), p.out > 4 ? Layout::dense_channels_last : any_layout(random, true), random),
        w(dtype, p.w_shape(), any_layout(random, true), random),
        biases{{dtype, {p.in}, Layout::spaced, random}, {dtype, {p.out}, Layout::spaced, random}},
        dx(dtype, p.x_shape(), p.in > 4 ? Layout::dense_channels_last : any_layout(random, false), random),
        out(dtype, p.y_shape(), p.out > 4 ? Layout::dense_channels_last : any_layout(random, false), random),
        dw(dtype, p.w_shape(), any_layout(random, false), random),
        biased(random.chance(0.7)),
        relu(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &biases[0], &biases[1]}) input->fill(random, -3, 3);
    for (RandomView* result : {&dx, &out, &dw}) result->poison();
  }
  std::shared_ptr<const ConvPlan> plan(ConvPass pass) const {
    const Device gpu = Device::cuda();
    const RandomView& in = pass == ConvPass::dgrad ? y : x;
    const RandomView& result = pass == ConvPass::dgrad ? dx : pass == ConvPass::fprop ? out : y;
    return choose(conv_problem(pass, in.on(gpu), result.on(gpu), w.on(gpu), problem.geometry));
  }
  void run(Device device) const {
    const View bias_x = biases[0].on(device), bias_y = biases[1].on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &bias_y : nullptr, relu}, problem.geometry);
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), {biased ? &bias_x : nullptr, relu},
                         problem.geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), problem.geometry);
  }
  void check() {
    run(Device::cpu());
    for (RandomView* result : {&dx, &out, &dw}) result->restore_poison();
    const PoisonedWorkspaces poisoned;
    run(Device::cuda());
    EXPECT_TRUE(out.matches_cpu(0)) << "fprop";
    EXPECT_TRUE(dx.matches_cpu(0)) << "dgrad";
    EXPECT_TRUE(dw.matches_cpu(0)) << "wgrad";
  }
};

constexpr Mode kFewOutputsModes[] = {
    {f32, Float32Precision::high}, {bf16, Float32Precision::highest}, {f16, Float32Precision::highest}};
class CudaConvFewOutputs : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvFewOutputs, testing::ValuesIn(kFewOutputsModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

bool has_wgmma() { return cuda::has_wgmma(Device::cuda().index); }

/// The data gradient of each problem has few channels. Each compiled kernel computes some of the problems.
TEST_P(CudaConvFewOutputs, IsExact) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_outputs});
  std::vector<bool> used(std::size(kFewOutputsInstances));
  for (const Problem& p : std::initializer_list<Problem>{
           {2, 1, 32, {20, 33, 47}, {3}, {{1}, {1}, {1}, 1}},
           {1, 3, 48, {20, 33, 47}, {3}, {{1}, {1}, {1}, 1}},
           {1, 4, 64, {9, 17, 30}, {3}, {{1}, {1}, {1}, 1}},
           {1, 1, 24, {20, 21, 40}, {5}, {{1}, {2}, {1}, 1}},
           {2, 1, 16, {19, 22, 28}, {4}, {{2}, {1}, {1}, 1}},
           {1, 2, 40, {19, 22, 28}, {4}, {{2}, {1}, {1}, 1}},
           {1, 3, 64, {19, 22, 28}, {4}, {{2}, {1}, {1}, 1}},
           {1, 2, 32, {20, 22, 41}, {5}, {{2}, {2}, {1}, 1}},                     // two tiles of channels
           {1, 2, 32, {20, 21, 22}, {3}, {{2}, {1}, {1}, 1}},                     // results with different taps
           {3, 2, 32, {1, 64, 300}, {1, 3, 3}, {{1}, {0, 1, 1}, {1}, 1}},         // an image
           {1, 2, 32, {1, 50, 66}, {1, 4, 4}, {{1, 2, 2}, {0, 1, 1}, {1}, 1}},    // an image, with a stride
           {1, 1, 8, {20, 9, 10}, {3, 1, 1}, {{1}, {1, 0, 0}, {1}, 1}},           // one line of taps
           {1, 2, 16, {6, 5, 70}, {1, 1, 7}, {{1}, {0, 0, 5}, {1}, 1}},           // seven taps
           {1, 1, 136, {12, 13, 14}, {2, 3, 2}, {{1, 2, 1}, {0, 1, 1}, {1}, 1}},  // chunks that are not full
           {1, 1, 32, {24, 3, 4}, {2}, {{2}, {0}, {1}, 1}},
           {40, 1, 16, {3, 4, 5}, {2, 3, 3}, {{1}, {0, 2, 1}, {1}, 1}},
           {1, 1, 16, {1, 1, 1}, {3}, {{1}, {1}, {1}, 1}},
           {1, 1, 16, {5, 6, 7}, {3, 1, 2}, {{1, 4, 5}, {0}, {1}, 1}},  // strides above the kernel size
           {1, 1, 16, {22, 47, 114}, {3, 2, 15}, {{1, 15, 1}, {0}, {1}, 1}},
           {1, 1, 16, {12, 44, 60}, {3, 1, 15}, {{1, 15, 1}, {0}, {1}, 1}},
           {1, 4, 32, {13, 14, 15}, {4}, {{2}, {1}, {1}, 1}},
           {1, 3, 16, {10, 11, 12}, {5}, {{1}, {2}, {1}, 1}},
           {1, 1, 16, {9, 10, 11}, {3}, {{1}, {4, 2, 3}, {1}, 1}},  // padding above the kernel size
       }) {
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Random random(kFirstSeed);
    Operands operands(p, GetParam().dtype, random);
    const auto plan = operands.plan(ConvPass::dgrad);
    const auto* family = std::get_if<FewOutputsPlan>(&plan->family);
    if (family) used[static_cast<size_t>(family->instance)] = true;
    operands.check();
    if (HasFailure()) return;
  }
  if (has_wgmma()) {
    EXPECT_EQ(std::ranges::count(used, true), std::ssize(used));
  }
}

/// y has few channels.
TEST_P(CudaConvFewOutputs, MirroredIsExact) {
  for (const Problem& p : std::initializer_list<Problem>{
           {2, 32, 1, {20, 33, 47}, {3}, {{1}, {1}, {1}, 1}},
           {1, 16, 3, {20, 33, 47}, {3, 2, 5}, {{1}, {0, 1, 4}, {1}, 1}},
           {1, 48, 2, {20, 21, 40}, {5}, {{1}, {2}, {1}, 1}},
           {2, 24, 2, {1, 40, 50}, {1, 3, 3}, {{1}, {0, 1, 2}, {1}, 1}},
       }) {
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Random random(kFirstSeed);
    Operands operands(p, GetParam().dtype, random);
    for (const bool outputs : {true, false}) {
      const ScopedSetting setting(GetParam().precision,
                                  {.kernel = outputs ? ConvKernel::few_outputs : ConvKernel::few_inputs});
      for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad}) {
        if (outputs ? pass != ConvPass::fprop || !has_wgmma() : pass == ConvPass::fprop) continue;
        const auto plan = operands.plan(pass);
        EXPECT_EQ(plan->rewrite, ConvRewrite::mirrored);
        EXPECT_TRUE(outputs ? std::holds_alternative<FewOutputsPlan>(plan->family)
                            : std::holds_alternative<FewInputsPlan>(plan->family));
      }
      operands.check();
    }
    if (HasFailure()) return;
  }
}

TEST_P(CudaConvFewOutputs, IsExactOnRandomProblems) {
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_outputs});
  Random random(kFirstSeed);
  int dgrads = 0, mirrored = 0;
  for (int i = 0; i < 150; ++i) {
    const Problem from = random_problem(random);
    ConvGeometry geometry = from.geometry;
    geometry.groups = 1;
    for (int a = 0; a < 3; ++a) {
      geometry.dilation[a] = i % 5 == 0 ? geometry.dilation[a] : 1;
      geometry.stride[a] = i % 2 == 0 ? 1 : std::min<int64_t>(geometry.stride[a], 3);
    }
    const int64_t few = random.integer(1, 4), many = random.integer(1, 12) * 8;
    const Problem p(from.batch, i % 4 < 2 ? few : many, i % 4 < 2 ? many : few, from.x_size, from.kernel, geometry);
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    Operands operands(p, GetParam().dtype, random);
    dgrads += std::holds_alternative<FewOutputsPlan>(operands.plan(ConvPass::dgrad)->family);
    for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad})
      mirrored += operands.plan(pass)->rewrite == ConvRewrite::mirrored;
    operands.check();
    if (HasFailure()) return;
  }
  EXPECT_GT(mirrored, 8);
  if (has_wgmma()) {
    EXPECT_GT(dgrads, 20);
  }
}

/// Results that do not read an infinite input are finite, also if the kernel has fewer taps than the compiled one.
TEST_P(CudaConvFewOutputs, KeepsInfinitiesLocal) {
  if (!has_wgmma()) GTEST_SKIP() << "other kernels compute the problems";
  const ScopedSetting setting(GetParam().precision, {.kernel = ConvKernel::few_outputs});
  for (const Problem& p : {Problem(1, 2, 16, {8, 9, 40}, {3}, {{1}, {1}, {1}, 1}),
                           Problem(1, 2, 16, {8, 9, 40}, {2, 3, 3}, {{1}, {1}, {1}, 1}),
                           Problem(1, 2, 16, {9, 8, 40}, {1, 3, 3}, {{1}, {0, 1, 1}, {1}, 1}),
                           Problem(1, 2, 16, {9, 8, 40}, {1, 1, 3}, {{1}, {0, 0, 1}, {1}, 1}),
                           Problem(1, 2, 16, {17, 18, 40}, {3}, {{2}, {1}, {1}, 1})}) {
    SCOPED_TRACE(concat(GetParam(), ": ", p));
    const Tensor y = ones(p.y_shape());
    const int64_t at[] = {2, 3, 7};
    y.select(0, 0).select(0, 1).select(0, at[0]).select(0, at[1]).select(0, at[2]).fill_(
        std::numeric_limits<double>::infinity());
    const auto on_gpu = [&](const Tensor& t) {
      return t.to(Device::cuda(), GetParam().dtype).contiguous(MemoryFormat::channels_last);
    };
    const Tensor x = on_gpu(zeros(p.x_shape()));
    kernels(Device::cuda())
        .conv_backward_data(x.view_out(), on_gpu(y).view_in(), on_gpu(ones(p.w_shape())).view_in(), {}, p.geometry);
    const std::vector<float> results = x.to(Device::cpu(), f32).contiguous().to_vector<float>();
    const auto reads = [&](int axis, int64_t i) {  // whether a tap of result i reads the infinite input
      const int64_t tap = i + p.geometry.padding[axis] - at[axis] * p.geometry.stride[axis];
      return tap >= 0 && tap < p.kernel[axis];
    };
    size_t i = 0;
    for (int64_t c = 0; c < p.in; ++c)
      for (int64_t d = 0; d < p.x_size[0]; ++d)
        for (int64_t h = 0; h < p.x_size[1]; ++h)
          for (int64_t w = 0; w < p.x_size[2]; ++w, ++i)
            ASSERT_EQ(std::isfinite(results[i]), !(reads(0, d) && reads(1, h) && reads(2, w)))
                << d << " " << h << " " << w;
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
