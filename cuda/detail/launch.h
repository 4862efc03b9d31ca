// Checked CUDA calls, the device and stream of a launch, grid sizes, scratch memory, and errors that kernels report.
// Private to the library.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "core/view.h"
#include "cuda/cuda.h"

namespace voxgrad::cuda {

/// Throws Error "<what>: cudaErrorName (description) at file:line" unless `status` is cudaSuccess. Clears CUDA's last
/// error, so that the next check does not report it again.
void check_cuda(cudaError_t status, const char* what, const char* file = __builtin_FILE(), int line = __builtin_LINE());

/// Upper bound of the number of GPUs; further GPUs are ignored.
inline constexpr int kMaxDevices = 64;

/// Returns the current stream of `device` on this thread; null is CUDA's default stream.
cudaStream_t current_stream(int device) noexcept;

/// The device and the stream on which an operation launches its kernels. While the object exists, the device of `view`
/// is CUDA's current device.
struct Launch {
  explicit Launch(const View& view) : device(view.device), guard(view.device), stream(current_stream(view.device)) {}

  int device;
  DeviceGuard guard;
  cudaStream_t stream;
};

/// Scratch memory of one call, from the allocator of the innermost AllocatorGuard or, without a guard, from the caching
/// allocator. A Workspace may be destroyed as soon as the kernels that use it are queued: the memory is reused only by
/// later work in the same stream. The constructor throws OutOfMemoryError if the memory cannot be allocated.
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

/// The last out-of-range index that a kernel found. Kernels write this report to page-locked host memory, so that the
/// check itself never waits. The next operation that waits for the GPU throws the error.
struct IndexError {
  int64_t index;
  int64_t size;    ///< size of the axis
  const char* op;  ///< null if there is no error
};

/// Returns the location to which kernels on `device` report index errors. Throws Error if it cannot be allocated.
IndexError* index_errors(int device);

/// Throws Error "<op>: index 7 is out of range ..." if a kernel on `device` reported an index error, and clears the
/// error. Call this function after waiting for the device.
void check_indices(int device);

/// Default number of threads per CTA.
inline constexpr int kBlock = 256;
/// Upper bound of grid sizes. A grid then has at most 2^30 threads, so that kernels can add the number of threads to an
/// index below 2^31 in uint32_t without overflow.
inline constexpr int64_t kMaxGrid = int64_t{1} << 20;

/// Returns the number of CTAs for a grid-stride loop over `count` items: at least 1 and at most kMaxGrid. A CTA handles
/// `per_block` items in one iteration.
inline unsigned grid_size(int64_t count, int per_block = kBlock) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(count, per_block), 1, kMaxGrid));
}

/// Calls dispatch() of core/dtype.h, with "CUDA" as the name of the device in error messages.
template <class... Ts, class F>
void dispatch_cuda(Types<Ts...> types, DType dtype, const char* op, F&& f) {
  dispatch(types, dtype, op, "CUDA", std::forward<F>(f));
}

/// Launches a kernel with pointers to its arguments. `shared_bytes` of dynamic shared memory may exceed 48 KiB. With
/// sm_90a, the kernel may start before the results of earlier kernels of the stream can be read (programmatic dependent
/// launch), so it must call wait_for_previous_kernels(). Throws Error "<op>: ..." if the launch fails.
void launch_kernel(const char* op, const void* kernel, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   void** arguments, unsigned cluster = 1);

#ifdef __CUDACC__
/// Waits until all earlier kernels of the stream have ended and their results can be read. Every kernel must call this
/// function before it accesses memory that another kernel accesses.
__device__ inline void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel in clusters of `cluster` CTAs.
template <class... Params>
void launch_in_clusters(const char* op, unsigned cluster, void (*kernel)(Params...), dim3 grid, int threads,
                        int shared_bytes, cudaStream_t stream, const std::type_identity_t<Params>&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch_kernel(op, reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes, stream, pointers, cluster);
}
/// Launches a kernel without clusters.
template <class... Params>
void launch_kernel(const char* op, void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, const std::type_identity_t<Params>&... arguments) {
  launch_in_clusters(op, 1, kernel, grid, threads, shared_bytes, stream, arguments...);
}

/// Checks indices in a kernel and reports those that are out of range. `op` is a string literal in host memory.
struct IndexCheck {
  int64_t size;
  const char* op;
  IndexError* errors;

  IndexCheck(int64_t axis_size, const char* name, const Launch& launch)
      : size(axis_size), op(name), errors(index_errors(launch.device)) {}
  /// Returns whether `index` is in [0, size); otherwise reports the error.
  __device__ bool operator()(int64_t index) const {
    if (index >= 0 && index < size) return true;
    *errors = {index, size, op};
    return false;
  }
};

/// Return the index of this thread in the grid, and the number of threads in the grid. The loop
/// for (int64_t i = thread_index(); i < count; i += thread_count()) covers any count.
__device__ inline int64_t thread_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }
#endif

}  // namespace voxgrad::cuda
