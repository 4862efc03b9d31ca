// The volumes: where they come from, and what is cut from them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <voxgrad.h>

namespace superres {

/// A head, its intensities scaled to a maximum of 1, f32 (D, H, W) with even sizes: D from bottom to
/// top, H from back to front, W from left to right.
struct Volume {
  std::string name;  // for reports: "ch2.nii.gz", "Shepp-Logan phantom"
  bool phantom = false;
  voxgrad::NiftiImage image;
  const voxgrad::Tensor& data() const { return image.data; }
};

/// Reads a NIfTI file and turns it upright; the first volume of a series. Throws voxgrad::Error, also if an axis is
/// shorter than 64 voxels or all voxels are equal.
Volume load_volume(const std::filesystem::path& path);

/// The (D, H, W) image with its axes exchanged and mirrored so that W runs to the subject's right, H to the front and D
/// upwards, as nearly as its affine allows; each voxel keeps its place in the world.
voxgrad::NiftiImage upright(const voxgrad::NiftiImage& image);

/// The 3-D Shepp-Logan head (Shepp and Logan 1974, with the ellipsoids of Kak and Slaney 1988 and Toft's
/// contrasts) with `size` voxels on each side.
Volume make_phantom(int64_t size);

/// The 2 x 2 x 2 box average of (N, 1, D, H, W).
voxgrad::Tensor low_resolution(const voxgrad::Tensor& high);

/// Slices start .. stop - 1 of a volume as (1, 1, stop - start, H, W).
voxgrad::Tensor slab(const Volume& volume, int64_t start, int64_t stop);

}  // namespace superres
