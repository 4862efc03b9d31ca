// NumPy's .npy format (numpy.lib.format): a magic string, a Python dict literal with dtype, order and
// shape, then the elements. Pickled objects are never read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "../tensor.h"

namespace voxgrad {

struct NpyOptions {
  int64_t max_bytes = INT64_MAX;  ///< larger arrays are refused before memory is taken for them
};

/// The array of the file, contiguous, on `device`. Reads versions 1.0, 2.0 and 3.0, either byte order,
/// C and Fortran order; dtypes f2 f4 f8 i4 i8 u1 b1. Throws Error if the file cannot be read or breaks a
/// rule of the format, for object and structured dtypes, and for more than 8 axes. Elements in Fortran order are copied
/// once, so that for a moment there are two of them.
Tensor load_npy(const std::filesystem::path& path, Device device = Device::cpu(), const NpyOptions& options = {});

/// A .npy file open for reading in parts, by several threads at once if need be: an array may be larger than memory.
class NpyFile {
 public:
  /// Reads the header. Throws as load_npy does; `max_bytes` is for what one call of read() takes.
  explicit NpyFile(const std::filesystem::path& path, const NpyOptions& options = {});
  const Shape& shape() const;
  DType dtype() const;
  /// The part of `size` elements from `start` on, contiguous, on the CPU. Throws unless it lies within shape().
  Tensor read(const Dims& start, const Shape& size) const;

 private:
  struct Body;
  std::shared_ptr<const Body> body_;
};

/// Writes `tensor`, from any device and with any strides, atomically as version 1.0 in C order.
/// Throws for bf16, which NumPy does not have.
void save_npy(const std::filesystem::path& path, const Tensor& tensor);

}  // namespace voxgrad
