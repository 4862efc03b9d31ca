// The functions of CUDA graph capture that the rest of cuda/ calls. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace voxgrad::cuda {

/// Returns whether any thread is capturing work of this device. No thread may wait for the whole device during a
/// capture.
bool capture_under_way(int device) noexcept;

/// Throws Error "<op>: <why> while a CUDA graph is being captured" if this thread is capturing work of the device.
void refuse_in_capture(const char* op, int device, const char* why);

/// GPU memory for numbers that change from replay to replay, such as a learning rate.
struct ReplayNumbers {
  void* data = nullptr;  ///< null outside of a capture: the numbers are then kernel arguments
  bool refresh = false;  ///< a replay is about to begin: write `data` and launch nothing else
};
/// Returns the memory for the numbers of the next kernel, `bytes` bytes.
ReplayNumbers replay_numbers(size_t bytes);

}  // namespace voxgrad::cuda
