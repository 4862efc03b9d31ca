// Tests that use tensors and autograd from several threads. `./run sanitize --thread core` runs them under the thread
// sanitizer.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr int kThreads = 4, kRounds = 500;

/// Calls work(thread index) on kThreads threads and waits for them.
template <class F>
void on_threads(const F& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, AccumulateGradientsOfOneLeaf) {
  const Tensor w = ones({1000}).requires_grad_();
  on_threads([&](int) {
    for (int i = 0; i < kRounds; ++i) sum(w * 2.0).backward();
  });
  EXPECT_EQ(w.grad().to_vector(), std::vector<double>(1000, 2.0 * kThreads * kRounds));
}

TEST(Threads, AccumulateRecordedGradientsOfOneLeaf) {
  const Tensor w = full({100}, 3, {.dtype = f64}).requires_grad_();
  on_threads([&](int) {
    for (int i = 0; i < 20; ++i) sum(w * w).backward({}, false, true);
  });
  const Tensor g = w.grad();
  EXPECT_EQ(g.at({99}), 6.0 * kThreads * 20);
  EXPECT_EQ(grad({sum(g)}, {w})[0].at({0}), 2.0 * kThreads * 20);
  w.set_grad({});  // breaks the cycle: w holds its gradient, and the gradient's graph holds w
}

TEST(Threads, ComputeGradientsOfSharedParameters) {
  const Tensor w = ones({100}).requires_grad_(), b = ones({100}).requires_grad_();
  std::vector<int> wrong(kThreads);
  on_threads([&](int thread) {
    for (int i = 0; i < kRounds; ++i) {
      const double factor = thread + 1;
      const Tensors grads = grad({sum(relu(w * factor + b))}, {w, b});
      wrong[static_cast<size_t>(thread)] += grads[0].at({7}) != factor || grads[1].at({99}) != 1;
    }
  });
  EXPECT_EQ(wrong, std::vector<int>(kThreads));
  EXPECT_FALSE(w.grad().defined());
}

TEST(Threads, RunBackwardOnOneRetainedGraph) {
  const Tensor w = ones({100}).requires_grad_();
  const Tensor shared = exp(w);
  on_threads([&](int) {
    for (int i = 0; i < 100; ++i) sum(shared * 2.0).backward({}, true);
  });
  EXPECT_NEAR(w.grad().at({5}), 2 * 2.718281828 * 100 * kThreads, 0.01);
}

TEST(Threads, CountAndFreeMemory) {
  const MemoryStats before = memory::stats();
  on_threads([](int thread) {
    for (int i = 0; i < kRounds; ++i) {  // small blocks, and large blocks, which the allocator caches
      const Tensor small = empty({i + 1}, {.dtype = u8}),
                   large = empty({(1 << 17) - 100 + 2 * i * (thread + 1)}, {.dtype = u8});
      if (i % 100 == 0) memory::empty_cache();
      if (i % 70 == 0) memory::reset_peak();
    }
  });
  memory::empty_cache();
  const MemoryStats after = memory::stats();
  EXPECT_EQ(after.current, before.current);
  EXPECT_EQ(after.allocations, before.allocations + 2 * kThreads * kRounds);
  EXPECT_LE(after.reserved, before.reserved);
  EXPECT_GE(after.peak, after.current);
}

TEST(Threads, ReuseLargeBlocksThatAnotherThreadFreed) {
  memory::empty_cache();
  const auto take_and_free = [] { static_cast<void>(empty({1 << 20}, {.dtype = u8})); };
  take_and_free();
  const MemoryStats before = memory::stats();
  on_threads([&](int thread) {
    if (thread == 0) take_and_free();
  });
  if (before.reserved >= before.current + (1 << 20)) {  // false under the address sanitizer, which disables the cache
    EXPECT_EQ(memory::stats().device_allocations, before.device_allocations);
  }
}

}  // namespace
}  // namespace voxgrad
