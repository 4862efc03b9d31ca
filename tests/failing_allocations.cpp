#include "tests/failing_allocations.h"

#include <cstdlib>
#include <new>

namespace voxgrad {
namespace {

struct Failures {
  bool on = false;
  long next = 0, period = 0, failed = 0;
};
thread_local Failures failures;

bool fail_now() {
  if (!failures.on || failures.next-- != 0) return false;
  ++failures.failed;
  failures.next = failures.period - 1;  // never again if the period is 0
  return true;
}

}  // namespace

FailingAllocations::FailingAllocations(long first, long period) { failures = {true, first, period, 0}; }
FailingAllocations::~FailingAllocations() { failures.on = false; }
long FailingAllocations::failed() const { return failures.failed; }

}  // namespace voxgrad

// The forms that the standard library's others call. Not inlined: GCC would take new and free() for a pair that does
// not belong together.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* data = voxgrad::fail_now() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  return data ? data : throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return voxgrad::fail_now() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }
