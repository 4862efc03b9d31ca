// Settings of a thread that a recorded graph depends on.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace voxgrad {

/// The settings of one thread, such as the dtype of autocast. The engine resets them during a backward pass, because
/// gradients must not depend on the settings of the thread that calls backward(). recompute() restores the settings of
/// the forward pass.
///
/// The files that define a setting register it, so that autograd does not depend on them.
class Context {
 public:
  /// Keeps a setting changed during its lifetime. The thread that made the guard must destroy it.
  using Guard = std::shared_ptr<void>;
  struct Setting {
    /// Captures the current value of this thread. Returns a function that sets this value again.
    std::function<Guard()> (*capture)();
    /// Sets the default value; null if backward passes keep the thread's value.
    Guard (*reset)();
  };

  /// Registers a setting for all threads. Called while static objects are initialized; returns true.
  static bool add(const Setting& setting);
  /// Sets the defaults on this thread during the lifetime of the returned guards.
  [[nodiscard]] static std::vector<Guard> reset();

  /// Captures all settings of this thread.
  Context();
  /// Sets the captured values on this thread during the lifetime of the returned guards.
  [[nodiscard]] std::vector<Guard> enter() const;

 private:
  std::vector<std::function<Guard()>> captured_;
};

}  // namespace voxgrad
