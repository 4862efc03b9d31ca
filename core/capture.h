// What the core and the optimizers have to know of a graph of GPU work that is being captured for replays. Programs use
// cuda::CUDAGraph (cuda/cuda.h).
#pragma once

#include <functional>
#include <memory>

#include "storage.h"

namespace voxgrad {

/// A capture under way on this thread: the work of its device is recorded, not done. Or, for the length of the actions
/// below, a replay.
class Capture {
 public:
  /// Null if there is none on this thread.
  static Capture* current() noexcept;

  virtual Device device() const = 0;
  /// Not 0, and no other capture's.
  uint64_t id() const { return id_; }
  /// Kernels read `storage`, or write it: replays will, too, so that it must stay. Its version moves with each replay
  /// that writes it.
  virtual void use(const std::shared_ptr<Storage>& storage, bool write) = 0;
  /// Calls step(false), which calls kernels of optimizers, and keeps it for replays: before each, step(true) makes the
  /// same calls again, in the same order. Then they do nothing but give the replay the numbers that they are called
  /// with.
  virtual void optimizer_step(std::function<void(bool replay)> step) = 0;

 protected:
  Capture() noexcept;
  ~Capture() = default;
  /// Makes `capture` current on this thread for as long as it lives.
  class Scope {
   public:
    [[nodiscard]] explicit Scope(Capture* capture) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

 private:
  uint64_t id_;
};

}  // namespace voxgrad
