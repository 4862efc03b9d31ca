#include "core/io/detail/gzip_file.h"

#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace voxgrad {
namespace {

constexpr size_t kChunk = 1 << 16;

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
  gzbuffer(handle_.get(), kChunk);
}

size_t UnpackedFile::read(void* to, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const auto want = static_cast<unsigned>(std::min(bytes - done, kChunk));
    const int got = gzread(handle_.get(), static_cast<char*>(to) + done, want);
    int error = Z_OK;
    const char* message = gzerror(handle_.get(), &error);
    file_.check(error != Z_BUF_ERROR, "truncated: the gzip stream is incomplete");
    file_.check(got >= 0 && error == Z_OK, "damaged: ", without_source(message));
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

int64_t UnpackedFile::count(int64_t limit) {
  if (gzdirect(handle_.get())) return std::min(limit, file_.size());
  rewind();
  std::vector<char> chunk(kChunk);
  int64_t total = 0;
  size_t got = 1;
  while (got > 0 && total < limit) total += static_cast<int64_t>(got = read(chunk.data(), chunk.size()));
  rewind();
  return std::min(total, limit);
}

void UnpackedFile::seek(int64_t position) {
  rewind();
  std::vector<char> chunk(kChunk);
  while (position > 0) {
    const size_t want = std::min<size_t>(chunk.size(), static_cast<size_t>(position));
    file_.check(read(chunk.data(), want) == want, "truncated: the file ends before the expected data");
    position -= static_cast<int64_t>(want);
  }
}

void UnpackedFile::rewind() { file_.check(gzrewind(handle_.get()) == 0, "cannot be rewound"); }

}  // namespace voxgrad
