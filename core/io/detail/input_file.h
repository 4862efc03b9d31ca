// Files being read, with the checks and the wording that all readers share. What a file claims about its
// sizes is compared with what it holds before any memory is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "../../error.h"
#include "../../tensor.h"

namespace voxgrad {

/// A regular file open for reading.
class InputFile {
 public:
  /// `op` begins the error messages; `max_bytes` is for check_limit(). Throws if `path` is missing, not readable, a
  /// directory or a device.
  InputFile(const std::filesystem::path& path, const char* op, int64_t max_bytes = INT64_MAX);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Bytes of the whole file.
  int64_t size() const { return size_; }
  /// Bytes that read() has not returned yet.
  int64_t remaining() const { return size_ - position_; }
  /// The next `bytes` bytes. Throws if the file ends before.
  void read(void* to, size_t bytes);
  /// `bytes` bytes from `position` on, for several threads at once. Throws if the file ends before.
  void read_at(int64_t position, void* to, size_t bytes) const;
  /// Goes to `position` bytes from the start.
  void seek(int64_t position) { position_ = position; }
  /// Text for a message that refuses the file: "; it is <format>" if its first bytes are those of another well-known
  /// format, otherwise nothing.
  std::string other_format() const;
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
  /// Throws if `bytes` bytes for `what` are more than the caller of the reader allowed.
  template <class... Args>
  void check_limit(int64_t bytes, const Args&... what) const {
    check(bytes <= max_bytes_, what..., " takes ", bytes, " bytes, more than max_bytes, which is ", max_bytes_);
  }

 private:
  std::string name_;
  const char* op_;
  int64_t max_bytes_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t position_ = 0;
};

/// Text from a file as messages show it: in quotes, shortened, with control characters as '?'.
std::string in_quotes(std::string_view text);

/// Bytes of a dense tensor of elements of `bits` bits as `file` claims it; `what` (it ends with a space) and `dtype`
/// are for messages. Throws if a count on the way to it overflows, even where another size is 0, and for a part of a
/// byte.
int64_t claimed_bytes(const InputFile& file, const std::string& what, const Shape& shape, std::string_view dtype,
                      int64_t bits);

/// A new tensor on the CPU filled in storage order with the next bytes of `file`. `strides` are those of
/// a dense tensor. The caller has compared claimed_bytes() with the file. Throws for a bool other than 0 or 1.
Tensor read_tensor(InputFile& file, const std::string& what, const Shape& shape, const Strides& strides, DType dtype);

/// Throws for a byte of the bool tensor `tensor` other than 0 and 1.
void check_bools(const InputFile& file, const std::string& what, const Tensor& tensor);

/// Throws unless the part of `size` elements from `start` on, not an empty one, lies within `shape`.
void check_part(const InputFile& file, const Shape& shape, const Dims& start, const Shape& size);

/// Such a part of an array in row-major order, as runs of elements that lie side by side in both: calls
/// run(first in the array, first in the part, count).
template <class Run>
void for_each_run(Shape shape, Dims start, Shape size, Run run) {
  while (shape.size() > 1 && size.back() == shape.back()) {  // a whole axis joins the one before
    for (Dims* dims : {&start, &size, &shape}) {
      (*dims)[dims->size() - 2] *= shape.back();
      if (dims != &shape) dims->erase(dims->size() - 1);
    }
    shape.erase(shape.size() - 1);
  }
  const Strides strides = contiguous_strides(shape);
  for (int64_t part = 0, count = size.back(), total = numel(size); part < total; part += count) {
    int64_t first = start.back(), rest = part / count;
    for (int64_t i = shape.size() - 2; i >= 0; rest /= size[i--]) first += (start[i] + rest % size[i]) * strides[i];
    run(first, part, count);
  }
}

}  // namespace voxgrad
