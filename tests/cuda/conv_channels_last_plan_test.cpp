// Tests the plans of the channels-last convolutions (cuda/conv/sm90) without a GPU. Tiles must cover every output, the
// boxes that TMA loads must contain each tap and channel once, and shared memory must be within the limits.
// docs/conv-kernels.md defines the terms.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/conv/plan/sm90_wgrad.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

/// Returns the problem of a pass with channels-last tensors.
ConvProblem channels_last_problem(const Problem& p, ConvPass pass, const Mode& mode) {
  const bool transposed = pass == ConvPass::dgrad;
  return {.pass = pass,
          .dtype = mode.dtype,
          .precision = mode.precision,
          .batch = p.batch,
          .groups = p.geometry.groups,
          .in_channels = transposed ? p.out : p.in,
          .out_channels = transposed ? p.in : p.out,
          .in_size = transposed ? p.y_size : p.x_size,
          .out_size = transposed ? p.x_size : p.y_size,
          .kernel = p.kernel,
          .geometry = p.geometry,
          .in_channels_last = true,
          .out_channels_last = true};
}

/// Returns the outputs that the GEMM rows of a tile compute. An output is given by its position (sample, depth, height,
/// width) within the tile.
std::set<std::tuple<int, int, int, int>> outputs_of(const FpropDgradPlan& plan) {
  std::set<std::tuple<int, int, int, int>> found;
  for (int i = 0; i < plan.m_tiles(); ++i)
    for (int row = 0; row < 64 && plan.base[i] >= 0; ++row) {
      const int at = plan.base[i] + row / 8 * plan.group_pitch + row % 8;
      const int w = at % plan.box[3], h = at / plan.box[3] % plan.box[2],
                d = at / (plan.box[3] * plan.box[2]) % plan.box[1], n = at / (plan.box[3] * plan.box[2] * plan.box[1]);
      if (n < plan.tile[0] && d < plan.tile[1] && h < plan.tile[2] && w < plan.tile[3]) found.emplace(n, d, h, w);
    }
  return found;
}

TEST(ConvChannelsLastPlan, RowsOfATileCoverItsOutputs) {
  int plans = 0;
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 600; ++seed) {
    Random random(seed);
    const Problem problem = random_problem(random);
    const Mode mode = kModes[seed % 4];
    for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad}) {
      SCOPED_TRACE(concat("seed ", seed, ", ", mode, ": ", problem));
      ConvProblem p = channels_last_problem(problem, pass, mode);
      p.in_channels_last = seed / 4 % 2;
      const auto plan = plan_fprop_dgrad(p);
      if (!plan) continue;
      ++plans;
      const size_t size = static_cast<size_t>(plan->tile[0] * plan->tile[1] * plan->tile[2] * plan->tile[3]);
      EXPECT_EQ(outputs_of(*plan).size(), size);
      EXPECT_GE(plan->input_stages, plan->resident ? plan->resident_chunks() : 2);
      const bool tf32x3 = p.dtype == f32 && p.precision == Float32Precision::highest;
      EXPECT_EQ(plan->products, tf32x3 ? 3 : 1);
      EXPECT_EQ(plan->chunks % plan->products, 0);
      EXPECT_GE(plan->chunks / plan->products * plan->chunk_channels, p.in_channels);
      EXPECT_TRUE(std::any_of(std::begin(kFpropDgradTiles), std::end(kFpropDgradTiles), [&](const auto& compiled) {
        return compiled.tile == plan->cta &&
               compiled.has(plan->row_bytes, static_cast<int>(item_size(p.dtype)), tf32x3);
      }));
      EXPECT_TRUE(plan->cooperative || !tf32x3);
      EXPECT_LE(plan->input_stages, 8);
      EXPECT_LE(plan->weight_stages, plan->unit_columns > 1 ? 16 : 8);
      EXPECT_LE(plan->input_stages * plan->input_bytes() + plan->all_weight_bytes(), p.shared_limit);
      if (plan->cta.slide > 1) {
        EXPECT_GE(plan->run, 1);
      }
    }
  }
  EXPECT_GT(plans, 200);
}

TEST(ConvChannelsLastPlan, BoxesContainEachTapOnce) {
  int plans = 0, narrow = 0;
  int with_splits[3] = {};  // plans with partial sums in memory; direct plans with one and with two splits
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 300; ++seed) {
    Random random(seed);
    const Problem problem = random_problem(random);
    SCOPED_TRACE(concat("seed ", seed, ": ", problem));
    const ConvProblem p = channels_last_problem(problem, ConvPass::wgrad, kModes[2]);
    const auto plan = plan_wgrad(p);
    if (!plan) continue;
    ++plans;
    std::map<std::tuple<int, int, int, int>, int> times;  // (chunk, tap along each axis)
    for (const auto& set : plan->sets) {
      int m_tiles = 0;
      for (const WgradBox& box : set) {
        const int taps_per_m_tile = 64 / plan->cta.chunk;
        m_tiles += (box.taps() + taps_per_m_tile - 1) / taps_per_m_tile;
        for (int d = 0; d < (plan->cta.slide > 1 ? plan->cta.slide : box.count[0]); ++d)
          for (int h = 0; h < box.count[1]; ++h)
            for (int w = 0; w < box.count[2]; ++w) {
              const int t[] = {d, h, w};
              int tap[3];
              for (int a = 0; a < 3; ++a) {
                const AxisPhase& part = plan->axis[a].phase[box.part[a]];
                tap[a] = part.tap_first + (box.first[a] + t[a]) * part.tap_step;
              }
              ++times[{box.chunk, tap[0], tap[1], tap[2]}];
            }
      }
      EXPECT_LE(m_tiles, 2 * plan->cta.m_tiles);
    }
    EXPECT_EQ(times.size(), static_cast<size_t>(plan->chunks * p.kernel[0] * p.kernel[1] * p.kernel[2]));
    for (const auto& [tap, count] : times) EXPECT_EQ(count, 1);
    EXPECT_GE(plan->channel_tiles * plan->chunks * plan->cta.chunk, p.in_channels);
    EXPECT_GE(static_cast<int64_t>(plan->splits) * plan->tiles_of_split, plan->all_tiles);
    EXPECT_LT(static_cast<int64_t>(plan->splits - 1) * plan->tiles_of_split, plan->all_tiles);
    EXPECT_LE(plan->shared_bytes() + 2048, p.shared_limit);
    EXPECT_EQ(plan->rows() % 16, 0);
    narrow += plan->tile[3] < 8;
    // A product reads octets of neighboring rows of x. The octets of a step of 16 voxels are always equally far apart.
    for (int row = 0; row < plan->rows(); ++row) {
      const int step = row / 16 * 16, octet = row / 8 % 2;
      EXPECT_EQ(plan->box_row(row), plan->box_row(step) + octet * plan->box_row(8) + row % 8) << row;
    }
    ASSERT_TRUE(!plan->direct || plan->splits <= WgradPlan::kMaxDirectSplits);
    ++with_splits[plan->direct ? plan->splits : 0];
  }
  EXPECT_GT(plans, 60);
  EXPECT_GT(narrow, 5);
  for (const int count : with_splits) EXPECT_GT(count, 5);
}

// TMA box offsets have 16 bits.
/// With one plane of inputs, each plane of results reads one of three taps along the depth.
TEST(ConvChannelsLastPlan, OmitsBoxesOutsideOfTheInputs) {
  const Mode bf16_mode{bf16, Float32Precision::highest};
  const Problem video{64, 256, 256, {3, 16, 16}, {3, 1, 1}, {{1}, {0}, {1}, 1}};
  const auto plan = plan_fprop_dgrad(channels_last_problem(video, ConvPass::dgrad, bf16_mode));
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->omits_boxes());
  const Problem volume{64, 256, 256, {48, 16, 16}, {3, 1, 1}, {{1}, {0}, {1}, 1}};
  const auto other = plan_fprop_dgrad(channels_last_problem(volume, ConvPass::dgrad, bf16_mode));
  ASSERT_TRUE(other);
  // The estimate grows with the products that the kernel computes: 3 for each of 46 planes of inputs, but 1 for each of
  // 3 planes of results.
  EXPECT_LT(plan->cycles * 16, other->cycles);
}

TEST(ConvChannelsLastPlan, RejectsTapOffsetsBeyond16Bits) {
  for (const int64_t padding : {30000, 40000}) {
    const Problem problem(1, 64, 64, {1, 8, 100000}, {1, 1, 3}, {{1}, {0, 0, padding}, {1}, 1});
    for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad})
      EXPECT_EQ(plan_fprop_dgrad(channels_last_problem(problem, pass, kModes[2])).has_value(), padding == 30000);
    EXPECT_EQ(plan_wgrad(channels_last_problem(problem, ConvPass::wgrad, kModes[2])).has_value(), padding == 30000);
  }
}

TEST(ConvChannelsLastPlan, RejectsVoxelCountsBeyondInt) {
  ConvProblem p =
      channels_last_problem({1, 64, 64, {16, 16, 16}, {3, 3, 3}, {{1}, {1}, {1}, 1}}, ConvPass::wgrad, kModes[1]);
  EXPECT_TRUE(plan_wgrad(p).has_value());
  p.batch = int64_t{1} << 19;
  EXPECT_FALSE(plan_wgrad(p).has_value());
}

/// Checks the utilization that the planner's cost model predicts for layers of nnU-Net. Detects changes of the planner
/// that make these layers slower.
TEST(ConvChannelsLastPlan, PredictsHighUtilizationOfNnUNetLayers) {
  const ConvGeometry same_size{{1}, {1}, {1}, 1};
  for (const auto& [channels, least] : {std::pair<int64_t, double>{32, 0.55}, {64, 0.6}, {128, 0.75}, {256, 0.75}}) {
    const int64_t size = 4096 / channels;
    const Problem problem(2, channels, channels, {size}, {3}, same_size);
    const ConvProblem p = channels_last_problem(problem, ConvPass::fprop, kModes[2]);
    const auto plan = plan_fprop_dgrad(p);
    ASSERT_TRUE(plan);
    const double products = 27.0 * static_cast<double>(2 * size * size * size * channels * channels);
    EXPECT_GT(products / 2048 / 132 / plan->cycles, least) << channels << " channels";
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
