// The CPU as a device: its allocator and its Runtime table.
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "core/detail/divide.h"
#include "core/device.h"
#include "core/error.h"
#include "core/profiler.h"

namespace voxgrad {
namespace {

constexpr size_t kAlignment = 64;

// The address sanitizer detects uses of freed memory only if blocks are really freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCaching = false;
#elif defined(__has_feature)
constexpr bool kCaching = !__has_feature(address_sanitizer);
#else
constexpr bool kCaching = true;
#endif

/// Allocates CPU memory. Training frees and allocates the same large blocks in every step. If they were returned to the
/// system each time, page faults would take a large part of the time of a convolution. The allocator therefore caches
/// large freed blocks by size class, up to a limit. The cache consists of shards, each with its own lock, because the
/// threads of a loader allocate many blocks at the same time. A thread searches its own shard first. Small blocks are
/// not cached.
class CpuAllocator {
 public:
  void* allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    if (bytes > SIZE_MAX / 2) throw_out_of_memory(bytes);
    const size_t block = block_bytes(bytes);
    void* data = take_cached(block);
    if (data == nullptr) {
      data = std::aligned_alloc(kAlignment, block);
      if (data == nullptr) {
        empty_cache();
        data = std::aligned_alloc(kAlignment, block);
      }
      if (data == nullptr) throw_out_of_memory(bytes);
      ++device_allocations_;
      reserved_ += static_cast<int64_t>(block);
    }
    ++allocations_;
    const int64_t current = current_ += static_cast<int64_t>(bytes);
    raise_peak(current);
    if (profiler::active()) profiler::detail::record_memory(Device::cpu(), data, static_cast<int64_t>(bytes), current);
    return data;
  }

  /// `bytes` must be the number that was passed to allocate().
  void deallocate(void* data, size_t bytes) noexcept {
    if (data == nullptr) return;
    const int64_t current = current_ -= static_cast<int64_t>(bytes);
    if (profiler::active()) profiler::detail::record_memory(Device::cpu(), data, -static_cast<int64_t>(bytes), current);
    if (const size_t block = block_bytes(bytes); !keep(data, block)) release(data, block);
  }

  MemoryStats stats() const { return {current_, peak_, reserved_, allocations_, device_allocations_}; }
  void reset_peak() {
    peak_ = current_.load();
    raise_peak(current_);  // current_ may have grown in the meantime
  }
  void empty_cache() {
    for (Shard& shard : shards_) {
      const std::lock_guard lock(shard.mutex);
      for (const auto& [block, data] : shard.blocks) {
        cached_bytes_ -= block;
        release(data, block);
      }
      shard.blocks.clear();
    }
  }

 private:
  static constexpr size_t kMinCached = size_t{1} << 17;  // bytes; smaller blocks are left to malloc, which reuses them
  static constexpr size_t kMaxCacheBytes = size_t{1} << 30;  // bytes in the cache
  static constexpr size_t kShards = 32;

  struct alignas(kAlignment) Shard {
    std::mutex mutex;
    std::multimap<size_t, void*> blocks;  // free blocks by size in bytes
  };

  static size_t own_shard() {
    static std::atomic<size_t> threads = 0;
    static thread_local const size_t number = threads++;
    return number % kShards;
  }
  /// Returns the size of the block for a request. Large blocks are at most an eighth larger than requested.
  static size_t block_bytes(size_t bytes) {
    const size_t unit = !kCaching || bytes < kMinCached ? kAlignment : std::bit_floor(bytes) / 8;
    return round_up(bytes, unit);
  }
  void raise_peak(int64_t current) {
    for (int64_t peak = peak_; peak < current && !peak_.compare_exchange_weak(peak, current);) continue;
  }
  void* take_cached(size_t block) {
    if (block < kMinCached) return nullptr;
    for (size_t i = 0, own = own_shard(); i < kShards; ++i) {
      Shard& shard = shards_[(own + i) % kShards];
      const std::lock_guard lock(shard.mutex);
      const auto found = shard.blocks.find(block);
      if (found == shard.blocks.end()) continue;
      void* const data = found->second;
      cached_bytes_ -= block;
      shard.blocks.erase(found);
      return data;
    }
    return nullptr;
  }
  bool keep(void* data, size_t block) noexcept {
    if (!kCaching || block < kMinCached) return false;
    if (cached_bytes_ += block; cached_bytes_ <= kMaxCacheBytes) {
      Shard& shard = shards_[own_shard()];
      const std::lock_guard lock(shard.mutex);
      try {
        shard.blocks.emplace(block, data);
        return true;
      } catch (const std::bad_alloc&) {  // no memory for the cache entry
      }
    }
    cached_bytes_ -= block;
    return false;
  }
  void release(void* data, size_t block) noexcept {
    std::free(data);
    reserved_ -= static_cast<int64_t>(block);
  }
  [[noreturn]] void throw_out_of_memory(size_t bytes) const {
    throw OutOfMemoryError(concat("out of memory on cpu: ", bytes, " bytes requested, ", current_.load(),
                                  " in use by tensors, ", reserved_.load(), " reserved"));
  }

  std::atomic<int64_t> current_ = 0, peak_ = 0, reserved_ = 0, allocations_ = 0, device_allocations_ = 0;
  std::array<Shard, kShards> shards_;
  std::atomic<size_t> cached_bytes_ = 0;
};

CpuAllocator& cpu_allocator() {
  static auto* allocator = new CpuAllocator;  // never destroyed, because static tensors may outlive it
  return *allocator;
}

}  // namespace

const Runtime& cpu_runtime() {
  static constexpr Runtime table{
      .device_count = [] { return 1; },
      .require = [](int index) { check(index == 0, "device", "the CPU has only index 0, got ", index); },
      .allocate = [](size_t bytes, int) { return cpu_allocator().allocate(bytes); },
      .deallocate = [](void* data, size_t bytes, int) noexcept { cpu_allocator().deallocate(data, bytes); },
      .copy =
          [](void* to, Device, const void* from, Device, size_t bytes) {
            if (bytes > 0) std::memcpy(to, from, bytes);
          },
      .synchronize = [](int) {},
      .stats = [](int) { return cpu_allocator().stats(); },
      .reset_peak = [](int) { cpu_allocator().reset_peak(); },
      .empty_cache = [](int) { cpu_allocator().empty_cache(); },
      .stream = nullptr,
      .mark = nullptr,
      .elapsed_ms = nullptr,
  };
  return table;
}

}  // namespace voxgrad
