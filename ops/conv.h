// Convolutions and transposed convolutions over one, two and three spatial axes.
//
// The following holds for all functions in this file:
// - Dtypes: f32, f64, bf16 and f16. All operands must have the same dtype and device. Products of bf16 or f16 elements
//   are exact, their sums are computed in float32, and the result is rounded once. On GPUs, the accuracy of f32 depends
//   on set_float32_precision() (core/precision.h).
// - If the input has no batch axis, the result has no batch axis either.
// - The result is channels-last if the input or the weight is channels-last; otherwise, it is contiguous.
// - The functions can be differentiated any number of times with respect to the input, the weight and the bias.
// - The functions throw Error if the operands do not match (number of axes, channels, groups, dtype, device), if an
//   axis other than the batch is empty, or if an option is out of range (stride, dilation and padding must be below
//   2^31). They also throw Error if the result has no voxels or if its number of elements does not fit in 64 bits.
// - A tensor may have more than 2^31 elements. The CUDA kernels throw Error if the positions along an axis, including
//   stride, dilation and padding, reach 2^30, or if one channel has 2^31 or more weights.
// - The CPU kernels use less than 64 MB of workspace. For bf16 and f16, they also use float32 copies of the operands.
#pragma once

#include <optional>
#include <string>

#include "../core/tensor.h"

namespace voxgrad {

/// Options of a convolution with N spatial axes, with the names and defaults of PyTorch. One integer applies to all
/// axes: .stride = 2 is the same as .stride = {2, 2, 2}.
template <int N>
struct ConvOptions {
  Extent<N> stride{1};
  Extent<N> padding{0};
  Extent<N> dilation{1};
  int64_t groups = 1;

  /// Throws Error if an option is invalid for every input. The message begins with `op`. The functions below call
  /// validate first.
  void validate(const char* op) const;
};

/// Options of a transposed convolution with N spatial axes.
template <int N>
struct ConvTransposeOptions {
  Extent<N> stride{1};
  Extent<N> padding{0};
  Extent<N> output_padding{0};
  int64_t groups = 1;
  Extent<N> dilation{1};
  /// Spatial size of the result. If output_size is given, output_padding is ignored.
  std::optional<Extent<N>> output_size{};

  /// See ConvOptions::validate.
  void validate(const char* op) const;
};

/// Computes a convolution (a cross-correlation, as in PyTorch) of x (N, Cin, D, H, W) with weight
/// (Cout, Cin / groups, kD, kH, kW), plus bias (Cout) if defined. Returns (N, Cout, D', H', W') with
/// D' = (D + 2 padding - dilation (kD - 1) - 1) / stride + 1, rounded down; H' and W' follow the same formula.
/// conv2d takes x (N, Cin, H, W) and conv1d takes x (N, Cin, L).
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<3>& options = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<2>& options = {});
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<1>& options = {});

/// Computes a transposed convolution of x (N, Cin, D, H, W) with weight (Cin, Cout / groups, kD, kH, kW), plus bias
/// (Cout) if defined. A transposed convolution is the gradient of a convolution with respect to its input. Returns
/// (N, Cout, D', H', W') with D' = (D - 1) stride - 2 padding + dilation (kD - 1) + output_padding + 1; H' and W'
/// follow the same formula. Also throws Error if output_padding is at least as large as both stride and dilation, or if
/// output_size is out of range; in the second case, the message lists the possible sizes.
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<3>& options = {});
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<2>& options = {});
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<1>& options = {});

/// Return a text that describes how conv3d or conv_transpose3d would be computed for tensors of these shapes, dtype,
/// device and memory format. The first line contains the number of floating-point operations (two for each product;
/// products with padding are not counted) and the total size of the operands and the result in bytes. Each of the next
/// lines describes the kernel of the forward pass or of a gradient: its arithmetic, tiles and workspace. For GPUs, each
/// of these lines also contains an estimate of the shortest possible time on the GPU of `kind`, or on an H200 if this
/// GPU does not exist. The functions compute no convolution and require no GPU.
std::string explain_conv3d(const Shape& x, const Shape& weight, const ConvOptions<3>& options = {},
                           const TensorOptions& kind = {}, MemoryFormat format = MemoryFormat::contiguous);
std::string explain_conv_transpose3d(const Shape& x, const Shape& weight, const ConvTransposeOptions<3>& options = {},
                                     const TensorOptions& kind = {}, MemoryFormat format = MemoryFormat::contiguous);

}  // namespace voxgrad
