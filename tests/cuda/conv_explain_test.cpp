// Tests explain_conv3d and explain_conv_transpose3d. Needs no GPU.
#include "core/precision.h"
#include "cuda/conv/plan/problem.h"
#include "ops/conv.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in\n" << text;
}

TEST(ConvExplain, DescribesPlanWorkAndMinimumTime) {
  const TensorOptions gpu{.device = Device::cuda()};
  const auto explained = [&](const TensorOptions& kind) {
    return explain_conv_transpose3d({8, 48, 96, 96, 96}, {48, 24, 3, 3, 3}, {}, kind);
  };
  std::string text = explained(gpu);
  for (const char* part : {"conv_transpose3d f32 on cuda:0", "[8, 24, 98, 98, 98]", "440 GFLOP", "2.08 GB",
                           "  forward: ", "  input gradient: ", "  weight gradient: ", "tensor cores, 3xTF32",
                           "workspace", "; on ", " (arithmetic)"})
    expect_contains(text, part);
  const bool h200 =
      text.find("on NVIDIA H200,") != std::string::npos;  // also without a GPU, because an H200 is assumed
  if (h200) expect_contains(text, "at least 3.29 ms (arithmetic)");
  set_float32_precision(Float32Precision::high);
  text = explained(gpu);
  set_float32_precision(Float32Precision::highest);
  expect_contains(text, "tensor cores, TF32");
  if (h200) expect_contains(text, "at least 1.1 ms (arithmetic)");
  expect_contains(explained({.dtype = bf16, .device = Device::cuda()}), "tensor cores, bf16");
  expect_contains(explain_conv3d({2, 64, 64, 64, 64}, {64, 64, 3, 3, 3}, {.padding = 1},
                                 {.dtype = bf16, .device = Device::cuda()}, MemoryFormat::channels_last),
                  "channels-last: CTA tile of 1 x ");
  expect_contains(explained({.dtype = f64, .device = Device::cuda()}), "plain kernel");
  force_conv_choice({.kernel = ConvKernel::plain});
  text = explained(gpu);
  force_conv_choice({});
  expect_contains(text, "plain kernel, no workspace");
  expect_contains(explained({}), "CPU: register tile");
  // Products with padding are not counted. They are 2 of the 8 * 3 products along the axis.
  expect_contains(explain_conv3d({1, 1, 8, 1, 1}, {1, 1, 3, 1, 1}, {.padding = {1, 0, 0}}, gpu), "kernel 44 FLOP");
  expect_contains(explain_conv3d({1, 1, 99, 1, 1}, {1, 1, 10, 1, 1}, {.stride = {10, 1, 1}},
                                 {.dtype = f16, .device = Device::cuda()}),
                  "float32 copies, then plain kernel");
}

TEST(ConvExplain, UsesTheRatesOfTheGpu) {
  const ConvProblem half{.dtype = f16}, tf32x3{};
  EXPECT_EQ(explain(half).flop_rate, 797e12);
  EXPECT_EQ(explain(half).byte_rate, 4.23e12);
  EXPECT_EQ(explain(tf32x3).flop_rate, 402e12 / 3);
  const ConvGpu a100{"A100", 80, 108, 1.41e9, 1.555e12};
  const ConvExplanation e = explain(half, a100);
  expect_contains(e.plan, "; on A100");
  EXPECT_NEAR(e.flop_rate / 312e12, 797.0 / 1070.5, 1e-3);  // the fraction of the nominal rate that an H200 reaches
  EXPECT_NEAR(e.byte_rate / 1.555e12, 4.23 / 4.917, 1e-3);
  ConvGpu newer;
  newer.capability = 103;
  EXPECT_EQ(explain(half, newer).flop_rate, 2 * 797e12);
}

TEST(ConvExplain, RejectsInvalidShapesLikeTheConvolution) {
  EXPECT_ERROR(explain_conv_transpose3d({2, 32, 8, 8, 8}, {64, 16, 4, 4, 4}),
               "conv_transpose3d: weight expects 64 input channels, input has 32");
  EXPECT_ERROR(explain_conv3d({2, 32, 8, 8}, {64, 16, 4, 4}), "conv3d: ");
}

}  // namespace
}  // namespace voxgrad::cudatest
