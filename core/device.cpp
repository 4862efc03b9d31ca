// Implements the names of devices, copies between devices, and memory statistics.
#include "core/device.h"

#include <charconv>
#include <system_error>

#include "core/error.h"
#include "core/profiler.h"

namespace voxgrad {

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
  const Device mover = to_device.is_cuda() ? to_device : from_device;
  if (to_device == from_device) return runtime(mover).copy(to, to_device, from, from_device, bytes);
  const profiler::Scope scope(profiler::Kind::op, "copy_between_devices", nullptr, mover);
  if (profiler::Event* event = scope.event()) {
    event->bytes = static_cast<double>(bytes);
    profiler::detail::claim(to);
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

namespace {
/// Returns the runtime of a device. Throws Error if the device does not exist.
const Runtime& required(Device device) {
  runtime(device).require(device.index);
  return runtime(device);
}
}  // namespace

MemoryStats memory::stats(Device device) { return required(device).stats(device.index); }
void memory::reset_peak(Device device) { required(device).reset_peak(device.index); }
void memory::empty_cache(Device device) { required(device).empty_cache(device.index); }
void synchronize(Device device) { required(device).synchronize(device.index); }

}  // namespace voxgrad
