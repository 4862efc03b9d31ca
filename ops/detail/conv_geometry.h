// The geometry of convolutions, one axis at a time: output sizes for the operators, and the gather form from which the
// CPU kernels work. (The CUDA kernels work from the first formula below.)
//
// Along an axis a convolution ties position i of x, position o of y and tap k together where
//   i + padding = o * stride + k * dilation.
// conv_forward writes the o and reads the i; conv_backward_data (conv_transpose) writes the i and reads the o.
// Seen from what is written, both are the same thing: a few phases, in each of which evenly spaced outputs read
// evenly spaced inputs, tap by tap. A forward convolution has one phase. A transposed one has one for each
// residue of (i + padding) modulo the stride that meets a tap; with g = gcd(stride, dilation), a residue that g does
// not divide meets none, and any other can meet every (stride / g)-th one and steps by dilation / g. Each tap belongs
// to exactly one phase: no multiplication is wasted.
#pragma once

#include <cstdint>
#include <vector>

namespace voxgrad {

/// Positions of y for x of `size` positions: (size + 2 padding - dilation (kernel - 1) - 1) / stride + 1, rounded down;
/// zero or negative where the kernel does not fit. Throws Error when the result does not fit 64 bits.
int64_t conv_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation);

/// (size - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1; may be zero or negative.
/// Throws Error when the result does not fit 64 bits.
int64_t conv_transpose_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                                   int64_t output_padding, int64_t dilation);

/// One axis of a convolution: `x_size` positions i, `y_size` positions o, `kernel` taps.
struct ConvAxis {
  int64_t x_size = 1;
  int64_t y_size = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
};

/// Tap `index` of the kernel: output number q of its phase reads input q * in_step + offset.
struct ConvTap {
  int64_t index = 0;
  int64_t offset = 0;
};

/// Outputs first + q * out_step for q in [0, count), and the taps that they meet, in order of their index.
struct ConvPhase {
  int64_t first = 0;
  int64_t count = 0;
  std::vector<ConvTap> taps;
};

/// How the outputs of one axis are gathered from its inputs. No output belongs to two phases, and every phase has
/// outputs and taps: there are never more of them than taps, however large the stride. Outputs of no phase are empty
/// sums.
struct ConvGather {
  int64_t in_size = 0;
  int64_t out_size = 0;
  int64_t in_step = 1;
  int64_t out_step = 1;
  std::vector<ConvPhase> phases;

  /// The largest count of a phase.
  int64_t steps() const;
  /// Whether every output belongs to a phase.
  bool covers_all() const;
};

/// y from x: one phase, in_step = stride.
ConvGather gather_forward(const ConvAxis& axis);

/// x from y: a phase for each residue modulo the stride that meets a tap, out_step = stride.
ConvGather gather_transposed(const ConvAxis& axis);

/// How many (i, o, tap) there are: the products along the axis.
int64_t conv_meetings(const ConvAxis& axis);

struct View;
struct ConvGeometry;
/// The useful ones of a convolution, or of either of its gradients: 2 for each product.
double conv_flop(const View& x, const View& w, const View& y, const ConvGeometry& geometry);

/// The q in [begin, end), within [0, count), whose inputs q * in_step + offset lie in [0, in_size); empty (begin ==
/// end) if there are none.
struct ConvRange {
  int64_t begin = 0;
  int64_t end = 0;
};
ConvRange tap_range(const ConvGather& gather, const ConvPhase& phase, const ConvTap& tap);

}  // namespace voxgrad
