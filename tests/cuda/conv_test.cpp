// Tests the CUDA convolutions against the CPU through the kernel table: every parameter, any strides, and every tile of
// the mma.sync and small-channel kernels. Outputs and workspaces contain NaN before the call. Outputs lie between
// guard values that no kernel may change. docs/conv-kernels.md defines the terms tap, phase and residue.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "cuda/conv/plan/instances.h"
#include "cuda/conv/plan/sm80.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using CudaConv = OnGpu;

/// Operands and results of conv_forward, conv_backward_data and conv_backward_weight on both devices. Operands are
/// small integers: every sum is exact in any order, and half-precision results are rounded once.
struct Comparison {
  const Problem& p;
  RandomView x;       // input of conv_forward and conv_backward_weight
  RandomView y;       // gradient of the output: an input of conv_backward_data and conv_backward_weight
  RandomView w;       // weight of conv_forward and conv_backward_data
  RandomView x_bias;  // bias that conv_backward_data adds
  RandomView y_bias;  // bias that conv_forward adds
  RandomView out;     // result of conv_forward
  RandomView dx;      // result of conv_backward_data
  RandomView dw;      // result of conv_backward_weight
  bool biased;        // true if the kernels add the biases

  /// x, y, out and dx have the given layout, or random layouts without `layout`. w and dw always have random layouts.
  Comparison(const Problem& problem, DType dtype, Random& random, std::optional<Layout> layout = {})
      : p(problem),
        x(dtype, p.x_shape(), layout.value_or(any_layout(random, true)), random),
        y(dtype, p.y_shape(), layout.value_or(any_layout(random, true)), random),
        w(dtype, p.w_shape(), any_layout(random, true), random),
        x_bias(dtype, {p.x_shape()[1]}, Layout::spaced, random),
        y_bias(dtype, {p.y_shape()[1]}, Layout::spaced, random),
        out(dtype, p.y_shape(), layout.value_or(any_layout(random, false)), random),
        dx(dtype, p.x_shape(), layout.value_or(any_layout(random, false)), random),
        dw(dtype, p.w_shape(), any_layout(random, false), random),
        biased(random.chance(0.5)) {
    for (RandomView* input : {&x, &y, &w, &x_bias, &y_bias}) input->fill(random, -8, 8);
    for (RandomView* output : {&dx, &out, &dw}) output->poison();
    run(Device::cpu());
  }
  void run(Device device) const {
    const View x_bias_view = x_bias.on(device), y_bias_view = y_bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), biased ? &y_bias_view : nullptr, p.geometry);
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), biased ? &x_bias_view : nullptr, p.geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), p.geometry);
  }
  void check() {
    for (RandomView* output : {&dx, &out, &dw}) output->restore_poison();
    const PoisonedWorkspaces poisoned;
    run(Device::cuda());
    EXPECT_TRUE(out.matches_cpu(0)) << "forward";
    EXPECT_TRUE(dx.matches_cpu(0)) << "data gradient";
    EXPECT_TRUE(dw.matches_cpu(0)) << "weight gradient";
  }
};

TEST_F(CudaConv, IsExactForSmallIntegers) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 400 && !HasFailure(); ++seed) {
    Random random(seed);
    const Problem problem = random_problem(random);
    const Mode mode = seed % 9 ? kModes[seed % 4] : Mode{f64, Float32Precision::highest};
    SCOPED_TRACE(concat("seed ", seed, ", ", mode, ": ", problem));
    const ScopedSetting setting(mode.precision);
    Comparison(problem, mode.dtype, random).check();
  }
}

/// Runs each test in every mode: f32 with both precisions, bf16 and f16.
class CudaConvModes : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvModes, testing::ValuesIn(kModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

/// Counts the launches of the compiled tiles of a mode since construction.
class Launches {
 public:
  explicit Launches(const Mode& mode) : arithmetic_(mode.arithmetic()) {
    for (const cuda::ConvInstance* instance : cuda::conv_instances()) before_.push_back(instance->launches);
  }
  /// Expects at least one launch of every compiled tile of these kernels.
  void expect_all(std::initializer_list<cuda::ConvKernel> kernels) const {
    int compiled = 0;
    for (size_t i = 0; i < before_.size(); ++i) {
      const cuda::ConvInstance& instance = *cuda::conv_instances()[i];
      if (instance.arithmetic != arithmetic_ ||
          std::find(kernels.begin(), kernels.end(), instance.kernel) == kernels.end())
        continue;
      if (instance.kernel != cuda::ConvKernel::mma_sync && !cuda::has_wgmma(0)) continue;
      ++compiled;
      EXPECT_GT(instance.launches, before_[i])
          << "never launched: " << (instance.pass == ConvPass::wgrad ? "wgrad" : "fprop, dgrad") << ", kernel "
          << static_cast<int>(instance.kernel) << ", width " << instance.width << ", rows " << instance.rows
          << ", blocks " << instance.blocks;
    }
    // The mma_sync kernels run on every GPU, the others only on GPUs with wgmma.
    const bool any_gpu = std::find(kernels.begin(), kernels.end(), cuda::ConvKernel::mma_sync) != kernels.end();
    EXPECT_TRUE(compiled > 0 || !(any_gpu || cuda::has_wgmma(0)));
  }

 private:
  cuda::ConvArithmetic arithmetic_;
  std::vector<int64_t> before_;
};

/// Forces each compiled mma.sync tile and the plain kernel for every problem, whichever kernel the planner would
/// choose.
TEST_P(CudaConvModes, IsExactWithEveryTile) {
  const Mode& mode = GetParam();
  const Launches launches(mode);
  const ConvGeometry padded{{1}, {1}, {1}, 1};
  const Problem problems[] = {
      {1, 24, 33, {9, 10, 11}, {3, 3, 3}, padded},
      {2, 130, 7, {6, 5, 9}, {2, 3, 1}, {{2, 1, 3}, {0, 2, 1}, {1, 2, 1}, 1}},
      {1, 3, 130, {7, 8, 9}, {3, 4, 5}, {{2, 2, 2}, {1, 2, 2}, {1, 1, 1}, 1}},
      {1, 8, 8, {12, 6, 20}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 3}},
      {1, 65, 65, {4, 4, 35}, {1, 1, 7}, {{1, 1, 4}, {0, 0, 3}, {1, 1, 2}, 1}},
      {3, 5, 1, {17, 1, 5}, {5, 1, 2}, {{3, 1, 2}, {6, 0, 1}, {2, 1, 3}, 2}},
      {2, 96, 96, {5, 6, 9}, {3, 1, 4}, {{2, 1, 2}, {1, 0, 1}, {1, 1, 1}, 1}},
      {1, 9, 17, {70, 9, 9}, {2, 1, 2}, {{31, 3, 2}, {1, 0, 1}, {1, 1, 1}, 1}},   // taps read 2 of 31 residues along D
      {1, 20, 12, {9, 10, 22}, {3, 2, 3}, {{1, 2, 3}, {1, 1, 1}, {1, 2, 3}, 1}},  // phases without taps
      {2, 33, 18, {20, 19, 9}, {2, 3, 2}, {{8, 7, 3}, {1, 0, 1}, {1, 2, 1}, 1}},
  };
  std::vector<cuda::ConvChoice> choices{{.kernel = cuda::ConvKernel::plain}, {}, {.pairs = 1}, {.pairs = 2}};
  for (const auto widths : {cuda::mma_sync_widths(mode.arithmetic()), cuda::mma_sync_wgrad_widths()})
    for (const int width : widths)
      choices.push_back({.kernel = cuda::ConvKernel::mma_sync, .width = static_cast<int16_t>(width)});
  Random random(kFirstSeed);
  for (const Problem& problem : problems) {
    Comparison comparison(problem, mode.dtype, random);
    for (const cuda::ConvChoice& choice : choices) {
      SCOPED_TRACE(concat(mode, ", width ", choice.width, ", pairs ", int{choice.pairs}, ", kernel ",
                          static_cast<int>(choice.kernel), ": ", problem));
      const ScopedSetting setting(mode.precision, choice);
      comparison.check();
      if (HasFailure()) return;
    }
  }
  launches.expect_all({cuda::ConvKernel::mma_sync});
}

/// The small_channel kernels process contiguous tensors with few channels, at any alignment.
TEST_P(CudaConvModes, IsExactWithFewChannels) {
  const Mode& mode = GetParam();
  const Launches launches(mode);
  const Problem problems[] = {
      {2, 8, 8, {9, 12, 40}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 2}},  // strided, two groups
      {1, 8, 8, {12, 24, 48}, {3, 5, 7}, {{2, 2, 2}, {1, 2, 3}, {1, 1, 1}, 3}},
      {2, 16, 3, {17, 41, 65}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
      {1, 3, 16, {9, 40, 65}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},  // a network's first layer
      {1, 5, 9, {6, 30, 47}, {2, 3, 4}, {{1, 1, 3}, {0, 2, 1}, {2, 1, 2}, 2}},   // taps read three residues along W
      {3, 1, 1, {20, 33, 30}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 5}},  // depthwise
      {1, 12, 16, {40, 7, 9}, {4, 1, 2}, {{2, 1, 1}, {1, 0, 1}, {1, 1, 1}, 1}},  // the ring of stages wraps around
      {1, 2, 13, {4, 3, 700}, {1, 1, 3}, {{1, 1, 3}, {0, 0, 0}, {1, 1, 1}, 1}},  // long lines, stride 3 along W
      {1, 16, 2, {3, 150, 6}, {2, 2, 2}, {{2, 2, 2}, {0, 0, 0}, {1, 1, 1}, 1}},
      {1, 4, 4, {8, 10, 11}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},
      {1, 16, 4, {7, 20, 22}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
      {1, 1, 1, {5, 6, 3}, {3, 3, 3}, {{1, 1, 20}, {1, 1, 0}, {1, 1, 1}, 1}},  // stride larger than the padded input
      {1, 12, 7, {4, 60, 50}, {2, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 2}},
  };
  Random random(kFirstSeed);
  for (const Problem& problem : problems)
    for (const Layout layout : {Layout::contiguous, Layout::spaced}) {  // tensors begin at a random element of a buffer
      Comparison comparison(problem, mode.dtype, random, layout);
      for (const int16_t rows : {128, 256, 0}) {
        SCOPED_TRACE(concat(mode, ", ", rows, " rows: ", problem));
        const ScopedSetting setting(
            mode.precision,
            {.kernel = rows > 0 ? cuda::ConvKernel::small_channel : cuda::ConvKernel::any, .width = rows});
        comparison.check();
        if (HasFailure()) return;
      }
    }
  launches.expect_all({cuda::ConvKernel::small_channel});
}

TEST_P(CudaConvModes, IsExactForEmptyAndExtremeSizes) {
  const Mode& mode = GetParam();
  const ConvGeometry plain;
  const Problem problems[] = {
      {1, 1, 1, {1, 1, 1}, {1, 1, 1}, plain},
      {0, 3, 4, {5, 5, 5}, {3, 3, 3}, plain},                                    // no samples
      {2, 3, 4, {1, 1, 4099}, {1, 1, 5}, {{1, 1, 2}, {0, 0, 2}, {1, 1, 1}, 1}},  // one axis
      {1, 2, 2, {1, 7, 1}, {1, 7, 1}, {{9, 9, 9}, {0, 0, 0}, {1, 1, 1}, 2}},     // stride larger than the input
      {1, 4, 4, {9, 9, 9}, {3, 3, 3}, {{2, 2, 2}, {2, 2, 2}, {2, 2, 2}, 1}},     // one of eight phases has taps
      {1, 2, 3, {6, 6, 6}, {2, 2, 2}, {{4, 4, 4}, {3, 3, 3}, {1, 1, 1}, 1}},     // phases without taps
      {1, 1, 1, {30, 30, 30}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 8}},  // depthwise; wgrad adds the sums of
                                                                                 // several ranges of voxels
      {1, 3, 70, {17, 16, 15}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},
      {1, 3, 5, {31, 2, 40}, {10, 1, 10}, {{10, 1, 10}, {2, 0, 3}, {1, 1, 1}, 1}},  // too many phases for a tile
      {1, 2, 2, {19, 11, 10}, {16, 8, 8}, plain},                                   // the taps fill the tap table
      {1, 2, 2, {20, 11, 10}, {17, 8, 8}, plain},                                   // more taps than the table holds
  };
  Random random(kFirstSeed);
  for (const Problem& problem : problems) {
    SCOPED_TRACE(concat(mode, ": ", problem));
    const ScopedSetting setting(mode.precision);
    Comparison(problem, mode.dtype, random).check();
    if (mode.dtype == f16) Comparison(problem, f64, random).check();
  }
}

/// The problems have so many CTA tiles that a persistent CTA computes several tiles and can load the operands of later
/// tiles early. The kernel of the first problem has one tap. The data gradient of the second problem has eight phases.
TEST_P(CudaConvModes, IsExactWithManyTiles) {
  const Problem problems[] = {
      {1, 3, 9, {64, 64, 96}, {1, 1, 1}, {}},
      {1, 9, 5, {64, 80, 96}, {3, 3, 3}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1}},
  };
  Random random(kFirstSeed);
  for (const Problem& problem : problems) {
    Comparison comparison(problem, GetParam().dtype, random);
    for (const int8_t pairs : {1, 2}) {
      SCOPED_TRACE(concat(GetParam(), ", pairs ", int{pairs}, ": ", problem));
      const ScopedSetting setting(GetParam().precision, {.pairs = pairs});
      comparison.check();
    }
  }
}

/// Input elements that no tap reads are infinite here. They must not affect the weight gradient.
TEST_P(CudaConvModes, WeightGradientIgnoresUnreadInputs) {
  const Problem p{1, 20, 20, {7, 7, 7}, {2, 2, 2}, {{2, 2, 2}, {0, 0, 0}, {1, 1, 1}, 1}};
  const ScopedSetting setting(GetParam().precision);
  const auto options = TensorOptions{.device = Device::cuda()};
  const auto values = [&](const Shape& shape) { return randn(shape, options).to(GetParam().dtype); };
  const Tensor w = values(p.w_shape()), y = values(p.y_shape());
  Tensor x = full(p.x_shape(), std::numeric_limits<double>::infinity(), options);
  x.narrow(2, 0, 6).narrow(3, 0, 6).narrow(4, 0, 6).fill_(1);
  x = x.to(GetParam().dtype);
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
    const Tensor dw = empty_like(w);
    cuda_kernels().conv_backward_weight(dw.view_out(), x.contiguous(format).view_in(), y.contiguous(format).view_in(),
                                        p.geometry);
    EXPECT_TRUE(std::isfinite(sum(dw.to(f64)).item())) << (format == MemoryFormat::contiguous ? "contiguous" : "last");
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
