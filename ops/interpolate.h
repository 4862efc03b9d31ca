// Interpolation of signals, images and volumes.
#pragma once

#include <array>
#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// linear requires an input (N, C, L), bilinear and bicubic (N, C, H, W), and trilinear (N, C, D, H, W). nearest and
/// nearest_exact accept all three.
enum class InterpolateMode : uint8_t { nearest, nearest_exact, linear, bilinear, bicubic, trilinear };
/// Prints the name of the mode, such as "nearest_exact".
std::ostream& operator<<(std::ostream& out, InterpolateMode mode);

/// Sizes of the spatial axes. One number applies to all axes.
struct InterpolateSize {
  InterpolateSize(int64_t all) : values{all} {}
  InterpolateSize(int all) : values{all} {}
  InterpolateSize(const Dims& sizes) : values(sizes) {}
  template <int N>
  InterpolateSize(const Extent<N>& sizes) : values(sizes.values) {}
  Dims values;
};

/// Scale factors of the spatial axes. One number applies to all axes.
struct ScaleFactor {
  constexpr ScaleFactor(double all) : values{all}, count(1) {}
  constexpr ScaleFactor(double h, double w) : values{h, w}, count(2) {}
  constexpr ScaleFactor(double d, double h, double w) : values{d, h, w}, count(3) {}
  constexpr double operator[](int64_t axis) const { return values[count == 1 ? 0 : static_cast<size_t>(axis)]; }
  std::array<double, 3> values{};
  int64_t count;
};
/// Prints one number if all factors are equal, otherwise a list such as "[1, 2, 2]".
std::ostream& operator<<(std::ostream& out, const ScaleFactor& scale);

/// Options of interpolate, with the names and defaults of PyTorch. Exactly one of size and scale_factor must be given.
struct InterpolateOptions {
  std::optional<InterpolateSize> size{};
  std::optional<ScaleFactor> scale_factor{};
  InterpolateMode mode = InterpolateMode::nearest;
  bool align_corners = false;  ///< must be false for nearest and nearest_exact

  /// Throws Error if the options are invalid for every input. The message begins with `op`. interpolate calls validate
  /// first.
  void validate(const char* op) const;
};

/// Resizes x (N, C, L), (N, C, H, W) or (N, C, D, H, W) as PyTorch's interpolate does with its default
/// recompute_scale_factor: positions are computed from scale_factor if it is given. Except in mode bicubic, an axis
/// whose size does not change is copied regardless of scale_factor, as in PyTorch's trilinear mode on the CPU. x must
/// have a floating-point dtype. Throws Error if an axis of x other than the batch is empty or if the result has no
/// voxels.
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

}  // namespace voxgrad
