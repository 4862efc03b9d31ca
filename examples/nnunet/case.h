// Cases for segmentation: images and class maps with their place in space, what is done to them before training, and
// the way back. As in nnU-Net (Isensee et al. 2021): crop, then normalise, then resample.
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

/// Where voxels lie, with NiftiImage's axes and affine; the spacing is the length of the affine's columns.
struct Geometry {
  Shape shape;                             ///< (D, H, W)
  std::array<double, 3> spacing{1, 1, 1};  ///< mm along D, H, W
  std::array<std::array<double, 4>, 4> affine{};
};

/// The voxels start .. start + size along D, H, W.
struct Box {
  Dims start;
  Shape size;
};

struct Case {
  std::string name;   ///< for messages
  Tensor image;       ///< (C, D, H, W) f32
  Tensor label;       ///< (D, H, W) u8, class numbers and ignored voxels; undefined if there is none
  Geometry geometry;  ///< of both
  Geometry original;  ///< of the files, and the part of them that is here, in their voxels
  Box box;
};

/// Reads a NIfTI file for each channel, and one with class numbers. Throws Error, with the file's name, for what
/// load_nifti refuses, a series, voxels that are NaN or infinite, files whose shapes differ or whose voxels lie more
/// than a tenth of a voxel apart, and labels that are neither whole numbers of [0, classes) nor ignore_index, or have
/// no foreground. A negative ignore_index: no voxel is ignored.
Case load_case(const std::string& name, const std::vector<std::filesystem::path>& images,
               const std::filesystem::path& label = {}, int64_t classes = 256, int64_t ignore_index = -100);

/// As load_case, but each read loads and checks only its voxels, and of .nii files reads only these. Accepts a label
/// without foreground.
PatchSource open_case(const std::vector<std::filesystem::path>& images, const std::filesystem::path& label,
                      int64_t classes = 256, int64_t ignore_index = -100);

/// The smallest box that holds all voxels of (C, D, H, W) that are not 0 in some channel. Throws if there are none.
Box nonzero_box(const Tensor& image);
/// A part of a case, before it is resampled. Throws if the box does not lie within.
Case crop(const Case& c, const Box& box);

/// Each channel of (C, D, H, W) with mean 0 and standard deviation 1. With `mask`, bool (D, H, W), both are those of
/// the voxels in it, and the others become 0; nonzero_mask() makes one.
Tensor z_score(const Tensor& image, const Tensor& mask = {});
/// bool (D, H, W): where some channel of (C, D, H, W) is not 0.
Tensor nonzero_mask(const Tensor& image);

/// How intensities of a channel are distributed over the foreground of all training cases.
struct Intensities {
  double low = 0, high = 0;  ///< percentiles 0.5 and 99.5
  double mean = 0, std = 1;
};
/// Returns the values of `channel` at `count` random foreground voxels, drawn with replacement. Background and voxels
/// of ignore_index are not foreground (nnU-Net counts the latter). Throws for a case without foreground.
std::vector<float> sample_foreground(const Case& c, int64_t channel, int64_t count, voxgrad::Generator& random,
                                     int64_t ignore_index = -100);
/// Of at least one value; percentiles are interpolated linearly.
Intensities measure_intensities(std::vector<float> values);
/// CT: each channel of (C, D, H, W) limited to [low, high], less the mean, over the standard deviation.
Tensor ct_normalize(const Tensor& image, const std::vector<Intensities>& channels);

/// The case with voxels of about `spacing` mm along D, H, W: as many as fit the same extent best, in the same
/// orientation. Images trilinearly or, with `cubic`, by cubic convolution along each axis; labels by the nearest voxel.
Case resample(const Case& c, const std::array<double, 3>& spacing, bool cubic = false);

/// A prediction for `c`, preprocessed by crop() and resample(), in the geometry of its files, for save_nifti: class
/// numbers (D, H, W) by the nearest voxel, with 0 beyond the box, in their dtype; or probabilities (K, D, H, W)
/// trilinearly, with class 0 beyond the box, in f32.
voxgrad::NiftiImage restore(const Tensor& prediction, const Case& c);

}  // namespace nnunet
