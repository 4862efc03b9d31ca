// Implements AtomicFile. The order of the system calls makes the write atomic: the data is flushed to the disk, then
// the file is renamed, then the directory is flushed. After a power failure, the file contains either the old bytes or
// all of the new bytes.
//
// A writer that is killed leaves its temporary file behind, and the next writer of the same path removes it. Each
// writer holds an flock on its file, so a file without a lock is abandoned. The system releases the lock when the
// process ends in any way. On NFS, Linux locks the file on the server, so the lock also protects the file from writers
// on other hosts. On a file system without flock, nothing is removed. On a file system whose locks are local to each
// host, writers of one path must run on the same host.
#include "core/io/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

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

/// Returns whether `path` still refers to the open file.
bool refers_to(const std::filesystem::path& path, int descriptor) {
  struct stat opened, named;
  return fstat(descriptor, &opened) == 0 && lstat(path.c_str(), &named) == 0 && S_ISREG(named.st_mode) &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// Removes the temporary file of a writer that has ended. The lock ensures that no running writer uses the file.
void remove_abandoned(const std::filesystem::path& temporary) {
  const int descriptor = open(temporary.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && refers_to(temporary, descriptor)) unlink(temporary.c_str());
  close(descriptor);
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
  try {
    create_temporary();
  } catch (...) {  // the destructor does not run if the constructor throws
    discard();
    throw;
  }
  if (exists) (void)fchmod(descriptor_, existing.st_mode & 07777);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::fail_with(int error) const {
  fail(op_, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

/// Creates the temporary file with the first number 0, 1, ... that no other writer of the same path uses. This
/// numbering finds abandoned files without a search of the directory.
void AtomicFile::create_temporary() {
  constexpr size_t kMaxStem = 200;  // bytes; file names have at most 255
  constexpr int kMaxWriters = 8;    // abandoned files with a number below this are removed
  const std::string stem = path_.filename().string().substr(0, kMaxStem);
  for (int number = 0; descriptor_ < 0 || number < kMaxWriters; ++number) {
    auto name = directory_of(path_) / concat('.', stem, ".voxgrad-", number, ".tmp");
    remove_abandoned(name);
    if (descriptor_ >= 0) continue;
    descriptor_ = retry_interrupted([&] { return open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
    if (descriptor_ < 0 && errno != EEXIST) fail_with(errno);
    if (descriptor_ < 0) continue;
    temporary_ = std::move(name);
    const bool locked_by_other = flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    // Another writer may have removed the file before this writer locked it.
    if (locked_by_other || !refers_to(temporary_, descriptor_)) {
      close(descriptor_);
      descriptor_ = -1;
      temporary_.clear();
    }
  }
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
  discard();  // after the rename, because closing the descriptor releases the lock
  if (const int error = sync_directory(directory_of(path_))) fail_with(error);
}

void AtomicFile::discard() noexcept {
  if (!temporary_.empty()) unlink(temporary_.c_str());  // while this writer still holds the lock
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op) {
  AtomicFile file(path, op);
  file.write(bytes);
  file.commit();
}

}  // namespace voxgrad
