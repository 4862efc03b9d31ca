// Devices, and the few things that the core asks of each kind: memory and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

namespace voxgrad {

enum class DeviceType : uint8_t { cpu, cuda };

/// The CPU, or one GPU by its index.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }
  /// From "cpu", "cuda" or "cuda:1". Throws on anything else.
  static Device parse(const std::string& text);

  constexpr bool is_cpu() const { return type == DeviceType::cpu; }
  constexpr bool is_cuda() const { return type == DeviceType::cuda; }
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

/// "CPU" or "CUDA", as messages name it.
const char* name(DeviceType type);
/// "cpu" or "cuda:0".
std::ostream& operator<<(std::ostream& out, Device device);

/// Bytes of memory handed out on one device.
struct MemoryStats {
  int64_t current = 0;             ///< in live storages
  int64_t peak = 0;                ///< the largest `current` since start or reset_peak
  int64_t reserved = 0;            ///< held from the driver or the system, the cache included
  int64_t allocations = 0;         ///< requests served since start
  int64_t device_allocations = 0;  ///< of these, how many went to the driver or the system
};

namespace memory {
MemoryStats stats(Device device = Device::cpu());
/// Sets `peak` back to `current`.
void reset_peak(Device device = Device::cpu());
/// Gives freed blocks that were kept for reuse back to the driver or the system.
void empty_cache(Device device = Device::cpu());
}  // namespace memory

/// Waits until all work queued on `device` has finished.
void synchronize(Device device);

/// The functions of one kind of device. Each kind fills one table: the CPU in core/cpu_runtime.cpp, GPUs in
/// cuda/runtime.cpp (cuda/absent.cpp in a build without CUDA).
struct Runtime {
  int (*device_count)();
  /// Throws Error if the device does not exist, with the reason.
  void (*require)(int index);
  /// At least `bytes` bytes, 64-byte aligned (256 on a GPU). Throws OutOfMemoryError.
  void* (*allocate)(size_t bytes, int index);
  void (*deallocate)(void* data, size_t bytes, int index) noexcept;
  /// Copies after the work queued on the current streams of both devices; when `to` is the CPU the bytes are there on
  /// return, when `from` is the CPU the source may be reused on return.
  void (*copy)(void* to, Device to_device, const void* from, Device from_device, size_t bytes);
  void (*synchronize)(int index);
  MemoryStats (*stats)(int index);
  void (*reset_peak)(int index);
  void (*empty_cache)(int index);
  // For the profiler; null for the CPU, which has no streams:
  void* (*stream)(int index);                ///< the current one
  std::shared_ptr<void> (*mark)(int index);  ///< behind the work queued on it so far
  /// From one mark to another; waits for both.
  double (*elapsed_ms)(const void* from, const void* to);
};

const Runtime& cpu_runtime();
const Runtime& cuda_runtime();
inline const Runtime& runtime(Device device) { return device.is_cuda() ? cuda_runtime() : cpu_runtime(); }

/// Runtime::copy, of the device that is a GPU if one is; the profiler sees it if the devices differ.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes);

}  // namespace voxgrad
