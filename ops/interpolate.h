// Interpolation of signals, images and volumes.
#pragma once

#include <array>
#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// linear is for (N, C, L), bilinear and bicubic are for (N, C, H, W), trilinear for (N, C, D, H, W), the others for
/// all.
enum class InterpolateMode : uint8_t { nearest, nearest_exact, linear, bilinear, bicubic, trilinear };
std::ostream& operator<<(std::ostream& out, InterpolateMode mode);

/// Sizes along the spatial axes; one number stands for equal ones.
struct InterpolateSize {
  InterpolateSize(int64_t all) : values{all} {}
  InterpolateSize(int all) : values{all} {}
  InterpolateSize(const Dims& sizes) : values(sizes) {}
  template <int N>
  InterpolateSize(const Extent<N>& sizes) : values(sizes.values) {}
  Dims values;
};

/// Factors along the spatial axes; one number stands for equal ones.
struct ScaleFactor {
  constexpr ScaleFactor(double all) : values{all}, count(1) {}
  constexpr ScaleFactor(double h, double w) : values{h, w}, count(2) {}
  constexpr ScaleFactor(double d, double h, double w) : values{d, h, w}, count(3) {}
  constexpr double operator[](int64_t axis) const { return values[count == 1 ? 0 : static_cast<size_t>(axis)]; }
  std::array<double, 3> values{};
  int64_t count;
};
std::ostream& operator<<(std::ostream& out, const ScaleFactor& scale);

struct InterpolateOptions {
  std::optional<InterpolateSize> size{};  ///< exactly one of size and scale_factor
  std::optional<ScaleFactor> scale_factor{};
  InterpolateMode mode = InterpolateMode::nearest;
  bool align_corners = false;  ///< not for the nearest ones

  /// Throws Error, with `op` in front, for what fits no input. interpolate does this first.
  void validate(const char* op) const;
};

/// PyTorch's interpolate, with recompute_scale_factor left at its default: a given scale_factor is used as it is.
/// An axis whose size stays is left as it is, whatever the scale_factor (PyTorch's trilinear mode on the CPU), but by
/// bicubic. x is (N, C, L), (N, C, H, W) or (N, C, D, H, W); it must have no empty axis but the batch, and the result
/// must have voxels.
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

}  // namespace voxgrad
