// Access to files through zlib, for core/io/nifti.cpp.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <memory>

#include "input_file.h"

namespace voxgrad {

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};
using GzHandle = std::unique_ptr<gzFile_s, GzClose>;

/// Opens a file by its descriptor, which stays open when the handle is closed. Returns null if zlib fails.
GzHandle open_gz(int descriptor, const char* mode);

/// The contents of a file, decompressed if it is a gzip file. Its functions throw Error if the gzip stream is damaged
/// or truncated.
class UnpackedFile {
 public:
  /// Keeps a reference to `file`.
  explicit UnpackedFile(const InputFile& file);

  bool is_packed() const { return gzdirect(handle_.get()) == 0; }
  /// Reads `bytes` bytes, or fewer at the end of the file. Returns their number.
  size_t read(void* to, size_t bytes);

 private:
  const InputFile& file_;
  GzHandle handle_;
};

}  // namespace voxgrad
