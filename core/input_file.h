// Files being read, with the checks and the wording that all readers share. What a file claims about its
// sizes is compared with what it holds before any memory is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/tensor.h"

namespace voxgrad {

/// A regular file open for reading.
class InputFile {
 public:
  /// `op` begins the error messages. Throws if `path` is missing, not readable, a directory or a device.
  InputFile(const std::filesystem::path& path, const char* op);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Bytes of the whole file.
  int64_t size() const { return size_; }
  /// Bytes that read() has not returned yet.
  int64_t remaining() const { return size_ - position_; }
  /// The next `bytes` bytes. Throws if the file ends before.
  void read(void* to, size_t bytes);
  /// The open file, for libraries that read by themselves.
  int descriptor() const { return descriptor_; }

  /// Throws Error("<op>: '<path>': <args streamed>").
  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    voxgrad::fail(op_, "'", name_, "': ", args...);
  }
  /// fail() unless `condition` holds.
  template <class... Args>
  void check(bool condition, const Args&... args) const {
    if (!condition) [[unlikely]]
      fail(args...);
  }

 private:
  std::string name_;
  const char* op_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t position_ = 0;
};

/// Text from a file as messages show it: in quotes, shortened, with control characters as '?'.
std::string in_quotes(std::string_view text);

/// Bytes of a dense tensor as `file` claims it. Throws if a count on the way to it overflows, even where
/// another size is 0.
int64_t claimed_bytes(const InputFile& file, const Shape& shape, DType dtype);

/// A new tensor on the CPU filled in storage order with the next bytes of `file`. `strides` are those of
/// a dense tensor. The caller has compared claimed_bytes() with the file. Throws for a bool other than 0 or 1.
Tensor read_tensor(InputFile& file, const Shape& shape, const Strides& strides, DType dtype);

}  // namespace voxgrad
