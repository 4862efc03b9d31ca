// Streams and events.
//
// By default, the current stream of a device is CUDA's legacy default stream. Programs and other libraries use this
// stream for kernels and cudaMemcpy calls without a stream argument, so that their work is ordered with voxgrad's work.
// Streams that voxgrad creates are non-blocking: their work overlaps with the default stream.
#include <array>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

// The value of the innermost StreamGuard of each device. The array is trivially destructible, so that a tensor that is
// freed at the end of a thread or after main() can still read the current stream.
thread_local std::array<ScopedValue<void*>*, kMaxDevices> current_streams{};

cudaStream_t as_stream(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t as_event(void* handle) { return static_cast<cudaEvent_t>(handle); }

/// CUDA streams that no Stream object owns at present. CUDA streams are never destroyed, because the allocator's blocks
/// belong to them.
struct Pool {
  std::mutex mutex;
  std::array<std::vector<cudaStream_t>, kMaxDevices> idle;
};

Pool& pool() {
  static auto* pool = new Pool;  // never destroyed, because a Stream may be a static object
  return *pool;
}

}  // namespace

cudaStream_t current_stream(int device) noexcept {
  const ScopedValue<void*>* innermost = current_streams[static_cast<size_t>(device)];
  return innermost ? as_stream(innermost->value()) : nullptr;
}

Stream::Stream(int device) : device_(device) {
  cuda_runtime().require(device);
  {
    const std::lock_guard lock(pool().mutex);
    auto& idle = pool().idle[static_cast<size_t>(device)];
    if (!idle.empty()) {
      handle_ = idle.back();
      idle.pop_back();
      return;
    }
  }
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "Stream");
  handle_ = stream;
}

Stream::~Stream() {
  if (handle_ == nullptr) return;
  const std::lock_guard lock(pool().mutex);
  try {
    pool().idle[static_cast<size_t>(device_)].push_back(as_stream(handle_));
  } catch (const std::bad_alloc&) {  // the stream is not reused
  }
}

Stream::Stream(Stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)), device_(other.device_) {}

void Stream::synchronize() const {
  check(handle_ != nullptr, "Stream", "cannot synchronize a stream that was moved from");
  check_cuda(cudaStreamSynchronize(as_stream(handle_)), "Stream::synchronize");
  check_indices(device_);
}

StreamGuard::StreamGuard(const Stream& stream)
    : stream_(current_streams[static_cast<size_t>(stream.device())], stream.handle()) {
  check(stream.handle() != nullptr, "StreamGuard", "the stream was moved from");
}
StreamGuard::StreamGuard(int device, void* stream)
    : stream_((cuda_runtime().require(device), current_streams[static_cast<size_t>(device)]), stream) {}

Event::Event(int device, bool enable_timing) : device_(device) {
  cuda_runtime().require(device);
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, enable_timing ? cudaEventDefault : cudaEventDisableTiming), "Event");
  handle_ = event;
}

Event::~Event() { cudaEventDestroy(as_event(handle_)); }

void Event::record() {
  const DeviceGuard guard(device_);
  check_cuda(cudaEventRecord(as_event(handle_), current_stream(device_)), "Event::record");
}

void Event::wait(int device) const {
  const DeviceGuard guard(device);
  check_cuda(cudaStreamWaitEvent(current_stream(device), as_event(handle_), 0), "Event::wait");
}

bool Event::query() const {
  auto mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "Event::query");
  const cudaError_t status = cudaEventQuery(as_event(handle_));
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "Event::query");
  if (status != cudaErrorNotReady) check_cuda(status, "Event::query");
  return status == cudaSuccess;
}

void Event::synchronize() const {
  check_cuda(cudaEventSynchronize(as_event(handle_)), "Event::synchronize");
  check_indices(device_);
}

float Event::elapsed_ms_since(const Event& start) const {
  start.synchronize();
  synchronize();
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, as_event(start.handle_), as_event(handle_)),
             "Event::elapsed_ms_since");
  return milliseconds;
}

}  // namespace voxgrad::cuda
