// Pooling and resampling of (N, C, D, H, W).
#pragma once

#include <optional>
#include <string>

#include "core/tensor.h"

namespace voxgrad {

struct MaxPoolOptions {
  Triple kernel_size;
  std::optional<Triple> stride{};  ///< kernel_size if not given
  Triple padding{0};               ///< at most half of kernel_size
  Triple dilation{1};
  bool ceil_mode = false;
};
struct AvgPoolOptions {
  Triple kernel_size;
  std::optional<Triple> stride{};
  Triple padding{0};
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<int64_t> divisor_override{};
};

Tensor max_pool3d(const Tensor& x, const MaxPoolOptions& options);
struct MaxPoolResult {
  Tensor output;
  Tensor indices;  ///< i64, positions in D * H * W
};
MaxPoolResult max_pool3d_with_indices(const Tensor& x, const MaxPoolOptions& options);
Tensor avg_pool3d(const Tensor& x, const AvgPoolOptions& options);

enum class InterpolateMode : uint8_t { nearest, trilinear };
struct InterpolateOptions {
  std::optional<Triple> size{};          ///< exactly one of size and scale_factor
  std::optional<double> scale_factor{};  ///< of all three axes
  InterpolateMode mode = InterpolateMode::nearest;
  bool align_corners = false;  ///< trilinear only
};
/// PyTorch's interpolate, with recompute_scale_factor left at its default: a given scale_factor is used as it is.
/// An axis whose size stays is left as it is, whatever the scale_factor (PyTorch's trilinear mode on the CPU).
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

}  // namespace voxgrad
