#include "core/parallel.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "core/error.h"

namespace voxgrad {
namespace {

int& thread_count() {
  static int count = [] {
    const char* text = std::getenv("VOXGRAD_NUM_THREADS");
    const int wanted = text ? std::atoi(text) : 0;
    return wanted > 0 ? wanted : omp_get_max_threads();
  }();
  return count;
}

}  // namespace

int num_threads() { return thread_count(); }

void set_num_threads(int count) {
  check(count > 0, "set_num_threads", "needs a positive number, got ", count);
  thread_count() = count;
  omp_set_num_threads(count);
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t pieces = std::min<int64_t>(num_threads(), std::max<int64_t>(1, count / std::max<int64_t>(1, grain)));
  if (pieces == 1 || omp_in_parallel()) return body(0, count);
  std::exception_ptr error;
#pragma omp parallel for num_threads(static_cast <int>(pieces)) schedule(static, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    try {
      body(count * piece / pieces, count * (piece + 1) / pieces);
    } catch (...) {
#pragma omp critical
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace voxgrad
