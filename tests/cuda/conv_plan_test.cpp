// Tests the tile plans of the mma.sync convolutions. Needs no GPU and no CUDA build.
#include "core/precision.h"
#include "cuda/conv/plan/sm80.h"
#include "ops/detail/conv_geometry.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

ConvProblem random_problem(Random& random) {
  const auto up_to = [&](int64_t max) {  // log-uniform, so that small numbers are frequent
    return std::min<int64_t>(max, static_cast<int64_t>(std::exp2(random.real(0, std::log2(double(max) + 1)))));
  };
  ConvProblem p{.pass = static_cast<ConvPass>(random.integer(0, 2)),
                .dtype = random.chance(0.5)   ? f32
                         : random.chance(0.5) ? bf16
                                              : f16,
                .precision = random.chance(0.5) ? Float32Precision::high : Float32Precision::highest,
                .batch = up_to(100),
                .groups = random.chance(0.5) ? 1 : up_to(64),
                .in_channels = up_to(2000),
                .out_channels = up_to(2000)};
  const bool large = random.chance(0.2);
  // Only one axis is long, so that the tensors have fewer than 2^63 bytes.
  const int long_axis = static_cast<int>(random.integer(0, 2));
  for (int a = 0; a < 3; ++a) {
    ConvGeometry& g = p.geometry;
    const int64_t x = up_to(large && a == long_axis ? 1 << 18 : 200);
    int64_t y = 0;
    while (y <= 0) {
      p.kernel[a] = up_to(large ? 100 : 16);
      g.stride[a] = up_to(12);
      g.dilation[a] = up_to(9);
      g.padding[a] = random.integer(0, 20);
      y = conv_output_size(x, p.kernel[a], g.stride[a], g.padding[a], g.dilation[a]);
    }
    p.in_size[a] = p.pass == ConvPass::dgrad ? y : x;
    p.out_size[a] = p.pass == ConvPass::dgrad ? x : y;
  }
  p.geometry.groups = p.groups;
  p.wgmma = random.chance(0.7);
  p.choice.k_blocks = static_cast<int8_t>(random.integer(0, 4));
  p.choice.m_tiles = random.chance(0.8) ? int8_t{0} : static_cast<int8_t>(random.integer(1, 4));
  p.choice.pairs = random.chance(0.8) ? int8_t{0} : static_cast<int8_t>(random.integer(1, 2));
  p.choice.width = random.chance(0.5) ? 0 : static_cast<int>(random.integer(1, 16)) * 8;
  return p;
}

/// Expects that the tiles of an axis cover its `count` results and that no tile is empty. Failures name the axis.
void expect_tiled(int64_t count, int64_t tile, int64_t tiles, const char* axis) {
  EXPECT_GT(tile, 0) << axis;
  EXPECT_TRUE(tiles * tile >= count && (tiles - 1) * tile < count)
      << axis << ": " << tiles << " tiles of size " << tile << " for " << count << " results";
}

bool is_compiled(std::span<const int> widths, int width) {
  return std::find(widths.begin(), widths.end(), width) != widths.end();
}

void check_fprop_dgrad(const ConvProblem& p, const MmaSyncPlan& plan) {
  const int tap_words = plan.columns * kMmaSyncKWords * (arithmetic_of(p) == ConvArithmetic::tf32x3 ? 2 : 1);
  const int ring = kMmaSyncWeightStages * mma_sync_stage_taps(tap_words) * tap_words;
  const int elements = p.dtype == f32 ? 1 : 2;
  int results = 1, halo = 1, classes = 1, taps = 1;
  for (int a = 0; a < 3; ++a) {
    expect_tiled(plan.axis[a].count, plan.tile[a], plan.tiles[a], "tile");
    EXPECT_EQ(plan.extent[a], (plan.tile[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold);
    results *= plan.tile[a];
    halo *= plan.extent[a];
    classes *= plan.axis[a].phases;
    taps *= static_cast<int>(p.kernel[a]);
  }
  EXPECT_EQ(plan.halo_voxels, halo);
  EXPECT_LE(results, kMmaSyncRows);
  EXPECT_TRUE(plan.line >= plan.extent[2] && (plan.tile[2] % 8 == 0 || (plan.line - plan.tile[2]) % 8 == 0));
  EXPECT_TRUE(plan.pitch > halo / plan.extent[2] * plan.line && plan.pitch % 32 == 8) << plan.pitch;
  const int staged = (halo + 127) / 128 * 128;
  EXPECT_LE((ring + plan.input_stages * kMmaSyncKWords * plan.pitch + 2 * staged) * 4,
            plan.merged ? p.shared_limit : kMaxMmaSyncSharedBytes);
  EXPECT_TRUE(plan.classes == classes && classes <= kMaxMmaSyncClasses && taps <= kMaxMmaSyncTaps);
  const auto widths = mma_sync_widths(arithmetic_of(p));
  EXPECT_TRUE(is_compiled(widths, plan.columns)) << plan.columns;
  if (is_compiled(widths, p.choice.width)) {
    EXPECT_EQ(plan.columns, p.choice.width);
  }
  expect_tiled(p.out_channels, plan.columns, plan.column_tiles, "columns");
  expect_tiled(p.in_channels, 8 * elements, plan.k_blocks, "channels");
  // The workspace holds at most the weights, padded to whole tiles, as two parts of 4 bytes each.
  const int64_t padded_weights = p.groups * (p.out_channels + plan.columns) * (p.in_channels + 8 * elements) * taps;
  EXPECT_LE(workspace_bytes(p, plan), 8 * padded_weights);
}

/// Returns the largest number of 8-channel blocks that a tile of the class reads. A class is a combination of phases.
int max_blocks8(const MmaSyncWgradPlan& plan, const MmaSyncWgradPlan::Class& c) {
  int max = 0;
  for (int tile = 0; tile < c.tiles; ++tile) {
    const int first = tile * c.tile_columns;
    const int last = std::min(first + c.tile_columns, plan.blocks8 * c.padded_taps) - 1;
    max = std::max(max, last / c.padded_taps - first / c.padded_taps + 1);
  }
  return max;
}

constexpr int64_t kMaxWorkspace = int64_t{256} << 20;

void check_wgrad(const ConvProblem& p, const MmaSyncWgradPlan& plan) {
  const int elements = p.dtype == f32 ? 1 : 2;
  int64_t k_tiles = p.batch, words = 1;
  for (int a = 0; a < 3; ++a) {
    expect_tiled(plan.axis[a].count, plan.k_tile[a], plan.tiles[a], "k-tile");
    k_tiles *= plan.tiles[a];
    words *= plan.k_tile[a];
  }
  EXPECT_LE(words, kMmaSyncKTileWords * elements);
  EXPECT_EQ(plan.k_tile[2] % (8 * elements), 0);
  EXPECT_EQ(plan.k_tiles, k_tiles);
  EXPECT_TRUE(plan.pitch >= plan.halo_words && plan.pitch % 32 == 4)
      << "pitch " << plan.pitch << ", halo_words " << plan.halo_words;
  const auto widths = mma_sync_wgrad_widths();
  EXPECT_TRUE(is_compiled(widths, plan.rows)) << plan.rows;
  if (is_compiled(widths, p.choice.width)) {
    EXPECT_EQ(plan.rows, p.choice.width);
  }
  expect_tiled(p.out_channels, plan.rows, plan.row_tiles, "rows");
  expect_tiled(p.in_channels, 8, plan.blocks8, "channels");
  int tiles = 0, columns = 0, taps = 0, padded_taps = 0, blocks8 = 0;
  for (const MmaSyncWgradPlan::Class& c : plan.classes) {
    expect_tiled(plan.blocks8 * c.padded_taps, c.tile_columns, c.tiles, "columns");
    EXPECT_GE(c.padded_taps, c.taps);
    EXPECT_TRUE(c.padded_taps % c.tile_columns == 0 || c.tile_columns % c.taps == 0);
    tiles += c.tiles;
    columns += plan.blocks8 * c.padded_taps;
    taps += c.taps;
    padded_taps += c.padded_taps;
    blocks8 = std::max(blocks8, max_blocks8(plan, c));
  }
  EXPECT_EQ(taps, p.kernel[0] * p.kernel[1] * p.kernel[2]);
  EXPECT_LE(padded_taps, kMaxMmaSyncTaps);
  EXPECT_LE(plan.classes.size(), size_t{kMaxMmaSyncClasses});
  EXPECT_EQ(plan.column_tiles, tiles);
  EXPECT_EQ(plan.columns, columns);
  EXPECT_GE(plan.shared_bytes, (plan.rows * kMmaSyncKTilePitch + blocks8 * 8 * plan.pitch) * 4);
  EXPECT_EQ(plan.shared_bytes % 16, 0);
  EXPECT_LE(plan.stages * plan.shared_bytes, kMaxMmaSyncSharedBytes);
  expect_tiled(plan.k_tiles, plan.range, plan.ranges, "ranges");
  const int64_t one_range = p.groups * p.out_channels * plan.columns * 8 * 4;
  EXPECT_LE(workspace_bytes(p, plan), std::max(kMaxWorkspace, one_range));
}

TEST(ConvPlan, IsValidForRandomProblems) {
  int planned = 0;
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 10000 && !HasFailure(); ++seed) {
    Random random(seed);
    const ConvProblem p = random_problem(random);
    SCOPED_TRACE(concat("seed ", seed, ", pass ", static_cast<int>(p.pass), ", ", p.dtype, ", channels ", p.in_channels,
                        " -> ", p.out_channels, ", in ", p.in_size, ", out ", p.out_size, ", kernel ", p.kernel,
                        ", stride ", p.geometry.stride, ", padding ", p.geometry.padding, ", dilation ",
                        p.geometry.dilation));
    EXPECT_FALSE(cuda::explain(p).plan.empty());
    if (p.pass == ConvPass::wgrad) {
      const auto plan = plan_mma_sync_wgrad(p);
      if (plan) check_wgrad(p, *plan);
      planned += plan.has_value();
    } else {
      const auto plan = plan_mma_sync_fprop_dgrad(p);
      if (plan) check_fprop_dgrad(p, *plan);
      planned += plan.has_value();
    }
  }
  EXPECT_GT(planned, 6000) << "too many problems need the plain kernels";
}

TEST(ConvPlan, IsValidForLargeKernels) {
  for (const Triple& kernel : {Triple(16, 8, 8), Triple(1, 1, 1023), Triple(31, 33, 1), Triple(4, 16, 16), Triple(10)})
    for (const DType dtype : {f32, bf16})
      for (const int64_t stride : {1, 2}) {
        ConvProblem p{.pass = ConvPass::wgrad,
                      .dtype = dtype,
                      .precision = Float32Precision::highest,
                      .batch = 1,
                      .groups = 1,
                      .in_channels = 3,
                      .out_channels = 64,
                      .kernel = kernel,
                      .geometry = {.stride = {stride}}};
        for (int a = 0; a < 3; ++a) {
          p.in_size[a] = kernel[a] + 2;
          p.out_size[a] = 2 / stride + 1;
        }
        SCOPED_TRACE(concat("kernel ", kernel, ", stride ", stride, ", ", dtype));
        if (const auto plan = plan_mma_sync_wgrad(p)) check_wgrad(p, *plan);
        p.pass = ConvPass::fprop;
        if (const auto plan = plan_mma_sync_fprop_dgrad(p)) check_fprop_dgrad(p, *plan);
      }
}

}  // namespace
}  // namespace voxgrad::cudatest
