// Tests that each family of CUDA convolutions computes the same bits in twenty runs, also if other kernels run at the
// same time, and in replays of a CUDA graph. The tests check that the planner selects the intended kernels.
#include <array>
#include <string>

#include "core/autograd.h"
#include "cuda/conv/plan/choose.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

constexpr MemoryFormat kContiguous = MemoryFormat::contiguous, kChannelsLast = MemoryFormat::channels_last;
const ConvGeometry kSame{{1}, {1}, {1}, 1};

/// Some passes of a convolution, and the kernels that must compute them.
struct Case {
  const char* kernels;           ///< part of the explanation of each pass
  const char* not_in = nullptr;  ///< not part of the explanation
  std::vector<ConvPass> passes{ConvPass::fprop, ConvPass::dgrad, ConvPass::wgrad};
  MemoryFormat format = kChannelsLast;
  Problem problem;
  ConvChoice choice{};
  bool only_floats = false;  ///< the kernels do not support bf16 and f16
  bool highest = true;       ///< the kernels support f32 in the precision `highest`
  bool wgmma = true;         ///< the kernels need an sm_90a GPU
};

const Case kCases[] = {
    {.kernels = "by wgmma",
     .passes = {ConvPass::fprop, ConvPass::dgrad},
     .problem = {2, 24, 40, {23, 22, 21}, {4, 4, 4}, {{2}, {1}, {1}, 1}}},
    {.kernels = "channels-last copies",
     .passes = {ConvPass::fprop, ConvPass::dgrad},
     .format = kContiguous,
     .problem = {2, 64, 64, {12, 13, 14}, {3, 3, 3}, kSame}},
    {.kernels = "by wgmma",
     .not_in = "split-K 1,",
     .passes = {ConvPass::fprop, ConvPass::dgrad},
     .problem = {1, 512, 512, {4, 4, 4}, {3, 3, 3}, kSame}},
    {.kernels = "weights shared by two CTAs",
     .passes = {ConvPass::fprop, ConvPass::dgrad},
     .problem = {2, 64, 64, {12, 13, 14}, {3, 3, 3}, kSame},
     .choice = {.cluster = 2}},
    // Partial sums in memory, and sums in shared memory of one CTA and of a cluster of two.
    {.kernels = "by wgmma",
     .not_in = "split-K 1,",
     .passes = {ConvPass::wgrad},
     .problem = {2, 24, 40, {23, 22, 21}, {4, 4, 4}, {{2}, {1}, {1}, 1}},
     .choice = {.cluster = 1}},
    {.kernels = "split-K 1, workspace 0.0 MiB",
     .passes = {ConvPass::wgrad},
     .problem = {1, 512, 512, {3, 3, 3}, {3, 3, 3}, kSame},
     .choice = {.cluster = 2}},
    {.kernels = "split-K 2 in a cluster",
     .passes = {ConvPass::wgrad},
     .problem = {2, 96, 96, {12, 13, 14}, {3, 3, 3}, kSame},
     .choice = {.cluster = 2}},
    {.kernels = "by mma.sync, channels-last",
     .passes = {ConvPass::wgrad},
     .problem = {2, 64, 64, {20, 21, 22}, {1, 1, 1}, {}},
     .choice = {.kernel = ConvKernel::multistage_wgrad},
     .only_floats = true,
     .wgmma = false},
    {.kernels = "by mma.sync",
     .problem = {2, 12, 20, {23, 22, 21}, {4, 4, 4}, {{2}, {1}, {1}, 1}},
     .choice = {.kernel = ConvKernel::mma_sync},
     .wgmma = false},
    {.kernels = "by mma.sync",
     .format = kContiguous,
     .problem = {2, 12, 20, {23, 22, 21}, {4, 4, 4}, {{2}, {1}, {1}, 1}},
     .choice = {.kernel = ConvKernel::mma_sync},
     .wgmma = false},
    {.kernels = "small channels",
     .format = kContiguous,
     .problem = {2, 8, 12, {23, 40, 41}, {3, 3, 3}, {{2}, {1}, {1}, 1}},
     .choice = {.kernel = ConvKernel::small_channel}},
    {.kernels = "depthwise",
     .problem = {2, 1, 1, {40, 41, 42}, {5, 5, 5}, {{2}, {2}, {1}, 64}},
     .choice = {.kernel = ConvKernel::depthwise}},
    {.kernels = "depthwise",
     .problem = {2, 1, 1, {20, 21, 22}, {3, 3, 3}, {{1}, {1}, {1}, 40}},
     .choice = {.kernel = ConvKernel::depthwise}},
    // Kernels on tensor cores compute the next two problems.
    {.kernels = "depthwise", .problem = {2, 1, 1, {20, 24, 30}, {5, 5, 5}, {{1}, {2}, {1}, 48}}},
    {.kernels = "depthwise",
     .passes = {ConvPass::wgrad},
     .problem = {2, 1, 1, {20, 24, 30}, {3, 3, 3}, {{1}, {1}, {1}, 48}}},
    {.kernels = "few input channels",
     .passes = {ConvPass::fprop, ConvPass::wgrad},
     .problem = {2, 2, 32, {40, 41, 42}, {5, 5, 5}, {{2}, {2}, {1}, 1}},
     .choice = {.kernel = ConvKernel::few_inputs},
     .highest = false,
     .wgmma = false},
    {.kernels = "few output channels",
     .passes = {ConvPass::dgrad},
     .problem = {2, 2, 32, {40, 41, 42}, {5, 5, 5}, {{2}, {2}, {1}, 1}},
     .choice = {.kernel = ConvKernel::few_outputs},
     .highest = false},
    {.kernels = "mirrored kernel",
     .passes = {ConvPass::fprop},
     .problem = {2, 32, 2, {40, 41, 42}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::few_outputs},
     .highest = false},
    {.kernels = "mirrored kernel",
     .passes = {ConvPass::dgrad, ConvPass::wgrad},
     .problem = {2, 32, 2, {40, 41, 42}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::few_inputs},
     .highest = false},
    {.kernels = "pointwise",
     .problem = {2, 64, 3, {40, 41, 42}, {1, 1, 1}, {}},
     .choice = {.kernel = ConvKernel::pointwise}},
    {.kernels = "pointwise of contiguous tensors",
     .format = kContiguous,
     .problem = {2, 64, 3, {40, 41, 42}, {1, 1, 1}, {}}},
    {.kernels = "groups as one", .problem = {2, 2, 2, {20, 21, 22}, {3, 3, 3}, {{1}, {1}, {1}, 32}}},
    // The plain kernels have a tile for more than 32, for at most 8, and for other numbers of output channels, each for
    // both orders of channels and voxels.
    {.kernels = "plain kernel",
     .problem = {2, 4, 40, {15, 16, 17}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::plain},
     .wgmma = false},
    {.kernels = "plain kernel",
     .problem = {2, 20, 4, {15, 16, 17}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::plain},
     .wgmma = false},
    {.kernels = "plain kernel",
     .format = kContiguous,
     .problem = {2, 4, 40, {15, 16, 17}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::plain},
     .wgmma = false},
    {.kernels = "plain kernel",
     .format = kContiguous,
     .problem = {2, 20, 4, {15, 16, 17}, {3, 3, 3}, kSame},
     .choice = {.kernel = ConvKernel::plain},
     .wgmma = false},
};

/// Returns the elements of a dense tensor.
std::string bits_of(const Tensor& tensor) {
  const Tensor copy = tensor.to(Device::cpu());
  return {static_cast<const char*>(copy.raw_data()), static_cast<size_t>(copy.numel() * item_size(copy.dtype()))};
}

/// The operands of a case: with random values on a GPU, without values on the CPU.
struct Operands {
  const Problem& p;
  Tensor x;
  Tensor w;
  Tensor y;

  Operands(const Case& of, DType dtype, Device device) : p(of.problem) {
    const auto values = [&](const Shape& shape) {
      if (device.is_cpu()) return empty(shape, {.dtype = dtype}, of.format);  // only the plan is needed
      return randn(shape).to(device, dtype).contiguous(of.format);
    };
    x = values(p.x_shape());
    w = values(p.w_shape());
    y = values(p.y_shape());
  }
  /// Returns the description of the plan of a pass.
  std::string explanation(ConvPass pass) const {
    const bool dgrad = pass == ConvPass::dgrad;
    return explain(conv_problem(pass, (dgrad ? y : x).view_in(), (dgrad ? x : y).view_in(), w.view_in(), p.geometry))
        .plan;
  }
  /// Returns the result of a pass.
  Tensor result(ConvPass pass) const {
    const Kernels& k = cuda_kernels();
    const Tensor to = empty_like(pass == ConvPass::fprop ? y : pass == ConvPass::dgrad ? x : w);
    if (pass == ConvPass::fprop) k.conv_forward(to.view_out(), x.view_in(), w.view_in(), nullptr, p.geometry);
    if (pass == ConvPass::dgrad) k.conv_backward_data(to.view_out(), y.view_in(), w.view_in(), nullptr, p.geometry);
    if (pass == ConvPass::wgrad) k.conv_backward_weight(to.view_out(), x.view_in(), y.view_in(), p.geometry);
    return to;
  }
};

/// Expects that the planner selects the kernels of the case.
void expect_kernels(const Case& of, const Operands& operands) {
  for (const ConvPass pass : of.passes) {
    const std::string text = operands.explanation(pass);
    EXPECT_NE(text.find(of.kernels), std::string::npos) << "no \"" << of.kernels << "\" in\n" << text;
    if (of.not_in) {
      EXPECT_EQ(text.find(of.not_in), std::string::npos) << text;
    }
  }
}

/// Also tests f64, which only the plain kernels support.
constexpr Mode kAllModes[] = {kModes[0], kModes[1], kModes[2], kModes[3], {DType::f64, Float32Precision::highest}};

bool is_supported(const Case& of, const Mode& mode) {
  if (of.only_floats && mode.dtype != f32) return false;
  if (!of.highest && mode.dtype == f32 && mode.precision == Float32Precision::highest) return false;
  return mode.dtype != f64 || of.choice.kernel == ConvKernel::plain;
}

// The plans are those of an H200.
TEST(ConvReproduciblePlan, SelectsTheKernelsOfEachCase) {
  for (const Mode& mode : kAllModes)
    for (const Case& of : kCases) {
      if (!is_supported(of, mode)) continue;
      SCOPED_TRACE(concat(mode, ": ", of.problem));
      const ScopedSetting setting(mode.precision, of.choice);
      expect_kernels(of, Operands(of, mode.dtype, Device::cpu()));
    }
}

class CudaConvReproducible : public OnGpu, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, CudaConvReproducible, testing::ValuesIn(kAllModes), [](const auto& mode) {
  return concat(mode.param.dtype, mode.param.precision == Float32Precision::high ? "_high" : "");
});

TEST_P(CudaConvReproducible, HasEqualBitsInTwentyRuns) {
  const Mode& mode = GetParam();
  const Device gpu = Device::cuda();
  const Stream other_stream;
  const Tensor load = rand({1 << 22}, {.device = gpu});
  for (const Case& of : kCases) {
    if (!is_supported(of, mode) || (of.wgmma && !has_wgmma(0))) continue;
    SCOPED_TRACE(concat(of.kernels, ", ", mode, ": ", of.problem));
    const ScopedSetting setting(mode.precision, of.choice);
    manual_seed(kFirstSeed);
    const Operands operands(of, mode.dtype, gpu);
    expect_kernels(of, operands);
    for (const ConvPass pass : of.passes) {
      std::string first;
      for (int run = 0; run < 20; ++run) {
        if (run % 2) {  // with other work on the GPU
          const StreamGuard guard(other_stream);
          for (int i = 0; i < 10; ++i) cuda_kernels().unary(UnaryOp::sin, load.view_out(), load.view_in(), 0, 0);
        }
        const std::string bits = bits_of(operands.result(pass));
        if (run == 0) first = bits;
        ASSERT_TRUE(bits == first) << "pass " << static_cast<int>(pass) << ", run " << run;
      }
    }
    other_stream.synchronize();
  }
}

/// A chain of convolutions, and its gradients.
struct Chain {
  Tensor input = values({2, 64, 12, 13, 14});
  Tensor gradient = values({2, 128, 6, 6, 7});
  Tensor weight = values({64, 64, 3, 3, 3});
  Tensor depthwise_weight = values({64, 1, 5, 5, 5});
  Tensor strided_weight = values({128, 64, 2, 2, 2});

  static Tensor values(const Shape& shape) { return randn(shape).to(Device::cuda(), bf16).contiguous(kChannelsLast); }
  /// Returns the output of the chain and the gradients of the input and the weights.
  Tensors results() const {
    const Tensors leaves{input.detach().requires_grad_(), weight.detach().requires_grad_(),
                         depthwise_weight.detach().requires_grad_(), strided_weight.detach().requires_grad_()};
    const Tensor first = conv3d(leaves[0], leaves[1], {}, {.padding = 1});
    const Tensor second = conv3d(first, leaves[2], {}, {.padding = 2, .groups = 64});
    const Tensor output = conv3d(second, leaves[3], {}, {.stride = 2});
    Tensors all = grad({output}, leaves, {gradient});
    all.push_back(output.detach());
    return all;
  }
};

using CudaConvGraph = OnGpu;

TEST_F(CudaConvGraph, ReplaysHaveTheBitsOfEagerCalls) {
  if (!has_wgmma(0)) GTEST_SKIP() << "the GPU has no wgmma";
  const TensorOptions halves{.dtype = bf16, .device = Device::cuda()};
  const std::string wgmma =
      explain_conv3d({2, 64, 12, 13, 14}, {64, 64, 3, 3, 3}, {.padding = 1}, halves, kChannelsLast);
  const std::string depthwise =
      explain_conv3d({2, 64, 12, 13, 14}, {64, 1, 5, 5, 5}, {.padding = 2, .groups = 64}, halves, kChannelsLast);
  for (const auto& [text, part] : {std::pair(wgmma, "by wgmma"), {depthwise, "depthwise: "}}) {
    int passes = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++passes;
    EXPECT_EQ(passes, 3) << text;
  }

  manual_seed(kFirstSeed);
  const Chain chain;
  chain.results();
  Tensors replayed;
  CUDAGraph graph;
  graph.capture([&] { replayed = chain.results(); });
  for (int run = 0; run < 20; ++run) {
    chain.input.copy_(Chain::values(chain.input.shape()));
    const Tensors eager = chain.results();
    graph.replay();
    for (size_t i = 0; i < eager.size(); ++i)
      ASSERT_TRUE(bits_of(replayed[i]) == bits_of(eager[i])) << "run " << run << ", result " << i;
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
