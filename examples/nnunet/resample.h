// nnU-Net's resampling of images and of logits.
#pragma once

#include <array>
#include <optional>

#include <voxgrad.h>

namespace nnunet {

/// Spacing in mm, or another length per axis.
using Spacing = std::array<double, 3>;

/// Arguments of nnU-Net's resample_data_or_seg_to_shape.
struct ResampleOptions {
  int order = 3;                           ///< 0: nearest voxel, 1: linear, 3: cubic B-spline
  std::optional<bool> force_separate_z{};  ///< by default, decided by the spacings
};

/// Returns the axis that is resampled separately, by the nearest slice, or nothing. By default this is the axis of the
/// largest spacing if that is more than 3 times the smallest, first for `current` and then for `target`. An axis is
/// separate only if no other axis has the same spacing.
std::optional<int64_t> separate_axis(const ResampleOptions& options, const Spacing& current, const Spacing& target);

/// Returns the size along each axis after a change of the spacing, rounded to the nearest integer (halves to even).
voxgrad::Dims resampled_size(const voxgrad::Shape& size, const Spacing& current, const Spacing& target);

/// Resizes x (C, D, H, W) of a floating dtype to the spatial shape `size`. Computes in f64, one channel at a time, and
/// returns the dtype of x. The centers of the outer voxels lie half a voxel within the faces of the volume. The result
/// is clipped to the range of the input, as in scikit-image: to that of the channel, or to that of each slice if an
/// axis is separate. `axis` is the result of separate_axis().
voxgrad::Tensor resample(const voxgrad::Tensor& x, const voxgrad::Dims& size, int order, std::optional<int64_t> axis);

}  // namespace nnunet
