// InputFile: a file open for reading, with the checks and error messages that all readers share. Readers compare the
// sizes in a header with the size of the file before they allocate memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "../../error.h"
#include "../../tensor.h"

namespace voxgrad {

/// Returns "1 byte" or "2 bytes", for error messages.
std::string in_bytes(int64_t count);

/// A regular file open for reading.
class InputFile : NonCopyable {
 public:
  /// `op` is the prefix of error messages; `max_bytes` is the limit of check_limit(). Throws if `path` does not exist,
  /// is not readable, or is a directory or a device.
  InputFile(const std::filesystem::path& path, const char* op, int64_t max_bytes = INT64_MAX);
  ~InputFile();

  /// Returns the size of the file in bytes.
  int64_t size() const { return size_; }
  /// Returns the number of bytes after the current position.
  int64_t remaining() const { return size_ - position_; }
  /// Reads `bytes` bytes and advances the position. Throws if the file is shorter.
  void read(void* to, size_t bytes) {
    read_at(position_, to, bytes);
    position_ += static_cast<int64_t>(bytes);
  }
  /// Reads `bytes` bytes at `position`. Several threads may call read_at() at the same time. Throws if the file is
  /// shorter.
  void read_at(int64_t position, void* to, size_t bytes) const;
  /// Returns the elements at `position` as a contiguous tensor on the CPU. The tensor is a private memory map of the
  /// file: pages are loaded when they are first used, and are shared with other processes until they are written.
  /// Writes do not reach the file. Elements that are not aligned in the file, and files that cannot be mapped, are
  /// read instead.
  Tensor tensor_at(int64_t position, const Shape& shape, DType dtype) const;
  /// Returns "; it is <format>" if the file begins like a file of another well-known format, otherwise "". For error
  /// messages.
  std::string other_format() const;
  /// Returns the file descriptor, for libraries that read from it themselves.
  int descriptor() const { return descriptor_; }

  /// Throws an Error with the message "<op>: '<path>': " and the arguments, streamed one after another.
  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    voxgrad::fail(op_, "'", name_, "': ", args...);
  }
  /// Calls fail() unless `condition` holds.
  template <class... Args>
  void check(bool condition, const Args&... args) const {
    if (!condition) [[unlikely]]
      fail(args...);
  }
  /// Throws if `bytes`, the size of `what`, exceeds max_bytes.
  template <class... Args>
  void check_limit(int64_t bytes, const Args&... what) const {
    check(bytes <= max_bytes_, what..., " takes ", in_bytes(bytes), ", more than max_bytes, which is ", max_bytes_);
  }

 private:
  std::string name_;
  const char* op_;
  int64_t max_bytes_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t position_ = 0;
  mutable std::shared_ptr<char> map_;  ///< the memory map, null until the first call of tensor_at()
};

/// Formats text from a file for error messages: in quotes, abbreviated, with control characters replaced by '?'.
std::string in_quotes(std::string_view text);

/// Returns the number of bytes of a dense tensor with this shape and `bits` bits per element, according to the header
/// of `file`. `what`, which must end with a space, and `dtype` are for error messages. Throws if the product of the
/// bits and the sizes overflows (sizes of 0 count as 1), or if the product is not a whole number of bytes.
int64_t claimed_bytes(const InputFile& file, const std::string& what, const Shape& shape, std::string_view dtype,
                      int64_t bits);

/// Throws if a byte of a bool tensor is neither 0 nor 1.
void check_bools(const InputFile& file, const std::string& what, const Tensor& tensor);

/// Reverses the order of the bytes within each of `count` elements of `size` bytes.
void swap_bytes(void* elements, int64_t size, int64_t count);

}  // namespace voxgrad
