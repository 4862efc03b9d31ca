// Pooling and resampling of (N, C, D, H, W). The functions throw Error for an empty axis other than the batch, for
// options that fit no input, and for a result without voxels.
#pragma once

#include <array>
#include <optional>

#include "core/tensor.h"

namespace voxgrad {

struct MaxPoolOptions {
  Triple kernel_size;
  std::optional<Triple> stride{};  ///< kernel_size if not given
  Triple padding{0};               ///< at most half of kernel_size
  Triple dilation{1};
  bool ceil_mode = false;

  /// Throws Error, with `op` in front, for what fits no input. The functions below do this first.
  void validate(const char* op) const;
};
struct AvgPoolOptions {
  Triple kernel_size;
  std::optional<Triple> stride{};
  Triple padding{0};
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<int64_t> divisor_override{};

  void validate(const char* op) const;
};

/// x (N, C, D, H, W), or (C, D, H, W) without a batch, as in PyTorch; the result has the same axes, with
/// D' = (D + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1, rounded down, or up in ceil_mode. avg_pool3d:
/// the same.
Tensor max_pool3d(const Tensor& x, const MaxPoolOptions& options);
struct MaxPoolResult {
  Tensor output;
  Tensor indices;  ///< i64, positions in D * H * W
};
MaxPoolResult max_pool3d_with_indices(const Tensor& x, const MaxPoolOptions& options);
Tensor avg_pool3d(const Tensor& x, const AvgPoolOptions& options);

enum class InterpolateMode : uint8_t { nearest, trilinear };
/// Factors along D, H and W; one number stands for three equal ones.
struct ScaleFactor {
  constexpr ScaleFactor(double all) : values{all, all, all} {}
  constexpr ScaleFactor(double d, double h, double w) : values{d, h, w} {}
  constexpr double operator[](int axis) const { return values[static_cast<size_t>(axis)]; }
  std::array<double, 3> values;
};
std::ostream& operator<<(std::ostream& out, const ScaleFactor& scale);

struct InterpolateOptions {
  std::optional<Triple> size{};  ///< exactly one of size and scale_factor
  std::optional<ScaleFactor> scale_factor{};
  InterpolateMode mode = InterpolateMode::nearest;
  bool align_corners = false;  ///< trilinear only

  void validate(const char* op) const;
};
/// PyTorch's interpolate, with recompute_scale_factor left at its default: a given scale_factor is used as it is.
/// An axis whose size stays is left as it is, whatever the scale_factor (PyTorch's trilinear mode on the CPU).
/// x is (N, C, D, H, W). Fewer axes throw: PyTorch takes (N, C, H, W) for images, whose depth here is an axis of size 1
/// with scale_factor 1.
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

}  // namespace voxgrad
