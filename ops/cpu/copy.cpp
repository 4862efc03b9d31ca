// Copies with conversion, constant fills and ranges.
#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

constexpr int64_t kTile = 32;

/// A copy between layouts: out is contiguous along the inner axis of `nest`, in along `axis`. Tiles go through a
/// buffer, so that both are read and written by whole cache lines.
template <class Word>
void transpose_words(const Nest<2>& nest, int axis, const View& out, const View& in) {
  const int64_t out_step = nest.stride[static_cast<size_t>(axis)][0];
  const int64_t length = nest.size[static_cast<size_t>(axis)], in_step = nest.inner_stride()[1];
  Nest<2> rest;
  for (int i = 0; i < nest.rank; ++i)
    if (i != axis) rest.push(nest.size[static_cast<size_t>(i)], nest.stride[static_cast<size_t>(i)]);
  for_each_row(
      rest,
      [&](const Offsets<2>& offset, int64_t count) {
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

/// Elements are bytes of a size here: the dtype does not matter.
template <class Word>
void copy_words(const View& out, const View& in) {
  const auto nest = make_nest(-1, out, in);
  if (nest.inner_stride()[0] == 1 && nest.inner_stride()[1] > 1)
    for (int axis = 0; axis + 1 < nest.rank; ++axis)
      if (nest.stride[static_cast<size_t>(axis)][1] == 1) return transpose_words<Word>(nest, axis, out, in);
  map_rows<Word, Word>(
      [](Word* y, const Word* x, int64_t count) { std::memcpy(y, x, static_cast<size_t>(count) * sizeof(Word)); }, out,
      in);
}

}  // namespace

void copy(const View& out, const View& in) {
  if (out.dtype == in.dtype) {
    switch (item_size(out.dtype)) {
      case 1:
        return copy_words<uint8_t>(out, in);
      case 2:
        return copy_words<uint16_t>(out, in);
      case 4:
        return copy_words<uint32_t>(out, in);
      default:
        return copy_words<uint64_t>(out, in);
    }
  }
  dispatch(Anything(), out.dtype, "copy", "CPU", [&]<class To>() {
    dispatch(Anything(), in.dtype, "copy", "CPU",
             [&]<class From>() { map<To, From>([](From x) { return convert<To>(x); }, out, in); });
  });
}

void fill(const View& out, double value) {
  dispatch(Anything(), out.dtype, "fill", "CPU",
           [&]<class T>() { map<T>([x = convert<T>(value)] { return x; }, out); });
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
