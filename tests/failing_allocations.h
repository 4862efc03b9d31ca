// Helpers that make memory allocations of the current thread fail.
#pragma once

#include <exception>
#include <initializer_list>

namespace voxgrad {

/// Makes one allocation or every period-th allocation of this thread fail while the object exists. A failing operator
/// new throws std::bad_alloc; the nothrow form returns a null pointer.
class FailingAllocations {
 public:
  /// Counts allocations from 0. Allocation number first + i * period fails for each i >= 0. If period is 0, only
  /// allocation number `first` fails.
  explicit FailingAllocations(long first, long period = 0);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
  /// Returns the number of allocations that have failed so far.
  long failed() const;
};

/// Calls `function` repeatedly. In the first call, the first allocation fails; in the second call, the second
/// allocation; and so on until a call has no failure. In further calls, every 2nd, 3rd or 5th allocation fails.
/// `function` may throw: the tests check that the program can continue after the exception.
template <class F>
void with_each_allocation_failing(const F& function) {
  const auto fails = [&](long first, long period) {
    FailingAllocations failing(first, period);
    try {
      function();
    } catch (const std::exception&) {
    }
    return failing.failed() > 0;
  };
  for (long first = 0; fails(first, 0); ++first) {
  }
  for (const long period : {2, 3, 5})
    for (long first = 0; first < period; ++first) fails(first, period);
}

}  // namespace voxgrad
