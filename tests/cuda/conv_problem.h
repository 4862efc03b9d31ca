// Convolution problems for tests of the CUDA kernels.
#pragma once

#include "core/precision.h"
#include "cuda/conv/plan/problem.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {

/// The sizes of a convolution: x (batch, groups * in, ...), w (groups * out, in, ...), y (batch, groups * out, ...).
/// `in` and `out` are the channels of one group. Tables of problems have the columns
/// {batch, in, out, x_size, kernel, {stride, padding, dilation, groups}}.
struct Problem {
  int64_t batch;
  int64_t in;
  int64_t out;
  Triple x_size;
  Triple kernel;
  Triple y_size{1};
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

/// Returns the problem of a pass of a convolution of dense channels-last tensors, with float32 as TF32.
inline cuda::ConvProblem dense_problem(ConvPass pass, const Problem& p, DType dtype = DType::bf16) {
  const auto strides = [](const Triple& size, int64_t channels) {
    return Triple{size[1] * size[2] * channels, size[2] * channels, channels};
  };
  const bool dgrad = pass == ConvPass::dgrad;
  return {.pass = pass,
          .dtype = dtype,
          .precision = Float32Precision::high,
          .batch = p.batch,
          .groups = p.geometry.groups,
          .in_channels = dgrad ? p.out : p.in,
          .out_channels = dgrad ? p.in : p.out,
          .in_size = dgrad ? p.y_size : p.x_size,
          .out_size = dgrad ? p.x_size : p.y_size,
          .kernel = p.kernel,
          .geometry = p.geometry,
          .in_stride = dgrad ? strides(p.y_size, p.out) : strides(p.x_size, p.in),
          .out_stride = dgrad ? strides(p.x_size, p.in) : strides(p.y_size, p.out),
          .in_channels_last = true,
          .out_channels_last = true,
          .in_dense = true,
          .out_dense = true};
}
inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "x " << p.x_shape() << ", w " << p.w_shape() << ", y " << p.y_shape() << ", stride "
             << p.geometry.stride << ", padding " << p.geometry.padding << ", dilation " << p.geometry.dilation
             << ", groups " << p.geometry.groups;
}

/// Returns a random problem that is small enough for tests with hundreds of problems.
inline Problem random_problem(Random& random) {
  const auto channels = [&] {
    constexpr int64_t kSome[] = {1, 2, 3, 5, 7, 8, 9, 24, 33, 65, 130};
    return kSome[random.integer(0, 10)];
  };
  while (true) {
    ConvGeometry geometry;
    Triple x{1}, kernel{1};
    for (int a = 0; a < 3; ++a) {
      do {
        x[a] = random.integer(1, 20);
        kernel[a] = random.integer(1, 7);
        geometry.stride[a] = random.chance(0.1) ? random.integer(5, 9) : random.integer(1, 4);
        geometry.padding[a] = random.integer(0, 6);
        geometry.dilation[a] = random.integer(1, 3);
      } while (x[a] + 2 * geometry.padding[a] < geometry.dilation[a] * (kernel[a] - 1) + 1);
    }
    geometry.groups = random.chance(0.5) ? 1 : random.integer(2, 4);
    const bool depthwise = random.chance(0.2);
    const Problem p(random.integer(1, 2), depthwise ? 1 : channels(), depthwise ? 1 : channels(), x, kernel, geometry);
    if (numel(p.x_shape()) > 300000 || numel(p.y_shape()) > 300000) continue;
    double products = static_cast<double>(p.batch * geometry.groups * p.in * p.out);
    for (int a = 0; a < 3; ++a) products *= static_cast<double>(kernel[a] * p.y_size[a]);
    if (products < 5e7) return p;
  }
}

/// An element type and a float32 precision, which determine the arithmetic of the tensor cores.
struct Mode {
  DType dtype;
  Float32Precision precision;

  cuda::ConvArithmetic arithmetic() const {
    return arithmetic_of(cuda::ConvProblem{.dtype = dtype, .precision = precision});
  }
};
inline constexpr Mode kModes[] = {{DType::f32, Float32Precision::highest},
                                  {DType::f32, Float32Precision::high},
                                  {DType::bf16, Float32Precision::highest},
                                  {DType::f16, Float32Precision::highest}};

inline std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << mode.dtype << (mode.precision == Float32Precision::high ? ", high" : ", highest");
}

/// Sets the float32 precision and overrides the choices of the planner for the lifetime of the object.
class ScopedSetting {
 public:
  explicit ScopedSetting(Float32Precision precision, cuda::ConvChoice choice = {}) {
    set_float32_precision(precision);
    cuda::force_conv_choice(choice);
  }
  ~ScopedSetting() {
    set_float32_precision(Float32Precision::highest);
    cuda::force_conv_choice({});
  }
  ScopedSetting(const ScopedSetting&) = delete;
  ScopedSetting& operator=(const ScopedSetting&) = delete;
};

}  // namespace voxgrad::cudatest
