// Copies with conversion, constant fills, ranges and random numbers. Element i of uniform and normal random numbers is
// the i-th number of the Philox stream (core/detail/philox.h).
#include <algorithm>

#include "core/detail/philox.h"
#include "ops/cpu/loops.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

constexpr int64_t kTile = 32;

/// Copies between memory formats: `out` is contiguous along the inner axis of `nest`, and `in` is contiguous along
/// `axis`. Transposes tiles in a buffer, so that reads and writes use whole cache lines.
template <class Word>
void transpose_words(const Nest& nest, int axis, const View& out, const View& in) {
  const int64_t out_step = nest.stride[static_cast<size_t>(axis)][0];
  const int64_t length = nest.size[static_cast<size_t>(axis)], in_step = nest.inner_stride()[1];
  Nest rest;
  for (int i = 0; i < nest.rank; ++i)
    if (i != axis) rest.push(nest.size[static_cast<size_t>(i)], nest.stride[static_cast<size_t>(i)]);
  for_each_row(
      rest,
      [&](const Offsets& offset, int64_t count) {
        Word tile[kTile][kTile];
        for (int64_t first = 0; first < length; first += kTile) {
          const int64_t n = std::min(kTile, length - first);
          const Word* x = in.as<const Word>() + offset[1] + first;
          Word* y = out.as<Word>() + offset[0] + first * out_step;
          for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < n; ++j) tile[j][i] = x[i * in_step + j];
          for (int64_t j = 0; j < n; ++j) std::copy_n(tile[j], count, y + j * out_step);
        }
      },
      kTile, length);
}

/// Copies with transpose_words() if `out` and `in` are contiguous along different axes. Returns false otherwise.
bool try_transpose(const View& out, const View& in) {
  const Nest nest = make_nest(-1, out, in);
  if (nest.inner_stride()[0] != 1 || nest.inner_stride()[1] <= 1) return false;
  for (int axis = 0; axis + 1 < nest.rank; ++axis)
    if (nest.stride[static_cast<size_t>(axis)][1] == 1) {
      with_word(out.dtype, [&]<class Word>() { transpose_words<Word>(nest, axis, out, in); });
      return true;
    }
  return false;
}

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

void copy(const View& out, const View& in) {
  if (out.dtype == in.dtype && try_transpose(out, in)) return;
  // For bf16 and f16, there are row functions only for conversions from and to float32. Other conversions go through
  // float32.
  const bool direct = out.dtype == in.dtype || out.dtype == f32 || in.dtype == f32;
  const DType to = direct ? out.dtype : widened(out.dtype);
  const DType from = direct ? in.dtype : widened(in.dtype);
  map_rows(conversion(to, from), nullptr, {{out, to}, {in, from}});
}

void fill(const View& out, double value) {
  dispatch(Anything(), out.dtype, "fill", "CPU", [&]<class T>() {
    const T element = convert<T>(value);
    const RowFunction row = [](const void* x, int64_t count, void* y, const void* const*) {
      std::fill_n(static_cast<T*>(y), count, *static_cast<const T*>(x));
    };
    map_rows(row, &element, {{out, out.dtype}});
  });
}

void arange(const View& out, double start, double step) {
  dispatch(Numbers(), out.dtype, "arange", "CPU", [&]<class T>() {
    T* y = out.as<T>();
    parallel_for(out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = convert<T>(arange_value(start, step, i));
    });
  });
}

void uniform(const View& out, GeneratorState state) {
  generate("uniform", out, state, []<class T>(const auto* u, int64_t j) { return rounded_uniform<T>(u[j]); });
}

void normal(const View& out, GeneratorState state) {
  generate("normal", out, state, []<class T>(const auto* u, int64_t j) {
    return convert<T>(normal_of(u[j / 2 * 2], u[j / 2 * 2 + 1], j % 2 != 0));
  });
}

}  // namespace voxgrad::cpu
