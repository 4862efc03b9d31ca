// Random number generators. One generator serves all devices.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "scoped_value.h"

namespace voxgrad {

/// A position in a Philox stream. After a saved state is restored, a generator repeats the numbers that it drew after
/// the state was saved.
struct GeneratorState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  friend bool operator==(const GeneratorState&, const GeneratorState&) = default;
};

/// Assigns ranges of a Philox stream to random operations. Several threads must not use one generator at the same time.
class Generator {
 public:
  explicit Generator(uint64_t seed = 0) : state_{seed, 0} {}
  void manual_seed(uint64_t seed) { state_ = {seed, 0}; }
  GeneratorState state() const { return state_; }
  void set_state(GeneratorState state) { state_ = state; }
  /// Advances the generator by `count` elements of `dtype`. Returns the previous state, at which these elements begin.
  GeneratorState reserve(int64_t count, DType dtype);
  /// Returns a uniformly distributed integer in [0, bound). Throws Error unless `bound` is positive.
  int64_t next_below(int64_t bound);
  /// Returns true with probability p. Throws Error unless p lies in [0, 1].
  bool bernoulli(double p);

 private:
  GeneratorState state_;
};

/// Returns the generator that random operations use by default: the generator of this thread's GeneratorGuard,
/// otherwise a generator that all threads share. Threads that draw numbers at the same time need separate generators.
Generator& default_generator();
/// Restarts the default generator with `seed`. The numbers that follow are the same on every device.
void manual_seed(uint64_t seed);

/// Makes `generator` this thread's default generator during the lifetime of the guard.
class [[nodiscard]] GeneratorGuard : ScopedValue<Generator*> {
 public:
  [[nodiscard]] explicit GeneratorGuard(Generator& generator);
};

}  // namespace voxgrad
