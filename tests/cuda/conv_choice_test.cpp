// Which kernel the planner of the CUDA convolutions gives a problem to, how m64 tiles cover a CTA tile, and what is
// remembered: without a GPU, like conv_plan_test.cpp.
#include <array>
#include <set>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "cuda/conv/fprop_dgrad/plan.h"
#include "cuda/conv/instances.h"
#include "cuda/conv/plan.h"
#include "cuda/conv/plan_cache.h"
#include "cuda/conv/wgrad/plan.h"
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

TEST(ConvPlan, LeavesToThePlainKernelWhatIsNotItsOwn) {
  for (const ConvPass pass : {ConvPass::fprop, ConvPass::dgrad}) {
    ConvProblem p = plain_problem(pass, f32);
    EXPECT_TRUE(plan_implicit_gemm(p));
    p.in_stride = {int64_t{1} << 30, 1, 1};  // a halo beyond 32-bit offsets
    EXPECT_FALSE(plan_implicit_gemm(p));
    p.in_stride = {0};
    p.choice.plain = true;
    EXPECT_FALSE(plan_implicit_gemm(p));
    EXPECT_FALSE(plan_implicit_gemm(plain_problem(pass, f64)));
  }
  ConvProblem p = plain_problem(ConvPass::wgrad, bf16);
  EXPECT_TRUE(plan_mma_sync_wgrad(p));
  p.choice.plain = true;
  EXPECT_FALSE(plan_mma_sync_wgrad(p));
  EXPECT_FALSE(plan_mma_sync_wgrad(plain_problem(ConvPass::wgrad, f64)));
}

/// The results of a CTA tile that a row of the tiles is, in the order of tiles and rows.
std::vector<std::array<int, 3>> covered(const std::array<int, 3>& box, int lines, int line, const RowTiles& rows) {
  std::vector<std::array<int, 3>> found;
  for (int tile = 0; tile < RowTiles::kMost; ++tile)
    for (int row = 0; row < 64; ++row) {
      const int at = rows.base[tile] + row / 8 * rows.group + row % 8;
      const std::array<int, 3> q{at / line / lines, at / line % lines, at % line};
      if (at < rows.end[tile] && q[0] < box[0] && q[1] < box[1] && q[2] < box[2]) found.push_back(q);
    }
  return found;
}

TEST(ConvPlan, CoversATileOnceWithFewM64Tiles) {
  struct Case {
    std::array<int, 3> box;
    int lines, line, tiles;
  };
  const Case cases[] = {
      {{1, 7, 34}, 9, 36, 4},   // line after line, with their ends
      {{2, 6, 8}, 6, 24, 2},    // 8 lines of which two belong to the next plane
      {{4, 8, 8}, 10, 10, 4},   // 8 lines of 8
      {{2, 8, 16}, 10, 18, 4},  // twice two of them
      {{8, 1, 16}, 3, 18, 2},   // 8 planes of 8
      {{3, 3, 3}, 5, 5, 1},     // all planes, consecutive
      {{2, 2, 30}, 60, 30, 2},  // each plane by itself
      {{1, 1, 1}, 1, 1, 1},
  };
  for (const auto& [box, lines, line, tiles] : cases) {
    SCOPED_TRACE(concat("box ", box[0], " x ", box[1], " x ", box[2]));
    const int size[3] = {box[0], box[1], box[2]};
    const auto rows = cover_tile(size, lines, line, tiles);
    ASSERT_TRUE(rows);
    const auto found = covered(box, lines, line, *rows);
    EXPECT_EQ(found.size(), static_cast<size_t>(box[0]) * box[1] * box[2]);
    EXPECT_EQ(std::set(found.begin(), found.end()).size(), found.size()) << "twice";
    EXPECT_FALSE(cover_tile(size, lines, line, tiles - 1));
  }
}

TEST(ConvPlan, PacksNoInputThatIsMostlyPadding) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  for (const auto& [channels, packed] : {std::pair(1, false), {4, false}, {5, true}, {16, true}}) {
    p.in_channels = channels;
    EXPECT_EQ(plan_implicit_gemm(p)->wgmma, packed) << channels;
  }
  p = plain_problem(ConvPass::fprop, f32);  // three products: input and result of a sample are 13 GB, packed 16
  p.in_channels = 9;
  p.out_channels = 17;
  p.in_size = p.out_size = {500};
  EXPECT_FALSE(plan_implicit_gemm(p)->wgmma) << cuda::explain(p).plan;
  p.in_size = p.out_size = {100};
  EXPECT_TRUE(plan_implicit_gemm(p)->wgmma);
}

TEST(ConvPlan, TakesTheStagesAndThePhasesThatAreAskedFor) {  // as CudaConvModes.IsExactWithEveryTile does
  for (const DType dtype : {f32, bf16})
    for (const int8_t depth : {1, 2, 3, 6})
      for (const int8_t slots : {1, 2}) {
        ConvProblem p = plain_problem(ConvPass::dgrad, dtype);
        p.in_channels = p.out_channels = 96;
        p.in_size = {3, 8, 4};
        p.out_size = {5, 6, 9};
        p.kernel = {3, 1, 4};
        p.geometry = {{2, 1, 2}, {1, 0, 1}, {1, 1, 1}, 1};
        p.precision = Float32Precision::high;
        p.choice = {.tile_phases = slots, .k_blocks = depth};
        const auto plan = plan_implicit_gemm(p);
        EXPECT_TRUE(plan && plan->wgmma && plan->stage_k_blocks == depth && plan->tile_phases == slots)
            << dtype << ", depth " << int{depth} << ", slots " << int{slots};
      }
}

TEST(ConvPlan, SlidesAlongDepthWhereNeighboursReadNeighbours) {
  ConvProblem p = plain_problem(ConvPass::fprop, f32);
  p.precision = Float32Precision::high;
  const auto slides = [&](uint8_t choice) {
    p.choice.slide = choice;
    return plan_implicit_gemm(p)->slide == kSlidingTaps;
  };
  EXPECT_TRUE(slides(2));
  EXPECT_FALSE(slides(1));
  for (const int64_t padding : {0, 2, 3}) {  // at 3 the first result reads nothing
    p.geometry.padding[0] = padding;
    p.out_size[0] = 20 + 2 * padding - 2;
    EXPECT_EQ(slides(2), padding < 3) << padding;
  }
  p.geometry.padding[0] = 2;
  p.out_size[0] = 20;
  p.geometry.dilation[0] = 2;
  EXPECT_FALSE(slides(2));
  p.geometry.dilation[0] = 1;
  p.geometry.padding[0] = 1;
  p.geometry.stride[1] = p.geometry.stride[2] = 2;  // of the other axes nothing is asked
  p.out_size[1] = p.out_size[2] = 10;
  EXPECT_TRUE(slides(2));
  p.precision = Float32Precision::highest;
  EXPECT_FALSE(slides(2));
}

TEST(ConvPlan, SlidesInMoreTilesThanTwoAMultiprocessor) {  // in CudaConvModes.IsExactWithSlidingTiles
  for (const DType dtype : {f32, bf16, f16}) {
    ConvProblem p = plain_problem(ConvPass::fprop, dtype);
    p.precision = Float32Precision::high;
    p.batch = 18;
    p.in_channels = 5;
    p.out_channels = 16;
    p.in_size = p.out_size = {9, 64, 80};
    p.kernel = {3, 1, 1};
    p.geometry.padding = {1, 0, 0};
    p.choice.slide = 2;
    const auto plan = plan_implicit_gemm(p);
    ASSERT_TRUE(plan && plan->wgmma && plan->slide == kSlidingTaps);
    EXPECT_GT(plan->samples * plan->tiles[0] * plan->tiles[1] * plan->tiles[2], 2 * p.multiprocessors) << dtype;
  }
}

TEST(ConvPlan, PacksNoLargeInputThatIsUsedLittle) {
  ConvProblem p = plain_problem(ConvPass::fprop, bf16);
  p.geometry.stride = {2};
  p.in_size = {200};
  p.out_size = {100};  // each input has 27 / 8 taps
  for (const auto& [channels, packed] : {std::pair(50, false), {65, true}}) {
    p.out_channels = channels;
    EXPECT_EQ(plan_implicit_gemm(p)->wgmma, packed) << channels;
  }
  p.out_channels = 50;
  p.in_size = {20};  // in caches
  p.out_size = {10};
  EXPECT_TRUE(plan_implicit_gemm(p)->wgmma);
}

TEST(ConvPlan, IsRememberedForItsProblemAlone) {
  ConvProblem p = plain_problem(ConvPass::fprop, f32);
  const auto plan = remembered<plan_implicit_gemm>(p);
  ASSERT_TRUE(plan && plan->wgmma);
  EXPECT_EQ(remembered<plan_implicit_gemm>(p)->columns, plan->columns);
  p.choice.mma_sync = true;
  EXPECT_FALSE(remembered<plan_implicit_gemm>(p)->wgmma);
  p.choice.plain = true;
  EXPECT_FALSE(remembered<plan_implicit_gemm>(p));
}

TEST(ConvPlan, KnowsEveryCompiledTile) {
  std::set<std::tuple<ConvPass, ConvKernel, ConvArithmetic, int, int, int>> known, held;
  for (const auto arithmetic :
       {ConvArithmetic::tf32, ConvArithmetic::tf32x3, ConvArithmetic::bf16, ConvArithmetic::f16}) {
    for (const ConvKernel kernel : {ConvKernel::mma_sync, ConvKernel::wgmma}) {
      const bool wgmma = kernel == ConvKernel::wgmma;
      for (const int width : implicit_gemm_widths(arithmetic, wgmma))
        known.insert({ConvPass::fprop, kernel, arithmetic, width, 0, 0});
      for (const int width : wgrad_widths(arithmetic, wgmma))
        known.insert({ConvPass::wgrad, kernel, arithmetic, width, 0, 0});
    }
    const bool three = arithmetic == ConvArithmetic::tf32x3;
    for (const int columns : {8, 16, 32})
      for (const int row_tiles : {1, 2})
        for (const int blocks : {1, 2})
          if (blocks == 1 || (!three && columns < 32))
            known.insert({ConvPass::fprop, ConvKernel::small_channel, arithmetic, columns, 128 * row_tiles, blocks});
    for (const int columns : {8, 16})
      known.insert({ConvPass::wgrad, ConvKernel::small_channel, arithmetic, columns, 0, 0});
    for (const FpropDgradTile& tile : fprop_dgrad_tiles())
      for (const int row_bytes : {32, 64, 128})
        if (is_compiled(tile.columns, tile.row_tiles, tile.slide, row_bytes, three))
          known.insert({ConvPass::fprop, ConvKernel::fprop_dgrad, arithmetic, tile.product_columns(), tile.row_tiles,
                        row_bytes});
    for (const WgradTile& tile : wgrad_tiles(arithmetic))
      if (arithmetic != ConvArithmetic::tf32)  // which goes as f16
        known.insert({ConvPass::wgrad, ConvKernel::wgrad, arithmetic, tile.columns, tile.slots, tile.chunk});
  }
  for (const ConvInstance* instance : conv_instances())
    held.insert(
        {instance->pass, instance->kernel, instance->arithmetic, instance->width, instance->rows, instance->blocks});
  if (held.empty()) GTEST_SKIP() << "this build has no CUDA";
  EXPECT_EQ(held, known);
}

}  // namespace
}  // namespace voxgrad::cudatest
