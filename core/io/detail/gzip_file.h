// Access to files through zlib, for core/io/nifti.cpp.
#pragma once

#include <unistd.h>
#include <zlib.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "input_file.h"

namespace voxgrad {

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};
using GzHandle = std::unique_ptr<gzFile_s, GzClose>;

/// Opens a file by its descriptor, which stays open when the handle is closed. Returns null if zlib fails.
inline GzHandle open_gz(int descriptor, const char* mode) {
  const int copy = dup(descriptor);
  gzFile file = copy >= 0 ? gzdopen(copy, mode) : nullptr;
  if (file == nullptr && copy >= 0) close(copy);
  return GzHandle(file);
}

/// The contents of a file, decompressed if it is a gzip file. Its functions throw Error if the gzip stream is damaged
/// or truncated.
class UnpackedFile {
 public:
  /// Keeps a reference to `file`.
  explicit UnpackedFile(const InputFile& file) : file_(file), handle_(open_gz(file.descriptor(), "rb")) {
    file_.check(handle_ != nullptr, "cannot be opened by zlib");
    gzbuffer(handle_.get(), 1 << 16);
  }

  bool is_packed() const { return gzdirect(handle_.get()) == 0; }
  /// Reads `bytes` bytes, or fewer at the end of the file. Returns their number.
  size_t read(void* to, size_t bytes) {
    const size_t got = gzfread(to, 1, bytes, handle_.get());
    int error = Z_OK;
    std::string_view message = gzerror(handle_.get(), &error);
    // Removes the file descriptor: "<fd:5>: incorrect data check" becomes "incorrect data check".
    if (message.starts_with("<fd:")) message.remove_prefix(message.find(' ') + 1);
    file_.check(error != Z_BUF_ERROR, "truncated: the gzip stream is incomplete");
    file_.check(error == Z_OK, "damaged: ", message);
    return got;
  }

 private:
  const InputFile& file_;
  GzHandle handle_;
};

}  // namespace voxgrad
