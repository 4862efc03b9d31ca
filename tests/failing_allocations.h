// Memory that runs out: allocations of this thread that fail on purpose.
#pragma once

#include <exception>
#include <initializer_list>

namespace voxgrad {

/// While it lives, operator new throws std::bad_alloc on this thread: for one allocation, or for every one of a period.
class FailingAllocations {
 public:
  /// Allocations fail whose number, counted from 0, is first + i * period, i >= 0; just the first one if period is 0.
  explicit FailingAllocations(long first, long period = 0);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
  /// How many have failed so far.
  long failed() const;
};

/// Calls `function` with the first allocation failing, then the second, and so on until one run meets no failure, and
/// then with every 2nd, 3rd, 5th failing. What `function` throws is passed over: what is tested is that the program
/// goes on.
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
