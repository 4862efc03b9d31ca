// Tests the CUDA runtime: memory, copies, streams, events, and the errors without a GPU.
#include <algorithm>
#include <memory>
#include <regex>
#include <set>
#include <thread>

#include "core/tensor.h"
#include "ops/create.h"
#include "ops/detail/kernels.h"
#include "ops/reduce.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

Tensor bytes_on_gpu(int64_t count) { return empty({count}, {.dtype = u8, .device = Device::cuda()}); }
MemoryStats gpu_stats() { return memory::stats(Device::cuda()); }

/// Returns the message of the Error that `statement` throws, or an empty string if it does not throw.
template <class F>
std::string error_of(F&& statement) {
  try {
    statement();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// ---- tests that run on every machine

TEST(CudaDevices, IsAvailableIfADeviceIsPresent) { EXPECT_EQ(cuda::is_available(), cuda::device_count() > 0); }

TEST(CudaDevices, RejectsMissingDeviceWithReason) {
  const int count = cuda::device_count();
  const Device missing = Device::cuda(count);
  const std::string prefix = "cuda:" + std::to_string(count) + " is not available: ";
  const std::string allocation = error_of([&] { empty({2}, {.device = missing}); });
  if (count > 0) {
    EXPECT_EQ(allocation, prefix + "the number of GPUs is " + std::to_string(count));
  } else {
    const std::string reason = allocation.substr(std::min(allocation.size(), prefix.size()));
    EXPECT_EQ(allocation.substr(0, prefix.size()), prefix);
    EXPECT_TRUE(reason == "this build has no CUDA" || reason.starts_with("the NVIDIA driver ")) << allocation;
  }
  for (const auto& other :
       {error_of([&] { memory::stats(missing); }), error_of([&] { memory::empty_cache(missing); }),
        error_of([&] { memory::reset_peak(missing); }), error_of([&] { synchronize(missing); }),
        error_of([&] { cuda::Stream stream(missing.index); }), error_of([&] { cuda::Event event(missing.index); })})
    EXPECT_EQ(other, allocation);
}

TEST(CudaDevices, RejectsNegativeIndices) {
  EXPECT_ERROR(empty({2}, {.device = Device::cuda(-1)}), "cuda:-1 is not available: ");
  EXPECT_ERROR(cuda::Stream(-1), "cuda:-1 is not available: ");
}

TEST(CudaDevices, KernelsThrowWithoutAGpu) {
  if (cuda::is_available()) GTEST_SKIP() << "a GPU is present";
  float element = 1;
  View view;
  view.data = &element;
  view.device = 0;
  EXPECT_THROW(kernels(Device::cuda()).fill(view, 2), Error);
  EXPECT_THROW(kernels(Device::cuda()).unary(UnaryOp::neg, view, view, 0, 0), Error);
  EXPECT_THROW(kernels(Device::cuda()).step("sgd", std::vector{StepViews{view, view, {}}}, SgdStep{}, {}), Error);
  EXPECT_EQ(element, 1);
}

// ---- tests that need a GPU

class CudaRuntime : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  }
};
using CudaAllocator = CudaRuntime;
using CudaStreams = CudaRuntime;

TEST_F(CudaAllocator, CountsMemoryOfTensors) {
  const MemoryStats before = gpu_stats();
  {
    const Tensor x = empty({1000}, {.device = Device::cuda()});
    EXPECT_EQ(gpu_stats().current, before.current + 4000);
    EXPECT_EQ(gpu_stats().allocations, before.allocations + 1);
    EXPECT_GE(gpu_stats().reserved, gpu_stats().current);
  }
  EXPECT_EQ(gpu_stats().current, before.current);
  EXPECT_GE(gpu_stats().peak, before.current + 4000);
  memory::reset_peak(Device::cuda());
  EXPECT_EQ(gpu_stats().peak, before.current);
}

TEST_F(CudaAllocator, EmptyTensorsUseNoMemory) {
  const MemoryStats before = gpu_stats();
  const Tensor x = bytes_on_gpu(0);
  EXPECT_EQ(gpu_stats().current, before.current);
  EXPECT_EQ(gpu_stats().allocations, before.allocations);
}

TEST_F(CudaAllocator, ReusesFreedBlocks) {
  for (const int64_t size : {int64_t{100}, 3 * kMiB, 50 * kMiB}) {
    const void* first = bytes_on_gpu(size).raw_data();
    const int64_t allocations_before = gpu_stats().device_allocations;
    const Tensor again = bytes_on_gpu(size - 1);
    EXPECT_EQ(again.raw_data(), first);
    EXPECT_EQ(gpu_stats().device_allocations, allocations_before);
  }
}

TEST_F(CudaAllocator, SmallTensorsShareASegment) {
  memory::empty_cache(Device::cuda());
  const int64_t allocations_before = gpu_stats().device_allocations;
  std::vector<Tensor> tensors;
  std::set<uintptr_t> addresses;
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(bytes_on_gpu(1000));
    addresses.insert(reinterpret_cast<uintptr_t>(tensors.back().raw_data()));
  }
  EXPECT_LE(gpu_stats().device_allocations, allocations_before + 1);
  ASSERT_EQ(addresses.size(), 100u);
  uintptr_t end = 0;
  for (const uintptr_t address : addresses) {
    EXPECT_EQ(address % 256, 0u);
    EXPECT_GE(address, end);
    end = address + 1000;
  }
}

TEST_F(CudaAllocator, MergesAdjacentFreeBlocks) {
  memory::empty_cache(Device::cuda());
  std::vector<Tensor> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(bytes_on_gpu(5 * kMiB));  // one segment of 20 MiB
  const int64_t allocations_before = gpu_stats().device_allocations;
  for (const size_t i : {1u, 3u, 0u, 2u}) pieces[i] = Tensor();
  const Tensor whole = bytes_on_gpu(20 * kMiB);
  EXPECT_EQ(gpu_stats().device_allocations, allocations_before);
}

TEST_F(CudaAllocator, EmptyCacheReleasesUnusedMemory) {
  memory::empty_cache(Device::cuda());
  const int64_t reserved = gpu_stats().reserved;
  const Tensor kept = bytes_on_gpu(30 * kMiB);
  bytes_on_gpu(100 * kMiB);
  EXPECT_EQ(gpu_stats().reserved, reserved + 130 * kMiB);
  memory::empty_cache(Device::cuda());
  EXPECT_EQ(gpu_stats().reserved, reserved + 30 * kMiB);
}

/// Returns the message of the OutOfMemoryError for 2^50 bytes.
std::string out_of_memory_message() {
  try {
    bytes_on_gpu(int64_t{1} << 50);
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
  return "no OutOfMemoryError";
}

TEST_F(CudaAllocator, OutOfMemoryReportsSizesAndIsRecoverable) {
  const Tensor kept = full({kMiB}, 3, {.device = Device::cuda()});
  const MemoryStats before = gpu_stats();
  const std::string message = out_of_memory_message();
  EXPECT_TRUE(std::regex_match(
      message,
      std::regex("out of memory on cuda:0: 1125899906842624 bytes requested, " + std::to_string(before.current) +
                 " in use by tensors, \\d+ reserved, \\d+ free of \\d+ on the device")))
      << message;
  EXPECT_EQ(gpu_stats().current, before.current);
  const Tensor next = full({10}, 4, {.device = Device::cuda()});
  EXPECT_EQ(next.at({9}), 4);
  EXPECT_EQ(kept.at({kMiB - 1}), 3);
  EXPECT_NO_THROW(synchronize(Device::cuda()));
}

TEST_F(CudaAllocator, ReleasesCacheBeforeOutOfMemory) {
  memory::empty_cache(Device::cuda());
  std::smatch figures;
  const std::string message = out_of_memory_message();
  ASSERT_TRUE(std::regex_search(message, figures, std::regex("(\\d+) free of"))) << message;
  const int64_t unused = std::stoll(figures[1]);
  bytes_on_gpu(unused / 2);
  EXPECT_NO_THROW(bytes_on_gpu(unused / 10 * 7));  // fits only after the allocator has released the cached half
  memory::empty_cache(Device::cuda());
}

TEST_F(CudaAllocator, RecoversFromFailingHostAllocations) {
  const Device device = Device::cuda();
  memory::empty_cache(device);
  const int64_t current = memory::stats(device).current;
  with_each_allocation_failing([&] {
    Tensors tensors;
    for (const int64_t size : {100, 1 << 18, 3 << 20, 1000, 1 << 21})
      tensors.push_back(empty({size}, {.device = device}));
    tensors.erase(tensors.begin() + 1);  // blocks are split, merged and reused
    tensors.push_back(empty({5000}, {.device = device}));
  });
  EXPECT_EQ(memory::stats(device).current, current);
  memory::empty_cache(device);
  EXPECT_EQ(ones({1 << 20}, {.device = device}).sum().item(), 1 << 20);
}

/// Hands out parts of a tensor, in order, and counts the calls. Skips the first 512 bytes, because the tensor is
/// itself a block of the caching allocator, and two blocks must not have the same address.
struct PoolAllocator {
  Tensor pool = bytes_on_gpu(64 * kMiB);
  size_t used = 512;
  int allocated = 0;
  int freed = 0;
  std::vector<void*> streams;
  cuda::ExternalAllocator functions{[this](size_t bytes, int, void* stream) -> void* {
                                      char* const data = reinterpret_cast<char*>(pool.mutable_data<uint8_t>()) + used;
                                      if (used + bytes > static_cast<size_t>(64 * kMiB)) return nullptr;
                                      used += (bytes + 511) / 512 * 512;
                                      ++allocated;
                                      streams.push_back(stream);
                                      return data;
                                    },
                                    [this](void*, int, void*) { ++freed; }};
};

TEST_F(CudaAllocator, ExternalAllocatorServesTensorsAndWorkspaces) {
  PoolAllocator allocator;
  const cuda::Stream stream;
  const MemoryStats before = gpu_stats();
  {
    const cuda::AllocatorGuard guard(allocator.functions);
    const cuda::StreamGuard other(0, stream.handle());
    const Tensor x = full({100000}, 2, {.device = Device::cuda()});
    EXPECT_EQ(sum(x).item(), 200000);  // the sum needs a workspace
  }
  EXPECT_GE(allocator.allocated, 3);
  EXPECT_EQ(allocator.freed, allocator.allocated);
  for (const void* used : allocator.streams) EXPECT_EQ(used, stream.handle());
  EXPECT_EQ(gpu_stats().current, before.current);
  EXPECT_EQ(gpu_stats().allocations, before.allocations);
}

TEST_F(CudaAllocator, TensorsFromBeforeTheGuardAreFreedAsUsual) {
  PoolAllocator allocator;
  const int64_t before = gpu_stats().current;
  {
    Tensor x = bytes_on_gpu(kMiB);
    const cuda::AllocatorGuard guard(allocator.functions);
    x = {};
  }
  EXPECT_EQ(gpu_stats().current, before);
  EXPECT_EQ(allocator.freed, 0);
}

TEST_F(CudaAllocator, ExhaustedExternalAllocatorIsAnOutOfMemoryError) {
  PoolAllocator allocator;
  const cuda::AllocatorGuard guard(allocator.functions);
  EXPECT_THROW(bytes_on_gpu(65 * kMiB), OutOfMemoryError);
  EXPECT_ERROR(bytes_on_gpu(65 * kMiB), "the external allocator returned null for 68157440 bytes");
}

TEST_F(CudaAllocator, ThreadsNeverShareBlocks) {
  const int64_t before = gpu_stats().current;
  std::vector<std::jthread> threads;
  std::vector<std::string> errors(4);
  for (unsigned thread = 0; thread < 4; ++thread)
    threads.emplace_back([thread, &errors] {
      errors[thread] = error_of([thread] {
        const cuda::Stream stream;
        const cuda::StreamGuard guard(stream);
        uint32_t state = thread + 1;
        std::vector<Tensor> held(8);
        for (int i = 0; i < 300; ++i) {
          state = state * 1664525 + 1013904223;
          const int64_t count = state >> 14;
          const size_t slot = static_cast<size_t>(i) % held.size();
          held[slot] = full({count + 1}, i, {.device = Device::cuda()});
          check(held[slot].at({count}) == i, "test", "another thread wrote to this block");
        }
      });
    });
  threads.clear();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(gpu_stats().current, before);
}

TEST_F(CudaRuntime, CopiesBetweenHostAndDeviceKeepBytes) {
  // The last size is larger than all upload buffers together and not a multiple of the buffer size.
  for (const int64_t count : {int64_t{1}, int64_t{1000}, 4 * kMiB, 40 * kMiB + 17}) {
    Tensor source = empty({count}, {.dtype = u8});
    auto* data = source.mutable_data<uint8_t>();
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<uint8_t>((i * 7) ^ (i >> 13));
    const Tensor expected = source.clone();
    const Tensor moved = source.to(Device::cuda());
    std::fill_n(data, count, uint8_t{0});  // the source may change after to() returns
    const Tensor back = moved.to(Device::cpu());
    EXPECT_TRUE(std::equal(back.data<uint8_t>(), back.data<uint8_t>() + count, expected.data<uint8_t>())) << count;
  }
}

TEST_F(CudaRuntime, CopiesBetweenDevices) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const Tensor there = full({kMiB}, 5, {.device = Device::cuda(1)});
  const Tensor here = there.to(Device::cuda(0));
  EXPECT_EQ(here.device(), Device::cuda(0));
  EXPECT_EQ(here.at({kMiB - 1}), 5);
  EXPECT_EQ(here.to(Device::cuda(1)).at({0}), 5);
}

TEST_F(CudaStreams, GuardsNest) {
  const cuda::Stream a, b;
  EXPECT_NE(a.handle(), nullptr);
  EXPECT_NE(a.handle(), b.handle());
  memory::empty_cache(Device::cuda());
  const void *on_a, *on_b;
  {
    const cuda::StreamGuard outer(a);
    on_a = bytes_on_gpu(100).raw_data();
    {
      const cuda::StreamGuard inner(b);
      on_b = bytes_on_gpu(100).raw_data();
    }
    EXPECT_EQ(bytes_on_gpu(100).raw_data(), on_a);
  }
  // Each stream, including the default stream, has its own blocks.
  const void* on_default = bytes_on_gpu(100).raw_data();
  EXPECT_NE(on_a, on_b);
  EXPECT_NE(on_a, on_default);
  EXPECT_NE(on_b, on_default);
}

TEST_F(CudaStreams, GuardsMayEndInAnyOrder) {
  const cuda::Stream a, b;
  auto outer = std::make_unique<cuda::StreamGuard>(a), inner = std::make_unique<cuda::StreamGuard>(b);
  const auto current = [] { return runtime(Device::cuda()).stream(0); };
  outer.reset();
  EXPECT_EQ(current(), b.handle());
  inner.reset();
  EXPECT_EQ(current(), nullptr);
}

TEST_F(CudaStreams, AreReused) {
  void* handle = nullptr;
  {
    const cuda::Stream stream;
    handle = stream.handle();
  }
  const cuda::Stream stream;
  EXPECT_EQ(stream.handle(), handle);
}

TEST_F(CudaStreams, RejectsMovedFromStream) {
  cuda::Stream first;
  void* handle = first.handle();
  const cuda::Stream second(std::move(first));
  EXPECT_EQ(second.handle(), handle);
  EXPECT_ERROR(first.synchronize(), "moved from");
  EXPECT_ERROR(cuda::StreamGuard{first}, "moved from");
}

TEST_F(CudaStreams, EventsOrderStreams) {
  constexpr int64_t count = 64 * kMiB;
  const cuda::Stream stream;
  cuda::Event done;
  Tensor x;
  {
    const cuda::StreamGuard guard(stream);
    x = full({count}, 0, {.device = Device::cuda()});
    for (int i = 1; i <= 20; ++i) x.fill_(i);
    done.record();
  }
  done.wait();
  const Tensor y = x.clone();
  EXPECT_EQ(y.at({0}), 20);
  EXPECT_EQ(y.at({count - 1}), 20);
}

TEST_F(CudaStreams, FreedBlockIsReusedOnlyAfterWorkOnOtherStreams) {
  // `x` is allocated on the default stream, then written and freed on another stream. The allocator must not reuse the
  // memory of `x` before the write has completed.
  constexpr int64_t count = 64 * kMiB;
  synchronize(Device::cuda());
  const void* address;
  {
    const cuda::Stream stream;
    Tensor x = empty({count}, {.device = Device::cuda()});
    address = x.raw_data();
    const cuda::StreamGuard guard(stream);
    for (int i = 0; i < 50; ++i) x.fill_(-1);
    x = Tensor();
  }
  const Tensor y = full({count}, 7, {.device = Device::cuda()});
  ASSERT_EQ(y.raw_data(), address);
  EXPECT_EQ(y.at({0}), 7);
  synchronize(Device::cuda());
  EXPECT_EQ(y.at({count - 1}), 7);
}

TEST_F(CudaStreams, EventsMeasureTime) {
  cuda::Event start, stop;
  EXPECT_ERROR(stop.elapsed_ms_since(start), "Event::elapsed_ms_since: cudaError");
  const Tensor x = empty({256 * kMiB}, {.dtype = u8, .device = Device::cuda()});
  start.record();
  for (int i = 0; i < 10; ++i) x.fill_(i);
  stop.record();
  EXPECT_GT(stop.elapsed_ms_since(start), 0.01f);
  EXPECT_TRUE(stop.query());
  cuda::Event untimed(0, /*enable_timing=*/false);
  EXPECT_TRUE(untimed.query());  // not recorded yet
  untimed.record();
  EXPECT_ERROR(untimed.elapsed_ms_since(start), "Event::elapsed_ms_since: cudaError");
}

TEST_F(CudaRuntime, WorkRunsOnTheDeviceOfItsTensors) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const int64_t before = memory::stats(Device::cuda(1)).current;
  const Tensor x = full({1000}, 2, {.device = Device::cuda(1)});
  EXPECT_EQ(memory::stats(Device::cuda(1)).current, before + 4000);
  const Tensor y = full({10}, 3, {.device = Device::cuda(0)});
  EXPECT_EQ(x.clone().at({999}), 2);
  EXPECT_EQ(y.clone().at({9}), 3);
}

}  // namespace
}  // namespace voxgrad
