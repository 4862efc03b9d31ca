// The CPU as a device: its memory and the table of its functions.
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
#include "core/memory_snapshot.h"

namespace voxgrad {
namespace {

constexpr size_t kAlignment = 64;

// Under the address sanitizer freed memory must stay freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCaching = false;
#elif defined(__has_feature)
constexpr bool kCaching = !__has_feature(address_sanitizer);
#else
constexpr bool kCaching = true;
#endif

/// The CPU's memory. Training frees and takes the same large blocks in every step; given back to the system each
/// time, their page faults cost up to half of a convolution's time. So large freed blocks are kept for requests of
/// their size class, up to a limit: in shards, each with a lock, of which a thread asks its own first, because a
/// loader's threads take many blocks at the same time. Small ones are malloc's.
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
    const auto lock = in_order();
    const int64_t current = current_ += static_cast<int64_t>(bytes);
    raise_peak(current);
    if (lock) memory::detail::note_allocation(Device::cpu(), data, bytes, current);
    return data;
  }

  /// `bytes` as they were asked for.
  void deallocate(void* data, size_t bytes) noexcept {
    if (data == nullptr) return;
    {
      const auto lock = in_order();
      const int64_t current = current_ -= static_cast<int64_t>(bytes);
      if (lock) memory::detail::note_free(Device::cpu(), data, bytes, current);
    }
    if (const size_t block = block_bytes(bytes); !keep(data, block)) release(data, block);
  }

  MemoryStats stats() const { return {current_, peak_, reserved_, allocations_, device_allocations_}; }
  void reset_peak() {
    peak_ = current_.load();
    raise_peak(current_);  // which may have grown meanwhile
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
  static constexpr size_t kSmallestCached = size_t{1} << 17;  // below, malloc itself reuses memory
  static constexpr size_t kLimit = size_t{1} << 30;
  static constexpr size_t kShards = 32;

  struct alignas(kAlignment) Shard {
    std::mutex mutex;
    std::multimap<size_t, void*> blocks;  // by block_bytes
  };

  static size_t own_shard() {
    static std::atomic<size_t> threads = 0;
    static thread_local const size_t number = threads++;
    return number % kShards;
  }
  /// What is taken for so many bytes: of large blocks at most an eighth more.
  static size_t block_bytes(size_t bytes) {
    const size_t unit = !kCaching || bytes < kSmallestCached ? kAlignment : std::bit_floor(bytes) / 8;
    return round_up(bytes, unit);
  }
  /// Locked while memory snapshots are made of what is noted, in the order in which current_ changes.
  std::unique_lock<std::mutex> in_order() {
    return profiler::active() ? std::unique_lock(noted_) : std::unique_lock<std::mutex>();
  }
  void raise_peak(int64_t current) {
    for (int64_t peak = peak_; peak < current && !peak_.compare_exchange_weak(peak, current);) continue;
  }
  void* take_cached(size_t block) {
    if (block < kSmallestCached) return nullptr;
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
    if (!kCaching || block < kSmallestCached) return false;
    if (cached_bytes_ += block; cached_bytes_ <= kLimit) {
      Shard& shard = shards_[own_shard()];
      const std::lock_guard lock(shard.mutex);
      try {
        shard.blocks.emplace(block, data);
        return true;
      } catch (const std::bad_alloc&) {  // no memory to remember it by
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
    throw OutOfMemoryError(concat("out of memory on cpu: ", bytes, " bytes asked for, ", current_.load(),
                                  " in use by tensors, ", reserved_.load(), " reserved"));
  }

  std::atomic<int64_t> current_ = 0, peak_ = 0, reserved_ = 0, allocations_ = 0, device_allocations_ = 0;
  std::mutex noted_;
  std::array<Shard, kShards> shards_;
  std::atomic<size_t> cached_bytes_ = 0;
};

CpuAllocator& cpu_allocator() {
  static auto* allocator = new CpuAllocator;  // never destroyed: a tensor may be a static object
  return *allocator;
}

void cpu_copy(void* to, Device, const void* from, Device, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void cpu_require(int index) { check(index == 0, "device", "cpu has index 0 only, got ", index); }

}  // namespace

const Runtime& cpu_runtime() {
  static constexpr Runtime table{
      .device_count = [] { return 1; },
      .require = cpu_require,
      .allocate = [](size_t bytes, int) { return cpu_allocator().allocate(bytes); },
      .deallocate = [](void* data, size_t bytes, int) noexcept { cpu_allocator().deallocate(data, bytes); },
      .copy = cpu_copy,
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
