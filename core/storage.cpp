#include "core/storage.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace voxgrad {
namespace {

std::atomic<int64_t> cpu_current{0}, cpu_peak{0}, cpu_allocations{0};
constexpr size_t kAlignment = 64;

void* cpu_allocate(size_t bytes, int) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  if (bytes <= SIZE_MAX - kAlignment)
    data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (data == nullptr)
    throw OutOfMemoryError(
        concat("out of memory on cpu: ", bytes, " bytes asked for, ", cpu_current.load(), " in use by tensors"));
  const int64_t current = cpu_current += static_cast<int64_t>(bytes);
  int64_t peak = cpu_peak;
  while (current > peak && !cpu_peak.compare_exchange_weak(peak, current)) {
  }
  ++cpu_allocations;
  return data;
}

void cpu_deallocate(void* data, size_t bytes, int) noexcept {
  std::free(data);
  if (data) cpu_current -= static_cast<int64_t>(bytes);
}

void cpu_copy(void* to, Device, const void* from, Device, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

MemoryStats cpu_stats(int) {
  MemoryStats stats;
  stats.current = cpu_current;
  stats.peak = cpu_peak;
  stats.reserved = stats.current;
  stats.allocations = stats.device_allocations = cpu_allocations;
  return stats;
}

void cpu_require(int index) { check(index == 0, "device", "cpu has index 0 only, got ", index); }

}  // namespace

const Runtime& cpu_runtime() {
  static constexpr Runtime table{
      .device_count = [] { return 1; },
      .require = cpu_require,
      .allocate = cpu_allocate,
      .deallocate = cpu_deallocate,
      .copy = cpu_copy,
      .synchronize = [](int) {},
      .stats = cpu_stats,
      .reset_peak = [](int) { cpu_peak = cpu_current.load(); },
      .empty_cache = [](int) {},
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
