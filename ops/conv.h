// Convolutions: forward convolution, its transpose, and the weight gradient: a family that is closed under
// differentiation.
//
// For all functions here:
// - f32, f64, bf16 and f16, one dtype and one device for all operands. Halves are multiplied exactly, summed in float32
//   and rounded once. On GPUs f32 is as accurate as set_float32_precision() (core/precision.h) asks for.
// - The input may lack its batch axis; the result then does.
// - The result is contiguous, or channels-last where the input is.
// - Gradients in the input, the weight and the bias, of any order.
// - They throw Error for operands that do not fit (rank, channels, groups, dtype, device), for an empty axis other than
//   the batch, for options out of range (stride, dilation and padding end below 2^31), and for a result without voxels
//   or beyond 64 bits.
// - A tensor may have more than 2^31 elements. The CUDA kernels refuse, with an Error, axes that with padding, stride
//   and dilation reach beyond 2^30 positions, and 2^31 or more weights for one channel.
// - Beside the operands the CPU takes less than 64 MB; for halves also float32 copies of the operands.
#pragma once

#include <optional>
#include <string>

#include "../core/tensor.h"

namespace voxgrad {

/// Defaults as in PyTorch; one int stands for all axes.
template <int N>
struct ConvOptions {
  Extent<N> stride{1};
  Extent<N> padding{0};
  Extent<N> dilation{1};
  int64_t groups = 1;

  /// Throws Error, with `op` in front, for what fits no input. The functions below do this first.
  void validate(const char* op) const;
};

template <int N>
struct ConvTransposeOptions {
  Extent<N> stride{1};
  Extent<N> padding{0};
  Extent<N> output_padding{0};
  int64_t groups = 1;
  Extent<N> dilation{1};
  /// Spatial size of the result; chooses output_padding. The sizes that can be had are named by the error.
  std::optional<Extent<N>> output_size{};

  /// As ConvOptions'.
  void validate(const char* op) const;
};

/// Cross-correlation. x (N, Cin, D, H, W), weight (Cout, Cin / groups, kD, kH, kW), bias (Cout) or undefined;
/// result (N, Cout, D', H', W') with D' = (D + 2 padding - dilation (kD - 1) - 1) / stride + 1, rounded down.
/// conv2d and conv1d: the same without D, and without D and H.
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<3>& options = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<2>& options = {});
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<1>& options = {});

/// Transposed convolution: the gradient of conv3d in its input. x (N, Cin, D, H, W),
/// weight (Cin, Cout / groups, kD, kH, kW), bias (Cout) or undefined; result (N, Cout, D', H', W') with
/// D' = (D - 1) stride - 2 padding + dilation (kD - 1) + output_padding + 1.
/// Throws also if output_padding is not smaller than stride or dilation, or if output_size cannot be had.
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<3>& options = {});
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<2>& options = {});
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<1>& options = {});

/// What conv3d and conv_transpose3d would run for tensors of these shapes, dtype, device and memory format, forward
/// and for both gradients, in words: the kernels with their arithmetic, tiles and workspace; the FLOP (two for each
/// product of elements that exist) and bytes (each operand and the result once); on GPUs the least time in which an
/// H200 could do them. Nothing is run, and no GPU is needed.
std::string explain_conv3d(const Shape& x, const Shape& weight, const ConvOptions<3>& options = {},
                           const TensorOptions& kind = {}, MemoryFormat format = MemoryFormat::contiguous);
std::string explain_conv_transpose3d(const Shape& x, const Shape& weight, const ConvTransposeOptions<3>& options = {},
                                     const TensorOptions& kind = {}, MemoryFormat format = MemoryFormat::contiguous);

}  // namespace voxgrad
