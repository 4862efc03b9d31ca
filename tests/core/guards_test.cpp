// Tests of scoped guards that are not destroyed in the reverse order of their construction, for example because a
// container or a smart pointer owns them.
#include <atomic>
#include <memory>
#include <optional>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/communicator.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/thread_pool.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(Guards, TheNewestLivingValueApplies) {
  ScopedValue<int>* newest = nullptr;
  std::optional<ScopedValue<int>> values[4];
  for (int i = 0; i < 4; ++i) values[i].emplace(newest, i);
  for (const auto& [removed, newest_left] : {std::pair{1, 3}, {3, 2}, {0, 2}}) {
    values[removed].reset();
    ASSERT_NE(newest, nullptr);
    EXPECT_EQ(newest->value(), newest_left);
  }
  values[2].reset();
  EXPECT_EQ(newest, nullptr);
}

TEST(Guards, RestoreGradModeAutocastAndSpatialGroup) {
  auto first = std::make_unique<NoGradGuard>();
  auto second = std::make_unique<GradModeGuard>(false);
  first.reset();
  EXPECT_FALSE(grad_enabled());
  second.reset();
  EXPECT_TRUE(grad_enabled());

  auto outer = std::make_unique<autocast>(bf16);
  auto inner = std::make_unique<autocast>(f16);
  outer.reset();
  EXPECT_EQ(autocast::dtype(), f16);
  inner.reset();
  EXPECT_EQ(autocast::dtype(), std::nullopt);

  // SpatialGroupGuard stores the pointer without dereferencing it, so the addresses of two integers can stand for
  // groups.
  int places[2];
  const auto group = [&](int i) { return reinterpret_cast<distributed::Communicator*>(&places[i]); };
  auto group0 = std::make_unique<distributed::SpatialGroupGuard>(group(0));
  auto group1 = std::make_unique<distributed::SpatialGroupGuard>(group(1));
  group0.reset();
  EXPECT_EQ(distributed::spatial_group(), group(1));
  group1.reset();
  EXPECT_EQ(distributed::spatial_group(), nullptr);
}

TEST(Guards, RestoreGeneratorAndThreads) {
  Generator a(1), b(2);
  auto outer = std::make_unique<GeneratorGuard>(a);
  auto inner = std::make_unique<GeneratorGuard>(b);
  outer.reset();
  EXPECT_EQ(&default_generator(), &b);
  inner.reset();
  EXPECT_NE(&default_generator(), &a);
  EXPECT_NE(&default_generator(), &b);

  const int threads = num_threads();
  set_num_threads(4);
  const auto pieces = [] {
    std::atomic<int> count = 0;
    parallel_for(4, 1, [&](int64_t, int64_t) { ++count; });
    return count.load();
  };
  auto serial = std::make_unique<SerialGuard>();
  auto other = std::make_unique<SerialGuard>();
  serial.reset();
  EXPECT_EQ(pieces(), 1);
  other.reset();
  EXPECT_EQ(pieces(), 4);
  set_num_threads(threads);
}

TEST(Guards, AProfilerRangeMayOutliveItsModuleScope) {
  const profiler::Session session;
  std::optional<profiler::RecordFunction> range;
  {
    const profiler::Scope module(profiler::Kind::module, "net");
    range.emplace("work");
  }
  range.reset();
  EXPECT_EQ(profiler::place().module, nullptr);
}

}  // namespace
}  // namespace voxgrad
