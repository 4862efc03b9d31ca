// The order of the system calls is what makes the write atomic: data to disk, then the rename, then the
// directory, so that after a power cut the name leads to the old bytes or to all of the new ones.
//
// A writer that is killed leaves its temporary file behind, and the next writer of the same path removes it. Which
// files are abandoned is told by an flock that each writer holds on its file: the system drops it with the process,
// however that ends, and no process number or clock has to be trusted; Linux carries it to the other hosts of an NFS
// mount too. Where a file system has no flock, nothing is removed. (One that keeps the locks within each host must
// not have writers of one path on two.)
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

/// Makes the rename durable. A directory that may be written but not read, or a file system without
/// fsync for directories, leaves that to the system: the file itself is complete either way.
int sync_directory(const std::filesystem::path& directory) {
  const int descriptor = retry_interrupted([&] { return open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) return errno == EACCES ? 0 : errno;
  const int error = retry_interrupted([&] { return fsync(descriptor); }) == 0 ? 0 : errno;
  close(descriptor);
  return error == EINVAL || error == ENOTSUP ? 0 : error;
}

/// Whether `path` leads to the open file, and not to another one by now.
bool leads_to(const std::filesystem::path& path, int descriptor) {
  struct stat opened, named;
  return fstat(descriptor, &opened) == 0 && lstat(path.c_str(), &named) == 0 && S_ISREG(named.st_mode) &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// Removes the temporary file of a writer that is gone. Who has the lock has the name too: nobody else removes the
/// file, and a new one is only made under a free name.
void remove_abandoned(const std::filesystem::path& temporary) {
  const int descriptor = open(temporary.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && leads_to(temporary, descriptor)) unlink(temporary.c_str());
  close(descriptor);
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
  try {
    create_temporary();
  } catch (...) {  // the destructor does not run
    discard();
    throw;
  }
  if (exists) (void)fchmod(descriptor_, existing.st_mode & 07777);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::fail_with(int error) const {
  fail(op_, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

/// Temporary files have the numbers 0, 1, ...: the first that no other writer of the same path has. So those that are
/// abandoned are found without a search of the directory.
void AtomicFile::create_temporary() {
  constexpr size_t kLongestStem = 200;  // file names end at 255 bytes
  constexpr int kMaxWriters = 8;       // what more of them at once leave, the next as many at once clean up
  const std::string stem = path_.filename().string().substr(0, kLongestStem);
  for (int number = 0; descriptor_ < 0 || number < kMaxWriters; ++number) {
    auto name = directory_of(path_) / concat('.', stem, ".voxgrad-", number, ".tmp");
    remove_abandoned(name);
    if (descriptor_ >= 0) continue;
    descriptor_ = retry_interrupted([&] { return open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
    if (descriptor_ < 0 && errno != EEXIST) fail_with(errno);
    if (descriptor_ < 0) continue;
    temporary_ = std::move(name);
    const bool locked_by_other = flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (locked_by_other || !leads_to(temporary_, descriptor_)) {  // taken for abandoned in the moment without a lock
      close(descriptor_);
      descriptor_ = -1;
      temporary_.clear();
    }
  }
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

void AtomicFile::seek(int64_t position) {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is closed already");
  if (lseek(descriptor_, position, SEEK_SET) < 0) fail_with(errno);
}

void AtomicFile::commit() {
  check(descriptor_ >= 0, op_, "'", path_.string(), "' is closed already");
  if (retry_interrupted([&] { return fsync(descriptor_); }) != 0) fail_with(errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_with(errno);
  temporary_.clear();
  discard();  // only now: the lock goes with the descriptor
  if (const int error = sync_directory(directory_of(path_))) fail_with(error);
}

void AtomicFile::discard() noexcept {
  if (!temporary_.empty()) unlink(temporary_.c_str());  // while the lock still says whose it is
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op) {
  AtomicFile file(path, op);
  file.write(bytes);
  file.commit();
}

}  // namespace voxgrad
