// Medical volumes in the NIfTI-1 format (https://nifti.nimh.nih.gov/nifti-1): .nii, and .nii.gz through zlib.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>

#include "../tensor.h"

namespace voxgrad {

/// A volume and its position in space.
struct NiftiImage {
  /// Intensities with the scaling of the file applied: f32 of shape (D, H, W), or (T, D, H, W) for a series. W is the
  /// first axis of the file (i), H the second (j), D the third (k).
  Tensor data;
  /// Size of a voxel in mm along D, H, W.
  std::array<double, 3> spacing{1, 1, 1};
  /// Maps a voxel (i, j, k, 1), which is data[k][j][i], to world coordinates (x, y, z, 1) in mm. x increases to the
  /// right of the subject, y to the front, z upwards.
  std::array<std::array<double, 4>, 4> affine{{{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}};
  /// Free text, at most 79 bytes.
  std::string descrip;
};

/// Options of load_nifti.
struct NiftiOptions {
  int64_t max_bytes = INT64_MAX;  ///< maximum size of the volume as f32; checked before the file is decompressed
};

/// Reads .nii or .nii.gz, which are distinguished by content, in either byte order. Voxels may be u8, i8, i16, u16,
/// i32, u32, f32, f64, and i64 or u64 if all values fit in i32. The affine is taken from the sform if present,
/// otherwise from the qform, otherwise from the spacing. Throws Error if the file cannot be read, violates the format
/// or does not have the length that its header states. Also throws for .hdr/.img pairs, NIfTI-2, other voxel types and
/// more than four axes. Before memory is allocated, throws Error if the file is too small for the volume that the
/// header describes. A .nii.gz can contain a volume that is 1000 times as large as the file; set max_bytes for
/// untrusted files.
NiftiImage load_nifti(const std::filesystem::path& path, Device device = Device::cpu(),
                      const NiftiOptions& options = {});

/// Writes a file atomically, with `affine` as the sform. `path` must end with .nii or .nii.gz. `data` may be on any
/// device. u8 and i32 keep their dtype; other dtypes are converted to f32. Throws if `data` is not of rank 3 or 4, if
/// an axis is longer than 32767, if a spacing is not positive, or if the description is too long. Also throws if a
/// value of the affine is not finite, or if the last row of the affine is not (0, 0, 0, 1).
void save_nifti(const std::filesystem::path& path, const NiftiImage& image);

}  // namespace voxgrad
