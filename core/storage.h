// The bytes under tensors: one allocation on one device, shared by all its views.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "device.h"

namespace voxgrad {

class Storage {
 public:
  /// Allocates; the bytes are not initialised. Throws OutOfMemoryError.
  Storage(size_t bytes, Device device);
  /// Takes over memory from elsewhere; `release` is called with `data` at the end.
  Storage(void* data, size_t bytes, Device device, std::function<void(void*)> release);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Counts the writes, from all threads. What autograd saved notes it, and refuses to be used when it has moved.
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
