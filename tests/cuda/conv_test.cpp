// The CUDA convolutions against the CPU's, through the kernel table: every parameter, any strides, poisoned results
// between guard bands.
#include <limits>

#include "core/autograd.h"
#include "core/precision.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using CudaConv = OnGpu;

/// The sizes of a convolution: x (batch, groups * in, ...), w (groups * out, in, ...), y (batch, groups * out, ...).
struct Problem {
  int64_t batch, in, out;
  Triple x_size, kernel, y_size{1};
  ConvGeometry geometry;

  Problem(int64_t batch_, int64_t in_, int64_t out_, Triple x, Triple k, ConvGeometry g)
      : batch(batch_), in(in_), out(out_), x_size(x), kernel(k), geometry(g) {
    for (int a = 0; a < 3; ++a)
      y_size[a] = (x[a] + 2 * g.padding[a] - g.dilation[a] * (k[a] - 1) - 1) / g.stride[a] + 1;
  }
  Shape x_shape() const { return {batch, geometry.groups * in, x_size[0], x_size[1], x_size[2]}; }
  Shape y_shape() const { return {batch, geometry.groups * out, y_size[0], y_size[1], y_size[2]}; }
  Shape w_shape() const { return {geometry.groups * out, in, kernel[0], kernel[1], kernel[2]}; }
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "x " << p.x_shape() << ", w " << p.w_shape() << ", y " << p.y_shape() << ", stride "
             << p.geometry.stride << ", padding " << p.geometry.padding << ", dilation " << p.geometry.dilation
             << ", groups " << p.geometry.groups;
}

Problem random_problem(Random& random) {
  const auto channels = [&] {
    constexpr int64_t kSome[] = {1, 2, 3, 5, 7, 8, 9, 24, 33, 65};
    return kSome[random.integer(0, 9)];
  };
  ConvGeometry geometry;
  Triple x{1}, kernel{1};
  for (int a = 0; a < 3; ++a) {
    do {
      x[a] = random.integer(1, 13);
      kernel[a] = random.integer(1, 5);
      geometry.stride[a] = random.chance(0.1) ? random.integer(5, 9) : random.integer(1, 4);
      geometry.padding[a] = random.integer(0, 6);
      geometry.dilation[a] = random.integer(1, 3);
    } while (x[a] + 2 * geometry.padding[a] < geometry.dilation[a] * (kernel[a] - 1) + 1);
  }
  geometry.groups = random.chance(0.5) ? 1 : random.integer(2, 4);
  const bool depthwise = random.chance(0.2);
  return {random.integer(1, 2), depthwise ? 1 : channels(), depthwise ? 1 : channels(), x, kernel, geometry};
}

/// Runs the three kernels on both devices and compares. Whole numbers make every sum exact, in any order.
void compare(const Problem& p, DType dtype, Random& random) {
  RandomView x(dtype, p.x_shape(), any_layout(random, true), random),
      y(dtype, p.y_shape(), any_layout(random, true), random);
  RandomView w(dtype, p.w_shape(), any_layout(random, true), random);
  RandomView dx(dtype, p.x_shape(), any_layout(random, false), random),
      out(dtype, p.y_shape(), any_layout(random, false), random);
  RandomView dw(dtype, p.w_shape(), any_layout(random, false), random);
  RandomView x_bias(dtype, {p.x_shape()[1]}, Layout::spaced, random),
      y_bias(dtype, {p.y_shape()[1]}, Layout::spaced, random);
  for (RandomView* input : {&x, &y, &w, &x_bias, &y_bias}) input->fill(random, -8, 8);
  for (RandomView* output : {&dx, &out, &dw}) output->poison();
  const bool biased = random.chance(0.5);
  for (const Device device : {Device::cpu(), Device::cuda()}) {
    const View x_bias_view = x_bias.on(device), y_bias_view = y_bias.on(device);
    const Kernels& k = kernels(device);
    k.conv_forward(out.on(device), x.on(device), w.on(device), biased ? &y_bias_view : nullptr, p.geometry);
    k.conv_backward_data(dx.on(device), y.on(device), w.on(device), biased ? &x_bias_view : nullptr, p.geometry);
    k.conv_backward_weight(dw.on(device), x.on(device), y.on(device), p.geometry);
  }
  EXPECT_TRUE(out.same(0)) << "forward";
  EXPECT_TRUE(dx.same(0)) << "data gradient";
  EXPECT_TRUE(dw.same(0)) << "weight gradient";
}

TEST_F(CudaConv, IsExactOnWholeNumbers) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 400 && !HasFailure(); ++seed) {
    Random random(seed);
    const Problem problem = random_problem(random);
    const bool high = random.chance(0.5);
    SCOPED_TRACE(concat("seed ", seed, high ? ", high: " : ", highest: ", problem));
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    compare(problem, seed % 6 ? f32 : f64, random);
  }
  set_float32_precision(Float32Precision::highest);
}

TEST_F(CudaConv, IsExactInCornerCases) {
  const ConvGeometry plain;
  const Problem problems[] = {
      {1, 1, 1, {1, 1, 1}, {1, 1, 1}, plain},
      {0, 3, 4, {5, 5, 5}, {3, 3, 3}, plain},                                     // no samples
      {2, 3, 4, {1, 1, 4099}, {1, 1, 5}, {{1, 1, 2}, {0, 0, 2}, {1, 1, 1}, 1}},   // one axis
      {1, 2, 2, {1, 7, 1}, {1, 7, 1}, {{9, 9, 9}, {0, 0, 0}, {1, 1, 1}, 2}},      // stride above everything
      {1, 4, 4, {9, 9, 9}, {3, 3, 3}, {{2, 2, 2}, {2, 2, 2}, {2, 2, 2}, 1}},      // one phase of eight has taps
      {1, 2, 3, {6, 6, 6}, {2, 2, 2}, {{4, 4, 4}, {3, 3, 3}, {1, 1, 1}, 1}},      // phases without a tap
      {1, 1, 1, {30, 30, 30}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 24}},  // depthwise, ranges of voxels
      {1, 3, 70, {17, 16, 15}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}},
  };
  Random random(kFirstSeed);
  for (const Problem& problem : problems) {
    SCOPED_TRACE(concat(problem));
    for (const DType dtype : {f32, f64}) compare(problem, dtype, random);
  }
}

/// Largest error of `got` over the largest value of `expected`.
double relative_error(const Tensor& got, const Tensor& expected) {
  const auto a = got.to_vector<double>(), b = expected.to_vector<double>();
  double error = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::max(error, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  return error / scale;
}

TEST_F(CudaConv, KeepsFloat32Accuracy) {
  NoGradGuard no_grad;
  for (const bool positive : {false, true}) {
    SCOPED_TRACE(positive ? "all positive" : "both signs");
    const auto values = [&](const Shape& shape) {
      const Tensor t = rand(shape);
      return positive ? t : affine(t, 2, -1);
    };
    const Problem p(1, 74, 40, {20, 20, 20}, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1});
    const Tensor x = values(p.x_shape()), w = values(p.w_shape()), y = values(p.y_shape());
    const auto run = [&](Device device, DType dtype) {
      const Tensor xs = x.to(device, dtype), ws = w.to(device, dtype), ys = y.to(device, dtype);
      Tensors results{empty_like(ys), empty_like(xs), empty_like(ws)};
      const Kernels& k = kernels(device);
      k.conv_forward(results[0].view_out(), xs.view_in(), ws.view_in(), nullptr, p.geometry);
      k.conv_backward_data(results[1].view_out(), ys.view_in(), ws.view_in(), nullptr, p.geometry);
      k.conv_backward_weight(results[2].view_out(), xs.view_in(), ys.view_in(), p.geometry);
      return results;
    };
    const Tensors exact = run(Device::cpu(), f64), got = run(Device::cuda(), f32);
    EXPECT_LE(relative_error(got[0], exact[0]), 1e-6) << "forward";
    EXPECT_LE(relative_error(got[1], exact[1]), 1e-6) << "data gradient";
    EXPECT_LE(relative_error(got[2], exact[2]), 1e-6) << "weight gradient";
  }
}

TEST_F(CudaConv, GivesTheSameBitsEveryTime) {
  const Problem p(2, 12, 20, {23, 22, 21}, {4, 4, 4}, {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, 1});
  const Device gpu = Device::cuda();
  const Tensor x = randn(p.x_shape()).to(gpu), w = randn(p.w_shape()).to(gpu), y = randn(p.y_shape()).to(gpu);
  std::vector<std::vector<float>> first;
  for (int run = 0; run < 20; ++run) {
    const Tensors results{empty_like(y), empty_like(x), empty_like(w)};
    cuda_kernels().conv_forward(results[0].view_out(), x.view_in(), w.view_in(), nullptr, p.geometry);
    cuda_kernels().conv_backward_data(results[1].view_out(), y.view_in(), w.view_in(), nullptr, p.geometry);
    cuda_kernels().conv_backward_weight(results[2].view_out(), x.view_in(), y.view_in(), p.geometry);
    for (size_t i = 0; i < 3; ++i) {
      const auto values = results[i].to_vector<float>();
      if (run == 0) first.push_back(values);
      ASSERT_EQ(values, first[i]) << "run " << run << ", result " << i;
    }
  }
}

/// With stride and kernel 2, planes 2i and 2i + 1 of the large side belong to plane i of the small one, so a few
/// planes can be checked by themselves.
TEST_F(CudaConv, GoesBeyondTwoToThe31Elements) {
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
      EXPECT_EQ(difference(up.narrow(2, 2 * plane, 2), part), 0) << "conv_transpose3d, plane " << plane;
      EXPECT_EQ(difference(down.narrow(2, plane, 1), conv3d(part, w, {}, {.stride = 2})), 0)
          << "conv3d, plane " << plane;
    }
    up.fill_(1);
    const Tensor dw = empty_like(w);
    cuda_kernels().conv_backward_weight(dw.view_out(), up.view_in(), x.view_in(), {{2}, {0}, {1}, 1});
    const double total = sum(x.to(f64)).item();
    for (const double value : dw.to_vector<double>()) EXPECT_NEAR(value / total, 1, 1e-6);
  } catch (const OutOfMemoryError& error) {
    GTEST_SKIP() << "not enough memory for 2^31 elements: " << error.what();
  }
}

}  // namespace
}  // namespace voxgrad::cudatest
