// Copies with conversion, constant fills and ranges.
#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
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

}  // namespace voxgrad::cpu
