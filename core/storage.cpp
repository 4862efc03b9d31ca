#include "core/storage.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

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
/// time, their page faults cost up to half of a convolution's time. So large freed blocks are kept for requests
/// of about their size, up to a limit.
class CpuAllocator {
 public:
  void* allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (bytes > SIZE_MAX / 2) throw_out_of_memory(bytes);
    Block block = take_cached(bytes);
    if (block.data == nullptr) {
      block = {nullptr, (bytes + kAlignment - 1) / kAlignment * kAlignment};
      block.data = std::aligned_alloc(kAlignment, block.bytes);
      if (block.data == nullptr) {
        release_cached();
        block.data = std::aligned_alloc(kAlignment, block.bytes);
      }
      if (block.data == nullptr) throw_out_of_memory(bytes);
      ++stats_.device_allocations;
      stats_.reserved += static_cast<int64_t>(block.bytes);
    }
    try {
      live_.emplace(block.data, block.bytes);
    } catch (const std::bad_alloc&) {
      release(block);
      throw_out_of_memory(bytes);
    }
    stats_.current += static_cast<int64_t>(bytes);
    stats_.peak = std::max(stats_.peak, stats_.current);
    ++stats_.allocations;
    if (profiler::active()) memory::detail::note_allocation(Device::cpu(), block.data, bytes, stats_.current);
    return block.data;
  }

  void deallocate(void* data, size_t bytes) noexcept {
    if (data == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(data);
    const Block block{data, found->second};
    live_.erase(found);
    stats_.current -= static_cast<int64_t>(bytes);
    if (profiler::active()) memory::detail::note_free(Device::cpu(), data, bytes, stats_.current);
    if (!kCaching || block.bytes < kSmallestCached || cached_bytes_ + block.bytes > kLimit) return release(block);
    try {
      cached_.emplace(block.bytes, data);
      cached_bytes_ += block.bytes;
    } catch (const std::bad_alloc&) {  // no memory to remember it by
      release(block);
    }
  }

  MemoryStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    stats_.peak = stats_.current;
  }
  void empty_cache() {
    const std::lock_guard lock(mutex_);
    release_cached();
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  static constexpr size_t kSmallestCached = size_t{1} << 17;  // below, malloc itself reuses memory
  static constexpr size_t kLimit = size_t{1} << 30;

  /// A cached block that wastes at most an eighth; null if there is none.
  Block take_cached(size_t bytes) {
    const auto found = cached_.lower_bound(bytes);
    if (found == cached_.end() || found->first - bytes > bytes / 8) return {nullptr, 0};
    const Block block{found->second, found->first};
    cached_bytes_ -= block.bytes;
    cached_.erase(found);
    return block;
  }
  void release(const Block& block) {
    std::free(block.data);
    stats_.reserved -= static_cast<int64_t>(block.bytes);
  }
  void release_cached() {
    for (const auto& [bytes, data] : cached_) release({data, bytes});
    cached_.clear();
    cached_bytes_ = 0;
  }
  [[noreturn]] void throw_out_of_memory(size_t bytes) {
    throw OutOfMemoryError(concat("out of memory on cpu: ", bytes, " bytes asked for, ", stats_.current,
                                  " in use by tensors, ", stats_.reserved, " reserved"));
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> cached_;
  std::unordered_map<void*, size_t> live_;
  size_t cached_bytes_ = 0;
  MemoryStats stats_;
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

Storage::Storage(size_t bytes, Device device) : bytes_(bytes), device_(device) {
  runtime(device).require(device.index);
  data_ = runtime(device).allocate(bytes, device.index);
}

Storage::Storage(void* data, size_t bytes, Device device, std::function<void(void*)> release)
    : data_(data), bytes_(bytes), device_(device), release_(std::move(release)) {}

Storage::~Storage() {
  if (release_)
    release_(data_);
  else if (data_)
    runtime(device_).deallocate(data_, bytes_, device_.index);
}

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
  const Device mover = to_device.is_cuda() ? to_device : from_device;
  if (to_device == from_device) return runtime(mover).copy(to, to_device, from, from_device, bytes);
  const profiler::Scope scope(profiler::Kind::op, "copy_between_devices", nullptr, mover);
  if (profiler::Event* event = scope.event()) {
    event->bytes = static_cast<double>(bytes);
    memory::detail::claim(to_device, to);
  }
  runtime(mover).copy(to, to_device, from, from_device, bytes);
}

Device Device::parse(const std::string& text) {
  if (text == "cpu") return cpu();
  if (text == "cuda") return cuda();
  if (text.starts_with("cuda:")) {
    int index = -1;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + 5, end, index);
    if (error == std::errc() && stop == end && index >= 0) return cuda(index);
  }
  fail("device", "expected cpu, cuda or cuda:N, got '", text, "'");
}

const char* name(DeviceType type) { return type == DeviceType::cuda ? "CUDA" : "CPU"; }

std::ostream& operator<<(std::ostream& out, Device device) {
  if (device.is_cpu()) return out << "cpu";
  return out << "cuda:" << device.index;
}

MemoryStats memory::stats(Device device) {
  runtime(device).require(device.index);
  return runtime(device).stats(device.index);
}
void memory::reset_peak(Device device) {
  runtime(device).require(device.index);
  runtime(device).reset_peak(device.index);
  detail::note_reset(device);
}
void memory::empty_cache(Device device) {
  runtime(device).require(device.index);
  runtime(device).empty_cache(device.index);
}
void synchronize(Device device) {
  runtime(device).require(device.index);
  runtime(device).synchronize(device.index);
}

}  // namespace voxgrad
