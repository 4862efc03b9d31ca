// Parallel loops on a pool of CPU threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "scoped_value.h"

namespace voxgrad {

/// Returns the number of threads that parallel_for uses. Default: the environment variable VOXGRAD_NUM_THREADS,
/// otherwise OMP_NUM_THREADS, otherwise the number of cores.
int num_threads();
/// Sets the number of threads that parallel_for uses.
void set_num_threads(int count);

/// Splits [0, count) into ranges of at least `grain` elements, calls body(begin, end) for each range in parallel, and
/// returns when all calls have returned. Rethrows an exception of a call. Nested calls run on the calling thread. The
/// ranges depend on the number of threads. For reproducible results, the order of additions in `body` must not depend
/// on the ranges.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

namespace detail {
/// If true, parallel_for ignores `grain`. For tests, which check the use of several threads with small tensors.
extern std::atomic<bool> ignores_grain;
}  // namespace detail

/// While the guard exists, loops that this thread starts with parallel_for run on this thread only. Use the guard in
/// programs that already run one thread per core.
class [[nodiscard]] SerialGuard : ScopedValue<bool> {
 public:
  [[nodiscard]] SerialGuard();
};

}  // namespace voxgrad
