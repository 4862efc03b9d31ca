// Tests the plans of the convolutions with few channels: the supported problems, the choice of the planner and the
// resource limits. Needs no GPU.
#include <cmath>

#include "core/error.h"
#include "cuda/conv/plan/choose.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

/// Returns a problem with contiguous tensors.
ConvProblem dense(ConvPass pass, int64_t in, int64_t out, Triple in_size, Triple out_size, Triple kernel,
                  ConvGeometry geometry) {
  ConvProblem p{.pass = pass,
                .precision = Float32Precision::high,
                .batch = 2,
                .in_channels = in,
                .out_channels = out,
                .in_size = in_size,
                .out_size = out_size,
                .kernel = kernel,
                .geometry = geometry};
  p.in_stride = {in_size[1] * in_size[2], in_size[2], 1};
  p.out_stride = {out_size[1] * out_size[2], out_size[2], 1};
  return p;
}
const ConvGeometry kHalved{{2}, {1}, {1}, 1};
ConvProblem upsampling() { return dense(ConvPass::dgrad, 8, 8, {8, 16, 32}, {15, 31, 63}, {3}, kHalved); }
ConvProblem weights() { return dense(ConvPass::wgrad, 8, 8, {63}, {32}, {3}, kHalved); }

TEST(ConvSmallChannelPlan, SupportsFewChannelsOfContiguousTensors) {
  EXPECT_TRUE(plan_small_channel_fprop_dgrad(upsampling()));
  EXPECT_TRUE(plan_small_channel_wgrad(weights()));
  for (auto change :
       {+[](ConvProblem& p) { p.in_channels = 17; }, +[](ConvProblem& p) { p.out_channels = 17; },
        +[](ConvProblem& p) { p.dtype = DType::f64; }, +[](ConvProblem& p) { p.wgmma = false; },
        +[](ConvProblem& p) { p.in_stride[2] = 8; }, +[](ConvProblem& p) { p.in_stride[1] = int64_t{1} << 40; }}) {
    ConvProblem p = upsampling(), w = weights();
    change(p);
    change(w);
    EXPECT_FALSE(plan_small_channel_fprop_dgrad(p));
    EXPECT_FALSE(plan_small_channel_wgrad(w));
  }
  ConvProblem gaps = upsampling();
  gaps.out_stride[1] = 64;  // gaps between the rows of the output
  EXPECT_FALSE(plan_small_channel_fprop_dgrad(gaps));
}

TEST(ConvSmallChannelPlan, IsNotChosenForProblemsThatSuitWgmma) {
  const auto is_chosen = [](const ConvProblem& p) {
    return std::holds_alternative<SmallChannelPlan>(choose(p)->family);
  };
  const ConvProblem p = dense(ConvPass::fprop, 16, 16, {128}, {128}, {3}, {{1}, {1}, {1}, 1});
  EXPECT_TRUE(plan_small_channel_fprop_dgrad(p));
  EXPECT_FALSE(is_chosen(p));
  ConvProblem forced = p;
  forced.choice.kernel = ConvKernel::small_channel;
  EXPECT_TRUE(is_chosen(forced));
  ConvProblem few = p;
  few.in_channels = 2;
  EXPECT_TRUE(is_chosen(few));
}

TEST(ConvSmallChannelPlan, OrderOfSumsDoesNotDependOnTheGpu) {
  for (const int size : {16, 40, 64}) {
    ConvProblem p = dense(ConvPass::wgrad, 8, 8, {size}, {size}, {3}, {{1}, {1}, {1}, 1});
    const auto plan = plan_small_channel_wgrad(p).value();
    p.multiprocessors = 78;
    const auto other = plan_small_channel_wgrad(p).value();
    for (int a = 0; a < 3; ++a) EXPECT_EQ(plan.tile[a], other.tile[a]);
    EXPECT_EQ(plan.ranges, other.ranges);
  }
}

/// Tensor cores truncate sums, so the plan limits the number of voxels that one accumulator adds up.
TEST(ConvSmallChannelPlan, LimitsVoxelsPerAccumulator) {
  for (const auto precision : {Float32Precision::high, Float32Precision::highest}) {
    ConvProblem p = dense(ConvPass::wgrad, 16, 4, {256}, {256}, {3}, {{1}, {1}, {1}, 1});
    p.batch = 8;
    p.precision = precision;
    const auto plan = plan_small_channel_wgrad(p).value();
    const int voxels = plan.tile[0] * plan.tile[1] * plan.y.line * plan.splits * 32 / kSmallChannelWgradConsumers;
    EXPECT_LE(voxels, precision == Float32Precision::high ? 16384 : 8192);
  }
}

/// Planning must not overflow for any size (checked with -fsanitize=undefined), and accepted plans must fit the limits.
TEST(ConvSmallChannelPlan, AcceptedPlansFitForRandomSizes) {
  Random random(1);
  const auto size = [&] { return std::max<int64_t>(1, std::llround(std::exp2(random.real(0, 27)))); };
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    const bool moderate = random.chance(0.5);
    Triple in{1}, out{1}, kernel{1};
    ConvGeometry g;
    for (int a = 0; a < 3; ++a) {
      in[a] = moderate ? random.integer(1, 80) : size();
      out[a] = moderate ? random.integer(1, 80) : size();
      kernel[a] = random.integer(1, 7);
      g.stride[a] = moderate || random.chance(0.5) ? random.integer(1, 4) : size();
      g.padding[a] = random.integer(0, 6);
      g.dilation[a] = moderate || random.chance(0.8) ? random.integer(1, 3) : size();
    }
    const auto pass = static_cast<ConvPass>(random.integer(0, 2));
    ConvProblem p = dense(pass, random.integer(1, 16), random.integer(1, 16), in, out, kernel, g);
    p.choice.kernel = ConvKernel::small_channel;
    SCOPED_TRACE(concat("problem ", i));
    const auto fits = [&](int bytes, const SmallChannelHalo& halo) {
      EXPECT_LE(bytes, p.shared_limit);
      EXPECT_GE(bytes, halo.stages * halo.plane() * 4 + halo.table_bytes());
      EXPECT_LE(halo.voxels(), halo.pitch);
      EXPECT_GE(halo.stages, halo.span[0]);
      EXPECT_LE(halo.stages, kMaxSmallChannelStages);
      ++accepted;
    };
    if (pass == ConvPass::wgrad) {
      if (const auto plan = plan_small_channel_wgrad(p)) fits(plan->shared_bytes, plan->x);
    } else if (const auto plan = plan_small_channel_fprop_dgrad(p)) {
      fits(plan->shared_bytes, plan->halo);
      EXPECT_LE(plan->tile[1] * plan->tile[2], 128 * plan->row_tiles);
    }
  }
  EXPECT_GT(accepted, 200);
}

}  // namespace
}  // namespace voxgrad::cudatest
