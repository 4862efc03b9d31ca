// The state of random numbers: one generator for all devices.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "scoped_value.h"

namespace voxgrad {

/// A position in a Philox stream. Saving and restoring the two numbers replays everything that follows.
struct GeneratorState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  friend bool operator==(const GeneratorState&, const GeneratorState&) = default;
};

/// Hands out stretches of a Philox stream. Not for use from several threads at once.
class Generator {
 public:
  explicit Generator(uint64_t seed = 0) : state_{seed, 0} {}
  void manual_seed(uint64_t seed) { state_ = {seed, 0}; }
  GeneratorState state() const { return state_; }
  void set_state(GeneratorState state) { state_ = state; }
  /// Reserves what `count` elements of `dtype` take and returns the state to draw them with.
  GeneratorState reserve(int64_t count, DType dtype);
  /// One integer in [0, bound), for shuffling. Throws if bound is not positive.
  int64_t next_below(int64_t bound);

 private:
  GeneratorState state_;
};

/// The generator that random operations use when none is given, in all threads but those with a GeneratorGuard: give
/// threads that draw at the same time generators of their own.
Generator& default_generator();
/// Restarts the default generator; the same numbers then follow on every device.
void manual_seed(uint64_t seed);

/// Makes `generator` this thread's default generator while it lives.
class [[nodiscard]] GeneratorGuard {
 public:
  [[nodiscard]] explicit GeneratorGuard(Generator& generator);

 private:
  ScopedValue<Generator*> generator_;
};

}  // namespace voxgrad
