// Storage: the memory of a tensor, one allocation on one device, shared by all views of the tensor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "device.h"
#include "noncopyable.h"

namespace voxgrad {

/// The memory of a tensor on one device, which all views of the tensor share. The destructor frees the memory.
class Storage : NonCopyable {
 public:
  /// Allocates uninitialized memory. Throws OutOfMemoryError, and Error if the device does not exist.
  Storage(size_t bytes, Device device) : bytes_(bytes), device_(device) {
    runtime(device).require(device.index);
    data_ = runtime(device).allocate(bytes, device.index);
  }
  /// Takes over memory that was allocated elsewhere. The destructor calls release(data).
  Storage(void* data, size_t bytes, Device device, std::function<void(void*)> release)
      : data_(data), bytes_(bytes), device_(device), release_(std::move(release)) {}
  ~Storage() {
    if (release_)
      release_(data_);
    else if (data_)
      runtime(device_).deallocate(data_, bytes_, device_.index);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Returns the number of writes so far. Autograd stores this version with each tensor that it saves. The backward
  /// pass throws if the version has changed since then.
  uint64_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Device device_;
  std::atomic<uint64_t> version_{0};
  std::function<void(void*)> release_;
};

}  // namespace voxgrad
