// The interface between a CUDA graph that is being captured and the rest of the library. Programs use cuda::CUDAGraph
// (cuda/cuda.h).
#pragma once

#include <functional>
#include <memory>

#include "scoped_value.h"
#include "storage.h"

namespace voxgrad {

/// A CUDA graph that this thread is capturing: work on the device of the graph is recorded instead of executed. While a
/// replay calls the function passed to optimizer_step(), current() returns the replayed graph.
class Capture {
 public:
  /// Returns the graph of this thread, or null.
  static Capture* current() noexcept;

  virtual Device device() const = 0;
  /// Returns a unique number, which is not 0.
  uint64_t id() const { return id_; }
  /// Registers `storage`, which a captured kernel reads or, if `write` is true, writes. Memory from outside the graph
  /// stays alive until the graph is destroyed. Each replay increments the versions of all written storages; the first
  /// replay excludes the graph's own memory, because the capture has already incremented its versions.
  virtual void use(const std::shared_ptr<Storage>& storage, bool write) = 0;
  /// Calls step(false), which launches the kernels of an optimizer, and stores `step`. Before each replay, step(true)
  /// must launch the same kernels in the same order. These launches are not executed; they only pass the current
  /// arguments, such as the learning rate, to the replay.
  virtual void optimizer_step(std::function<void(bool replay)> step) = 0;

 protected:
  Capture() noexcept;
  ~Capture() = default;
  /// Makes this graph current() during the lifetime of the result.
  Restore<Capture*> make_current() noexcept;

 private:
  uint64_t id_;
};

}  // namespace voxgrad
