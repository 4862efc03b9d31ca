// Small allocations that fail: an exception, nothing lost, and the program goes on.
#include <gtest/gtest.h>

#include <exception>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(OutOfMemory, GraphsAreMadeRunAndFreed) {
  const int64_t live = memory::stats().current;
  {
    const Tensor w = ones({3, 4}).requires_grad_();
    with_each_allocation_failing([&] {
      const Tensor h = exp(w * 0.5);
      const Tensor loss = sum(cat({h * w, relu(h)}, 0));
      loss.backward(Tensor(), true);
      grad({loss}, {w}, {}, false, true);
    });
    w.set_grad({});
    sum(w * 2.0).backward();
    EXPECT_EQ(w.grad().to_vector(), std::vector<double>(12, 2));
  }
  EXPECT_EQ(memory::stats().current, live);
}

// The block goes back to the system when there is no memory to remember it by.
TEST(OutOfMemory, LargeBlocksAreFreedAndNotLost) {
  const int64_t live = memory::stats().current;
  with_each_allocation_failing([] {
    const Tensor a = empty({1 << 18}), b = empty({3 << 17});
    EXPECT_NE(a.raw_data(), b.raw_data());
  });
  EXPECT_EQ(memory::stats().current, live);
  EXPECT_EQ(full({1 << 18}, 2).to_vector().back(), 2);
}

// The nodes of a graph are freed in the middle of other failures, where no memory can be taken.
TEST(OutOfMemory, FreeingALongGraphTakesNone) {
  Tensor x = ones({}).requires_grad_();
  for (int i = 0; i < 1000; ++i) x = x + 1.0;
  FailingAllocations failing(0, 1);
  x = {};
  EXPECT_EQ(failing.failed(), 0);
}

}  // namespace
}  // namespace voxgrad
