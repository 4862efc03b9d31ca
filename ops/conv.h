// Convolutions: forward convolution, its transpose, and the weight gradient: a family that is closed
// under differentiation.
#pragma once

#include <optional>

#include "core/tensor.h"

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
/// result (N, Cout, D', H', W') with D' = (D + 2 padding - dilation (kD - 1) - 1) / stride + 1.
/// f32 and f64. Throws Error for wrong ranks, channels, groups, dtypes, devices, or an empty result.
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<3>& options = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<2>& options = {});
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions<1>& options = {});

/// Transposed convolution: the gradient of conv3d in its input. x (N, Cin, D, H, W),
/// weight (Cin, Cout / groups, kD, kH, kW), bias (Cout) or undefined; result (N, Cout, D', H', W') with
/// D' = (D - 1) stride - 2 padding + dilation (kD - 1) + output_padding + 1.
/// Throws as conv3d, and if output_padding is not smaller than stride or dilation.
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<3>& options = {});
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<2>& options = {});
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions<1>& options = {});

}  // namespace voxgrad
