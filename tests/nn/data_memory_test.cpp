// Tests that a loader worker that runs out of memory reports an error for its batch instead of ending the program.
#include <new>
#include <optional>

#include "nn/data/loader.h"
#include "ops/create.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

thread_local std::optional<FailingAllocations> no_memory;

TEST(LoaderMemory, AWorkerReportsBadAlloc) {
  const data::FunctionDataset dataset(8, [](int64_t index, Generator&) {
    no_memory.reset();
    data::Sample sample{full({}, static_cast<double>(index)), {}};
    if (index % 2 == 1) no_memory.emplace(0, 1);  // all further allocations of this batch fail
    return sample;
  });
  data::Loader loader(dataset, {.num_workers = 2});
  auto batch = loader.begin();
  for (int64_t index = 0; index < 8; index += 2) {
    EXPECT_EQ(batch->input.item(), static_cast<double>(index));
    EXPECT_THROW(++batch, std::bad_alloc);
    ++batch;
  }
  EXPECT_EQ(batch, loader.end());
}

}  // namespace
}  // namespace voxgrad
