// How the CUDA convolutions are cut into tiles: plain C++, tested without a GPU and in builds without CUDA.
#include "cuda/conv/plan.h"

#include "core/precision.h"
#include "ops/conv_geometry.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

ConvProblem random_problem(Random& random) {
  const auto up_to = [&](int64_t most) {  // small ones as often as large ones
    return std::min<int64_t>(most, static_cast<int64_t>(std::exp2(random.real(0, std::log2(double(most) + 1)))));
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
  for (int a = 0; a < 3; ++a) {
    ConvGeometry& g = p.geometry;
    const int64_t x = up_to(large ? 1 << 20 : 200);
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
  p.choice.mma_sync = random.chance(0.2);
  if (random.chance(0.2)) {  // what may slide along depth
    p.kernel[0] = 3;
    p.geometry.stride[0] = p.geometry.dilation[0] = 1;
    p.in_size[0] = p.out_size[0];
    p.geometry.padding[0] = 1;
  }
  p.choice.slide = static_cast<uint8_t>(random.integer(0, 2));
  p.choice.tile_phases = static_cast<int8_t>(random.integer(0, 2));
  p.choice.k_blocks = static_cast<int8_t>(random.integer(0, 4));
  p.choice.pairs = random.chance(0.8) ? int8_t{0} : static_cast<int8_t>(1 << random.integer(0, 2));
  p.choice.x_shifts = random.chance(0.7) ? uint8_t{0} : static_cast<uint8_t>(random.integer(1, 3));
  p.choice.m_tiles = random.chance(0.8) ? int8_t{0} : static_cast<int8_t>(random.integer(1, 10));
  p.choice.width = random.chance(0.5) ? 0 : static_cast<int>(random.integer(1, 16)) * 8;
  return p;
}

/// The tiles of an axis hold its results, and none is empty.
void expect_tiled(int64_t count, int64_t tile, int64_t tiles, const char* what) {
  EXPECT_GT(tile, 0) << what;
  EXPECT_TRUE(tiles * tile >= count && (tiles - 1) * tile < count)
      << what << ": " << tiles << " of " << tile << " for " << count;
}

bool compiled(std::span<const int> widths, int width) {
  return std::find(widths.begin(), widths.end(), width) != widths.end();
}

/// Bytes of shared memory by mma.sync: two blocks a multiprocessor of sm_90.
constexpr int kMostShared = 113 * 1024;

/// Each result of the CTA tile is a row of one tile, and what it reads with any tap is staged.
void check_rows(const ImplicitGemmPlan& plan, int tiles) {
  const int line = plan.extent[2] / plan.axis[2].fold, plane = line * plan.extent[1];
  int reach = (plan.axis[2].fold - 1) * plan.residue_positions;  // the most that a tap adds
  for (int a = 0; a < 3; ++a) reach += (plan.axis[a].max_span - 1) * (a == 0 ? plane : a == 1 ? line : 1);
  std::set<int> found;
  for (int tile = 0; tile < RowTiles::kMost; ++tile)
    for (int row = 0; row < 64; ++row) {
      const int at = plan.rows.base[tile] + row / 8 * plan.rows.group + row % 8;
      EXPECT_LE(at + reach, plan.rows.positions - 1);
      if (at >= plan.rows.end[tile] || at % line >= plan.tile[2] || at / line % plan.extent[1] >= plan.tile[1] ||
          at / plane >= plan.tile[0])
        continue;
      EXPECT_LT(tile, plan.rows.tiles);
      EXPECT_TRUE(found.insert(at).second) << "position " << at << " twice";
    }
  EXPECT_LE(plan.rows.tiles, tiles);
  EXPECT_EQ(static_cast<int>(found.size()), plan.tile[0] * plan.tile[1] * plan.tile[2]);
  EXPECT_GE(plan.rows.positions, plan.axis[2].fold * plan.residue_positions);
  EXPECT_GE(plan.residue_positions, plane * plan.extent[0]);
  // TMA's.
  EXPECT_TRUE(plan.rows.positions % 8 == 0 && plan.residue_positions % 8 == 0);
  EXPECT_LE(line, 128);
  for (int a = 0; a < 2; ++a) {
    EXPECT_LE(plan.axis[a].in_step, 8);
    EXPECT_LE((plan.extent[a] - 1) * plan.axis[a].in_step + 1, 256);
  }
}

void check_implicit_gemm(const ConvProblem& p, const ImplicitGemmPlan& plan) {
  constexpr int kRows = 256, kMaxTaps = 1024, kMaxClasses = 64;  // of cuda/conv/common/implicit_gemm.cuh
  constexpr int kKWords = 8;
  const bool three = arithmetic_of(p) == ConvArithmetic::tf32x3;
  const int product = plan.columns * plan.slide, tap_words = product * kKWords * (three ? 2 : 1);
  const int ring =
      plan.wgmma ? weight_stages(product, three, plan.slide) * weight_stage_taps(product, three, plan.slide) * tap_words
                 : 3 * (tap_words <= 256 ? 8 : 4) * tap_words;
  const int elements = p.dtype == f32 ? 1 : 2;
  int results = 1, halo = 1, classes = 1, taps = 1;
  for (int a = 0; a < 3; ++a) {
    expect_tiled(plan.axis[a].count, a == 0 ? plan.range : plan.tile[a], plan.tiles[a], "tile");
    EXPECT_EQ(plan.extent[a], (plan.tile[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold);
    results *= plan.tile[a];
    halo *= plan.extent[a];
    classes *= plan.axis[a].phases;
    taps *= static_cast<int>(p.kernel[a]);
  }
  EXPECT_EQ(plan.halo_voxels, halo);
  const int staged = plan.wgmma ? 0 : (halo + 127) / 128 * 128;
  int words = 0;  // of a stage
  if (plan.wgmma) {
    EXPECT_TRUE(may_use_wgmma(p) && !plan.merged);
    EXPECT_TRUE(plan.tile_phases == 1 || (plan.tile_phases == 2 && plan.axis[2].phases % 2 == 0));
    EXPECT_TRUE(plan.input_stages >= 2 && plan.input_stages <= kMostInputStages);
    EXPECT_TRUE(plan.stage_k_blocks >= 1 && plan.k_blocks % plan.stage_k_blocks == 0 &&
                plan.stage_k_blocks * taps <= kMaxTaps)
        << plan.stage_k_blocks;
    if (p.choice.k_blocks > 0 && plan.k_blocks % p.choice.k_blocks == 0) {
      EXPECT_EQ(plan.stage_k_blocks, p.choice.k_blocks);
    }
    if (plan.slide > 1) {
      EXPECT_TRUE(plan.slide == 3 && plan.tile_phases == 1 && plan.tile[0] == 1 && plan.extent[0] == 1 &&
                  plan.range >= 1);
      EXPECT_TRUE(p.kernel[0] == 3 && p.geometry.stride[0] == 1 && p.geometry.dilation[0] == 1 && !three);
      EXPECT_NE(p.choice.slide, 1);
    } else {
      EXPECT_EQ(plan.range, plan.tile[0]);
    }
    check_rows(plan, m64_tiles(product, three, plan.tile_phases, plan.slide) / plan.tile_phases);
    words = plan.stage_k_blocks * plan.rows.positions * kKWords * (three ? 2 : 1);
  } else {
    EXPECT_LE(results, kRows);
    EXPECT_EQ(plan.tile_phases, 1);
    EXPECT_TRUE(plan.line >= plan.extent[2] && (plan.tile[2] % 8 == 0 || (plan.line - plan.tile[2]) % 8 == 0));
    EXPECT_TRUE(plan.pitch > halo / plan.extent[2] * plan.line && plan.pitch % 32 == 8) << plan.pitch;
    words = kKWords * plan.pitch;
  }
  // By wgmma two buffers of results in two phases, of up to 32 columns in lines that keep clear of each other's banks,
  // 64 rows a tile, and barriers.
  const int buffer = (plan.columns % 32 == 0 ? 32 : std::min(plan.columns, 24)) * (plan.tile_phases == 1 ? 0 : 164);
  const int tiles = plan.wgmma ? m64_tiles(product, three, plan.tile_phases, plan.slide) / plan.tile_phases : 0;
  const int beside = plan.wgmma ? 2 * 4 * buffer + 8 * 64 * tiles + 1024 : 0;
  EXPECT_LE((ring + plan.input_stages * words + 2 * staged) * 4 + beside,
            plan.merged || plan.wgmma ? p.shared_limit : kMostShared);
  EXPECT_TRUE(plan.classes == classes && classes <= kMaxClasses && taps <= kMaxTaps);
  const auto widths = implicit_gemm_widths(arithmetic_of(p), plan.wgmma);
  EXPECT_TRUE(compiled(widths, plan.columns)) << plan.columns;
  if (compiled(widths, p.choice.width)) {
    EXPECT_EQ(plan.columns, p.choice.width);
  }
  expect_tiled(p.out_channels, plan.columns, plan.column_tiles, "columns");
  expect_tiled(p.in_channels, 8 * elements, plan.k_blocks, "channels");
  // Not more than the weights, filled up to whole tiles, in two parts.
  const int64_t filled = p.groups * (p.out_channels + plan.columns) * (p.in_channels + 8 * elements) * taps;
  const int64_t inputs = plan.wgmma ? plan.samples * input_bytes(p) : 0;
  EXPECT_LE(workspace_bytes(p, plan) - inputs, 8 * filled);
  if (plan.wgmma) {
    EXPECT_TRUE(plan.samples >= 1 && plan.samples <= std::max<int64_t>(1, p.batch));
    const double sample = static_cast<double>(p.groups) * static_cast<double>(item_size(p.dtype)) *
                          (static_cast<double>(p.in_channels) * p.in_size[0] * p.in_size[1] * p.in_size[2] +
                           static_cast<double>(p.out_channels) * p.out_size[0] * p.out_size[1] * p.out_size[2]);
    EXPECT_TRUE(inputs <= int64_t{1} << 30 || (plan.samples == 1 && static_cast<double>(inputs) <= sample)) << inputs;
  }
}

/// Blocks of 8 channels that the tiles of a class touch at most.
int most_blocks(const MmaSyncWgradPlan& plan, const MmaSyncWgradPlan::Class& c) {
  int most = 0;
  for (int tile = 0; tile < c.tiles; ++tile) {
    const int first = tile * c.tile_columns;
    const int last = std::min(first + c.tile_columns, plan.blocks8 * c.padded_taps) - 1;
    most = std::max(most, last / c.padded_taps - first / c.padded_taps + 1);
  }
  return most;
}

constexpr int64_t kMostWorkspace = int64_t{256} << 20;

/// Of mma.sync.
void check_wgrad(const ConvProblem& p, const MmaSyncWgradPlan& plan) {
  constexpr int kKTileWords = 128, kMaxTaps = 1024, kMaxClasses = 64;  // of cuda/conv/mma_sync/wgrad.cuh
  const int elements = p.dtype == f32 ? 1 : 2;
  int64_t k_tiles = p.batch, words = 1;
  for (int a = 0; a < 3; ++a) {
    expect_tiled(plan.axis[a].count, plan.k_tile[a], plan.tiles[a], "k-tile");
    k_tiles *= plan.tiles[a];
    words *= plan.k_tile[a];
  }
  EXPECT_LE(words, kKTileWords * elements);
  EXPECT_EQ(plan.k_tile[2] % (8 * elements), 0);
  EXPECT_EQ(plan.k_tiles, k_tiles);
  EXPECT_TRUE(plan.pitch >= plan.halo_words && plan.pitch % 32 == 4) << plan.pitch << " for " << plan.halo_words;
  const auto widths = wgrad_widths(arithmetic_of(p), false);
  EXPECT_TRUE(compiled(widths, plan.rows)) << plan.rows;
  if (compiled(widths, p.choice.width)) {
    EXPECT_EQ(plan.rows, p.choice.width);
  }
  expect_tiled(p.out_channels, plan.rows, plan.row_tiles, "rows");
  expect_tiled(p.in_channels, 8, plan.blocks8, "channels");
  int tiles = 0, columns = 0, taps = 0, padded_taps = 0, most = 0;  // most: blocks of 8 channels
  for (const MmaSyncWgradPlan::Class& c : plan.classes) {
    expect_tiled(plan.blocks8 * c.padded_taps, c.tile_columns, c.tiles, "columns");
    EXPECT_GE(c.padded_taps, c.taps);
    EXPECT_TRUE(c.padded_taps % c.tile_columns == 0 || c.tile_columns % c.taps == 0);
    tiles += c.tiles;
    columns += plan.blocks8 * c.padded_taps;
    taps += c.taps;
    padded_taps += c.padded_taps;
    most = std::max(most, most_blocks(plan, c));
  }
  EXPECT_EQ(taps, p.kernel[0] * p.kernel[1] * p.kernel[2]);
  EXPECT_LE(padded_taps, kMaxTaps);
  EXPECT_LE(plan.classes.size(), size_t{kMaxClasses});
  EXPECT_EQ(plan.column_tiles, tiles);
  EXPECT_EQ(plan.columns, columns);
  EXPECT_GE(plan.shared_bytes, (plan.rows * (kKTileWords + 4) + most * 8 * plan.pitch) * 4);
  EXPECT_EQ(plan.shared_bytes % 16, 0);
  EXPECT_LE(plan.stages * plan.shared_bytes, kMostShared);
  expect_tiled(plan.k_tiles, plan.range, plan.ranges, "ranges");
  const int64_t one = p.groups * p.out_channels * plan.columns * 8 * 4;
  EXPECT_LE(workspace_bytes(p, plan), std::max(kMostWorkspace, one));
}

/// Whether each tap of a voxel reads what is staged of the axis, and at its place.
void check_sliding(const ConvProblem& p, int a, const SlidingAxis& axis) {
  expect_tiled(axis.count, axis.tile, axis.tiles, "sliding tiles");
  EXPECT_EQ(axis.count, p.out_size[a]);
  EXPECT_GE(axis.taps * axis.pieces, p.kernel[a]);
  EXPECT_LT(axis.taps * (axis.pieces - 1), p.kernel[a]);
  const int64_t stride = p.geometry.stride[a], dilation = p.geometry.dilation[a];
  for (int voxel = 0; voxel < std::min(axis.tile, 8); ++voxel)
    for (int tap = 0; tap < axis.taps; ++tap) {
      const int row = voxel * axis.advance + tap * axis.tap_step;  // as the kernels read it
      EXPECT_LT(row, axis.rows(axis.tile));
      const int staged_for = row < axis.span ? 0 : (row - axis.span) / axis.advance + 1;  // as they stage it
      EXPECT_EQ(staged_for * stride + (row - staged_for * axis.advance) * axis.in_step,
                voxel * stride + tap * dilation);
    }
}

void check_wgrad(const ConvProblem& p, const PackedWgradPlan& plan) {
  const int elements = p.dtype == f32 ? 1 : 2;
  EXPECT_TRUE(may_use_wgmma(p));
  check_sliding(p, 0, plan.depth);
  check_sliding(p, 1, plan.height);
  const auto widths = wgrad_widths(arithmetic_of(p), true);
  EXPECT_TRUE(compiled(widths, plan.columns)) << plan.columns;
  EXPECT_GE(plan.products, 1);
  EXPECT_LE(plan.products, most_products(arithmetic_of(p), plan.columns));
  EXPECT_LE(plan.height.tile * plan.pairs, kMostKBlocks);
  EXPECT_TRUE(!plan.by_k_blocks || plan.height.tile * plan.pairs % 2 == 0);
  // rows and columns hold all channels and taps
  EXPECT_LE(plan.y_shifts * plan.row_octets, 8);
  EXPECT_GE(plan.row_octets * 8 * plan.row_tiles, p.out_channels);
  EXPECT_TRUE(plan.y_shifts == 1 || plan.row_tiles == 1);
  EXPECT_GE(plan.column_octets * 8 * plan.column_tiles, p.in_channels);
  EXPECT_GE(plan.plane_products * plan.columns, plan.height.taps * plan.x_shifts * plan.column_octets * 8);
  EXPECT_GE(plan.products * (plan.by_k_blocks ? 1 : 2), plan.depth.taps * plan.plane_products);
  // taps of a residue along the width
  EXPECT_EQ(plan.tap_step * p.geometry.dilation[2], plan.shift * p.geometry.stride[2]);
  int64_t tiles = 0;
  for (int64_t tap = 0; tap < std::min<int64_t>(plan.tap_step, p.kernel[2]); ++tap) {
    const int64_t taps = (p.kernel[2] - tap + plan.tap_step - 1) / plan.tap_step;
    tiles += (taps + plan.y_shifts - 1) / plan.y_shifts;
  }
  EXPECT_EQ(plan.y_shift_tiles, tiles);
  EXPECT_TRUE(plan.x_shifts >= 1 && plan.x_shifts <= (elements == 1 ? kMostXShifts : 1));
  expect_tiled(plan.y_shift_tiles, plan.x_shifts, plan.x_shift_tiles, "x shifts");
  expect_tiled(p.out_size[2] + (plan.y_shifts - 1) * int64_t{plan.shift}, plan.pairs * 8 * elements, plan.width_tiles,
               "width");
  EXPECT_EQ(plan.sliding_tiles, p.batch * plan.depth.tiles * plan.height.tiles * plan.width_tiles);
  EXPECT_TRUE(plan.samples >= 1 && plan.samples <= p.batch);
  int64_t ranges = 0;
  for (int64_t done = 0; done < p.batch && plan.samples > 0 && ranges <= plan.ranges; done += plan.samples)
    ranges += (std::min(plan.samples, p.batch - done) * (plan.sliding_tiles / p.batch) + plan.range - 1) / plan.range;
  EXPECT_EQ(ranges, plan.ranges);
  // shared memory
  const WgradSharedMemory memory = memory_of(p, plan);
  EXPECT_TRUE(plan.x_stages > plan.depth.span && plan.x_stages <= kMostWgradStages);
  EXPECT_TRUE(!plan.late || plan.x_stages >= plan.depth.span + plan.depth.advance);  // those of two voxels at once
  EXPECT_TRUE(plan.y_stages >= 2 && plan.y_stages <= kMostWgradStages);
  EXPECT_LE(memory.total, p.shared_limit);
  EXPECT_EQ(memory.x_pitch % 16 + memory.y_pitch % 16, 0);
  EXPECT_TRUE(elements == 1 || memory.x_stage % 128 + memory.y_stage % 128 == 0);  // TMA's
  EXPECT_GE(memory.x_lines, plan.height.rows(plan.height.tile));
  if (elements == 1) {  // as it is copied
    const int words = plan.line_words;
    EXPECT_TRUE(words >= 8 * plan.pairs && words + 3 <= memory.raw_pitch / 4 && memory.raw_pitch % 16 == 0) << words;
    EXPECT_GE(memory.raw_stage, memory.x_lines * plan.column_octets * 8 * memory.raw_pitch);
    EXPECT_TRUE(plan.raw_stages >= 2 && plan.raw_stages <= kMostWgradStages);
  }
  // What accumulators truncate is not seen: 16384 voxels an accumulator (8192: three products), where that many sums
  // can be kept.
  const int64_t voxels = int64_t{plan.depth.tile} * plan.height.tile * plan.pairs * 8 * elements;
  const int64_t packed = packed_y_bytes(p, plan) + plan.samples * input_bytes(p, plan);
  const int64_t sums = workspace_bytes(p, plan) - packed;
  const double sample = static_cast<double>(p.groups) * static_cast<double>(item_size(p.dtype)) *
                        (static_cast<double>(p.in_channels) * p.in_size[0] * p.in_size[1] * p.in_size[2] +
                         static_cast<double>(p.out_channels) * p.out_size[0] * p.out_size[1] * p.out_size[2]);
  // More only of one sample, that is no larger than what it is made from; of floats x is copied beside.
  const int64_t beside = elements == 1 && plan.samples == 1 ? input_bytes(p, plan) : 0;
  EXPECT_LE(beside, static_cast<int64_t>(sample));
  EXPECT_TRUE(packed - beside <= int64_t{1} << 30 ||
              (plan.samples == 1 && static_cast<double>(packed - beside) <= sample))
      << packed;
  if (2 * sums < kMostWorkspace) {
    EXPECT_LE(plan.range * voxels / (plan.by_k_blocks ? 2 : 1),
              arithmetic_of(p) == ConvArithmetic::tf32x3 ? 8192 : 16384);
  }
  EXPECT_LE(sums, std::max(kMostWorkspace, sums / plan.ranges * ((p.batch + plan.samples - 1) / plan.samples)));
}

TEST(ConvPlan, HoldsWhateverTheProblem) {
  int planned = 0, by_wgmma = 0;
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 10000 && !HasFailure(); ++seed) {
    Random random(seed);
    ConvProblem p = random_problem(random);
    SCOPED_TRACE(concat("seed ", seed, ", pass ", static_cast<int>(p.pass), ", ", p.dtype, ", channels ", p.in_channels,
                        " -> ", p.out_channels, ", in ", p.in_size, ", out ", p.out_size, ", kernel ", p.kernel,
                        ", stride ", p.geometry.stride, ", padding ", p.geometry.padding, ", dilation ",
                        p.geometry.dilation));
    EXPECT_FALSE(cuda::explain(p).plan.empty());
    if (p.pass == ConvPass::wgrad) {
      for (const auto& [gpu_has_it, refused] : {std::pair(true, false), {true, true}, {false, false}}) {
        p.wgmma = gpu_has_it;
        p.choice.mma_sync = refused;
        const auto plan = plan_mma_sync_wgrad(p);
        if (plan) check_wgrad(p, *plan);
        planned += plan.has_value() && gpu_has_it && !refused;
        const auto by_one = plan_packed_wgrad(p);
        if (by_one) check_wgrad(p, *by_one);
        by_wgmma += by_one.has_value();
      }
    } else {
      const auto plan = plan_implicit_gemm(p);
      if (plan) check_implicit_gemm(p, *plan);
      planned += plan.has_value();
    }
  }
  EXPECT_GT(planned, 6000) << "the plain kernels shall be the exception";
  EXPECT_GT(by_wgmma, 1000);
}

TEST(ConvPlan, PacksUpToTheLastPositionThatIsRead) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 200 && !HasFailure(); ++seed) {
    Random random(seed);
    const ConvProblem p = random_problem(random);
    if (p.pass == ConvPass::dgrad) continue;
    for (int a = 0; a < 3; ++a) {
      int64_t end = 1;  // behind the last position that a tap meets, if that is there
      for (int64_t tap = 0; tap < p.kernel[a]; ++tap)
        for (int64_t result = 0; result < p.out_size[a]; ++result)
          end = std::max(end, result * p.geometry.stride[a] + tap * p.geometry.dilation[a] - p.geometry.padding[a] + 1);
      EXPECT_EQ(read_size(p, a), std::min(end, p.in_size[a])) << "seed " << seed << ", axis " << a;
      EXPECT_EQ(read_step(p, a), p.geometry.stride[a]);
    }
  }
}

/// What is copied or packed of x beside the lattice does not keep large problems from wgmma.
TEST(ConvPlan, TakesLargeProblemsOfStridedLines) {
  ConvProblem p{.pass = ConvPass::wgrad, .dtype = f32, .precision = Float32Precision::high, .batch = 1};
  p.groups = 1, p.in_channels = p.out_channels = 32;
  p.kernel = Triple(4), p.geometry = {2, 1, 1, 1};
  p.in_size = Triple(200), p.out_size = Triple(100);
  p.in_stride = {200 * 200 * 32, 200 * 32, 32}, p.out_stride = {100 * 100 * 32, 100 * 32, 32};
  EXPECT_TRUE(plan_packed_wgrad(p).has_value());
  p.dtype = bf16, p.in_channels = p.out_channels = 16;  // and more than a kernel packs is left to others
  p.in_size = {1024, 1026, 1030}, p.out_size = Triple(256), p.geometry = {4, 0, 1, 1};
  EXPECT_FALSE(plan_packed_wgrad(p).has_value());
}

TEST(ConvPlan, HoldsAtTheMostTaps) {
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
        if (const auto plan = plan_packed_wgrad(p)) check_wgrad(p, *plan);
        p.pass = ConvPass::fprop;
        if (const auto plan = plan_implicit_gemm(p)) check_implicit_gemm(p, *plan);
      }
}

}  // namespace
}  // namespace voxgrad::cudatest
