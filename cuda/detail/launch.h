// What every file that calls CUDA needs: checked calls, the device and stream of a launch, its grid, and
// scratch memory. Private to the library.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/detail/divide.h"
#include "core/view.h"
#include "cuda/cuda.h"

namespace voxgrad::cuda {

/// Throws Error "<what>: cudaErrorName (description) at file:line" unless `status` is cudaSuccess. Takes the error
/// out of CUDA's own last-error slot, so that the next check does not meet it again.
void check_cuda(cudaError_t status, const char* what, const char* file = __builtin_FILE(), int line = __builtin_LINE());

/// For the line after a kernel launch: throws if it was refused.
inline void check_launch(const char* op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  check_cuda(cudaGetLastError(), op, file, line);
}

/// More GPUs than this are not looked at.
inline constexpr int kMaxDevices = 64;

/// The stream on which this thread's operations on `device` run; null is CUDA's default stream.
cudaStream_t current_stream(int device) noexcept;

/// Where the kernels of one call run: the device of its views, made current, and that device's current stream.
struct Launch {
  explicit Launch(const View& view) : device(view.device), guard(view.device), stream(current_stream(view.device)) {}

  int device;
  DeviceGuard guard;
  cudaStream_t stream;
};

/// Scratch memory of one call, from the caching allocator. The next owner of the bytes comes later in the same
/// stream, so it may go out of scope as soon as the kernels that use it are queued. Throws OutOfMemoryError.
class Workspace {
 public:
  Workspace(const Launch& launch, size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  int device_;
  cudaStream_t stream_;
};

/// The last index out of range that a kernel met on a GPU. It lies in host memory, where kernels write it: nobody waits
/// for it, and the next wait for the GPU that happens anyway throws it.
struct IndexError {
  int64_t index;
  int64_t size;    ///< of the axis
  const char* op;  ///< null: none
};

/// Where kernels on `device` report. Throws Error if there is no memory for it.
IndexError* index_errors(int device);

/// For the line after a wait for `device`: throws Error "<op>: index 7 is out of range ..." if a kernel before it
/// reported one, and forgets it.
void check_indices(int device);

/// Threads in a block where nothing speaks for another number.
inline constexpr int kBlock = 256;
/// Grids stay below this, so that an index and a grid's stride of up to 1024 threads a block add up below 2^32
/// for indices below 2^31.
inline constexpr int64_t kMaxGrid = int64_t{1} << 20;

/// Blocks for a loop over `count` items, `per_block` of them in a block at a time. Never more than kMaxGrid (so the
/// kernel must loop in steps of thread_count()), and at least one.
inline unsigned grid_size(int64_t count, int per_block = kBlock) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(count, per_block), 1, kMaxGrid));
}

/// Lets the kernel have so many bytes of dynamic shared memory from now on, or more if it might have more before: of
/// two threads that launch it, none takes from the other. On the current device.
void allow_shared(const void* kernel, int bytes);

#ifdef __CUDACC__
/// Launches a kernel with more than 48 KiB of dynamic shared memory.
template <class Problem>
void launch_with_shared(void (*kernel)(Problem), unsigned blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const Problem& problem) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<blocks, threads, static_cast<size_t>(shared_bytes), stream>>>(problem);
}

/// Reports indices of an axis that are out of range, under the name of `op`, a string literal of the host.
struct IndexCheck {
  int64_t size;
  const char* op;
  IndexError* errors;

  IndexCheck(int64_t axis_size, const char* name, const Launch& launch)
      : size(axis_size), op(name), errors(index_errors(launch.device)) {}
  __device__ bool operator()(int64_t index) const {
    if (index >= 0 && index < size) return true;
    *errors = {index, size, op};
    return false;
  }
};

/// for (int64_t i = thread_index(); i < count; i += thread_count()) covers a count of any size.
__device__ inline int64_t thread_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }
#endif

}  // namespace voxgrad::cuda
