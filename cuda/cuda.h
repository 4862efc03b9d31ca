// What a program sees of CUDA. Also there in a build without it, where is_available() is false and the
// constructors throw.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "../core/device.h"
#include "../core/scoped_value.h"

namespace voxgrad::cuda {

/// True if this build has CUDA and a GPU answers.
bool is_available();
/// The number of GPUs; 0 in a build without CUDA and on a machine without one. Asked once and remembered.
int device_count();

// Threads may use tensors of one GPU, and make Streams, Events and guards, at the same time; one object is used by one
// thread at a time, but that any may query() an Event.

/// Makes GPU number `device` CUDA's current device on this thread during its lifetime, for programs that call CUDA
/// themselves; voxgrad's own operations run on the GPU of their tensors. Throws Error if the device does not exist.
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

/// A queue of work on one GPU. Operations run on the GPU of their tensors, in the current stream of that GPU on
/// this thread: CUDA's default stream, or the Stream that a StreamGuard holds.
///
/// Work in two streams is not ordered unless an Event orders it, with the default stream neither. Memory belongs to
/// the stream that was current when it was allocated: a tensor that another stream used must be freed while that
/// stream is current, or after an Event made the owner's stream wait for it.
///
/// The queue behind a Stream is reused by later Streams and never destroyed: destruction does not wait, and work
/// still queued is carried out.
class Stream {
 public:
  /// Throws Error if the device does not exist.
  explicit Stream(int device = 0);
  ~Stream();
  /// The stream moved from can only be destroyed.
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&&) = delete;
  /// Waits until all work queued so far has finished. Throws Error if some of it failed.
  void synchronize() const;
  int device() const { return device_; }
  /// The cudaStream_t.
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
  int device_ = 0;
};

/// Makes `stream` the current stream of its device on this thread while it lives. Guards nest.
class [[nodiscard]] StreamGuard {
 public:
  [[nodiscard]] explicit StreamGuard(const Stream& stream);

 private:
  ScopedValue<void*> stream_;
};

/// A point in a stream, for timing and for ordering streams.
class Event {
 public:
  /// One without timing costs less. Throws Error if the device does not exist.
  explicit Event(int device = 0, bool enable_timing = true);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Marks the work queued so far on the current stream of the device. A later record() moves the mark.
  void record();
  /// Makes later work on the current stream of the device, or of another, wait for the mark. The host does not wait.
  /// Nothing happens if there is no mark.
  void wait() const { wait(device_); }
  void wait(int device) const;
  /// Whether the work before the mark is done, or there is no mark; threads may ask while others capture. Throws Error
  /// if it failed.
  bool query() const;
  /// Makes the host wait for the mark. Throws Error if the work before it failed.
  void synchronize() const;
  /// Milliseconds from `start` to this event, to about half a microsecond; waits for both. Throws Error if one of
  /// them was never recorded or has no timing, or they lie on two devices.
  float elapsed_ms_since(const Event& start) const;

 private:
  void* handle_ = nullptr;
  int device_ = 0;
};

class GraphRecording;

/// Work of one GPU that is recorded once and then done again and again by single calls: small kernels no longer wait
/// for the host. PyTorch's torch.cuda.CUDAGraph.
///
///   cuda::CUDAGraph graph;
///   graph.capture([&] {
///     optimizer.zero_grad();
///     loss = mse_loss(model(x), target);
///     loss.backward();
///     optimizer.step();
///   });
///   for (...) {
///     x.copy_(batch);   // and target: replays read the tensors that were captured
///     graph.replay();   // and write those; loss is this step's
///   }
///
/// - The function runs once, on the host only: its kernels are recorded, not run, and nothing but kernels is part of a
///   replay. Run it once or twice before, so that state is made and libraries are set up.
/// - Tensors that the function makes lie in memory of the graph: they hold what the last replay left, and stay valid as
///   long as somebody holds them. The graph keeps all other memory that it reads or writes.
/// - Steps of optimizers are part of a replay with their learning rate and step number of the time of the replay; their
///   first step, which makes their state, is refused. The optimizer must live, with the same state.
/// - Refused, with an Error: results read by the CPU (item(), to(cpu), printing), copies from the CPU, waiting for the
///   device, random numbers (dropout in training). An Error ends the capture; the program goes on as if it had not
///   begun.
/// - One thread at a time.
class CUDAGraph {
 public:
  /// Throws Error if the device does not exist.
  explicit CUDAGraph(int device = 0);
  /// Waits for replays under way.
  ~CUDAGraph();
  CUDAGraph(const CUDAGraph&) = delete;
  CUDAGraph& operator=(const CUDAGraph&) = delete;

  /// Records what `function` does on the device, in place of what was recorded before. Waits for the device and empties
  /// its cache first. Throws what `function` throws, Error if it does what cannot be captured, OutOfMemoryError.
  void capture(const std::function<void()>& function);
  /// Queues the recorded work on the current stream. Throws Error if nothing was captured, or if the optimizer of a
  /// captured step is gone or has other memory.
  void replay();
  /// Drops what was recorded, and its memory.
  void reset();

 private:
  std::unique_ptr<GraphRecording> recording_;
  int device_ = 0;
};

}  // namespace voxgrad::cuda
