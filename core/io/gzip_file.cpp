// Implements access to files through zlib.
#include "core/io/detail/gzip_file.h"

#include <unistd.h>

#include <string_view>

namespace voxgrad {
namespace {

/// Removes the file descriptor from an error message of zlib: "<fd:5>: incorrect data check" becomes "incorrect data
/// check".
std::string_view without_source(std::string_view message) {
  const size_t end = message.starts_with("<fd:") ? message.find(": ") : std::string_view::npos;
  return end == std::string_view::npos ? message : message.substr(end + 2);
}

}  // namespace

GzHandle open_gz(int descriptor, const char* mode) {
  const int copy = dup(descriptor);
  gzFile file = copy >= 0 ? gzdopen(copy, mode) : nullptr;
  if (file == nullptr && copy >= 0) close(copy);
  return GzHandle(file);
}

UnpackedFile::UnpackedFile(const InputFile& file) : file_(file), handle_(open_gz(file.descriptor(), "rb")) {
  file_.check(handle_ != nullptr, "cannot be opened by zlib");
  gzbuffer(handle_.get(), 1 << 16);
}

size_t UnpackedFile::read(void* to, size_t bytes) {
  const size_t got = gzfread(to, 1, bytes, handle_.get());
  int error = Z_OK;
  const char* message = gzerror(handle_.get(), &error);
  file_.check(error != Z_BUF_ERROR, "truncated: the gzip stream is incomplete");
  file_.check(error == Z_OK, "damaged: ", without_source(message));
  return got;
}

}  // namespace voxgrad
