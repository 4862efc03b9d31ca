// Segmentation cases: images and label maps with their geometry.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace nnunet {

using voxgrad::Dims;
using voxgrad::Shape;
using voxgrad::Tensor;

/// Shape and position of a voxel grid, in the conventions of NiftiImage.
struct Geometry {
  Shape shape;                                    ///< (D, H, W)
  std::array<double, 3> spacing{1, 1, 1};         ///< mm along D, H, W: the lengths of the affine's columns
  std::array<std::array<double, 4>, 4> affine{};  ///< maps voxel indices (w, h, d) to mm
};

/// A box of voxels: from `start` to `start + size - 1` along D, H and W.
struct Box {
  Dims start;
  Shape size;
};

/// The images of one subject and an optional label map on the same voxel grid.
struct Case {
  std::string name;   ///< used in error messages
  Tensor image;       ///< (C, D, H, W) f32
  Tensor label;       ///< (D, H, W) u8: class indices and ignore_index; undefined for a case without a label
  Geometry geometry;  ///< voxel grid of `image` and `label`
};

/// Reads one NIfTI file per channel and, unless `label` is empty, one file with class indices in [0, classes). If
/// ignore_index is not negative, the label may also hold this number, for voxels that training ignores.
///
/// Throws Error, with the name of the file, if load_nifti rejects a file, or if a file holds a series of volumes or a
/// voxel that is NaN or infinite. Throws if the shapes of the files differ, or if their affines place voxels with the
/// same index more than a tenth of the smallest spacing apart. Throws if the label holds a number that is neither a
/// class nor ignore_index, or if the label has no foreground voxel.
Case load_case(const std::string& name, const std::vector<std::filesystem::path>& images,
               const std::filesystem::path& label = {}, int64_t classes = 256, int64_t ignore_index = -100);

/// Returns the smallest box that contains every voxel of an image (C, D, H, W) that is nonzero in at least one channel.
/// Throws Error if all voxels are 0.
Box nonzero_box(const Tensor& image);
/// Returns a bool mask (D, H, W) of the voxels of an image (C, D, H, W) that are nonzero in at least one channel.
Tensor nonzero_mask(const Tensor& image);

/// Statistics of one channel over the foreground voxels of all training cases.
struct Intensities {
  double low = 0;   ///< 0.5th percentile
  double high = 0;  ///< 99.5th percentile
  double mean = 0;
  double std = 1;
};
/// Returns the values of `channel` at `count` random foreground voxels, drawn with replacement. Foreground voxels have
/// a label other than 0 and ignore_index; nnU-Net, in contrast, includes ignored voxels. Throws Error for a case
/// without foreground.
std::vector<float> sample_foreground(const Case& c, int64_t channel, int64_t count, voxgrad::Generator& random,
                                     int64_t ignore_index = -100);
/// Computes the statistics of `values`. Percentiles are interpolated linearly. The variance is the sum of squared
/// deviations divided by the number of values. Throws Error if there are no values or if a value is not finite.
Intensities measure_intensities(std::vector<float> values);

}  // namespace nnunet
