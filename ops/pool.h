// Maximum and average pooling of signals, images and volumes.
//
// The 3-D functions take x (N, C, D, H, W) or (C, D, H, W), the 2-D functions (N, C, H, W) or (C, H, W), and the 1-D
// functions (N, C, L) or (C, L). The result has the same axes, dtype and memory format as x, and x must have a floating
// dtype. All functions throw Error if an axis other than the batch is empty, if an option is invalid, or if the result
// has no voxels.
#pragma once

#include <optional>

#include "../core/tensor.h"
#include "interpolate.h"

namespace voxgrad {

/// Options of maximum pooling with N spatial axes, with the names and defaults of PyTorch.
template <int N>
struct MaxPoolOptions {
  Extent<N> kernel_size{1};
  std::optional<Extent<N>> stride{};  ///< default: kernel_size
  Extent<N> padding{0};               ///< padding on both sides of each axis, at most half of kernel_size
  Extent<N> dilation{1};
  bool ceil_mode = false;  ///< rounds the size of the result up instead of down

  /// Prefix of the name of the layer that uses these options: "MaxPool" for nn::MaxPool3d.
  static constexpr const char* kLayer = "MaxPool";
  /// Throws Error if an option is invalid for every input. The message begins with `op`. The functions below call
  /// validate first.
  void validate(const char* op) const;
};

/// Options of average pooling with N spatial axes, with the names and defaults of PyTorch.
template <int N>
struct AvgPoolOptions {
  Extent<N> kernel_size{1};
  std::optional<Extent<N>> stride{};          ///< default: kernel_size
  Extent<N> padding{0};                       ///< padding on both sides of each axis, at most half of kernel_size
  bool ceil_mode = false;                     ///< rounds the size of the result up instead of down
  bool count_include_pad = true;              ///< counts the padding in the divisor
  std::optional<int64_t> divisor_override{};  ///< divisor of the sums; default: the number of elements of the window

  static constexpr const char* kLayer = "AvgPool";
  /// See MaxPoolOptions::validate.
  void validate(const char* op) const;
};

/// Return the maximum of each window. The size of the result is
/// D' = (D + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1, rounded down, or up in ceil_mode.
/// If a window contains NaN, its maximum is NaN.
Tensor max_pool3d(const Tensor& x, const MaxPoolOptions<3>& options);
Tensor max_pool2d(const Tensor& x, const MaxPoolOptions<2>& options);
Tensor max_pool1d(const Tensor& x, const MaxPoolOptions<1>& options);
/// The result of maximum pooling with the positions of the maxima.
struct MaxPoolResult {
  Tensor output;
  Tensor indices;  ///< i64, in the shape of output: positions of the maxima in the flattened axes D * H * W
};
/// Like max_pool3d, but also return the index of the first maximum of each window.
MaxPoolResult max_pool3d_with_indices(const Tensor& x, const MaxPoolOptions<3>& options);
MaxPoolResult max_pool2d_with_indices(const Tensor& x, const MaxPoolOptions<2>& options);
MaxPoolResult max_pool1d_with_indices(const Tensor& x, const MaxPoolOptions<1>& options);
/// Return the mean of each window. The size of the result is that of max_pool3d with dilation 1.
Tensor avg_pool3d(const Tensor& x, const AvgPoolOptions<3>& options);
Tensor avg_pool2d(const Tensor& x, const AvgPoolOptions<2>& options);
Tensor avg_pool1d(const Tensor& x, const AvgPoolOptions<1>& options);

/// Pool to a given size. Along an axis with D inputs and D' outputs, output o is the mean or the maximum of the inputs
/// from floor(o * D / D') to ceil((o + 1) * D / D') - 1.
Tensor adaptive_avg_pool3d(const Tensor& x, const Extent<3>& output_size);
Tensor adaptive_avg_pool2d(const Tensor& x, const Extent<2>& output_size);
Tensor adaptive_avg_pool1d(const Tensor& x, const Extent<1>& output_size);
Tensor adaptive_max_pool3d(const Tensor& x, const Extent<3>& output_size);
Tensor adaptive_max_pool2d(const Tensor& x, const Extent<2>& output_size);
Tensor adaptive_max_pool1d(const Tensor& x, const Extent<1>& output_size);

}  // namespace voxgrad
