// Tests the implicit GEMM of channels-last tensors (cuda/conv/sm90) against the CPU: every compiled tile, strides,
// dilations, split-K, groups, any number of channels, infinities and NaN. docs/conv-kernels.md defines the terms.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <string_view>
#include <thread>

#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/instances.h"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/conv/plan/sm90_wgrad.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

/// Operands and results of conv_forward, conv_backward_data and conv_backward_weight on both devices. Operands are
/// small integers, so results are exact.
struct Operands {
  const Problem& p;
  RandomView x;       // input of conv_forward and conv_backward_weight
  RandomView y;       // gradient of the output: an input of conv_backward_data and conv_backward_weight
  RandomView w;       // weight of conv_forward and conv_backward_data
  RandomView x_bias;  // bias that conv_backward_data adds
  RandomView y_bias;  // bias that conv_forward adds
  RandomView out;     // result of conv_forward
  RandomView dx;      // result of conv_backward_data
  RandomView dw;      // result of conv_backward_weight
  bool biased;        // true if the kernels add the biases and conv_forward applies ReLU

  /// Results with Layout::channels_last may start at any element; dense_channels_last results are aligned.
  Operands(const Problem& problem, DType dtype, Random& random, Layout inputs = Layout::dense_channels_last,
           Layout results = Layout::dense_channels_last)
      : p(problem),
        x(dtype, p.x_shape(), inputs, random),
        y(dtype, p.y_shape(), inputs, random),
        w(dtype, p.w_shape(), random.chance(0.5) ? Layout::dense_channels_last : Layout::contiguous, random),
        x_bias(dtype, {p.x_shape()[1]}, Layout::spaced, random),
        y_bias(dtype, {p.y_shape()[1]}, Layout::spaced, random),
        out(dtype, p.y_shape(), results, random),
        dx(dtype, p.x_shape(), results, random),
        dw(dtype, p.w_shape(), random.chance(0.5) ? Layout::dense_channels_last : any_layout(random, false), random),
        biased(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &x_bias, &y_bias}) input->fill(random, -8, 8);
    out.poison();
    dx.poison();
    dw.poison();
    run(Device::cpu());
  }
  void run(Device device) const {
    const View x_bias_view = x_bias.on(device), y_bias_view = y_bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), {biased ? &y_bias_view : nullptr, biased}, p.geometry);
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), {biased ? &x_bias_view : nullptr, false},
                         p.geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), p.geometry);
  }
  void check() {
    out.restore_poison();
    dx.restore_poison();
    dw.restore_poison();
    const PoisonedWorkspaces poisoned;
    run(Device::cuda());
    EXPECT_TRUE(out.matches_cpu(0)) << "fprop";
    EXPECT_TRUE(dx.matches_cpu(0)) << "dgrad";
    EXPECT_TRUE(dw.matches_cpu(0)) << "wgrad";
  }
};

constexpr Layout kChannelsLast = Layout::dense_channels_last;
constexpr Layout kContiguous = Layout::contiguous;
/// Pairs of (layout of the inputs, layout of the results). The kernels need no copies for the first pair.
constexpr std::pair<Layout, Layout> kLayouts[] = {
    {kChannelsLast, kChannelsLast}, {kContiguous, kContiguous},        {kChannelsLast, kContiguous},
    {kContiguous, kChannelsLast},   {Layout::flipped, Layout::spaced}, {kChannelsLast, Layout::channels_last}};

class CudaConvChannelsLast : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvChannelsLast, testing::ValuesIn(kModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

const Problem kProblems[] = {
    {1, 64, 64, {9, 10, 24}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},
    {2, 32, 40, {8, 17, 16}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
    {3, 72, 136, {4, 4, 4}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // several samples per tile, split-K
    {1, 16, 8, {6, 5, 34}, {1, 3, 3}, {{1, 1, 2}, {0, 1, 1}, {1, 1, 1}, 1}},   // anisotropic
    {2, 128, 64, {5, 6, 7}, {2, 2, 2}, {{2, 2, 2}, {0, 0, 0}, {1, 1, 1}, 1}},
    {1, 24, 48, {8, 8, 8}, {4, 4, 4}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
    {1, 40, 24, {7, 9, 20}, {1, 1, 1}, {{1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 1}},
    {2, 96, 184, {9, 12, 20}, {1, 1, 1}, {{1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 1}},
    {2, 136, 16, {5, 6, 16}, {1, 1, 3}, {{1, 1, 2}, {0, 0, 1}, {1, 1, 1}, 1}},   // two phases of several tiles of
                                                                                 // columns
    {1, 64, 64, {9, 12, 14}, {3, 3, 3}, {{1, 1, 1}, {2, 2, 2}, {2, 2, 2}, 1}},   // dilated
    {1, 64, 64, {6, 7, 8}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 2}},     // groups
    {1, 16, 16, {11, 10, 12}, {2, 3, 2}, {{3, 2, 4}, {1, 0, 1}, {1, 1, 1}, 1}},  // phases without taps
    {1, 8, 16, {6, 20, 20}, {5, 3, 7}, {{1, 1, 1}, {2, 1, 3}, {1, 1, 1}, 1}},
    {2, 1, 32, {9, 10, 17}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // taps along the width become channels
    {1, 1, 24, {9, 8, 23}, {3, 1, 5}, {{1, 2, 2}, {1, 0, 3}, {1, 1, 2}, 1}},
    {2, 40, 64, {6, 4, 8}, {2, 2, 2}, {{2, 2, 2}, {0, 0, 0}, {1, 1, 1}, 1}},
    {1, 24, 40, {5, 6, 9}, {1, 2, 3}, {{1, 2, 3}, {0, 0, 0}, {1, 1, 1}, 1}},
    {2, 64, 32, {12, 12, 12}, {3, 3, 3}, {{1, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
    {2, 32, 32, {13, 12, 20}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // sliding tiles, weights stay in
                                                                                 // shared memory
    {1, 48, 16, {9, 14, 23}, {3, 5, 7}, {{1, 1, 1}, {0, 2, 3}, {1, 1, 1}, 1}},
    {1, 24, 24, {5, 19, 16}, {3, 3, 3}, {{1, 2, 2}, {2, 1, 1}, {1, 1, 1}, 1}},
    {2, 8, 16, {16, 16, 24}, {8, 8, 8}, {{8, 8, 8}, {0, 0, 0}, {1, 1, 1}, 1}},  // 512 taps
    // Few planes: some taps of a plane of results lie outside of the inputs.
    {2, 64, 64, {3, 12, 16}, {3, 1, 1}, {{1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 1}},
    {1, 48, 64, {7, 8, 16}, {3, 3, 3}, {{1, 1, 1}, {0, 1, 1}, {1, 1, 1}, 1}},
    {2, 64, 128, {2, 16, 16}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},
    {1, 64, 64, {9, 8, 16}, {3, 1, 1}, {{1, 1, 1}, {0, 0, 0}, {4, 1, 1}, 1}},
    {1, 32, 33, {6, 7, 16}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // the last tile of columns has one
                                                                               // column
    {2, 24, 41, {5, 9, 14}, {3, 3, 3}, {{1, 2, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // the last tile has nine columns
};

TEST_P(CudaConvChannelsLast, IsExactWithEveryTile) {
  const Mode& mode = GetParam();
  std::vector<cuda::ConvChoice> choices{{}, {.copies = 2}, {.copies = 3}, {.unsplit = true}};
  for (const auto& [tile, halves, tf32, tf32x3] : cuda::kFpropDgradTiles)
    for (const int8_t row : {1, 2, 4})
      for (const int8_t warpgroups : {1, 2})  // per tile
        choices.push_back({.slide = static_cast<uint8_t>(tile.slide > 1 ? 2 : 1),
                           .k_blocks = row,
                           .m_tiles = static_cast<int8_t>(tile.row_tiles),
                           .pairs = warpgroups,
                           .width = static_cast<int16_t>(tile.columns)});
  for (const auto& [tile, halves, tf32, tf32x3] : cuda::kFpropDgradTiles)
    for (const int8_t warpgroups : {1, 2}) {
      choices.push_back({.m_tiles = static_cast<int8_t>(tile.row_tiles),
                         .pairs = warpgroups,
                         .cluster = 2,
                         .width = static_cast<int16_t>(tile.columns)});
      choices.push_back({.columns = 2,
                         .m_tiles = static_cast<int8_t>(tile.row_tiles),
                         .pairs = warpgroups,
                         .width = static_cast<int16_t>(tile.columns)});
    }
  for (const cuda::WgradTile& tile : cuda::wgrad_tiles(mode.arithmetic()))
    for (const int8_t cluster : {1, 2})
      choices.push_back({.slide = static_cast<uint8_t>(tile.slide > 1 ? 2 : 1),
                         .k_blocks = static_cast<int8_t>(tile.chunk),
                         .m_tiles = static_cast<int8_t>(tile.m_tiles),
                         .cluster = cluster,
                         .width = static_cast<int16_t>(tile.columns)});
  for (const cuda::MultistageWgradTile& tile : cuda::multistage_wgrad_tiles(mode.arithmetic()))
    choices.push_back({.kernel = cuda::ConvKernel::multistage_wgrad,
                       .m_tiles = static_cast<int8_t>(tile.rows / 64),
                       .width = static_cast<int16_t>(tile.columns)});
  std::vector<int64_t> before;
  for (const cuda::ConvInstance* instance : cuda::conv_instances()) before.push_back(instance->launches);
  Random random(kFirstSeed);
  // Test each problem with the first pair of layouts and with one other pair.
  for (size_t number = 0; number < 2 * std::size(kProblems); ++number) {
    const Problem& problem = kProblems[number / 2];
    const auto [input, result] = kLayouts[number % 2 ? 1 + number / 2 % 4 : 0];
    Operands operands(problem, mode.dtype, random, input, result);
    for (const cuda::ConvChoice& choice : choices) {
      SCOPED_TRACE(concat(mode, ", ", int{choice.width}, " columns, ", int{choice.m_tiles}, " row tiles, depth ",
                          int{choice.k_blocks}, ", cluster ", int{choice.cluster}, ": ", problem));
      const ScopedSetting setting(mode.precision, choice);
      operands.check();
      if (HasFailure()) return;
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    const cuda::ConvInstance& instance = *cuda::conv_instances()[i];
    const bool tested = instance.kernel == cuda::ConvKernel::multistage_wgrad ||
                        (instance.kernel >= cuda::ConvKernel::fprop_dgrad && cuda::has_wgmma(0));
    if (!tested || instance.arithmetic != mode.arithmetic()) continue;
    EXPECT_GT(instance.launches, before[i]) << "never launched: " << instance.width << " columns, " << instance.rows
                                            << " row tiles, blocks " << instance.blocks;
  }
}

class CudaConvProcesses : public OnGpu {};

/// The GPU interrupts the kernels of one process to run those of another. Warps of a warpgroup may then continue at
/// different times, and must still see each round of their barriers.
TEST_F(CudaConvProcesses, DoNotBlockEachOther) {
  if (!cuda::has_wgmma(0)) GTEST_SKIP() << "the GPU has no wgmma";
  std::string program = "/proc/self/exe", filter = "--gtest_filter=CudaConvChannelsLast.IsExactWithEveryTile/bf16",
              brief = "--gtest_brief=1";
  char* const arguments[] = {program.data(), filter.data(), brief.data(), nullptr};
  std::vector<char*> variables;
  for (char** each = environ; *each; ++each)
    if (!std::string_view(*each).starts_with("GTEST_"))
      variables.push_back(*each);  // without the shard of this process
  variables.push_back(nullptr);
  std::vector<pid_t> running;
  for (int i = 0; i < 3; ++i) {
    pid_t process = 0;
    EXPECT_EQ(posix_spawn(&process, program.c_str(), nullptr, nullptr, arguments, variables.data()), 0);
    if (process > 0) running.push_back(process);
  }
  for (int seconds = 0; seconds < 300 && !running.empty(); ++seconds) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::erase_if(running, [](pid_t process) {
      int status = 0;
      const pid_t ended = waitpid(process, &status, WNOHANG);
      EXPECT_TRUE(ended == 0 || (ended == process && WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
      return ended != 0;
    });
  }
  EXPECT_TRUE(running.empty()) << running.size() << " of 3 processes did not end within 300 seconds";
  for (const pid_t process : running) {
    kill(process, SIGKILL);
    waitpid(process, nullptr, 0);
  }
}

/// The kernel adds the sums of one or two splits in shared memory. The CTAs of the last problem are in more than two
/// rounds of clusters, because a GPU has room for 66 clusters of two.
TEST_P(CudaConvChannelsLast, WeightGradientIsExactWithSumsInSharedMemory) {
  if (!cuda::has_wgmma(0)) GTEST_SKIP() << "the GPU has no wgmma";
  const Mode& mode = GetParam();
  const ConvGeometry same{{1}, {1}, {1}, 1};
  const int8_t most_m_tiles = mode.arithmetic() == cuda::ConvArithmetic::tf32x3 ? 6 : 7;
  const struct {
    int splits;
    Problem problem;
    cuda::ConvChoice choice{.cluster = 2};
    int64_t min_ctas = 1;
  } cases[] = {
      {1, {1, 1024, 33, {3}, {3}, same}},
      {1, {1, 1024, 41, {3}, {3}, same}},
      {2, {2, 32, 33, {8, 9, 16}, {3}, same}},
      {2, {2, 24, 41, {8, 9, 16}, {3}, same}},
      {2,
       {1, 264, 489, {8, 16, 16}, {2, 3, 3}, same},
       {.k_blocks = 32, .m_tiles = most_m_tiles, .cluster = 2, .width = 32},
       2 * 132 + 1},
  };
  Random random(kFirstSeed);
  for (const auto& [splits, problem, choice, min_ctas] : cases) {
    SCOPED_TRACE(concat(mode, ": ", problem));
    const ScopedSetting setting(mode.precision, choice);
    Operands operands(problem, mode.dtype, random);
    const Device gpu = Device::cuda();
    const View x = operands.x.on(gpu), y = operands.y.on(gpu), dw = operands.dw.on(gpu);
    const auto plan = cuda::choose(cuda::conv_problem(ConvPass::wgrad, x, y, dw, problem.geometry));
    const auto* wgrad = std::get_if<cuda::WgradPlan>(&plan->family);
    ASSERT_TRUE(wgrad && wgrad->direct);
    EXPECT_EQ(wgrad->splits, splits);
    EXPECT_GE(wgrad->units, min_ctas);
    const PoisonedWorkspaces poisoned;
    kernels(gpu).conv_backward_weight(dw, x, y, problem.geometry);
    EXPECT_TRUE(operands.dw.matches_cpu(0));
  }
}

TEST_P(CudaConvChannelsLast, IsExactOnRandomProblems) {
  const Mode& mode = GetParam();
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 150 && !HasFailure(); ++seed) {
    Random random(seed);
    Problem problem = random_problem(random);
    if (seed % 2) {
      problem.in = 8 * random.integer(1, 9);
      problem.out = 8 * random.integer(1, 9);
    }
    const auto [input, result] = kLayouts[random.integer(0, 5)];
    SCOPED_TRACE(concat("seed ", seed, ", ", mode, ": ", problem));
    // With two warpgroups per tile forced, the planner selects these kernels for more problems.
    const ScopedSetting setting(mode.precision,
                                {.kernel = seed % 3 == 1 ? cuda::ConvKernel::multistage_wgrad : cuda::ConvKernel::any,
                                 .pairs = static_cast<int8_t>(seed % 3 ? 0 : 2),
                                 .cluster = static_cast<int8_t>(seed / 3 % 3)});
    Operands(problem, mode.dtype, random, input, result).check();
  }
}

/// The planner merges groups with few channels where its cost model predicts a gain. In every mode it merges the groups
/// of most of these problems.
TEST_P(CudaConvChannelsLast, IsExactWithMergedGroups) {
  const Mode& mode = GetParam();
  Random random(kFirstSeed);
  const ScopedSetting setting(mode.precision);
  int merged = 0;
  for (const auto& [groups, in, out] :
       {std::array<int64_t, 3>{64, 1, 1}, {32, 1, 2}, {3, 5, 5}, {16, 4, 8}, {2, 40, 24}}) {
    const Problem problem(2, in, out, {7, 9, 11}, {3, 3, 3}, {{1, 2, 1}, {1, 1, 1}, {1, 1, 1}, groups});
    SCOPED_TRACE(concat(mode, ": ", problem));
    Operands operands(problem, mode.dtype, random, kChannelsLast, kChannelsLast);
    const Device gpu = Device::cuda();
    merged += cuda::choose(cuda::conv_problem(ConvPass::fprop, operands.x.on(gpu), operands.out.on(gpu),
                                              operands.w.on(gpu), problem.geometry))
                  ->merged_groups > 1;
    operands.check();
  }
  EXPECT_TRUE(merged >= 3 || !cuda::has_wgmma(0)) << merged << " of five problems were merged";
}

/// A 12-bit integer needs a high and a low TF32 part. Each operand in turn holds such numbers. Every sum is still
/// exact.
TEST_P(CudaConvChannelsLast, IsExactWithTwoPartOperands) {
  const Mode& mode = GetParam();
  if (mode.arithmetic() != cuda::ConvArithmetic::tf32x3) GTEST_SKIP() << "this mode rounds 12-bit integers";
  Random random(kFirstSeed);
  const ScopedSetting setting(mode.precision, {.pairs = 2});
  for (const Problem& problem : {kProblems[0], kProblems[1], kProblems[3]})
    for (const auto& [input, result] : kLayouts)
      for (RandomView Operands::*large : {&Operands::x, &Operands::y, &Operands::w}) {
        Operands operands(problem, mode.dtype, random, input, result);
        (operands.*large).fill(random, -3000, 3000);
        operands.run(Device::cpu());
        operands.check();
      }
}

/// In f32, the channels-last copies of all samples would exceed 1 GiB.
TEST_P(CudaConvChannelsLast, CopiesAFewSamplesAtATime) {
  const Mode& mode = GetParam();
  const auto integers = [&](const Shape& shape) {
    return affine(rand(shape, {.device = Device::cuda()}), 16, -8).to(i32).to(mode.dtype);
  };
  const Tensor x = integers({3, 64, 128, 128, 128}), w = integers({24, 64, 1, 1, 1});
  const auto convolved = [&](cuda::ConvChoice choice) {
    const ScopedSetting setting(mode.precision, choice);
    return conv3d(x, w);
  };
  EXPECT_EQ(amax(abs(convolved({}) - convolved({.kernel = cuda::ConvKernel::mma_sync}))).item(), 0);
}

/// The weight gradient scales each channel by its largest element, wherever that element is. Nothing overflows, and
/// small elements next to a large one keep their bits.
TEST_P(CudaConvChannelsLast, ScalesEachChannelByItsLargestElement) {
  const Mode& mode = GetParam();
  if (mode.dtype != f32) GTEST_SKIP() << "only f32 operands are scaled";
  Random random(kFirstSeed);
  const ScopedSetting setting(mode.precision);
  const Problem problem(1, 32, 32, {8, 16, 16}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1});
  for (RandomView Operands::*operand : {&Operands::x, &Operands::y}) {
    Operands operands(problem, mode.dtype, random, kChannelsLast, kChannelsLast);
    RandomView& large = operands.*operand;
    // Each channel has one large element. The large elements are in different blocks of voxels.
    for (int64_t channel = 0; channel < 32; ++channel) {
      const int64_t voxel = channel * 64 + 3;
      large.cpu.set({large.start + channel * large.view.stride[1] + voxel * large.view.stride[4]}, 0x1p20);
    }
    large.gpu = large.cpu.to(Device::cuda());
    for (const Device device : {Device::cpu(), Device::cuda()})
      kernels(device).conv_backward_weight(operands.dw.on(device), operands.x.on(device), operands.y.on(device),
                                           problem.geometry);
    EXPECT_TRUE(operands.dw.matches_cpu(1e-5)) << (operand == &Operands::x ? "x" : "y");
  }
}

/// Infinities and NaN must appear at the same positions as on the CPU, even if operands are split into two parts.
TEST_P(CudaConvChannelsLast, KeepsInfinitiesAndNaN) {
  const Mode& mode = GetParam();
  Random random(kFirstSeed);
  const ScopedSetting setting(mode.precision, {.pairs = 2});
  Operands operands(kProblems[0], mode.dtype, random);
  for (const auto& [voxel, value] : {std::pair<int64_t, double>(0, std::numeric_limits<double>::infinity()),
                                     {7, -std::numeric_limits<double>::infinity()},
                                     {20, std::numeric_limits<double>::quiet_NaN()}}) {
    RandomView& x = operands.x;  // channel 3, height 5, width `voxel`
    x.cpu.set({x.start + 3 * x.view.stride[1] + 5 * x.view.stride[3] + voxel * x.view.stride[4]}, value);
    x.gpu = x.cpu.to(Device::cuda());
  }
  for (const Device device : {Device::cpu(), Device::cuda()})
    kernels(device).conv_forward(operands.out.on(device), operands.x.on(device), operands.w.on(device), nullptr,
                                 operands.p.geometry);
  EXPECT_TRUE(operands.out.matches_cpu(0));
}

}  // namespace
}  // namespace voxgrad::cudatest
