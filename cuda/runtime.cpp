// The runtime functions for GPUs and their table: device queries, allocation, copies, CUDA error checks, device guards,
// workspaces, and index errors that kernels report.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "core/device.h"
#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/detail/allocator.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/launch.h"

namespace voxgrad {
namespace cuda {
namespace {

struct Devices {
  int count = 0;
  std::string error;  ///< the reason why count is 0; otherwise unused
};

/// Returns a version of CUDA as text: 13000 becomes "13.0".
std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

/// Returns the reason why cudaGetDeviceCount returned `status` or found no device.
std::string reason_without_devices(cudaError_t status) {
  int driver = 0;  // newest version of CUDA that the driver supports; 0 without a driver
  cudaDriverGetVersion(&driver);
  constexpr int kRequired = CUDART_VERSION / 1000;
  if (driver == 0 && ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr)
    return concat("the NVIDIA driver is missing (", ::dlerror(), "); install a driver that supports CUDA ", kRequired);
  if (driver != 0 && status == cudaErrorInsufficientDriver)
    return concat("the NVIDIA driver is too old: it supports CUDA ", version_text(driver),
                  ", but this program needs CUDA ", kRequired, " or newer");
  if (status == cudaSuccess || status == cudaErrorNoDevice)
    return "the NVIDIA driver found no GPU; check nvidia-smi and the variable CUDA_VISIBLE_DEVICES";
  return concat("the NVIDIA driver failed with ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
}

/// Returns the GPUs. Queries the driver only on the first call.
const Devices& devices() {
  static const Devices* found = [] {
    auto* result = new Devices;
    const cudaError_t status = cudaGetDeviceCount(&result->count);
    if (status == cudaSuccess && result->count > 0) {
      result->count = std::min(result->count, kMaxDevices);
      return result;
    }
    *result = {.count = 0, .error = reason_without_devices(status)};
    cudaGetLastError();
    return result;
  }();
  return *found;
}

/// Throws Error if GPU `index` does not exist.
void require(int index) {
  const Devices& found = devices();
  if (index >= 0 && index < found.count) return;
  const std::string message = concat(Device::cuda(index), " is not available: ");
  if (found.count == 0) throw Error(message + found.error);
  throw Error(concat(message, "the number of GPUs is ", found.count));
}

thread_local ScopedValue<const ExternalAllocator*>* external_allocators = nullptr;

/// Allocates with the allocator of the innermost AllocatorGuard of this thread, or with the caching allocator if there
/// is no guard.
void* allocate_on(int device, size_t bytes, cudaStream_t stream) {
  if (external_allocators == nullptr || bytes == 0) return Allocator::of(device).allocate(bytes, stream);
  void* const data = external_allocators->value()->allocate(bytes, device, stream);
  if (data == nullptr)
    throw OutOfMemoryError(concat("out of memory on ", Device::cuda(device),
                                  ": the external allocator returned null for ", bytes, " bytes"));
  return data;
}
void deallocate_on(int device, void* data, cudaStream_t stream) noexcept {
  if (data == nullptr) return;
  const bool external = external_allocators != nullptr && !Allocator::of(device).is_live(data);
  if (external) return external_allocators->value()->deallocate(data, device, stream);
  Allocator::of(device).deallocate(data, stream);
}

void* allocate(size_t bytes, int index) { return allocate_on(index, bytes, current_stream(index)); }
void deallocate(void* data, size_t, int index) noexcept { deallocate_on(index, data, current_stream(index)); }

constexpr size_t kPiece = size_t{4} << 20;  // bytes of a page-locked buffer

/// A page-locked buffer, and the event recorded after its last copy.
struct Slot {
  std::mutex mutex;
  void* data = nullptr;
  cudaEvent_t copied = nullptr;

  /// Waits until the buffer may be overwritten.
  void acquire() {
    if (copied == nullptr) check_cuda(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "copy");
    if (data == nullptr) check_cuda(cudaMallocHost(&data, kPiece), "copy");
    check_cuda(cudaEventSynchronize(copied), "copy");
  }
};

/// The buffers of a stream. Up to four threads, one per slot, can copy at the same time.
struct Ring {
  std::array<Slot, 4> slots;
  std::atomic<size_t> next = 0;
};

/// Returns the ring of a stream. Each stream has its own ring, so that a copy never waits for the work of another
/// stream.
Ring& ring_of(int device, cudaStream_t stream) {
  using Rings = std::map<std::pair<int, cudaStream_t>, Ring>;
  static std::mutex mutex;
  static auto* rings = new Rings;  // never destroyed: the driver frees the memory when the process ends
  const std::lock_guard lock(mutex);
  return (*rings)[{device, stream}];
}

/// Queues a copy of `bytes` bytes from host memory to `to` on `device`. `from` may be reused when the call returns. The
/// bytes pass through page-locked buffers, 16 MiB per stream. The call waits only if earlier copies of the stream still
/// occupy all buffers.
void upload(void* to, const void* from, size_t bytes, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  Ring& ring = ring_of(device, stream);
  for (size_t done = 0; done < bytes; done += kPiece) {
    Slot& slot = ring.slots[ring.next++ % ring.slots.size()];
    const std::lock_guard lock(slot.mutex);
    slot.acquire();
    const size_t piece = std::min(kPiece, bytes - done);
    std::memcpy(slot.data, static_cast<const char*>(from) + done, piece);
    check_cuda(cudaMemcpyAsync(static_cast<char*>(to) + done, slot.data, piece, cudaMemcpyHostToDevice, stream),
               "copy");
    check_cuda(cudaEventRecord(slot.copied, stream), "copy");
  }
}

/// Queues a copy between two GPUs. The copy follows the queued work of the current streams of both GPUs, and precedes
/// their later work.
void copy_between_devices(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  cuda::Event writable(to_device, /*enable_timing=*/false), done(from_device, /*enable_timing=*/false);
  writable.record();  // the target may be overwritten after the work that is queued now
  writable.wait(from_device);
  {
    const DeviceGuard guard(from_device);
    check_cuda(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, current_stream(from_device)), "copy");
  }
  done.record();
  done.wait(to_device);
}

void copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
  if (bytes == 0) return;
  for (const Device device : {to_device, from_device})
    if (device.is_cuda() && to_device != from_device)
      refuse_in_capture("copy", device.index,
                        to_device.is_cpu() ? "results cannot be read by the CPU (item(), to(cpu), printing)"
                                           : "data cannot be copied between devices");
  if (to_device.is_cuda() && from_device.is_cuda() && to_device != from_device)
    return copy_between_devices(to, to_device.index, from, from_device.index, bytes);
  const int device = to_device.is_cuda() ? to_device.index : from_device.index;
  const cudaStream_t stream = current_stream(device);
  if (from_device.is_cpu()) return upload(to, from, bytes, device, stream);
  const DeviceGuard guard(device);
  // A copy to pageable memory holds a lock of the driver while it waits for the stream. The lock would block event
  // queries of other threads, so wait without the lock first.
  if (to_device.is_cpu()) check_cuda(cudaStreamSynchronize(stream), "copy");
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy");
  if (!to_device.is_cpu()) return;
  check_cuda(cudaStreamSynchronize(stream), "copy");
  check_indices(device);
}

void wait_for(int index) {
  check(!capture_under_way(index), "synchronize", "cannot wait for the device while a CUDA graph is being captured");
  const DeviceGuard guard(index);
  check_cuda(cudaDeviceSynchronize(), "synchronize");
  check_indices(index);
}

}  // namespace

bool is_available() { return device_count() > 0; }
int device_count() { return devices().count; }

namespace {
std::array<std::atomic<IndexError*>, kMaxDevices> reports{};
std::atomic<IndexError*>& report_of(int device) { return reports[static_cast<size_t>(device)]; }
}  // namespace

IndexError* index_errors(int device) {
  std::atomic<IndexError*>& report = report_of(device);
  if (IndexError* existing = report.load()) return existing;
  const DeviceGuard guard(device);
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(IndexError), cudaHostAllocMapped | cudaHostAllocPortable), "index_errors");
  auto* created = new (memory) IndexError{};
  IndexError* existing = nullptr;
  if (report.compare_exchange_strong(existing, created)) return created;
  cudaFreeHost(memory);  // another thread has meanwhile stored its allocation
  return existing;
}

void check_indices(int device) {
  IndexError* report = report_of(device).load();
  if (report == nullptr) return;
  const char* op = std::atomic_ref(report->op).exchange(nullptr);
  check(op == nullptr, op, "index ", report->index, " is out of range for an axis of size ", report->size, " (on ",
        Device::cuda(device), "; results computed with this index are invalid)");
}

void check_cuda(cudaError_t status, const char* what, const char* file, int line) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  const std::string_view path = file;
  fail(what, cudaGetErrorName(status), " (", cudaGetErrorString(status), ") at ", path.substr(path.rfind('/') + 1), ":",
       line);
}

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(previous_);
}

Workspace::Workspace(const Launch& launch, size_t bytes)
    : data_(allocate_on(launch.device, bytes, launch.stream)), device_(launch.device), stream_(launch.stream) {}
Workspace::~Workspace() { deallocate_on(device_, data_, stream_); }

AllocatorGuard::AllocatorGuard(const ExternalAllocator& allocator) : allocator_(external_allocators, &allocator) {}

}  // namespace cuda

const Runtime& cuda_runtime() {
  static constexpr Runtime table{
      .device_count = cuda::device_count,
      .require = cuda::require,
      .allocate = cuda::allocate,
      .deallocate = cuda::deallocate,
      .copy = cuda::copy,
      .synchronize = cuda::wait_for,
      .stats = [](int index) { return cuda::Allocator::of(index).stats(); },
      .reset_peak = [](int index) { cuda::Allocator::of(index).reset_peak(); },
      .empty_cache = [](int index) { cuda::Allocator::of(index).empty_cache(); },
      .stream = [](int index) -> void* { return cuda::current_stream(index); },
      .mark = [](int index) -> std::shared_ptr<void> {
        const auto event = std::make_shared<cuda::Event>(index);
        event->record();
        return event;
      },
      .elapsed_ms = [](const void* from, const void* to) -> double {
        return static_cast<const cuda::Event*>(to)->elapsed_ms_since(*static_cast<const cuda::Event*>(from));
      },
  };
  return table;
}

}  // namespace voxgrad
