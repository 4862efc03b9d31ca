// Medical volumes in the NIfTI-1 format (https://nifti.nimh.nih.gov/nifti-1): .nii, and .nii.gz through zlib.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "../tensor.h"

namespace voxgrad {

/// A volume, and where its voxels lie in space.
struct NiftiImage {
  /// Intensities, scaled as the file says: f32 of shape (D, H, W), or (T, D, H, W) for a series. W is the
  /// file's first axis (i, x in the file's order), H its second (j), D its third (k).
  Tensor data;
  /// Size of a voxel in mm along D, H, W.
  std::array<double, 3> spacing{1, 1, 1};
  /// From a voxel (i, j, k, 1), that is data[k][j][i], to the world (x, y, z, 1) in mm, where x grows to
  /// the subject's right, y to the front, z upwards.
  std::array<std::array<double, 4>, 4> affine{{{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}};
  /// Free text, at most 79 bytes.
  std::string descrip;
};

struct NiftiOptions {
  int64_t max_bytes = INT64_MAX;  ///< volumes that take more, as f32, are refused before they are unpacked
};

/// Reads .nii or .nii.gz (told apart by content) in either byte order; voxels of u8 i8 i16 u16 i32 u32
/// f32 f64, and i64 u64 whose values i32 holds. The affine is the sform, else the qform, else the spacing alone. Throws
/// Error if the file cannot be read, breaks a rule of the format or ends early, and for .hdr/.img pairs, NIfTI-2, other
/// voxel types and more than four axes. Sizes are compared with what the file holds, unpacked, before memory is taken.
/// gzip packs zeros by a thousand: for files from strangers set max_bytes.
NiftiImage load_nifti(const std::filesystem::path& path, Device device = Device::cpu(),
                      const NiftiOptions& options = {});

/// A file open for reading in parts, by several threads at once if need be: a volume may be larger than memory. Of .nii
/// files just the parts are read; .nii.gz files are unpacked whole, once.
class NiftiFile {
 public:
  /// Throws as load_nifti does; `max_bytes` is for a .nii.gz, and for what one call of read() takes.
  explicit NiftiFile(const std::filesystem::path& path, const NiftiOptions& options = {});
  /// (D, H, W) or (T, D, H, W).
  const Shape& shape() const;
  /// All but the voxels: `data` is undefined.
  const NiftiImage& header() const;
  /// The part of `size` voxels from `start` on as f32, scaled as the file says, on the CPU. Throws unless it lies
  /// within shape().
  Tensor read(const Dims& start, const Shape& size) const;

 private:
  struct Body;
  std::shared_ptr<const Body> body_;
};

/// Writes voxels with `affine` as the sform, atomically; `path` ends with .nii or .nii.gz. `data` may be on any device:
/// u8 and i32 stay what they are, other dtypes become float32. Throws for other ranks than 3 and 4, axes above 32767,
/// spacing that is not positive and values of the affine that are not finite.
void save_nifti(const std::filesystem::path& path, const NiftiImage& image);

}  // namespace voxgrad
