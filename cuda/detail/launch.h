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

/// Throws Error if the kernel launch before this call failed.
inline void check_launch(const char* op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  check_cuda(cudaGetLastError(), op, file, line);
}

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

/// Raises the dynamic shared memory limit of `kernel` on the current device to at least `bytes`. Never lowers the
/// limit, so that threads that launch the same kernel do not interfere.
void allow_shared(const void* kernel, int bytes);

/// Calls dispatch() of core/dtype.h, with "CUDA" as the name of the device in error messages.
template <class... Ts, class F>
void dispatch_cuda(Types<Ts...> types, DType dtype, const char* op, F&& f) {
  dispatch(types, dtype, op, "CUDA", std::forward<F>(f));
}

#ifdef __CUDACC__
/// Launches a kernel in clusters of `cluster` CTAs, with `shared_bytes` of dynamic shared memory, which may exceed
/// 48 KiB.
template <class... Params>
void launch_in_clusters(unsigned cluster, void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                        cudaStream_t stream, const std::type_identity_t<Params>&... arguments) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, arguments...));  // check_launch() reports errors
}
/// Launches a kernel without clusters, with `shared_bytes` of dynamic shared memory, which may exceed 48 KiB.
template <class... Params>
void launch_with_shared(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                        const std::type_identity_t<Params>&... arguments) {
  launch_in_clusters(1, kernel, grid, threads, shared_bytes, stream, arguments...);
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
