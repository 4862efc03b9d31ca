// Tests properties of the CUDA convolutions that need no reference implementation: adjointness, concurrent launches
// from two threads, and more than 2^31 elements.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <thread>

#include "core/autograd.h"
#include "cuda/conv/plan/choose.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using CudaConv = OnGpu;

/// Expects <conv(x), y> = <x, conv_transpose(y)> = <w, weight gradient>, where <a, b> is the sum of the products of all
/// elements.
void expect_adjoint(const Problem& p, const Mode& mode, MemoryFormat format) {
  const auto values = [&](const Shape& shape) {
    return randn(shape, {.device = Device::cuda()}).to(mode.dtype).contiguous(format);
  };
  const auto dot = [](const Tensor& a, const Tensor& b) { return sum(a.to(f64) * b.to(f64)).item(); };
  const Tensor x = values(p.x_shape()), w = values(p.w_shape()), y = values(p.y_shape());
  const Tensor out = empty_like(y), dx = empty_like(x), dw = empty_like(w);
  cuda_kernels().conv_forward(out.view_out(), x.view_in(), w.view_in(), nullptr, p.geometry);
  cuda_kernels().conv_backward_data(dx.view_out(), y.view_in(), w.view_in(), nullptr, p.geometry);
  cuda_kernels().conv_backward_weight(dw.view_out(), x.view_in(), y.view_in(), p.geometry);
  const double rounding = mode.dtype == bf16                                              ? 0x1p-8
                          : mode.dtype == f16 || mode.precision == Float32Precision::high ? 0x1p-11
                                                                                          : 1e-6;
  const auto lengths = [&](const Tensor& a, const Tensor& b) { return std::sqrt(dot(a, a) * dot(b, b)); };
  const double tolerance = rounding * (lengths(out, y) + lengths(x, dx) + lengths(w, dw));
  EXPECT_NEAR(dot(out, y), dot(x, dx), tolerance);
  EXPECT_NEAR(dot(out, y), dot(w, dw), tolerance);
}

TEST_F(CudaConv, KernelsAreAdjoint) {
  NoGradGuard no_grad;
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 40; ++seed)
    for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
      Random random(seed);
      Problem p = random_problem(random);
      const Mode mode = kModes[seed % 4];
      if (seed / 4 % 2) {  // channels that need no copies
        p.in = 8 * random.integer(1, 9);
        p.out = 8 * random.integer(1, 9);
      }
      SCOPED_TRACE(
          concat("seed ", seed, ", ", mode, format == MemoryFormat::contiguous ? ": " : ", channels-last: ", p));
      const ScopedSetting setting(mode.precision);
      manual_seed(seed);
      expect_adjoint(p, mode, format);
    }
}

/// Both threads launch the same kernel, but with different amounts of dynamic shared memory.
TEST_F(CudaConv, SupportsConcurrentLaunchesFromTwoThreads) {
  const ScopedSetting setting(Float32Precision::high, {.kernel = cuda::ConvKernel::wgrad});
  struct Work {
    Tensor x;
    Tensor w;
    Tensor y;  // gradient of the output
    explicit Work(int64_t width) {
      const TensorOptions options{.device = Device::cuda()};
      x = randn({1, 64, 12, 12, width}, options);
      w = randn({64, 64, 3, 3, 3}, options);
      y = randn({1, 64, 10, 10, width - 2}, options);
    }
    /// Returns the tile of the kernel and the bytes of its shared memory.
    std::array<int, 4> plan() const {
      const auto problem = cuda::conv_problem(ConvPass::wgrad, x.view_in(), y.view_in(), w.view_in(), ConvGeometry());
      const auto chosen = std::get<cuda::WgradPlan>(cuda::choose(problem)->family);
      return {chosen.cta.chunk, chosen.cta.columns, chosen.cta.m_tiles, chosen.stages * chosen.stage_bytes()};
    }
    /// Returns true if 100 weight gradients have the same sums over the channels.
    bool is_reproducible() const {
      NoGradGuard no_grad;
      std::vector<float> first;
      for (int run = 0; run < 100; ++run) {
        const Tensor dw = empty_like(w);
        cuda_kernels().conv_backward_weight(dw.view_out(), x.view_in(), y.view_in(), {});
        const auto sums = sum(dw, {0, 1}).to_vector<float>();
        if (run == 0) first = sums;
        if (sums != first) return false;
      }
      return true;
    }
  };
  const Work narrow(46);
  std::optional<Work> wider;  // same kernel, but a different amount of shared memory
  for (int64_t width = 50; width < 130 && !wider; width += 4) {
    const auto narrow_plan = narrow.plan(), wider_plan = wider.emplace(width).plan();
    if (!std::equal(narrow_plan.begin(), narrow_plan.begin() + 3, wider_plan.begin()) ||
        narrow_plan[3] == wider_plan[3])
      wider.reset();
  }
  ASSERT_TRUE(wider.has_value());
  bool other_is_reproducible = false;
  std::thread other([&] { other_is_reproducible = narrow.is_reproducible(); });
  EXPECT_TRUE(wider->is_reproducible());
  other.join();
  EXPECT_TRUE(other_is_reproducible);
}

/// With stride 2 and kernel size 2, planes 2i and 2i + 1 of the large tensor depend only on plane i of the small
/// tensor, so a few planes can be checked separately, perhaps with other kernels.
TEST_F(CudaConv, SupportsMoreThan2To31Elements) {
  NoGradGuard no_grad;
  const int64_t small = 646;  // (2 * 646)^3 > 2^31
  const TensorOptions options{.device = Device::cuda()};
  const auto difference = [](const Tensor& a, const Tensor& b) { return amax(abs(a - b)).item(); };
  try {
    const Tensor x = rand({1, 1, small, small, small}, options), w = rand({1, 1, 2, 2, 2}, options);
    const Tensor up = conv_transpose3d(x, w, {}, {.stride = 2});
    ASSERT_GT(up.numel(), int64_t{1} << 31);
    const Tensor down = conv3d(up, w, {}, {.stride = 2});
    for (const int64_t plane : {int64_t{0}, small / 2, small - 1}) {
      const Tensor part = conv_transpose3d(x.narrow(2, plane, 1), w, {}, {.stride = 2});
      EXPECT_LE(difference(up.narrow(2, 2 * plane, 2), part), 1e-6) << "conv_transpose3d, plane " << plane;
      EXPECT_LE(difference(down.narrow(2, plane, 1), conv3d(part, w, {}, {.stride = 2})), 1e-5)
          << "conv3d, plane " << plane;
    }
    up.fill_(1);
    const Tensor dw = empty_like(w), sparse_y = rand({1, 1, small / 4, small / 4, small / 4}, options);
    cuda_kernels().conv_backward_weight(dw.view_out(), up.view_in(), x.view_in(), {{2}, {0}, {1}, 1});
    const auto expect_total = [&](const Tensor& y) {  // x is all ones, so each tap sums all elements of y
      const double total = sum(y.to(f64)).item();
      for (const double value : dw.to_vector<double>()) EXPECT_NEAR(value / total, 1, 1e-6);
    };
    expect_total(x);
    cuda_kernels().conv_backward_weight(dw.view_out(), up.view_in(), sparse_y.view_in(), {{8}, {0}, {1}, 1});
    expect_total(sparse_y);
  } catch (const OutOfMemoryError& error) {
    GTEST_SKIP() << "not enough memory for 2^31 elements: " << error.what();
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
