// Tests which kernels the planner of the CUDA convolutions selects, and its cache of plans. Needs no GPU.
#include <set>
#include <tuple>

#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/instances.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

ConvProblem plain_problem(ConvPass pass, DType dtype) {
  return {.pass = pass,
          .dtype = dtype,
          .precision = Float32Precision::highest,
          .batch = 2,
          .groups = 1,
          .in_channels = 20,
          .out_channels = 30,
          .in_size = {20},
          .out_size = {20},
          .kernel = {3},
          .geometry = {.padding = {1}}};
}

TEST(ConvPlan, MmaSyncRejectsUnsupportedProblems) {
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad}) {
    ConvProblem p = plain_problem(pass, f32);
    EXPECT_TRUE(plan_mma_sync_fprop_dgrad(p));
    p.in_stride = {int64_t{1} << 30, 1, 1};  // offsets within a halo exceed 32 bits
    EXPECT_FALSE(plan_mma_sync_fprop_dgrad(p));
    EXPECT_FALSE(plan_mma_sync_fprop_dgrad(plain_problem(pass, f64)));
  }
  ConvProblem p = plain_problem(ConvPass::wgrad, bf16);
  EXPECT_TRUE(plan_mma_sync_wgrad(p));
  EXPECT_FALSE(plan_mma_sync_wgrad(plain_problem(ConvPass::wgrad, f64)));
}

constexpr ConvKernel kFamilies[] = {ConvKernel::mma_sync,   ConvKernel::multistage_wgrad, ConvKernel::small_channel,
                                    ConvKernel::few_inputs, ConvKernel::few_outputs,      ConvKernel::pointwise,
                                    ConvKernel::depthwise,  ConvKernel::fprop_dgrad,      ConvKernel::wgrad};

TEST(ConvPlan, SelectsFamilyWithTheLowestCost) {
  int families = 0;
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad})
    for (const DType dtype : {bf16, f32})
      for (const auto& [groups, in, out] : {std::array{1, 1, 32}, {1, 32, 1}, {1, 8, 8}, {1, 64, 64}, {64, 1, 1}})
        for (const bool channels_last : {false, true}) {
          ConvProblem p = plain_problem(pass, dtype);
          p.groups = groups;
          p.in_channels = in;
          p.out_channels = out;
          for (const bool of_in : {true, false}) {
            const int64_t channels = groups * (of_in ? in : out);
            View view{.dtype = dtype, .rank = 5, .size = {p.batch, channels, 20, 20, 20}};
            const std::array<int, 5> contiguous{4, 3, 2, 1, 0}, last{1, 4, 3, 2, 0};
            lay_out(view, channels_last ? last : contiguous);
            of_in ? set_in_layout(p, view) : set_out_layout(p, view);
          }
          const auto best = choose(p);
          for (const ConvKernel family : kFamilies) {
            p.choice.kernel = family;
            const auto plan = choose(p);
            if (plan->problem.choice.kernel != family) continue;  // the family does not support the problem
            ++families;
            EXPECT_LE(best->cycles, plan->cycles) << static_cast<int>(family);
          }
        }
  EXPECT_GT(families, 120);
}

TEST(ConvPlan, CopiesContiguousTensorsIfThisTakesLessTime) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.groups = 64;
  p.in_channels = p.out_channels = 1;
  p.in_stride = p.out_stride = {400, 20, 1};
  p.in_channel_stride = p.out_channel_stride = 8000;
  p.out_sample_stride = 64 * 8000;
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad}) {
    p.pass = pass;
    const auto plan = choose(p);
    ASSERT_EQ(plan->rewrite, ConvRewrite::channels_last_copies);
    EXPECT_TRUE(plan->problem.in_channels_last && plan->problem.out_channels_last);
    EXPECT_TRUE(std::holds_alternative<DepthwisePlan>(plan->copies->family));
  }
  p.batch = 0;
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad}) {
    p.pass = pass;
    EXPECT_EQ(choose(p)->samples, 0);
  }
  p.batch = 2000;  // the copies would be larger than 1 GiB
  EXPECT_NE(choose(p)->rewrite, ConvRewrite::channels_last_copies);
}

/// Copies of a tensor that TMA cannot read have padded voxels.
TEST(ConvPlan, CopiesBothTensorsUnlessTmaCanReadOne) {
  ConvProblem p = plain_problem(ConvPass::dgrad, bf16);
  p.out_channels = 12;
  p.out_stride = {400 * 12, 20 * 12, 12};
  p.out_channels_last = p.out_dense = true;
  for (const bool aligned : {false, true}) {
    p.out_aligned = aligned;
    const auto rewritten = rewritten_problems(ConvRewrite::channels_last_copies, p);
    ASSERT_EQ(rewritten.size(), 1U);
    const ConvProblem& copied = rewritten[0].problem;
    EXPECT_TRUE(copied.in_channels_last && copied.in_aligned && copied.out_aligned);
    EXPECT_EQ(copied.out_dense, aligned);
    EXPECT_EQ(copied.out_stride[2], aligned ? 12 : 16);
  }
  p.in_channels_last = true;
  EXPECT_TRUE(rewritten_problems(ConvRewrite::channels_last_copies, p).empty());
}

TEST(ConvPlan, SelectsAFamilyThatSupportsTheProblem) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  EXPECT_TRUE(std::holds_alternative<FpropDgradPlan>(choose(p)->family));
  p.out_sample_stride = -1;
  EXPECT_FALSE(std::holds_alternative<FpropDgradPlan>(choose(p)->family));
  p = plain_problem(ConvPass::wgrad, bf16);
  p.in_channels = p.out_channels = 16;
  p.in_stride = p.out_stride = {400, 20, 1};
  EXPECT_TRUE(std::holds_alternative<SmallChannelWgradPlan>(choose(p)->family));
  p.in_channel_stride = int64_t{1} << 40;
  EXPECT_FALSE(std::holds_alternative<SmallChannelWgradPlan>(choose(p)->family));
  p.dtype = f64;
  EXPECT_TRUE(std::holds_alternative<std::monostate>(choose(p)->family));
}

TEST(ConvPlan, DoesNotCopyOperandsOfMemoryBoundWeightGradients) {
  ConvProblem p = plain_problem(ConvPass::wgrad, f32);
  p.precision = Float32Precision::high;
  p.in_channels = p.out_channels = 64;
  p.in_channels_last = p.out_channels_last = true;
  p.in_size = p.out_size = {64};
  EXPECT_TRUE(std::holds_alternative<WgradPlan>(choose(p)->family));  // the products of 3^3 taps take longer
  p.kernel = {1};
  p.geometry.padding = {0};
  EXPECT_TRUE(std::holds_alternative<MultistageWgradPlan>(choose(p)->family));
  p.dtype = bf16;
  EXPECT_TRUE(std::holds_alternative<WgradPlan>(choose(p)->family));
}

TEST(ConvPlan, MultistageWgradRequiresVectorsOfChannels) {
  ConvProblem p = plain_problem(ConvPass::wgrad, f32);
  p.choice.kernel = ConvKernel::multistage_wgrad;
  p.in_channels = p.out_channels = 12;
  p.in_channels_last = p.out_channels_last = true;
  ASSERT_TRUE(plan_multistage_wgrad(p));
  for (const auto change :
       {+[](ConvProblem& q) { q.dtype = f16; }, +[](ConvProblem& q) { q.in_channels = 10; },
        +[](ConvProblem& q) { q.out_channels = 10; }, +[](ConvProblem& q) { q.in_channels_last = false; },
        +[](ConvProblem& q) { q.out_aligned = false; }, +[](ConvProblem& q) { q.batch = 0; },
        +[](ConvProblem& q) {
          q.in_stride = {int64_t{1} << 30, 1, 1};
        }}) {
    ConvProblem changed = p;
    change(changed);
    EXPECT_FALSE(plan_multistage_wgrad(changed));
  }
}

TEST(ConvPlan, TreatsStridedWidthAsChannels) {
  ConvProblem p = plain_problem(ConvPass::dgrad, bf16);
  p.kernel = p.geometry.stride = {2};
  p.geometry.padding = {0};
  p.in_channels = p.out_channels = 32;
  p.in_size = {10};
  p.out_stride = {20 * 20 * 32, 20 * 32, 32};
  p.in_channels_last = p.out_channels_last = p.weight_channels_last = true;
  const auto plan = choose(p);
  EXPECT_EQ(plan->rewrite, ConvRewrite::width_as_channels);
  EXPECT_EQ(plan->problem.out_channels, 64);
  EXPECT_EQ(plan->problem.out_size[2], 10);
  EXPECT_EQ(plan->problem.out_stride[2], 64);
  EXPECT_EQ(copied_bytes(plan->problem), 0);
  EXPECT_TRUE(std::holds_alternative<FpropDgradPlan>(plan->family));
}

TEST(ConvPlan, TreatsPhasesAsChannels) {
  ConvProblem p = plain_problem(ConvPass::dgrad, bf16);
  p.geometry.stride = {2};
  p.in_channels = 64;
  p.out_channels = 32;
  p.in_size = {64};
  p.out_size = {128};
  p.out_stride = {128 * 128 * 32, 128 * 32, 32};
  p.in_channels_last = p.out_channels_last = true;
  const auto plan = choose(p);
  EXPECT_EQ(plan->rewrite, ConvRewrite::phases_as_channels);
  EXPECT_EQ(plan->problem.out_channels, 64);
  EXPECT_EQ(plan->problem.out_size[2], 64);
  EXPECT_EQ(plan->problem.out_stride[2], 64);
  struct Width {
    int64_t kernel, stride, padding, new_kernel, new_padding;
  };
  for (const Width& width : {Width{3, 2, 1, 2, 1},
                             {3, 2, 0, 2, 0},
                             {4, 2, 1, 3, 1},
                             {5, 3, 0, 2, 0},
                             {1, 2, 0, 1, 0},
                             {5, 2, 2, 3, 1},
                             {5, 2, 4, 3, 2}}) {
    SCOPED_TRACE(concat("kernel ", width.kernel, ", stride ", width.stride, ", padding ", width.padding));
    p.kernel[2] = width.kernel;
    p.geometry.stride[2] = width.stride;
    p.geometry.padding[2] = width.padding;
    p.out_size[2] = 60;
    const auto rewritten = rewritten_problems(ConvRewrite::phases_as_channels, p);
    ASSERT_EQ(rewritten.size(), 1U);
    EXPECT_EQ(rewritten[0].problem.kernel[2], width.new_kernel);
    EXPECT_EQ(rewritten[0].problem.geometry.padding[2], width.new_padding);
    EXPECT_EQ(rewritten[0].problem.geometry.stride[2], 1);
    p.out_size[2] = 61;
    EXPECT_TRUE(rewritten_problems(ConvRewrite::phases_as_channels, p).empty());
  }
}

TEST(ConvPlan, MergesGroupsWithFewChannels) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.groups = 32;
  p.in_channels = p.out_channels = 2;
  EXPECT_EQ(choose(p)->merged_groups, 1);
  p.in_channels_last = p.out_channels_last = true;
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad}) {
    p.pass = pass;
    const auto plan = choose(p);
    EXPECT_GE(plan->merged_groups, 8);
    EXPECT_EQ(plan->problem.groups * plan->merged_groups, 32);
    EXPECT_EQ(plan->problem.in_channels, 2 * plan->merged_groups);
    EXPECT_EQ(plan->problem.out_channels, 2 * plan->merged_groups);
    EXPECT_EQ(std::holds_alternative<WgradPlan>(plan->family), pass == ConvPass::wgrad);
    EXPECT_EQ(std::holds_alternative<FpropDgradPlan>(plan->family), pass != ConvPass::wgrad);
  }
  p.choice.kernel = ConvKernel::fprop_dgrad;
  p.pass = ConvPass::fprop;
  p.groups = 3;  // all groups may be merged, although 15 channels are not a multiple of 32 bytes
  p.in_channels = p.out_channels = 5;
  EXPECT_EQ(choose(p)->merged_groups, 3);
  p.groups = 2;
  p.in_channels = p.out_channels = 128;
  EXPECT_EQ(choose(p)->merged_groups, 1);
}

/// Merged groups share NaN. The kernels for depthwise convolutions do not.
TEST(ConvPlan, DoesNotMergeDepthwiseGroups) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.groups = 32;
  p.in_channels = p.out_channels = 1;
  p.in_channels_last = p.out_channels_last = true;
  EXPECT_TRUE(rewritten_problems(ConvRewrite::merged_groups, p).empty());
  p.kernel = {2};  // not supported by the kernels for depthwise convolutions
  EXPECT_FALSE(rewritten_problems(ConvRewrite::merged_groups, p).empty());
}

TEST(ConvPlan, LimitsCopiesToOneGibibyte) {
  ConvProblem p = plain_problem(ConvPass::wgrad, f32);  // needs copies of the high and low parts of x and y
  p.batch = 30;
  p.in_channels = p.out_channels = 64;
  p.in_size = p.out_size = {64};
  p.in_channel_stride = p.out_channel_stride = 64 * 64 * 64;
  EXPECT_EQ(plan_wgrad(p)->samples, 6);  // a sample needs 134 MB; 5 launches process 6 samples each
  p.dtype = bf16;
  p.in_channels_last = p.out_channels_last = true;
  EXPECT_EQ(plan_wgrad(p)->samples, 30);
}

TEST(ConvPlan, DividesTheBatchIfCopiesOfAllSamplesAreTooLarge) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.batch = 30;
  p.in_channels = p.out_channels = 64;
  p.in_size = p.out_size = {128};  // a copy of a sample has 256 MiB
  ASSERT_TRUE(std::holds_alternative<FpropDgradPlan>(choose(p)->family));
  EXPECT_EQ(choose(p)->samples, 4);
  EXPECT_EQ(choose(p)->problem.batch, 4);
  ASSERT_TRUE(choose(p)->rest);
  EXPECT_EQ(choose(p)->rest->samples, 2);
  EXPECT_TRUE(std::holds_alternative<FpropDgradPlan>(choose(p)->rest->family));
  p.in_channels_last = p.out_channels_last = true;
  EXPECT_EQ(choose(p)->samples, 30);
  EXPECT_FALSE(choose(p)->rest);
}

TEST(ConvPlan, ComputesHalvesWithFloat32CopiesIfNoFamilySupportsThem) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.kernel = {11};  // 1331 taps
  EXPECT_EQ(choose(p)->rewrite, ConvRewrite::float32_copies);
  EXPECT_EQ(choose(p)->problem.dtype, f32);
  ASSERT_TRUE(choose(p)->copies);
  EXPECT_EQ(choose(p)->copies->problem, choose(p)->problem);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(choose(p)->copies->family));
  p.dtype = f32;
  EXPECT_EQ(choose(p)->rewrite, ConvRewrite::none);
}

TEST(ConvPlan, CacheDistinguishesProblems) {
  ConvProblem p = plain_problem(ConvPass::fprop, f32);
  p.wgmma = false;
  const auto plan = choose(p);
  ASSERT_NE(std::get<MmaSyncPlan>(plan->family).columns, 8);
  EXPECT_EQ(choose(p), plan);
  p.choice.kernel = ConvKernel::mma_sync;
  p.choice.width = 8;
  EXPECT_EQ(std::get<MmaSyncPlan>(choose(p)->family).columns, 8);
  p.choice.kernel = ConvKernel::plain;
  EXPECT_TRUE(std::holds_alternative<std::monostate>(choose(p)->family));
}

TEST(ConvPlan, ListsEveryCompiledTile) {
  std::set<std::tuple<ConvPass, ConvKernel, ConvArithmetic, int, int, int>> expected, compiled_tiles;
  for (const auto arithmetic :
       {ConvArithmetic::tf32, ConvArithmetic::tf32x3, ConvArithmetic::bf16, ConvArithmetic::f16}) {
    for (const int width : mma_sync_widths(arithmetic))
      expected.insert({ConvPass::fprop, ConvKernel::mma_sync, arithmetic, width, 0, 0});
    for (const int width : mma_sync_wgrad_widths())
      expected.insert({ConvPass::wgrad, ConvKernel::mma_sync, arithmetic, width, 0, 0});
    for (const auto& [rows, columns] : multistage_wgrad_tiles(arithmetic))
      expected.insert({ConvPass::wgrad, ConvKernel::multistage_wgrad, arithmetic, columns, rows, 0});
    const bool tf32x3 = arithmetic == ConvArithmetic::tf32x3;
    for (const int columns : {8, 16, 32})
      for (const int row_tiles : {1, 2})
        for (const int blocks : {1, 2})
          if (blocks == 1 || (!tf32x3 && columns < 32))
            expected.insert({ConvPass::fprop, ConvKernel::small_channel, arithmetic, columns, 128 * row_tiles, blocks});
    for (const int columns : {8, 16})
      expected.insert({ConvPass::wgrad, ConvKernel::small_channel, arithmetic, columns, 0, 0});
    for (const CompiledFpropDgradTile& compiled : kFpropDgradTiles)
      for (const int row_bytes : {32, 64, 128})
        if (compiled.has(row_bytes, arithmetic == ConvArithmetic::tf32 || tf32x3 ? 4 : 2, tf32x3))
          expected.insert({ConvPass::fprop, ConvKernel::fprop_dgrad, arithmetic, compiled.tile.product_columns(),
                           compiled.tile.row_tiles, row_bytes});
    for (const WgradTile& tile : wgrad_tiles(arithmetic))
      if (arithmetic != ConvArithmetic::tf32)  // TF32 uses the f16 tiles
        expected.insert(
            {ConvPass::wgrad, ConvKernel::wgrad, arithmetic, tile.product_columns(), tile.m_tiles, tile.chunk});
  }
  for (const ConvInstance* instance : conv_instances())
    compiled_tiles.insert(
        {instance->pass, instance->kernel, instance->arithmetic, instance->width, instance->rows, instance->blocks});
  if (compiled_tiles.empty()) GTEST_SKIP() << "this build has no CUDA";
  EXPECT_EQ(compiled_tiles, expected);
}

}  // namespace
}  // namespace voxgrad::cudatest
