// Replaces the global operator new and delete of the test programs.
#include "tests/failing_allocations.h"

#include <cstdlib>
#include <new>

namespace voxgrad {
namespace {

struct Failures {
  bool on = false;
  long next = 0;    // successful allocations before the next failure
  long period = 0;  // distance between failures; 0: fail once
  long failed = 0;  // allocations that have failed
};
thread_local Failures failures;

bool fail_now() {
  if (!failures.on || failures.next-- != 0) return false;
  ++failures.failed;
  failures.next = failures.period - 1;  // -1 if the period is 0: never reaches 0 again
  return true;
}

}  // namespace

FailingAllocations::FailingAllocations(long first, long period) { failures = {true, first, period, 0}; }
FailingAllocations::~FailingAllocations() { failures.on = false; }
long FailingAllocations::failed() const { return failures.failed; }

}  // namespace voxgrad

// The other forms of operator new and delete call these four, except for the forms with std::align_val_t, which this
// file does not replace. noinline keeps GCC from warning of a mismatch between operator new and free().
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* data = voxgrad::fail_now() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  return data ? data : throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return voxgrad::fail_now() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }
