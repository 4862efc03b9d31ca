// Tests operators on tensors with more than 2^31 elements, where 32-bit indices overflow. The expected value of each
// element follows from its position, or parts are compared with results for smaller tensors. Results are compared on
// the device.
//
// On a GPU, a test is skipped if the memory does not suffice. On the CPU, the tests need up to 50 GB and several
// minutes; they run only if VOXGRAD_TEST_LARGE_CPU is set.
#include <cmath>
#include <cstdlib>

#include "core/autograd.h"
#include "cuda/conv/plan/problem.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/random_view.h"

namespace voxgrad {
namespace {

constexpr int64_t kRows = 65537, kColumns = 32771;  // both odd; the product is slightly more than 2^31
constexpr int64_t kEdge = 1292;                     // its cube is more than 2^31

class LargeTensors : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (device.is_cuda() && !cuda::is_available()) GTEST_SKIP() << "no GPU is present";
    if (device.is_cpu() && !std::getenv("VOXGRAD_TEST_LARGE_CPU")) GTEST_SKIP() << "VOXGRAD_TEST_LARGE_CPU is not set";
  }
  void TearDown() override {
    if (!IsSkipped()) memory::empty_cache(device);
  }

  /// Runs `body`. Skips the test if memory runs out.
  template <class Body>
  void skip_if_out_of_memory(const Body& body) {
    try {
      body();
    } catch (const OutOfMemoryError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  /// Returns the numbers 0, 1, ..., size - 1 along `axis`. The other axes have size 1.
  Tensor ramp(int64_t size, int64_t axis, int64_t rank) const {
    Shape shape = Dims::filled(rank, 1);
    shape[axis] = size;
    return reshape(arange(0, static_cast<double>(size), 1, {.device = device}), shape);
  }
  /// Returns -1 in the first half of `axis` and 1 in the second half. The other axes have size 1.
  Tensor halves(int64_t size, int64_t axis, int64_t rank) const {
    const Tensor upper = ge(ramp(size, axis, rank), full({}, static_cast<double>(size / 2), {.device = device}));
    return upper.to(f32) * 2 - 1;
  }
  /// Returns x[i, j] = i + j / 4, which is exact in f32.
  Tensor matrix() const { return ramp(kRows, 0, 2) + ramp(kColumns, 1, 2) * 0.25; }
  /// Returns x[d, h, w] = d + h + w.
  Tensor volume(int64_t edge) const { return ramp(edge, 2, 5) + ramp(edge, 3, 5) + ramp(edge, 4, 5); }

  const Device device = GetParam();
};

void expect_equal(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(sum(eq(got, expected)).item<int64_t>(), got.numel());
}
void expect_close(const Tensor& got, const Tensor& expected, double tolerance) {
  EXPECT_LE(amax(abs(got - expected)).item(), tolerance);
}

/// Returns 0 + 1 + ... + (n - 1).
double triangle(int64_t n) { return 0.5 * static_cast<double>(n) * static_cast<double>(n - 1); }

TEST_P(LargeTensors, SumsBytes) {
  skip_if_out_of_memory([&] {
    const int64_t count = (int64_t{1} << 32) + 17;
    const Tensor x = full({count}, 1, {.dtype = u8, .device = device});
    x.set({count - 1}, 3);
    x.set({int64_t{1} << 31}, 0);
    EXPECT_EQ(sum(x).item<int64_t>(), count + 1);
  });
}

TEST_P(LargeTensors, ReducesAllElementsAndSingleAxes) {
  skip_if_out_of_memory([&] {
    const Tensor x = matrix(), rows = ramp(kRows, 0, 1).to(f64), columns = ramp(kColumns, 0, 1).to(f64);
    const double all = triangle(kRows) * kColumns + 0.25 * triangle(kColumns) * kRows;
    EXPECT_NEAR(sum(x).item() / all, 1, 1e-6);
    const Tensor by_row = rows * kColumns + 0.25 * triangle(kColumns);
    const Tensor by_column = columns * (0.25 * kRows) + triangle(kRows);
    expect_close(sum(x, {1}).to(f64) / by_row, ones_like(by_row), 1e-6);
    expect_close(sum(x, {0}).to(f64) / by_column, ones_like(by_column), 1e-6);
    x.set({kRows - 1, kColumns - 1}, 1e6);
    x.set({kRows - 1, 5}, -3);
    EXPECT_EQ(amax(x).item(), 1e6);
    EXPECT_EQ(amin(x).item(), -3);
    EXPECT_EQ(amax(x, {0}).at({kColumns - 1}), 1e6);
    EXPECT_EQ(amin(x, {1}).at({kRows - 1}), -3);
  });
}

TEST_P(LargeTensors, SupportsGroupNorm) {
  skip_if_out_of_memory([&] {
    // One group. s and t are -1 and 1 over the halves of an axis, u is -2 and 2 over the channels. Then x = s + u has
    // mean 0 and variance 5. The upstream gradient 1 + t + s / 2 has mean 1 and correlates with x only through s.
    const int64_t depth = 1023, height = 1026, width = 1024;
    const Tensor s = halves(width, 4, 5), t = halves(height, 3, 5), u = halves(2, 1, 5) * 2;
    const Shape shape{1, 2, depth, height, width};
    const Tensor x = expand(s + u, shape).clone().requires_grad_();
    const Tensor gamma = ones({2}, {.device = device, .requires_grad = true});
    const Tensor beta = zeros({2}, {.device = device, .requires_grad = true});
    const Tensor y = group_norm(x, 1, gamma, beta);
    const Tensors grads = grad({y}, {x, gamma, beta}, {expand(1 + t + s * 0.5, shape).clone()});

    NoGradGuard no_grad;
    const double rstd = 1 / std::sqrt(5 + 1e-5), count = static_cast<double>(depth * height * width);
    expect_close(y.detach(), (s + u) * rstd, 1e-6);
    expect_close(grads[0], (t + s * 0.5 - (s + u) * (0.5 * rstd * rstd)) * rstd, 1e-6);
    for (const int64_t c : {0, 1}) {
      EXPECT_NEAR(grads[1].at({c}) / count, (0.5 + (c ? 2 : -2)) * rstd, 1e-6);
      EXPECT_NEAR(grads[2].at({c}) / count, 1, 1e-6);
    }
  });
}

TEST_P(LargeTensors, SupportsSoftmax) {
  skip_if_out_of_memory([&] {
    const Tensor rows = ramp(kRows, 0, 2) * 1e-4, columns = ramp(kColumns, 1, 2) * 1e-4, x = rows + columns;
    // The tolerance 1e-4 is far above the error from rounding x and far below the error that a wrong index causes.
    expect_close(softmax(x, 1) / softmax(columns, 1), ones({1, 1}, {.device = device}), 1e-4);
    expect_close(softmax(x, 0) / softmax(rows, 0), ones({1, 1}, {.device = device}), 1e-4);
  });
}

TEST_P(LargeTensors, SupportsMaxPool) {
  skip_if_out_of_memory([&] {
    // The window has two elements along the last axis, where x grows by 1.
    const Tensor x = volume(kEdge).requires_grad_();
    const MaxPoolOptions<3> options{.kernel_size = {1, 1, 2}, .stride = Triple(1)};
    const auto [y, indices] = max_pool3d_with_indices(x, options);
    expect_equal(y.detach(), narrow(x.detach(), 4, 0, kEdge - 1) + 1);
    expect_equal(max_pool3d(x.detach(), options), y.detach());  // computes no indices
    EXPECT_EQ(indices.at<int64_t>({0, 0, kEdge - 1, kEdge - 1, kEdge - 2}), x.numel() - 1);
    EXPECT_EQ(indices.at<int64_t>({0, 0, kEdge - 1, 0, 0}), x.numel() - kEdge * kEdge + 1);
    const Tensor dx = grad({y}, {x}, {ones_like(y)})[0];
    Tensor expected = full({kEdge}, 1, {.device = device});
    expected.set({0}, 0);
    expect_equal(dx, reshape(expected, {1, 1, 1, 1, kEdge}));
  });
}

TEST_P(LargeTensors, SupportsAvgPool) {
  skip_if_out_of_memory([&] {
    const Tensor x = volume(kEdge).requires_grad_();
    const Tensor y = avg_pool3d(x, {.kernel_size = {1, 1, 2}, .stride = Triple(1)});
    expect_equal(y.detach(), narrow(x.detach(), 4, 0, kEdge - 1) + 0.5);
    const Tensor dx = grad({y}, {x}, {ones_like(y)})[0];
    Tensor expected = full({kEdge}, 1, {.device = device});
    expected.set({0}, 0.5);
    expected.set({kEdge - 1}, 0.5);
    expect_equal(dx, reshape(expected, {1, 1, 1, 1, kEdge}));
  });
}

TEST_P(LargeTensors, SupportsInterpolateNearest) {
  skip_if_out_of_memory([&] {
    const int64_t half = kEdge / 2;
    const Tensor x = volume(half).requires_grad_();
    const Tensor y = interpolate(x, {.scale_factor = 2});
    expect_equal(reshape(y.detach(), {half, 2, half, 2, half, 2}), reshape(x.detach(), {half, 1, half, 1, half, 1}));
    expect_equal(grad({y}, {x}, {ones_like(y)})[0], full({1}, 8, {.device = device}));
  });
}

TEST_P(LargeTensors, SupportsInterpolateTrilinear) {
  skip_if_out_of_memory([&] {
    // With align_corners, interpolation keeps a linear function linear. Upsample to more than 2^31 elements, then
    // downsample again.
    const int64_t half = kEdge / 2;
    const double step = static_cast<double>(half - 1) / static_cast<double>(kEdge - 1);
    const auto to = [](const Tensor& x, int64_t edge) {
      return interpolate(x, {.size = Triple(edge), .mode = InterpolateMode::trilinear, .align_corners = true});
    };
    const Tensor large = to(volume(half), kEdge);
    expect_close(large, volume(kEdge) * step, 1e-3);
    expect_close(to(large, half), volume(half), 1e-3);
  });
}

TEST_P(LargeTensors, SupportsIndexSelectAndScatterAdd) {
  skip_if_out_of_memory([&] {
    const Tensor x = matrix();
    for (const int64_t axis : {0, 1}) {
      const int64_t size = x.size(axis);
      const Tensor backwards = arange(static_cast<double>(size - 1), -1, -1, {.dtype = i64, .device = device});
      expect_equal(index_select(x, axis, backwards), flip(x, {axis}));
    }
    const Tensor backwards =
        expand(reshape(arange(kRows - 1, -1, -1, {.dtype = i64, .device = device}), {kRows, 1}), x.shape());
    expect_equal(scatter_add(x, 0, backwards, kRows), flip(x, {0}));
  });
}

TEST_P(LargeTensors, SupportsCat) {
  skip_if_out_of_memory([&] {
    const Tensor x = matrix();
    const int64_t upper = 40000, left = 11111;
    expect_equal(cat({narrow(x, 0, 0, upper), narrow(x, 0, upper, kRows - upper)}, 0), x);
    expect_equal(cat({narrow(x, 1, 0, left), narrow(x, 1, left, kColumns - left)}, 1), x);
  });
}

TEST_P(LargeTensors, PermutesAndConverts) {
  skip_if_out_of_memory([&] {
    const Tensor x = reshape(volume(kEdge) + ramp(kEdge, 4, 5), {kEdge, kEdge, kEdge});
    const Tensor turned = permute(x, {2, 0, 1}), copied = turned.contiguous();
    EXPECT_EQ(copied.at({kEdge - 1, kEdge - 2, kEdge - 3}), 4 * kEdge - 7);
    expect_equal(copied, turned);
    expect_equal(copied.to(i32).to(f32), turned);
  });
}

/// A convolution in bf16 whose input has more than 2^31 elements. The kernel is a cube with an odd edge, and the
/// padding keeps the size.
struct LargeConvolution {
  const char* kernels;  ///< part of the description of each pass
  int64_t out;          ///< channels of the result
  int64_t groups;
  int64_t edge;  ///< of the kernel
  MemoryFormat format = MemoryFormat::channels_last;
};

class CudaConvLargeTensors : public cudatest::OnGpu {
 protected:
  static constexpr int64_t kChannels = 64, kDepth = 336, kSize = 325;
  static constexpr int64_t kPlane = kChannels * kSize * kSize;  // elements of x
  static_assert(kDepth * kPlane > int64_t{1} << 31);
  // Slabs of kSlab planes. In a channels-last tensor, the second slab contains element 2^31. No plane is within two
  // planes of two slabs.
  static constexpr int64_t kSlab = 2, kBegins[] = {4, 316, 326};
  static_assert(316 * kPlane < int64_t{1} << 31 && 318 * kPlane > int64_t{1} << 31);

  /// Returns random integers from -4 to 4.
  static Tensor integers(const Shape& shape) {
    return (rand(shape, {.device = Device::cuda()}) * 9.0 - 4.5).to(i32).to(bf16);
  }
  static Tensor large(int64_t channels, MemoryFormat format) {
    return empty({1, channels, kDepth, kSize, kSize}, {.dtype = bf16, .device = Device::cuda()}, format);
  }
  /// Returns the slabs as samples of one tensor, each with `halo` more planes on both sides.
  static Tensor slabs(const Tensor& x, int64_t halo, MemoryFormat format) {
    Tensors parts;
    for (const int64_t begin : kBegins) parts.push_back(x.narrow(2, begin - halo, kSlab + 2 * halo));
    return cat(parts, 0).contiguous(format);
  }
  static void expect_equal_bits(const Tensor& got, const Tensor& expected, const char* pass) {
    ASSERT_EQ(got.shape(), expected.shape());
    EXPECT_EQ(amax(abs(got.to(f32) - expected.to(f32))).item(), 0) << pass;
    EXPECT_GT(amax(abs(expected.to(f32))).item(), 0) << pass;
  }

  void check(const LargeConvolution& c) {
    const int64_t halo = c.edge / 2;
    const Tensor w = integers({c.out, kChannels / c.groups, c.edge, c.edge, c.edge}).contiguous(c.format);
    const Tensor x = large(kChannels, c.format), y = large(c.out, c.format);
    for (int64_t plane = 0; plane < kDepth; ++plane)
      x.narrow(2, plane, 1).copy_(integers({1, kChannels, 1, kSize, kSize}));
    // Only the slabs of y are not zero, so that each sum has few terms and is exact in float.
    y.fill_(0);
    for (const int64_t begin : kBegins) y.narrow(2, begin, kSlab).copy_(integers({1, c.out, kSlab, kSize, kSize}));
    const ConvGeometry geometry{{1}, {halo}, {1}, c.groups}, of_slabs{{1}, {0, halo, halo}, {1}, c.groups};

    const Kernels& k = cuda_kernels();
    const Tensor small_x = slabs(x, halo, c.format), small_y = slabs(y, 0, c.format);
    const Tensor small_out = empty_like(small_y), small_dx = empty_like(small_x), small_dw = empty_like(w);
    k.conv_forward(small_out.view_out(), small_x.view_in(), w.view_in(), nullptr, of_slabs);
    k.conv_backward_data(small_dx.view_out(), small_y.view_in(), w.view_in(), nullptr, of_slabs);
    k.conv_backward_weight(small_dw.view_out(), small_x.view_in(), small_y.view_in(), of_slabs);
    {
      const Tensor out = empty_like(y);
      k.conv_forward(out.view_out(), x.view_in(), w.view_in(), nullptr, geometry);
      expect_equal_bits(slabs(out, 0, c.format), small_out, "forward");
    }
    {
      const Tensor dw = empty_like(w);
      k.conv_backward_weight(dw.view_out(), x.view_in(), y.view_in(), geometry);
      expect_equal_bits(dw, small_dw, "weight gradient");
    }
    const Tensor dx = empty_like(x);
    k.conv_backward_data(dx.view_out(), y.view_in(), w.view_in(), nullptr, geometry);
    expect_equal_bits(slabs(dx, halo, c.format), small_dx, "data gradient");
  }
};

/// Compares three slabs of planes with a convolution of these slabs alone. Needs about 15 GB.
TEST_F(CudaConvLargeTensors, HaveTheResultsOfTheirParts) {
  if (!cuda::has_wgmma(0)) GTEST_SKIP() << "the GPU has no wgmma";
  NoGradGuard no_grad;
  manual_seed(cudatest::kFirstSeed);
  const LargeConvolution convolutions[] = {{"by wgmma", 64, 1, 1},
                                           {"by wgmma", 16, 1, 3},
                                           {"depthwise", 64, 64, 5},
                                           {"pointwise", 3, 1, 1},
                                           {"pointwise of contiguous tensors", 3, 1, 1, MemoryFormat::contiguous}};
  for (const LargeConvolution& c : convolutions) {
    SCOPED_TRACE(concat(c.kernels, ", ", c.out, " channels of results"));
    const std::string text = explain_conv3d(
        {1, kChannels, kDepth, kSize, kSize}, {c.out, kChannels / c.groups, c.edge, c.edge, c.edge},
        {.padding = c.edge / 2, .groups = c.groups}, {.dtype = bf16, .device = Device::cuda()}, c.format);
    int passes = 0;
    for (size_t at = text.find(c.kernels); at != std::string::npos; at = text.find(c.kernels, at + 1)) ++passes;
    EXPECT_EQ(passes, 3) << text;
    try {
      check(c);
    } catch (const OutOfMemoryError& error) {
      GTEST_SKIP() << error.what();
    }
    memory::empty_cache(Device::cuda());
  }
}

INSTANTIATE_TEST_SUITE_P(On, LargeTensors, testing::Values(Device::cpu(), Device::cuda()),
                         [](const auto& test) { return test.param.is_cuda() ? "CUDA" : "CPU"; });

}  // namespace
}  // namespace voxgrad
