// The order of the system calls makes the write atomic: the data is flushed to the disk, then the file is renamed, then
// the directory is flushed. After a power failure, the file contains either the old bytes or all of the new bytes.
#include "core/io/atomic_file.h"

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

/// Makes the rename durable. Does nothing if the directory cannot be read or the file system has no fsync for
/// directories; the file itself is complete in any case.
int sync_directory(const std::filesystem::path& directory) {
  const int descriptor = retry_interrupted([&] { return open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) return errno == EACCES ? 0 : errno;
  const int error = retry_interrupted([&] { return fsync(descriptor); }) == 0 ? 0 : errno;
  close(descriptor);
  return error == EINVAL || error == ENOTSUP ? 0 : error;
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path, const char* op) : path_(path), op_(op) {
  check(path.has_filename(), op, "cannot write '", path.string(), "': the path has no file name");
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
    // The rename would replace a read-only file without an error.
    if (access(path_.c_str(), W_OK) != 0) fail_with(errno);
  }
  create_temporary();
  if (exists) (void)fchmod(descriptor_, existing.st_mode & 07777);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::fail_with(int error) const {
  fail(op_, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

/// Creates a file with a name that no other writer of the same path uses.
void AtomicFile::create_temporary() {
  constexpr size_t kMaxStem = 200;  // bytes; file names have at most 255
  static std::atomic<int> next_number{0};
  const std::string stem = path_.filename().string().substr(0, kMaxStem);
  do {
    temporary_ = directory_of(path_) / concat('.', stem, ".voxgrad-", getpid(), '-', next_number++, ".tmp");
    descriptor_ =
        retry_interrupted([&] { return open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_with(errno);
}

void AtomicFile::write(const void* data, size_t bytes) {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is already closed");
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = retry_interrupted([&] { return ::write(descriptor_, from, bytes); });
    if (written < 0) fail_with(errno);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::seek(int64_t position) {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is already closed");
  if (lseek(descriptor_, position, SEEK_SET) < 0) fail_with(errno);
}

void AtomicFile::commit() {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is already closed");
  if (retry_interrupted([&] { return fsync(descriptor_); }) != 0) fail_with(errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_with(errno);
  temporary_.clear();
  discard();
  if (const int error = sync_directory(directory_of(path_))) fail_with(error);
}

void AtomicFile::discard() noexcept {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op) {
  AtomicFile file(path, op);
  file.write(bytes);
  file.commit();
}

}  // namespace voxgrad
