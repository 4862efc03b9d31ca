// Devices, their memory statistics, and the table of functions that each kind of device implements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

namespace voxgrad {

/// The kinds of devices: the CPU, and GPUs with CUDA.
enum class DeviceType : uint8_t { cpu, cuda };

/// The CPU, or a GPU with its index.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }
  /// Converts "cpu", "cuda" (GPU 0) or "cuda:N" (GPU N). Throws Error for other texts.
  static Device parse(const std::string& text);

  constexpr bool is_cpu() const { return type == DeviceType::cpu; }
  constexpr bool is_cuda() const { return type == DeviceType::cuda; }
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

/// Returns "CPU" or "CUDA".
const char* name(DeviceType type);
/// Prints "cpu" or "cuda:N".
std::ostream& operator<<(std::ostream& out, Device device);

/// Memory statistics of one device.
struct MemoryStats {
  int64_t current = 0;             ///< bytes in live storages
  int64_t peak = 0;                ///< the maximum of `current` since the start or the last reset_peak()
  int64_t reserved = 0;            ///< bytes taken from the driver or the system, including the cache
  int64_t allocations = 0;         ///< allocations since the start
  int64_t device_allocations = 0;  ///< allocations since the start that called the driver or the system
};

namespace memory {
/// Returns the statistics of a device. All functions of this namespace throw Error if the device does not exist.
MemoryStats stats(Device device = Device::cpu());
/// Sets `peak` to `current`.
void reset_peak(Device device = Device::cpu());
/// Returns cached free blocks to the driver or the system.
void empty_cache(Device device = Device::cpu());
}  // namespace memory

/// Waits until all work queued on `device` has finished. Throws Error if any of this work failed.
void synchronize(Device device);

/// The functions of one kind of device. Each kind fills one table: the CPU in core/cpu_runtime.cpp, GPUs in
/// cuda/runtime.cpp (cuda/absent.cpp in a build without CUDA).
struct Runtime {
  int (*device_count)();
  /// Throws Error with the reason if the device does not exist.
  void (*require)(int index);
  /// Returns at least `bytes` bytes, aligned to 64 bytes (256 on a GPU). Throws OutOfMemoryError.
  void* (*allocate)(size_t bytes, int index);
  void (*deallocate)(void* data, size_t bytes, int index) noexcept;
  /// Queues a copy that starts after the work on the current streams of both devices. On return, the copy is complete
  /// if `to` is on the CPU, and the source may be reused if `from` is on the CPU.
  void (*copy)(void* to, Device to_device, const void* from, Device from_device, size_t bytes);
  void (*synchronize)(int index);
  MemoryStats (*stats)(int index);
  void (*reset_peak)(int index);
  void (*empty_cache)(int index);
  // The members below are for the profiler. They are null for the CPU, which has no streams.
  void* (*stream)(int index);                ///< returns the current stream
  std::shared_ptr<void> (*mark)(int index);  ///< records an event in the current stream
  /// Returns the milliseconds between two events of mark(). Waits for both events.
  double (*elapsed_ms)(const void* from, const void* to);
};

/// Return the functions of the CPU, of GPUs, or of the kind of `device`. In a build without CUDA, the functions of GPUs
/// report no devices.
const Runtime& cpu_runtime();
const Runtime& cuda_runtime();
inline const Runtime& runtime(Device device) { return device.is_cuda() ? cuda_runtime() : cpu_runtime(); }

/// Copies bytes with Runtime::copy of the GPU, or of the CPU if neither device is a GPU. The profiler records copies
/// between devices.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes);

}  // namespace voxgrad
