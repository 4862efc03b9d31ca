// Tests of the thread pool: every index is visited once, exceptions reach the caller, and the pool works with fewer
// threads if the system cannot create more.
#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#include "tests/support.h"

namespace voxgrad {
namespace {

/// Sets the number of threads until the object is destroyed.
struct Threads {
  explicit Threads(int count) { set_num_threads(count); }
  ~Threads() { set_num_threads(before); }
  const int before = num_threads();
};

/// Returns whether parallel_for visits each of `count` indices exactly once.
bool visits_each_index_once(int64_t count) {
  std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  return std::all_of(visits.begin(), visits.end(), [](const auto& n) { return n == 1; });
}

TEST(Parallel, VisitsEveryIndexOnce) {
  for (const int threads : {1, 2, 7}) {
    const Threads guard(threads);
    for (const int64_t count : {0, 1, 6, 1000})
      EXPECT_TRUE(visits_each_index_once(count)) << count << " on " << threads;
  }
}

TEST(Parallel, SplitsLoopsWithCountsNearInt64Max) {
  const Threads guard(7);
  for (const int64_t count : {int64_t{1} << 62, INT64_MAX}) {
    std::mutex mutex;
    std::map<int64_t, int64_t> pieces;
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      const std::lock_guard lock(mutex);
      pieces[begin] = end;
    });
    EXPECT_EQ(pieces.size(), 7U);
    int64_t next = 0;
    for (const auto& [begin, end] : pieces) {
      EXPECT_EQ(begin, next);
      EXPECT_NEAR(static_cast<double>(end - begin), static_cast<double>(count) / 7, 1e3);
      next = end;
    }
    EXPECT_EQ(next, count);
  }
}

TEST(Parallel, SerialGuardDisablesParallelLoops) {
  const Threads guard(3);
  const auto pieces = [] {
    std::atomic<int> count = 0;
    parallel_for(10, 1, [&](int64_t, int64_t) { ++count; });
    return count.load();
  };
  {
    const SerialGuard serial;
    { const SerialGuard nested; }
    EXPECT_EQ(pieces(), 1);
  }
  EXPECT_EQ(pieces(), 3);
}

TEST(Parallel, RethrowsErrorsOfTheBody) {
  const Threads guard(3);
  EXPECT_ERROR(parallel_for(10, 1, [](int64_t begin, int64_t) { check(begin > 0, "body", "no"); }), "body: no");
  EXPECT_TRUE(visits_each_index_once(10));
  EXPECT_ERROR(set_num_threads(0), "set_num_threads: the number of threads must be positive, got 0");
  EXPECT_EQ(num_threads(), 3);
}

// The test below limits the address space. The address sanitizer reserves a large part of the address space, so builds
// with this sanitizer omit the test.
#if defined(__SANITIZE_ADDRESS__)
#define VG_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VG_ADDRESS_SANITIZER
#endif
#endif
#ifndef VG_ADDRESS_SANITIZER
TEST(ParallelDeathTest, VisitsEveryIndexOnceWithFewerThreadsThanRequested) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto work = [] {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = static_cast<rlim_t>(pages) * 4096 + (rlim_t{200} << 20);  // room for about 25 stacks of 8 MiB
    const rlimit room{limit, limit};
    if (setrlimit(RLIMIT_AS, &room) != 0) std::exit(2);
    set_num_threads(1 << 30);
    std::exit(visits_each_index_once(1000) && visits_each_index_once(1000) ? 0 : 1);
  };
  EXPECT_EXIT(work(), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace voxgrad
