// Sources of volumes (NIfTI files and a phantom) and functions that prepare them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <voxgrad.h>

namespace superres {

/// A volume of a head, f32 (D, H, W) with even sizes and intensities scaled to [0, 1]. D runs from bottom to top, H
/// from back to front, and W from the subject's left to right.
struct Volume {
  std::string name;      ///< shown in reports: "ch2.nii.gz", "Shepp-Logan phantom"
  bool phantom = false;  ///< true if make_phantom() created the volume
  voxgrad::NiftiImage image;
  const voxgrad::Tensor& data() const { return image.data; }
};

/// Reads a NIfTI file and reorients the image with upright(). If the file contains a series of volumes, uses the first
/// volume. Throws voxgrad::Error if the file cannot be read, if an axis is shorter than 64 voxels or if all voxels are
/// equal.
Volume load_volume(const std::filesystem::path& path);

/// Permutes and mirrors the axes of an image (D, H, W) so that D points up, H to the front and W to the subject's
/// right. If the axes are oblique, selects the closest orientation. Updates the affine, so that each voxel keeps its
/// world position.
voxgrad::NiftiImage upright(const voxgrad::NiftiImage& image);

/// Returns the 3-D Shepp-Logan phantom (Shepp and Logan 1974, with the ellipsoids of Kak and Slaney 1988 and Toft's
/// contrasts) with `size` voxels per side. Throws voxgrad::Error unless `size` is 64 to 512.
Volume make_phantom(int64_t size);

/// Halves the resolution of volumes (N, 1, D, H, W) by averaging blocks of 2 x 2 x 2 voxels.
voxgrad::Tensor low_resolution(const voxgrad::Tensor& high);

/// Returns slices start .. stop - 1 of a volume as a tensor (1, 1, stop - start, H, W).
voxgrad::Tensor slab(const Volume& volume, int64_t start, int64_t stop);

}  // namespace superres
