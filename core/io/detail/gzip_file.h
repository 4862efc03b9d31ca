// Files through zlib, for core/io/nifti.cpp.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "input_file.h"

namespace voxgrad {

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};
using GzHandle = std::unique_ptr<gzFile_s, GzClose>;

/// zlib's view of an open file; closing it leaves the descriptor open. Null if zlib refuses.
GzHandle open_gz(int descriptor, const char* mode);

/// The bytes of a file, unpacked if it is gzip. Throws Error where the packed stream is damaged or has no end.
class UnpackedFile {
 public:
  /// Keeps a reference to `file`.
  explicit UnpackedFile(const InputFile& file);

  bool is_packed() const { return gzdirect(handle_.get()) == 0; }
  /// Reads up to `bytes` bytes; fewer only at the end.
  size_t read(void* to, size_t bytes);
  /// Bytes from the start to the end, or to `limit` if there are more. Then stands at the start again.
  int64_t count(int64_t limit);
  /// Goes to `position` bytes from the start. Throws if the file ends before.
  void seek(int64_t position);

 private:
  void rewind();

  const InputFile& file_;
  GzHandle handle_;
};

}  // namespace voxgrad
