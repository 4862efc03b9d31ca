// nnU-Net's resampling of images and of logits.
#pragma once

#include <array>
#include <optional>

#include <voxgrad.h>

namespace nnunet {

/// Voxel spacing along the three axes, mm.
using Spacing = std::array<double, 3>;

/// Arguments of nnU-Net's resample_data_or_seg_to_shape.
struct ResampleOptions {
  int order = 3;                           ///< 0: nearest voxel, 1: linear, 3: cubic B-spline
  std::optional<bool> force_separate_z{};  ///< default: see separate_axis()
};

/// Returns the axis that is resampled separately, to the nearest slice, or nullopt if all axes are resampled together.
/// By default, the axis with the largest spacing is separate if this spacing is more than 3 times the smallest spacing.
/// This rule is applied to `current` and, if no axis of `current` is separate, to `target`. Returns nullopt if several
/// axes have the largest spacing. If force_separate_z is true, selects the axis with the largest spacing of `current`;
/// if it is false, returns nullopt.
std::optional<int64_t> separate_axis(const ResampleOptions& options, const Spacing& current, const Spacing& target);

/// Returns the size along each axis after a change of the spacing, rounded to the nearest integer (halves to even).
voxgrad::Dims resampled_size(const voxgrad::Shape& size, const Spacing& current, const Spacing& target);

/// Resizes x (C, D, H, W) of a floating-point dtype to the spatial shape `size`. Computes in f64, one channel at a
/// time, and returns the dtype of x. Input and output volume have the same outer faces, as with align_corners=False in
/// PyTorch. As in scikit-image, the result is clipped to the range of the input channel or, if an axis is separate, to
/// the range of each slice. `axis` is the result of separate_axis().
voxgrad::Tensor resample(const voxgrad::Tensor& x, const voxgrad::Dims& size, int order, std::optional<int64_t> axis);

}  // namespace nnunet
