// Loops over the cores.
#pragma once

#include <cstdint>
#include <functional>

#include "scoped_value.h"

namespace voxgrad {

/// Threads that parallel_for uses: VOXGRAD_NUM_THREADS, else OMP_NUM_THREADS, else the cores.
int num_threads();
void set_num_threads(int count);

/// Calls body(begin, end) on pieces of [0, count) that hold at least `grain` elements each; the pieces
/// run at the same time and end before the call returns. An exception of a piece is thrown on.
/// Nested calls run in the calling thread. How the range is cut depends on the number of threads: bodies
/// must not let a sum depend on it.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

/// While it lives, parallel_for runs in the calling thread alone. For programs with a thread for each core already.
class [[nodiscard]] SerialGuard {
 public:
  [[nodiscard]] SerialGuard();

 private:
  ScopedValue<bool> serial_;
};

}  // namespace voxgrad
