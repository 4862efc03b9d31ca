// What the rest of cuda/ has to know of captures. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace voxgrad::cuda {

/// Whether any thread captures work of this device: nobody may wait for the whole device then.
bool capture_under_way(int device) noexcept;

/// Throws Error "<op>: <why> while a CUDA graph is being captured" if this thread captures the device's work.
void refuse_in_capture(const char* op, int device, const char* why);

/// Where a kernel finds numbers that change from replay to replay, a learning rate for instance.
struct ReplayNumbers {
  void* data = nullptr;  ///< on the GPU; null if there is no capture: the numbers travel as the kernel's arguments
  bool refresh = false;  ///< a replay is about to begin: write `data`, launch nothing else
};
/// `bytes` bytes for the next of the kernels that have such numbers.
ReplayNumbers replay_numbers(size_t bytes);

}  // namespace voxgrad::cuda
