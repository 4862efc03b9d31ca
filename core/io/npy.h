// Reads and writes NumPy's .npy format (numpy.lib.format): a magic string, a Python dict literal with dtype, order and
// shape, then the elements. Pickled objects are never read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "../tensor.h"

namespace voxgrad {

/// Options of load_npy and NpyFile.
struct NpyOptions {
  int64_t max_bytes = INT64_MAX;  ///< maximum size of the array; checked before memory is allocated
};

/// Returns the array in the file as a contiguous tensor on `device`. Supports versions 1.0, 2.0 and 3.0, both byte
/// orders, C and Fortran order, and the dtypes f2, f4, f8, i4, i8, u1 and b1. Throws Error if the file cannot be read,
/// violates the format, exceeds max_bytes, has an object or structured dtype, or has more than 8 axes.
///
/// On the CPU, if the array is in C order and in the byte order of the machine, the result is a private memory map of
/// the file. load_safetensors() describes such tensors.
Tensor load_npy(const std::filesystem::path& path, Device device = Device::cpu(), const NpyOptions& options = {});

/// A .npy file that is read in parts, so that arrays may be larger than memory. Several threads may read at the same
/// time.
class NpyFile {
 public:
  /// Reads the header. Throws as load_npy does. `max_bytes` limits the result of one call of read().
  explicit NpyFile(const std::filesystem::path& path, const NpyOptions& options = {});
  const Shape& shape() const;
  DType dtype() const;
  /// Returns the elements start .. start + size as a contiguous tensor on the CPU. Throws unless these elements lie
  /// within shape().
  Tensor read(const Dims& start, const Shape& size) const;

 private:
  struct Body;
  std::shared_ptr<const Body> body_;
};

/// Writes a tensor as version 1.0 in C order, atomically. The tensor may be on any device. Throws for bf16, which NumPy
/// does not support.
void save_npy(const std::filesystem::path& path, const Tensor& tensor);

}  // namespace voxgrad
