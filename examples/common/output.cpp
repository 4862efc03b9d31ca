#include "examples/common/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/atomic_file.h"
#include "core/error.h"

namespace examples {
namespace {

constexpr const char* kOp = "output folder";

}  // namespace

bool output_ready() {
  pollfd out{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return poll(&out, 1, 0) != 0;  // an error is for the write to report
}

OutputFolder::OutputFolder(std::filesystem::path path) : path_(std::move(path)) {
  std::filesystem::create_directories(path_);
  lock_ = open((path_ / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  voxgrad::check(lock_ >= 0, kOp, "cannot write in '", path_.string(), "': ", std::generic_category().message(errno));
  // A file system without locks does without.
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  close(lock_);
  voxgrad::fail(kOp, "'", path_.string(), "' is in use by another run; choose another folder or wait for its end");
}

OutputFolder::~OutputFolder() { close(lock_); }

void OutputFolder::check_writable(const char* name) const { voxgrad::AtomicFile(path_ / name, kOp); }

}  // namespace examples
