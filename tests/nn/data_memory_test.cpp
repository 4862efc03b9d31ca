// A worker that gets no memory at all: its batch fails, not the program.
#include <cstdlib>
#include <new>

#include "nn/data/loader.h"
#include "ops/create.h"
#include "tests/support.h"

namespace {
thread_local bool no_memory = false;
}

// Not inlined: GCC would take new and free() for a pair that does not belong together.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = no_memory ? nullptr : std::malloc(bytes);
  return memory ? memory : throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return no_memory ? nullptr : std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace voxgrad {
namespace {

TEST(LoaderMemory, AWorkerWithoutAnyDeliversItsError) {
  const data::FunctionDataset dataset(8, [](int64_t index, Generator&) {
    no_memory = false;
    data::Sample sample{full({}, static_cast<double>(index)), {}};
    no_memory = index % 2 == 1;  // for the rest of the batch
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
