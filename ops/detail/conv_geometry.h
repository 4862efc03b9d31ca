// The geometry of convolutions along one axis: output sizes for the operators, and the gather form, which is a division
// of the outputs for the CPU kernels. (The CUDA kernels use the formula below directly.)
//
// Along an axis, a convolution multiplies position i of x with tap k and adds the product to position o of y if
//   i + padding = o * stride + k * dilation.
// conv_forward writes y and reads x; conv_backward_data (conv_transpose) writes x and reads y. Both kernels use the
// same gather form: the outputs are divided into phases. A phase consists of evenly spaced outputs, which read evenly
// spaced inputs for each tap. A forward convolution has one phase. A transposed convolution has one phase for each
// residue of i + padding modulo the stride, if the residue has taps. With g = gcd(stride, dilation), a residue that g
// does not divide has no taps. Any other residue has every (stride / g)-th tap. From one of these taps to the next, the
// index of the input changes by dilation / g. Each tap belongs to exactly one phase, so that no multiplication is
// wasted.
#pragma once

#include <cstdint>
#include <vector>

namespace voxgrad {

/// Returns the number of outputs for `size` inputs:
/// (size + 2 padding - dilation (kernel - 1) - 1) / stride + 1, rounded down. The result is zero or negative if the
/// kernel does not fit. Throws Error if the result does not fit in 64 bits.
int64_t conv_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation);

/// Returns the number of outputs of a transposed convolution for `size` inputs:
/// (size - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1, which may be zero or negative.
/// Throws Error if the result does not fit in 64 bits.
int64_t conv_transpose_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                                   int64_t output_padding, int64_t dilation);

/// One axis of a convolution with `x_size` positions i, `y_size` positions o and `kernel` taps.
struct ConvAxis {
  int64_t x_size = 1;
  int64_t y_size = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
};

/// Tap `index` of the kernel. For this tap, output number q of the phase reads input q * in_step + offset.
struct ConvTap {
  int64_t index = 0;
  int64_t offset = 0;
};

/// The outputs first + q * out_step for q in [0, count), and the taps that they use, in order of their index.
struct ConvPhase {
  int64_t first = 0;
  int64_t count = 0;
  std::vector<ConvTap> taps;
};

/// The gather form of one axis. An output belongs to at most one phase; an output without a phase is 0, an empty sum.
/// Every phase has outputs and taps, so the number of phases is at most the number of taps, even with a large stride.
struct ConvGather {
  int64_t in_size = 0;
  int64_t out_size = 0;
  int64_t in_step = 1;
  int64_t out_step = 1;
  std::vector<ConvPhase> phases;

  /// Returns the largest `count` of a phase.
  int64_t steps() const;
  /// Returns true if every output belongs to a phase.
  bool covers_all() const;
};

/// Returns the gather form that computes y from x: one phase, with in_step = stride.
ConvGather gather_forward(const ConvAxis& axis);

/// Returns the gather form that computes x from y: one phase for each residue modulo the stride that has taps, with
/// out_step = stride.
ConvGather gather_transposed(const ConvAxis& axis);

struct View;
struct ConvGeometry;
/// Returns spatial axis `axis` (0, 1 or 2) of the convolution of x with the weight `w`, whose result is y.
ConvAxis conv_axis(const View& x, const View& w, const View& y, const ConvGeometry& geometry, int axis);

/// Returns the floating-point operations of a convolution or of either of its gradients: two for each product. Products
/// with padding are not counted.
double conv_flop(const View& x, const View& w, const View& y, const ConvGeometry& geometry);

/// The integers [begin, end).
struct ConvRange {
  int64_t begin = 0;
  int64_t end = 0;
};
/// Returns the range of all q in [0, phase.count) for which the input q * in_step + tap.offset is in [0, in_size), or
/// {0, 0} if there are none.
ConvRange tap_range(const ConvGather& gather, const ConvPhase& phase, const ConvTap& tap);

}  // namespace voxgrad
