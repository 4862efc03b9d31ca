// Tests the choice of the CPU kernels for the processor, and compares the kernels of all CPU capabilities. A capability
// is a set of instructions, such as "avx2", for which the kernels are compiled.
#include "ops/cpu_capability.h"

#include <cstdlib>
#include <vector>

#include "ops/create.h"
#include "ops/detail/kernels.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

/// Returns the CPU capabilities that the program was compiled for and the processor supports.
std::vector<const char*> capabilities() {
  std::vector<const char*> result;
  for (const char* name : {"native", "default", "avx2", "avx512"}) try {
      cpu_kernels_for(name);
      result.push_back(name);
    } catch (const Error&) {
    }
  return result;
}

/// Operands of a convolution (x, w and y), and of a matrix product (a and b).
struct Problem {
  Tensor x = randn({2, 24, 9, 10, 11}), w = randn({40, 24, 3, 3, 3}), y = randn({2, 40, 9, 10, 11});
  Tensor a = randn({1, 67, 130}), b = randn({1, 130, 45});
  ConvGeometry geometry{.padding = 1};
};

/// Runs convolutions, a matrix product, tanh, a sum and a softmax with the kernels of the capability. Returns their
/// results.
Tensors run(const char* capability, const Problem& p) {
  const Kernels& k = cpu_kernels_for(capability);
  Tensors results{zeros_like(p.y), zeros_like(p.x),   zeros_like(p.w), zeros({1, 67, 45}),
                  zeros_like(p.a), zeros({1, 67, 1}), zeros_like(p.a)};
  k.conv_forward(results[0].view_out(), p.x.view_in(), p.w.view_in(), {}, p.geometry);
  k.conv_backward_data(results[1].view_out(), p.y.view_in(), p.w.view_in(), {}, p.geometry);
  k.conv_backward_weight(results[2].view_out(), p.x.view_in(), p.y.view_in(), p.geometry);
  k.matmul(results[3].view_out(), p.a.view_in(), p.b.view_in());
  k.unary(UnaryOp::tanh, results[4].view_out(), p.a.view_in(), 0, 0);
  k.reduce(ReduceOp::sum, results[5].view_out(), p.a.view_in());
  k.softmax(results[6].view_out(), p.a.view_in(), 2, false);
  return results;
}

TEST(CpuCapability, KernelsOfAllCapabilitiesAgree) {
  manual_seed(1);
  const Problem problem;
  const Tensors expected = run(capabilities().front(), problem);
  for (const char* capability : capabilities()) {
    SCOPED_TRACE(capability);
    const Tensors results = run(capability, problem), again = run(capability, problem);
    for (size_t i = 0; i < results.size(); ++i) {
      SCOPED_TRACE(i);
      const std::vector<float> got = results[i].to_vector<float>(), want = expected[i].to_vector<float>();
      EXPECT_EQ(got, again[i].to_vector<float>()) << "a repetition must give the same bits";
      double scale = 0, error = 0;
      for (size_t j = 0; j < got.size(); ++j) {
        scale = std::max(scale, std::abs(static_cast<double>(want[j])));
        error = std::max(error, std::abs(static_cast<double>(got[j]) - want[j]));
      }
      EXPECT_LT(error, 1e-6 * scale);
    }
  }
}

TEST(CpuCapability, ErrorsOfKernelsCanBeCaught) {
  const Tensor x = ones({4}), index = full({1}, 7, {.dtype = i64}), out = zeros({1});
  for (const char* capability : capabilities()) {
    SCOPED_TRACE(capability);
    EXPECT_ERROR(cpu_kernels_for(capability).gather("take", out.view_out(), x.view_in(), index.view_in(), 0),
                 "index 7 is out of range");
  }
}

TEST(CpuCapability, TheBestSupportedCapabilityIsTheDefault) {
  if (std::getenv("VOXGRAD_CPU_CAPABILITY")) {
    EXPECT_EQ(cpu_capability(), std::getenv("VOXGRAD_CPU_CAPABILITY"));
  } else {
    EXPECT_EQ(cpu_capability(), capabilities().back());
    EXPECT_EQ(&cpu_kernels_for(nullptr), &cpu_kernels());
  }
}

TEST(CpuCapability, UnknownCapabilitiesAreErrors) {
  EXPECT_ERROR(cpu_kernels_for("avx1024"), "no CPU kernels for \"avx1024\" (VOXGRAD_CPU_CAPABILITY), only for: ");
  EXPECT_ERROR(cpu_kernels_for(""), "no CPU kernels for \"\"");
}

}  // namespace
}  // namespace voxgrad
