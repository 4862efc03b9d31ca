// A check that every example runs at exit. If standard output could not be written, for example because the disk is
// full, the exit code is 1.
#include <cstdio>
#include <cstdlib>

namespace {

void check_output() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  std::fputs("standard output could not be written\n", stderr);
  std::_Exit(1);
}

[[maybe_unused]] const int registered = std::atexit(check_output);

}  // namespace
