// Loops over views of one shape. The axes are ordered by the strides of the first view and merged where all
// views allow it, so that most calls end as one long contiguous row. Work is cut at fixed places: which
// elements share a vector, a tail or a partial sum never depends on the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "core/parallel.h"
#include "core/view.h"

// Element i of a result depends on elements i only, also where a result is written over an operand.
#if defined(__GNUC__) && !defined(__clang__)
#define VG_INDEPENDENT _Pragma("GCC ivdep")
#else
#define VG_INDEPENDENT
#endif

namespace voxgrad::cpu {

/// Elements of a row that one call of a row body gets at most.
inline constexpr int64_t kRowPiece = 1024;
/// Elements below which a second thread does not pay.
inline constexpr int64_t kGrain = 32768;

/// Units of `work` elements each that make a piece of parallel_for worth while.
inline int64_t grain_of(int64_t work) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work)); }

template <size_t N>
using Offsets = std::array<int64_t, N>;

/// The axes that N views have in common, outermost first; axis rank - 1 is the inner one. rank is at least 1.
template <size_t N>
struct Nest {
  int rank = 0;
  std::array<int64_t, kMaxRank> size{};
  std::array<Offsets<N>, kMaxRank> stride{};  // by axis, then by view

  int64_t inner_size() const { return size[static_cast<size_t>(rank - 1)]; }
  const Offsets<N>& inner_stride() const { return stride[static_cast<size_t>(rank - 1)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= size[static_cast<size_t>(i)];
    return count;
  }
  int64_t rows() const { return numel() / std::max<int64_t>(1, inner_size()); }

  /// Adds an axis inside of those there are.
  void push(int64_t axis_size, const Offsets<N>& axis_stride) {
    size[static_cast<size_t>(rank)] = axis_size;
    stride[static_cast<size_t>(rank++)] = axis_stride;
  }

  /// Drops axes of size 1, orders and merges the others; an empty nest is left with one axis.
  Nest simplified() const {
    Nest sorted;
    if (std::find(size.begin(), size.begin() + rank, 0) != size.begin() + rank) {  // nothing to step through
      sorted.push(0, stride[0]);
      return sorted;
    }
    for (size_t i = 0; i < static_cast<size_t>(rank); ++i) {
      if (size[i] == 1) continue;
      size_t at = static_cast<size_t>(sorted.rank);
      sorted.push(size[i], stride[i]);
      for (; at > 0 && farther(stride[i], sorted.stride[at - 1]); --at) {
        std::swap(sorted.size[at], sorted.size[at - 1]);
        std::swap(sorted.stride[at], sorted.stride[at - 1]);
      }
    }
    Nest merged;
    for (size_t i = 0; i < static_cast<size_t>(sorted.rank); ++i) {
      if (merged.rank > 0 && merged.absorb(sorted.size[i], sorted.stride[i])) continue;
      merged.push(sorted.size[i], sorted.stride[i]);
    }
    if (merged.rank == 0) {
      Offsets<N> ones;
      ones.fill(1);
      merged.push(1, ones);
    }
    return merged;
  }

 private:
  /// Whether an axis of strides `a` belongs outside of one with strides `b`: by the first view that tells.
  static bool farther(const Offsets<N>& a, const Offsets<N>& b) {
    for (size_t k = 0; k < N; ++k)
      if (std::abs(a[k]) != std::abs(b[k]) && a[k] != 0 && b[k] != 0) return std::abs(a[k]) > std::abs(b[k]);
    return false;
  }
  /// Joins an axis to the innermost one if all views step evenly over both.
  bool absorb(int64_t inner, const Offsets<N>& inner_step) {
    Offsets<N>& last = stride[static_cast<size_t>(rank - 1)];
    for (size_t k = 0; k < N; ++k)
      if (last[k] != inner_step[k] * inner) return false;
    last = inner_step;
    size[static_cast<size_t>(rank - 1)] *= inner;
    return true;
  }
};

/// The nest of views of one shape, without axis `without` (-1: with all).
template <class... Views>
Nest<1 + sizeof...(Views)> make_nest(int without, const View& first, const Views&... rest) {
  Nest<1 + sizeof...(Views)> nest;
  for (int i = 0; i < first.rank; ++i)
    if (i != without) nest.push(first.size[i], {first.stride[i], rest.stride[i]...});
  return nest.simplified();
}

/// Steps through the rows of a nest, from any of them on, keeping each view's offset.
template <size_t N>
class RowCursor {
 public:
  RowCursor(const Nest<N>& nest, int64_t row) : nest_(nest) {
    for (int i = nest.rank - 2; i >= 0; --i) {
      const auto axis = static_cast<size_t>(i);
      index_[axis] = row % nest.size[axis];
      row /= nest.size[axis];
      for (size_t k = 0; k < N; ++k) offset_[k] += index_[axis] * nest.stride[axis][k];
    }
  }
  const Offsets<N>& offset() const { return offset_; }
  void next() {
    for (int i = nest_.rank - 2; i >= 0; --i) {
      const auto axis = static_cast<size_t>(i);
      for (size_t k = 0; k < N; ++k) offset_[k] += nest_.stride[axis][k];
      if (++index_[axis] < nest_.size[axis]) return;
      for (size_t k = 0; k < N; ++k) offset_[k] -= nest_.stride[axis][k] * nest_.size[axis];
      index_[axis] = 0;
    }
  }

 private:
  const Nest<N>& nest_;
  std::array<int64_t, kMaxRank> index_{};
  Offsets<N> offset_{};
};

/// Calls row(offsets, count) for all rows, cut into pieces of at most `piece` elements, in parallel. `work` is what
/// one element costs, in units of a memory access.
template <size_t N, class F>
void for_each_row(const Nest<N>& nest, F&& row, int64_t piece = kRowPiece, int64_t work = 1) {
  if (nest.numel() == 0) return;
  const int64_t inner = nest.inner_size();
  const int64_t pieces = (inner + piece - 1) / piece;
  const Offsets<N> step = nest.inner_stride();
  parallel_for(nest.rows() * pieces, grain_of(std::min(inner, piece) * work), [&](int64_t begin, int64_t end) {
    RowCursor cursor(nest, begin / pieces);
    int64_t part = begin % pieces;
    for (int64_t i = begin; i < end; ++i) {
      Offsets<N> offset = cursor.offset();
      for (size_t k = 0; k < N; ++k) offset[k] += part * piece * step[k];
      row(offset, std::min(piece, inner - part * piece));
      if (++part == pieces) {
        part = 0;
        cursor.next();
      }
    }
  });
}

/// Calls f(k, j) for k along an axis of `length` and j across it. k ascends for every j; which of the two loops goes
/// inside follows from the steps of what is written or read in order.
template <class F>
void for_lines(int64_t length, int64_t count, bool axis_inside, F&& f) {
  if (axis_inside) {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = 0; k < length; ++k) f(k, j);
  } else {
    for (int64_t k = 0; k < length; ++k)
      for (int64_t j = 0; j < count; ++j) f(k, j);
  }
}

/// combine(start, f(0), ..., f(count - 1)) in a fixed number of lanes, which the compiler keeps in vectors.
template <class A, class Combine, class F>
A fold_lanes(int64_t count, A start, Combine combine, F&& f) {
  constexpr int64_t kLanes = 32;
  if (count < kLanes) {
    for (int64_t i = 0; i < count; ++i) start = combine(start, f(i));
    return start;
  }
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, start);
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = combine(lanes[l], f(i + l));
  for (int64_t l = 0; l < count - whole; ++l) lanes[l] = combine(lanes[l], f(whole + l));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] = combine(lanes[l], lanes[l + half]);
  return lanes[0];
}

/// f(0) + ... + f(count - 1).
template <class F>
double sum_lanes(int64_t count, F&& f) {
  return fold_lanes(
      count, 0.0, [](double a, double b) { return a + b; }, f);
}

/// Room for one piece of a row. Its elements are left uninitialised, but for a byte that quiets GCC about that.
template <class T>
class RowBuffer {
 public:
  RowBuffer() { bytes_[0] = {}; }
  T* data() { return reinterpret_cast<T*>(bytes_); }

 private:
  alignas(64) std::byte bytes_[kRowPiece * sizeof(T)];
};

/// The `count` elements at `x`, copied to `buffer` unless they are contiguous as they are.
template <class T>
const T* packed(const T* x, int64_t step, int64_t count, T* buffer) {
  if (step == 1) return x;
  if (step == 0) {
    std::fill_n(buffer, count, *x);
    return buffer;
  }
  for (int64_t i = 0; i < count; ++i) buffer[i] = x[i * step];
  return buffer;
}

/// Calls f(y, x..., count) on contiguous pieces of out and in; rows of other strides go through buffers on the stack.
template <class Out, class... In, class F, class... Views>
void map_rows(F f, const View& out, const Views&... in) {
  static_assert(sizeof...(In) == sizeof...(Views));
  const auto nest = make_nest(-1, out, in...);
  const auto step = nest.inner_stride();
  [&]<size_t... k>(std::index_sequence<k...>) {
    for_each_row(nest, [&](const auto& offset, int64_t count) {
      std::tuple<RowBuffer<In>...> buffers;
      Out* y = out.template as<Out>() + offset[0];
      if (step[0] == 1)
        return f(y,
                 packed(in.template as<const In>() + offset[k + 1], step[k + 1], count, std::get<k>(buffers).data())...,
                 count);
      RowBuffer<Out> result;
      f(result.data(),
        packed(in.template as<const In>() + offset[k + 1], step[k + 1], count, std::get<k>(buffers).data())..., count);
      for (int64_t i = 0; i < count; ++i) y[i * step[0]] = result.data()[i];
    });
  }
  (std::index_sequence_for<In...>{});
}

/// out[i] = f(in[i]...).
template <class Out, class... In, class F, class... Views>
void map(F f, const View& out, const Views&... in) {
  map_rows<Out, In...>(
      [f](Out* y, const In*... x, int64_t count) {
        VG_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) y[i] = f(x[i]...);
      },
      out, in...);
}

}  // namespace voxgrad::cpu
