// Uniform and normal random numbers. Element i is the i-th number of the Philox stream (core/detail/philox.h).
#include <algorithm>

#include "core/detail/divide.h"
#include "core/detail/philox.h"
#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

/// Generates the elements of each Philox counter: element j is draw<T>(uniforms, j), where `uniforms` are the uniform
/// numbers of the counter.
template <class F>
void generate(const char* op, const View& out, GeneratorState state, F&& draw) {
  dispatch(Floats(), out.dtype, op, "CPU", [&]<class T>() {
    constexpr int64_t n = kUniformsPerCounter<T>;
    const int64_t count = out.numel();
    T* y = out.as<T>();
    parallel_for(divide_up(count, n), kGrain / 64, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Philox4 words = philox(state.seed, state.offset + static_cast<uint64_t>(c));
        compute_t<T> uniforms[n];
        T values[n];
        for (int64_t j = 0; j < n; ++j) uniforms[j] = uniform_of<compute_t<T>>(words, static_cast<uint64_t>(j));
        for (int64_t j = 0; j < n; ++j) values[j] = draw.template operator()<T>(uniforms, j);
        std::copy_n(values, std::min(n, count - c * n), y + c * n);
      }
    });
  });
}

}  // namespace

void uniform(const View& out, GeneratorState state) {
  generate("uniform", out, state, []<class T>(const auto* u, int64_t j) { return rounded_uniform<T>(u[j]); });
}

void normal(const View& out, GeneratorState state) {
  generate("normal", out, state, []<class T>(const auto* u, int64_t j) {
    return convert<T>(normal_of(u[j / 2 * 2], u[j / 2 * 2 + 1], j % 2 != 0));
  });
}

}  // namespace voxgrad::cpu
