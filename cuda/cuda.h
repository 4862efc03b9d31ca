// Streams, events, CUDA graphs, device guards and external allocators. A build without CUDA has the same declarations,
// but is_available() returns false and the constructors throw Error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "../core/device.h"
#include "../core/scoped_value.h"

namespace voxgrad::cuda {

/// Returns true if this build has CUDA and the machine has a GPU that CUDA can use.
bool is_available();
/// Returns the number of GPUs: 0 in a build without CUDA or on a machine without a GPU. Queries the driver only once.
int device_count();

// Thread safety: several threads may use tensors of one GPU, and create Streams, Events and guards, at the same time. A
// single object may be used by only one thread at a time, except that any thread may call Event::query().

/// Makes GPU number `device` CUDA's current device on this thread for the lifetime of the guard. Use it for your own
/// CUDA calls; voxgrad's operations always run on the GPU of their tensors. Throws Error if the device does not exist.
class [[nodiscard]] DeviceGuard {
 public:
  [[nodiscard]] explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// A queue of work on one GPU. Operations run on the GPU of their tensors, in the current stream of that GPU on this
/// thread. The current stream is CUDA's default stream, or the Stream of a StreamGuard.
///
/// Work in two streams, including the default stream, is ordered only by an Event. Memory belongs to the stream that
/// was current when the memory was allocated. Before you free a tensor that another stream used, make the other stream
/// current, or make the owning stream wait for the other stream with an Event.
///
/// The CUDA stream of a destroyed Stream is reused by later Streams. The destructor does not wait for queued work,
/// which still completes.
class Stream {
 public:
  /// Throws Error if the device does not exist.
  explicit Stream(int device = 0);
  ~Stream();
  /// A stream that was moved from can only be destroyed.
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&&) = delete;
  /// Waits until all work queued so far has finished. Throws Error if any of this work failed.
  void synchronize() const;
  int device() const { return device_; }
  /// Returns the cudaStream_t.
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
  int device_ = 0;
};

/// Makes `stream` the current stream of its device on this thread for the lifetime of the guard. Guards may be nested.
class [[nodiscard]] StreamGuard {
 public:
  [[nodiscard]] explicit StreamGuard(const Stream& stream);
  /// Uses `stream`, a cudaStream_t of GPU `device` that another library owns; null is CUDA's default stream. Throws
  /// Error if the device does not exist.
  [[nodiscard]] StreamGuard(int device, void* stream);

 private:
  ScopedValue<void*> stream_;
};

/// Functions that allocate GPU memory, for programs in which another library owns the memory of the GPU.
struct ExternalAllocator {
  /// Returns at least `bytes` bytes of GPU `device`, aligned to 512 bytes, for work on `stream` (a cudaStream_t).
  /// `bytes` is never 0. Returns null if no memory is left; the operation then throws OutOfMemoryError.
  std::function<void*(size_t bytes, int device, void* stream)> allocate;
  /// Frees a block that `allocate` returned. Work on `stream` that is already queued may still use the block. Must not
  /// throw.
  std::function<void(void* data, int device, void* stream)> deallocate;
};

/// Makes the operations of this thread allocate GPU memory with `allocator` for the lifetime of the guard. Tensors that
/// are allocated during this lifetime must be destroyed on the same thread before the guard; otherwise their memory is
/// never freed. The allocator must outlive the guard.
class [[nodiscard]] AllocatorGuard {
 public:
  [[nodiscard]] explicit AllocatorGuard(const ExternalAllocator& allocator);

 private:
  ScopedValue<const ExternalAllocator*> allocator_;
};

/// A mark in a stream, for timing and for ordering streams.
class Event {
 public:
  /// Creates an event, which is cheaper without timing. Throws Error if the device does not exist.
  explicit Event(int device = 0, bool enable_timing = true);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Marks the work queued so far on the current stream of the device. A later record() moves the mark.
  void record();
  /// Makes later work on the current stream of the event's device wait for the mark. The host does not wait. Does
  /// nothing if record() was never called.
  void wait() const { wait(device_); }
  /// Makes later work on the current stream of `device` wait for the mark.
  void wait(int device) const;
  /// Returns true if the work before the mark has completed, or if record() was never called. May be called by any
  /// thread, also while another thread captures a graph. Throws Error if the work failed.
  bool query() const;
  /// Makes the host wait for the mark. Throws Error if the work before the mark failed.
  void synchronize() const;
  /// Waits for both events and returns the time from `start` to this event in milliseconds, with a resolution of about
  /// 0.5 microseconds. Throws Error if an event was never recorded or has no timing, or if the events are on different
  /// devices.
  float elapsed_ms_since(const Event& start) const;

 private:
  void* handle_ = nullptr;
  int device_ = 0;
};

class GraphRecording;

/// Work of one GPU that is captured once and then replayed any number of times. A replay is a single call, so that
/// small kernels do not wait for the host to launch them. Corresponds to torch.cuda.CUDAGraph.
///
///     cuda::CUDAGraph graph;
///     graph.capture([&] {
///       optimizer.zero_grad();
///       loss = mse_loss(model(x), target);
///       loss.backward();
///       optimizer.step();
///     });
///     for (...) {
///       x.copy_(batch);         // replays read the captured tensors
///       target.copy_(labels);
///       graph.replay();         // overwrites the captured results: loss is the loss of this step
///     }
///
/// - capture() runs the function once, on the host only: the kernels are recorded and do not run. replay() runs only
///   the recorded kernels, not the function. Run the function once or twice before the capture, so that state is
///   allocated and libraries are initialized.
/// - Tensors that the function creates are stored in memory that belongs to the graph. These tensors hold the values of
///   the last replay and remain valid after the graph is destroyed. The graph keeps all other memory alive that its
///   kernels read or write.
/// - Replayed optimizer steps use the learning rate and the step number at the time of the replay. The optimizer must
///   still exist and have the same state tensors as during the capture. The first step of an optimizer, which allocates
///   the state, cannot be captured.
/// - During a capture, these operations throw Error: reads of results by the CPU (item(), to(cpu), printing), copies
///   from the CPU, waits for the device, and random numbers (dropout in training). An Error ends the capture and
///   leaves the graph without a recording; the program can continue.
/// - A graph may be used by only one thread at a time.
class CUDAGraph {
 public:
  /// Throws Error if the device does not exist.
  explicit CUDAGraph(int device = 0);
  /// Waits for replays that are still running.
  ~CUDAGraph();
  CUDAGraph(const CUDAGraph&) = delete;
  CUDAGraph& operator=(const CUDAGraph&) = delete;

  /// Records the work of `function` on the device and replaces an earlier recording. First waits for the device and
  /// empties the memory cache of the device. Throws the exceptions of `function`, Error if the function cannot be
  /// captured, and OutOfMemoryError.
  void capture(const std::function<void()>& function);
  /// Queues the recorded work on the current stream. Throws Error if no graph was captured, if the optimizer of a
  /// captured step no longer exists, or if the parameters or the state of this optimizer were replaced.
  void replay();
  /// Waits for replays that are still running, deletes the recording and releases its memory. Tensors that the captured
  /// function created keep their memory.
  void reset();

 private:
  std::unique_ptr<GraphRecording> recording_;
  int device_ = 0;
};

}  // namespace voxgrad::cuda
