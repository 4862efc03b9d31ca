// A guard that handles Ctrl-C and SIGTERM. The guard sets a flag, so that a training loop can finish its step and save
// a checkpoint before the program ends.
#pragma once

#include <csignal>

namespace examples {

/// While a guard exists, the first SIGINT or SIGTERM sets a flag. A second signal ends the program as usual.
class [[nodiscard]] InterruptGuard {
 public:
  [[nodiscard]] InterruptGuard() {
    requested_flag() = 0;
    previous_int_ = std::signal(SIGINT, handle);
    previous_term_ = std::signal(SIGTERM, handle);
  }
  ~InterruptGuard() {
    std::signal(SIGINT, previous_int_);
    std::signal(SIGTERM, previous_term_);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// Returns true if a signal has arrived since the guard was created.
  bool requested() const { return requested_flag() != 0; }

 private:
  using Handler = void (*)(int);
  static volatile std::sig_atomic_t& requested_flag() {
    static volatile std::sig_atomic_t flag = 0;
    return flag;
  }
  static void handle(int signal) {
    requested_flag() = 1;
    std::signal(signal, SIG_DFL);
  }
  Handler previous_int_ = SIG_DFL;   // handler of SIGINT before the guard
  Handler previous_term_ = SIG_DFL;  // handler of SIGTERM before the guard
};

}  // namespace examples
