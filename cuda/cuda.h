// What a program sees of CUDA. Also there in a build without it, where is_available() is false and the
// constructors throw.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace voxgrad::cuda {

/// True if this build has CUDA and a GPU answers.
bool is_available();
/// The number of GPUs; 0 in a build without CUDA and on a machine without one. Asked once and remembered.
int device_count();

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

/// Makes `stream` the current stream of its device on this thread for as long as it lives. Guards nest.
class StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  void* previous_;
  int device_;
};

/// A point in a stream, for timing and for ordering streams.
class Event {
 public:
  /// Throws Error if the device does not exist.
  explicit Event(int device = 0);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Marks the work queued so far on the current stream of the device. A later record() moves the mark.
  void record();
  /// Makes later work on the current stream of the device wait for the mark. The host does not wait. Nothing
  /// happens if there is no mark.
  void wait() const;
  /// Makes the host wait for the mark. Throws Error if the work before it failed.
  void synchronize() const;
  /// Milliseconds from `start` to this event, to about half a microsecond; waits for both. Throws Error if one of
  /// them was never recorded or they lie on two devices.
  float elapsed_ms_since(const Event& start) const;

 private:
  void* handle_ = nullptr;
  int device_ = 0;
};

}  // namespace voxgrad::cuda
