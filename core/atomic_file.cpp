// The order of the system calls is what makes the write atomic: data to disk, then the rename, then the
// directory, so that after a power cut the name leads to the old bytes or to all of the new ones.
#include "core/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>

#include "core/error.h"

namespace voxgrad {
namespace {

template <class Call>
auto retry_interrupted(Call call) {
  decltype(call()) result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// Makes the rename durable. A directory that may be written but not read, or a file system without
/// fsync for directories, leaves that to the system: the file itself is complete either way.
int sync_directory(const std::filesystem::path& directory) {
  const int descriptor = retry_interrupted([&] { return open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) return errno == EACCES ? 0 : errno;
  const int error = retry_interrupted([&] { return fsync(descriptor); }) == 0 ? 0 : errno;
  close(descriptor);
  return error == EINVAL || error == ENOTSUP ? 0 : error;
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path, const char* op) : path_(path), op_(op) {
  check(path.has_filename(), op, "cannot write '", path.string(), "': it names no file");
  std::error_code ignored;
  if (std::filesystem::is_symlink(path, ignored)) {
    const auto target = std::filesystem::canonical(path, ignored);
    if (!ignored) path_ = target;
  }
  struct stat existing;
  const bool exists = stat(path_.c_str(), &existing) == 0;
  if (exists) {
    check(!S_ISDIR(existing.st_mode), op, "cannot write '", path.string(), "': it is a directory");
    check(S_ISREG(existing.st_mode), op, "cannot write '", path.string(), "': it is not a regular file");
    // The rename would not ask: a file that its owner made read-only would be lost.
    if (access(path_.c_str(), W_OK) != 0) fail_with(errno);
  }
  create_temporary();
  if (exists) (void)fchmod(descriptor_, existing.st_mode & 07777);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::fail_with(int error) const {
  fail(op_, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

void AtomicFile::create_temporary() {
  static std::atomic<unsigned> counter{0};
  constexpr size_t kLongestStem = 200;  // file names end at 255 bytes
  const std::string stem = path_.filename().string().substr(0, kLongestStem);
  do {
    temporary_ = directory_of(path_) / concat('.', stem, '.', getpid(), '-', counter++, ".tmp");
    descriptor_ =
        retry_interrupted([&] { return open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_with(errno);
}

void AtomicFile::write(const void* data, size_t bytes) {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is closed already");
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = retry_interrupted([&] { return ::write(descriptor_, from, bytes); });
    if (written < 0) fail_with(errno);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is closed already");
  if (retry_interrupted([&] { return fsync(descriptor_); }) != 0) fail_with(errno);
  // close() reports late write errors of network file systems; its descriptor is gone even then.
  const int closed = close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 && errno != EINTR) fail_with(errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_with(errno);
  temporary_.clear();
  if (const int error = sync_directory(directory_of(path_))) fail_with(error);
}

void AtomicFile::discard() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op) {
  AtomicFile file(path, op);
  file.write(bytes);
  file.commit();
}

}  // namespace voxgrad
