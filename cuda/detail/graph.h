// Functions for kernels and allocations that may run during the capture of a CUDA graph. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <typeinfo>

namespace voxgrad::cuda {

/// Returns whether any thread is capturing work of `device`. During a capture, no thread may wait for the whole device.
bool capture_under_way(int device) noexcept;

/// Throws Error "<op>: <why> while a CUDA graph is being captured" if this thread is capturing work of `device`.
void refuse_in_capture(const char* op, int device, const char* why);

/// GPU memory for numbers that change from replay to replay, such as a learning rate.
struct ReplayNumbers {
  void* data = nullptr;  ///< null if no optimizer step is captured; the numbers are then kernel arguments
  bool refresh = false;  ///< true before a replay: the caller must write `data` and launch nothing else
};
/// Returns memory for the numbers of the next kernel of a captured optimizer step. They have `bytes` bytes and are of
/// type `type`. Throws Error if the captured kernel reads numbers of another type.
ReplayNumbers replay_numbers(size_t bytes, const std::type_info& type);

}  // namespace voxgrad::cuda
