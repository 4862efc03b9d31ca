// The functions of cuda/ in a build without CUDA. is_available() returns false, device_count() returns 0, and functions
// that need a GPU throw Error.
#include "core/device.h"
#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/detail/kernels.h"
#include "ops/detail/kernels.h"

namespace voxgrad {
namespace {

[[noreturn]] void refuse(int index) {
  throw Error(concat(Device::cuda(index), " is not available: this build has no CUDA"));
}

/// A stub that converts to a pointer to a function of any type. The function throws Error.
struct Absent {
  template <class Result, class... Args>
  using Function = Result (*)(Args...);
  template <class Result, class... Args>
  constexpr operator Function<Result, Args...>() const {
    return [](Args...) -> Result { refuse(0); };
  }
};

}  // namespace

const Kernels& cuda_kernels() {
  static constexpr Kernels table{
#define VG_KERNEL(name, outputs, parameters) .name = Absent{},
#include "ops/detail/kernels.def"
      .explain_conv = cuda::kernel::explain_conv,
  };
  return table;
}

const Runtime& cuda_runtime() {
  static const Runtime table{
      .device_count = [] { return 0; },
      .require = refuse,
      .allocate = Absent{},
      .deallocate = [](void*, size_t, int) noexcept {},
      .copy = Absent{},
      .synchronize = refuse,
      .stats = Absent{},
      .reset_peak = refuse,
      .empty_cache = refuse,
      .stream = Absent{},
      .mark = Absent{},
      .elapsed_ms = Absent{},
  };
  return table;
}

namespace cuda {
namespace {
// The initial values of StreamGuard::stream_ and AllocatorGuard::allocator_. They stay null and are never read, because
// the constructors of the guards throw.
thread_local ScopedValue<void*>* no_streams = nullptr;
thread_local ScopedValue<const ExternalAllocator*>* no_allocators = nullptr;
}  // namespace

bool has_wgmma(int) { return false; }
bool is_available() { return false; }
int device_count() { return 0; }

DeviceGuard::DeviceGuard(int device) { refuse(device); }
DeviceGuard::~DeviceGuard() = default;

// The constructors throw, so that the other members are never called.
Stream::Stream(int device) { refuse(device); }
Stream::~Stream() = default;
Stream::Stream(Stream&&) noexcept = default;
void Stream::synchronize() const {}

StreamGuard::StreamGuard(const Stream& stream) : stream_(no_streams, nullptr) { refuse(stream.device()); }
StreamGuard::StreamGuard(int device, void*) : stream_(no_streams, nullptr) { refuse(device); }

AllocatorGuard::AllocatorGuard(const ExternalAllocator&) : allocator_(no_allocators, nullptr) { refuse(0); }

Event::Event(int device, bool) { refuse(device); }
Event::~Event() = default;
void Event::record() {}
void Event::wait(int) const {}
void Event::synchronize() const {}
bool Event::query() const { return true; }
float Event::elapsed_ms_since(const Event&) const { return 0; }

class GraphRecording {};
CUDAGraph::CUDAGraph(int device) { refuse(device); }
CUDAGraph::~CUDAGraph() = default;
void CUDAGraph::capture(const std::function<void()>&) {}
void CUDAGraph::replay() {}
void CUDAGraph::reset() {}

}  // namespace cuda
}  // namespace voxgrad
