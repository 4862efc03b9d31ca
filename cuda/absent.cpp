// What stands in for cuda/ in a build without CUDA: nothing is available, and everything else says so.
#include <utility>

#include "core/device.h"
#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/detail/kernels.h"

namespace voxgrad {
namespace {

[[noreturn]] void refuse(int index) {
  throw Error(concat("device ", Device::cuda(index), " asked for: this build has no CUDA"));
}

/// Becomes a function of whatever type is wanted; that function throws.
struct Absent {
  template <class Result, class... Args>
  using Function = Result (*)(Args...);
  template <class Result, class... Args>
  operator Function<Result, Args...>() const {
    return [](Args...) -> Result { refuse(0); };
  }
};

/// A table of nothing but function pointers, each of them absent.
template <class Table>
Table absent_table() {
  using AnyFunction = void (*)();
  return []<size_t... i>(std::index_sequence<i...>) { return Table{(static_cast<void>(i), Absent{})...}; }
  (std::make_index_sequence<sizeof(Table) / sizeof(AnyFunction)>());
}

}  // namespace

const Kernels& cuda_kernels() {
  static const Kernels table = [] {
    Kernels absent = absent_table<Kernels>();
    absent.explain_conv = cuda::kernel::explain_conv;
    return absent;
  }();
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
thread_local ScopedValue<void*>* no_streams = nullptr;  // stays empty: the guard's constructor throws
}

bool has_wgmma(int) { return false; }
bool is_available() { return false; }
int device_count() { return 0; }

DeviceGuard::DeviceGuard(int device) { refuse(device); }
DeviceGuard::~DeviceGuard() = default;

// The constructors throw, so that the members are never reached.
Stream::Stream(int device) { refuse(device); }
Stream::~Stream() = default;
Stream::Stream(Stream&&) noexcept = default;
void Stream::synchronize() const {}

StreamGuard::StreamGuard(const Stream& stream) : stream_(no_streams, nullptr) { refuse(stream.device()); }

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
