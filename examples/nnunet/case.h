// Segmentation cases (images and label maps with their geometry), nnU-Net's preprocessing of them, and its inverse for
// predictions. nnU-Net (Isensee et al. 2021) crops a case, then normalizes its channels, then resamples it.
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
using voxgrad::data::PatchSource;

/// Shape and position of a voxel grid, in the conventions of NiftiImage.
struct Geometry {
  Shape shape;                                    ///< (D, H, W)
  std::array<double, 3> spacing{1, 1, 1};         ///< mm along D, H, W: the lengths of the affine's columns
  std::array<std::array<double, 4>, 4> affine{};  ///< from voxel indices (w, h, d) to mm
};

/// A box of voxels: from `start` to `start + size - 1` along D, H and W.
struct Box {
  Dims start;
  Shape size;
};

/// The images of one subject and, if there is one, the label map on the same voxel grid.
struct Case {
  std::string name;   ///< used in error messages
  Tensor image;       ///< (C, D, H, W) f32
  Tensor label;       ///< (D, H, W) u8: class indices and ignore_index; undefined for a case without a label
  Geometry geometry;  ///< voxel grid of `image` and `label`
  Geometry original;  ///< voxel grid of the files
  Box box;            ///< region of the files that `image` and `label` cover, in voxels of `original`
};

/// Reads one NIfTI file per channel and, unless `label` is empty, one file with class indices in [0, classes). If
/// ignore_index is not negative, the label may also hold this number, for voxels that training ignores.
///
/// Throws Error, with the name of the file, if load_nifti rejects a file, if a file holds a series of volumes or a
/// voxel that is NaN or infinite, if the shapes of the files differ, or if their affines place a voxel more than a
/// tenth of the smallest spacing apart. Also throws if the label holds a number that is neither a class nor
/// ignore_index, or has no foreground voxel.
Case load_case(const std::string& name, const std::vector<std::filesystem::path>& images,
               const std::filesystem::path& label = {}, int64_t classes = 256, int64_t ignore_index = -100);

/// Opens the files of a case without loading them. Takes the arguments of load_case, but reads and checks only the
/// voxels of each patch when the patch is requested. A .nii.gz file is still decompressed as a whole. Accepts a label
/// without foreground.
PatchSource open_case(const std::vector<std::filesystem::path>& images, const std::filesystem::path& label,
                      int64_t classes = 256, int64_t ignore_index = -100);

/// Returns the smallest box that contains every voxel of an image (C, D, H, W) that is nonzero in at least one channel.
/// Throws Error if all voxels are 0.
Box nonzero_box(const Tensor& image);
/// Returns the part of a case within `box`, which is given in voxels of c.image. Throws Error if the box exceeds the
/// image, or if the case was already resampled.
Case crop(const Case& c, const Box& box);

/// Normalizes each channel of an image (C, D, H, W) f32 to mean 0 and standard deviation 1 (biased). If `mask`, bool
/// (D, H, W), is given, computes the mean and the standard deviation from the voxels inside the mask only, and sets the
/// voxels outside to 0. Throws Error if the mask is empty.
Tensor z_score(const Tensor& image, const Tensor& mask = {});
/// Returns a bool mask (D, H, W) of the voxels of an image (C, D, H, W) that are nonzero in at least one channel.
Tensor nonzero_mask(const Tensor& image);

/// Statistics of one channel over the foreground voxels of all training cases, for ct_normalize.
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
/// Computes the statistics of `values`. Percentiles are interpolated linearly; the standard deviation is biased. Throws
/// Error if there are no values or if one is not finite.
Intensities measure_intensities(std::vector<float> values);
/// Normalizes a CT image (C, D, H, W) f32. Clamps each channel to its [low, high], subtracts its mean and divides by
/// its standard deviation. `channels` has one entry per channel.
Tensor ct_normalize(const Tensor& image, const std::vector<Intensities>& channels);

/// Resamples a case to voxels of about `spacing` mm along D, H and W. The number of voxels along each axis is rounded,
/// and the spacing adjusted, so that the case keeps its extent and orientation. The image is interpolated trilinearly
/// or, with `cubic`, by cubic convolution along each axis; the label takes the nearest voxel. Throws Error if a spacing
/// is not positive or if an axis would have more than 32767 voxels.
Case resample(const Case& c, const std::array<double, 3>& spacing, bool cubic = false);

/// Transforms a prediction for `c`, a case after crop() and resample(), to the voxel grid of the files of the case. The
/// result can be passed to save_nifti.
///
/// Class numbers (D, H, W) keep their dtype, take the nearest voxel, and are 0 outside the cropped box. Probabilities
/// (K, D, H, W) with K > 1 are interpolated trilinearly and returned as f32; outside the box, class 0 has
/// probability 1. Throws Error if the prediction does not have the spatial shape of `c`.
voxgrad::NiftiImage restore(const Tensor& prediction, const Case& c);

}  // namespace nnunet
