// Implements the creation of folders, the locked output folder, and the check whether writing to standard output would
// block.
#include "examples/common/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace examples {
namespace {

constexpr const char* kOp = "output folder";

enum class Lock : uint8_t { acquired, taken, unsupported };

/// Opens a file or folder and tries to lock it. Stores the file descriptor in `descriptor`, or -1 if the lock was not
/// acquired. The lock is held until the descriptor is closed.
Lock lock(const std::filesystem::path& path, int flags, int& descriptor) {
  descriptor = open(path.c_str(), flags | O_CLOEXEC, 0666);
  voxgrad::check(descriptor >= 0, kOp, "cannot open '", path.string(), "': ", std::generic_category().message(errno));
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return Lock::acquired;
  const bool taken = errno == EWOULDBLOCK;
  close(descriptor);
  descriptor = -1;
  return taken ? Lock::taken : Lock::unsupported;
}

}  // namespace

bool output_ready() {
  pollfd out{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return poll(&out, 1, 0) != 0;  // also true after an error; the next write will report the error
}

void create_folder(const std::filesystem::path& path) {
  if (path.empty() || std::filesystem::is_directory(path)) return;
  create_folder(path.parent_path());
  if (!std::filesystem::create_directory(path)) return;  // a path with a slash at its end
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  const int descriptor = open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int error = descriptor >= 0 && fsync(descriptor) == 0 ? 0 : errno;
  if (descriptor >= 0) close(descriptor);
  // A folder that cannot be read cannot be flushed. Some file systems do not support fsync for folders.
  if (error == EACCES || error == EINVAL || error == ENOTSUP) error = 0;
  voxgrad::check(error == 0, kOp, "cannot create '", path.string(), "': ", std::generic_category().message(error));
}

OutputFolder::OutputFolder(std::filesystem::path path) : path_(std::move(path)) {
  create_folder(path_);
  Lock result = lock(path_, O_RDONLY | O_DIRECTORY, lock_);
  // NFS can lock only files that are open for writing. If the file system supports no locks, continue without a lock.
  if (result == Lock::unsupported) result = lock(path_ / ".lock", O_RDWR | O_CREAT, lock_);
  voxgrad::check(result != Lock::taken, kOp, "'", path_.string(),
                 "' is in use by another run; choose another folder or wait until that run ends");
}

OutputFolder::~OutputFolder() {
  if (lock_ >= 0) close(lock_);
}

void OutputFolder::check_writable(const char* name) const { voxgrad::AtomicFile(path_ / name, kOp); }

}  // namespace examples
