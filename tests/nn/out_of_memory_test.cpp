// Tests failing allocations while checkpoints are saved and loaded and while averaged weights are in use. Also tests
// SkipInit guards that are destroyed in any order.
#include "nn/checkpoint.h"

#include <optional>

#include "core/autograd.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/optim/ema.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "tests/core/file_support.h"
#include "tests/failing_allocations.h"

namespace voxgrad {
namespace {

using OutOfMemoryInState = FileTest;

TEST_F(OutOfMemoryInState, CheckpointsSaveAndLoadAfterFailures) {
  nn::Linear model(2, 3);
  optim::AdamW optimizer(model.parameters(), {});
  const CheckpointParts parts{.model = &model, .optimizer = &optimizer};
  with_each_allocation_failing([&] { save_checkpoint(path("c"), parts); });
  save_checkpoint(path("c"), parts);
  with_each_allocation_failing([&] { load_checkpoint(path("c"), parts); });
  EXPECT_EQ(file_count(), 1);
}

TEST(ExponentialMovingAverage, RestoresTheModelIfMemoryRunsOut) {
  nn::Linear model(2, 3);
  optim::ExponentialMovingAverage average(model, {.decay = 0.5});
  const NoGradGuard no_grad;
  model.weight.fill_(2);
  with_each_allocation_failing([&] { const auto swapped = average.swap(); });
  EXPECT_EQ(model.weight.to_vector(), std::vector<double>(6, 2));
  std::optional<FailingAllocations> failing;
  {
    const auto swapped = average.swap();
    EXPECT_NE(model.weight.to_vector(), std::vector<double>(6, 2));
    failing.emplace(0, 1);
  }
  EXPECT_EQ(failing->failed(), 0);
  failing.reset();
  EXPECT_EQ(model.weight.to_vector(), std::vector<double>(6, 2));
}

TEST(SkipInit, GuardsMayBeDestroyedInAnyOrder) {
  auto outer = std::make_unique<nn::init::SkipInit>(), inner = std::make_unique<nn::init::SkipInit>();
  const Tensor x = zeros({10});
  outer.reset();
  nn::init::uniform_(x, 1, 2);
  EXPECT_EQ(x.at({0}), 0);
  inner.reset();
  nn::init::uniform_(x, 1, 2);
  EXPECT_GE(x.at({0}), 1);
}

}  // namespace
}  // namespace voxgrad
