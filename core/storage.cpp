// Implements Storage, the memory of a tensor.
#include "core/storage.h"

#include <utility>

namespace voxgrad {

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

}  // namespace voxgrad
