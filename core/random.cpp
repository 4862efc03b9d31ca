// Implements Generator, the default generator and the seed functions.
#include "core/random.h"

#include "core/detail/divide.h"
#include "core/detail/philox.h"
#include "core/error.h"

namespace voxgrad {

GeneratorState Generator::reserve(int64_t count, DType dtype) {
  check(count >= 0, "random", "count must not be negative, got ", count);
  const GeneratorState start = state_;
  const uint64_t per_counter = dtype == DType::f64 ? 2 : 4;
  state_.offset += divide_up(static_cast<uint64_t>(count), per_counter);
  return start;
}

int64_t Generator::next_below(int64_t bound) {
  check(bound > 0, "random", "the bound must be positive, got ", bound);
  const auto range = static_cast<uint64_t>(bound);
  const uint64_t limit = UINT64_MAX - UINT64_MAX % range;  // larger draws would favor small results
  while (true) {
    const Philox4 r = philox(state_.seed, state_.offset++);
    const uint64_t draw = static_cast<uint64_t>(r.v[0]) << 32 | r.v[1];
    if (draw < limit) return static_cast<int64_t>(draw % range);
  }
}

bool Generator::bernoulli(double p) {
  check(p >= 0 && p <= 1, "random", "the probability must lie in [0, 1], got ", p);
  const GeneratorState state = reserve(1, DType::f64);
  return philox_uniform<double>(state.seed, state.offset, 0) < p;
}

namespace {
thread_local ScopedValue<Generator*>* own_generator = nullptr;
}  // namespace

Generator& default_generator() {
  static Generator generator;
  return own_generator ? *own_generator->value() : generator;
}

GeneratorGuard::GeneratorGuard(Generator& generator) : ScopedValue(own_generator, &generator) {}

void manual_seed(uint64_t seed) { default_generator().manual_seed(seed); }

}  // namespace voxgrad
