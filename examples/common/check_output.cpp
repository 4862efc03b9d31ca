// A part of every example: a program whose output did not arrive, as on a full disk, must not end with 0.
#include <cstdio>
#include <cstdlib>

namespace {

void check_output() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  std::fputs("the standard output could not be written\n", stderr);
  std::_Exit(1);
}

[[maybe_unused]] const int registered = std::atexit(check_output);

}  // namespace
