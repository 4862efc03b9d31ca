// Loops over views of the same shape. Axes are ordered by the strides of the first view and merged if the strides of
// all views allow it, so that most calls become a loop over one long contiguous row. The division of the work depends
// only on the shape and strides, so that results do not depend on the number of threads. The file also declares the
// kernels (ops/detail/kernels.def).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <vector>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "core/thread_pool.h"
#include "core/view.h"
#include "ops/detail/halves.h"
#include "ops/detail/kernels.h"

// Lets the compiler vectorize a loop in which element i of the result depends only on elements i of the operands. The
// result may be stored in an operand.
#if defined(__GNUC__) && !defined(__clang__)
#define VG_INDEPENDENT _Pragma("GCC ivdep")
#else
#define VG_INDEPENDENT
#endif

namespace voxgrad::cpu {

#define VG_KERNEL(name, outputs, parameters) void name parameters;
#include "ops/detail/kernels.def"
ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry);

/// Largest number of elements per call of a row function: the capacity of a RowBuffer.
inline constexpr int64_t kRowPiece = 1024;
/// Elements per task of parallel_for. With fewer elements, a second thread does not save time.
inline constexpr int64_t kGrain = 32768;

/// Returns the iterations per task of parallel_for if each iteration costs as much as `work` elements.
inline int64_t grain_of(int64_t work) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work)); }

/// Largest number of views that one loop accesses.
inline constexpr size_t kMaxViews = 4;
/// An offset or a stride for each view of a loop. Unused entries are 0.
using Offsets = std::array<int64_t, kMaxViews>;

/// The axes of views of the same shape, outermost first. Axis rank - 1 is the inner axis. A row consists of the
/// elements along the inner axis for one index of each other axis.
struct Nest {
  int rank = 0;  // at least 1, except while axes are added
  std::array<int64_t, kMaxRank> size{};
  std::array<Offsets, kMaxRank> stride{};  // per axis and view

  int64_t inner_size() const { return size[static_cast<size_t>(rank - 1)]; }
  const Offsets& inner_stride() const { return stride[static_cast<size_t>(rank - 1)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= size[static_cast<size_t>(i)];
    return count;
  }
  int64_t rows() const { return numel() / std::max<int64_t>(1, inner_size()); }

  /// Adds an axis as the new inner axis.
  void push(int64_t axis_size, const Offsets& axis_stride) {
    size[static_cast<size_t>(rank)] = axis_size;
    stride[static_cast<size_t>(rank++)] = axis_stride;
  }

  /// Returns the nest without axes of size 1, with the other axes ordered and merged. A nest without elements becomes
  /// one axis of size 0.
  Nest simplified() const;
};

/// Returns the nest of views of the same shape, without axis `omitted`. Omits no axis if `omitted` is -1.
template <class... Views>
Nest make_nest(int omitted, const View& first, const Views&... rest) {
  Nest nest;
  for (int i = 0; i < first.rank; ++i)
    if (i != omitted) nest.push(first.size[i], {first.stride[i], rest.stride[i]...});
  return nest.simplified();
}

/// Iterates over the rows of a nest, starting at any row, and computes the offset of the row in each view.
class RowCursor {
 public:
  RowCursor(const Nest& nest, int64_t row);
  const Offsets& offset() const { return offset_; }
  /// Advances by `rows` rows, at most rows_in_line().
  void next(int64_t rows = 1) {
    for (int i = nest_.rank - 2; i >= 0; --i, rows = 1) {
      const auto axis = static_cast<size_t>(i);
      for (size_t k = 0; k < kMaxViews; ++k) offset_[k] += rows * nest_.stride[axis][k];
      index_[axis] += rows;
      if (index_[axis] < nest_.size[axis]) return;
      for (size_t k = 0; k < kMaxViews; ++k) offset_[k] -= nest_.stride[axis][k] * nest_.size[axis];
      index_[axis] = 0;
    }
  }
  /// Returns the number of rows from the current row to the end of the axis before the inner axis. These rows are
  /// row_step() apart.
  int64_t rows_in_line() const {
    const auto axis = static_cast<size_t>(nest_.rank - 2);
    return nest_.rank > 1 ? nest_.size[axis] - index_[axis] : 1;
  }
  Offsets row_step() const { return nest_.rank > 1 ? nest_.stride[static_cast<size_t>(nest_.rank - 2)] : Offsets{}; }

 private:
  const Nest& nest_;
  std::array<int64_t, kMaxRank> index_{};
  Offsets offset_{};
};

/// Processes `count` elements of a row, starting at the offset of each view.
using RowBody = std::function<void(const Offsets& offset, int64_t count)>;
/// Divides all rows into pieces of at most `piece` elements and calls row(offset, count) for each piece, in parallel.
/// `work` is the cost of an element in memory accesses.
void for_each_row(const Nest& nest, const RowBody& row, int64_t piece = kRowPiece, int64_t work = 1);

/// Calls f(k, j) for each element k in [0, length) of each line j in [0, count). For every j, k ascends. With
/// `axis_inner`, the inner loop is over k. This order is faster if the elements of a line are closer in memory than the
/// lines.
template <class F>
void for_lines(int64_t length, int64_t count, bool axis_inner, F&& f) {
  if (axis_inner) {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = 0; k < length; ++k) f(k, j);
  } else {
    for (int64_t k = 0; k < length; ++k)
      for (int64_t j = 0; j < count; ++j) f(k, j);
  }
}

/// Neighboring lines of two views.
template <class Out, class In>
struct Lines {
  Out* out;
  const In* in;
  Offsets along;   // strides of `out` and `in` along a line
  Offsets across;  // strides of `out` and `in` between lines
  int64_t length;  // elements per line of `in`
  int64_t count;   // number of lines

  const In& input(int64_t k, int64_t j) const { return in[k * along[1] + j * across[1]]; }
  Out& output(int64_t k, int64_t j) const { return out[k * along[0] + j * across[0]]; }
  /// Calls f(k, j) for element k of line j. k ascends for every j.
  template <class F>
  void for_each(F&& f) const {
    for_lines(length, count, std::abs(along[1]) < std::abs(across[1]), f);
  }
};

/// Calls f(lines) for all lines along `axis`, at most `piece` lines at a time, in parallel.
template <class Out, class In, class F>
void for_all_lines(const View& out, const View& in, int axis, int64_t piece, F&& f) {
  const auto nest = make_nest(axis, in, out);
  const Offsets step = nest.inner_stride();
  const Offsets along{out.stride[axis], in.stride[axis]}, across{step[1], step[0]};
  for_each_row(
      nest,
      [&](const Offsets& offset, int64_t count) {
        f(Lines<Out, In>{out.as<Out>() + offset[1], in.as<const In>() + offset[0], along, across, in.size[axis],
                         count});
      },
      piece, in.size[axis]);
}

/// Returns the larger or smaller of two values, or NaN if one of them is NaN.
template <bool largest, class T>
T extremum(T a, T b) {
  return ((largest ? b > a : b < a) | (b != b)) ? b : a;
}

/// Number of lanes of fold_pieces(). A lane is a partial result; the compiler keeps the lanes in vector registers.
inline constexpr int64_t kFoldLanes = 32;
/// Combines start, x_0, ..., x_(count - 1) in an order that depends only on `count` and `piece`. Each lane begins with
/// `start`, so combining with `start` more than once must not change the result. The elements are read
/// in pieces of `piece` elements: f(first, n) returns a function that maps i to x_(first + i) for the n elements of a
/// piece. If there are several pieces, `piece` is a multiple of kFoldLanes.
template <class A, class Combine, class F>
A fold_pieces(int64_t count, int64_t piece, A start, Combine combine, F&& f) {
  if (count < kFoldLanes) {
    const auto element = f(0, count);
    for (int64_t i = 0; i < count; ++i) start = combine(start, element(i));
    return start;
  }
  A lanes[kFoldLanes];
  std::fill_n(lanes, kFoldLanes, start);
  for (int64_t first = 0; first < count; first += piece) {
    const int64_t n = std::min(piece, count - first), whole = n / kFoldLanes * kFoldLanes;
    const auto element = f(first, n);
    for (int64_t i = 0; i < whole; i += kFoldLanes)
      for (int64_t l = 0; l < kFoldLanes; ++l) lanes[l] = combine(lanes[l], element(i + l));
    for (int64_t l = 0; l < n - whole; ++l) lanes[l] = combine(lanes[l], element(whole + l));
  }
  for (int64_t half = kFoldLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] = combine(lanes[l], lanes[l + half]);
  return lanes[0];
}

/// Combines start, f(0), ..., f(count - 1) in an order that depends only on `count`.
template <class A, class Combine, class F>
A fold_lanes(int64_t count, A start, Combine combine, const F& f) {
  return fold_pieces(count, count, start, combine, [&f](int64_t, int64_t) { return f; });
}

/// Returns f(0) + ... + f(count - 1), added in the order of fold_lanes().
template <class F>
double sum_lanes(int64_t count, const F& f) {
  return fold_lanes(
      count, 0.0, [](double a, double b) { return a + b; }, f);
}

/// Computes `count` contiguous elements of y from the elements of x[0], x[1], ... `state` is the argument of
/// map_rows().
using RowFunction = void (*)(const void* state, int64_t count, void* y, const void* const* x);

/// Returns the row function y = convert(x). Conversions between bf16 or f16 and a dtype other than f32 are not
/// supported.
RowFunction conversion(DType to, DType from);

/// Memory for kRowPiece elements of any dtype.
struct RowBuffer {
  alignas(64) std::byte packed[kRowPiece * 8];     // contiguous, in the dtype of the view
  alignas(64) std::byte converted[kRowPiece * 8];  // in the dtype of the row function
};

/// Calls f.template operator()<Word>() with the unsigned integer type that has the size of an element.
template <class F>
void with_word(DType dtype, F&& f) {
  const int64_t size = item_size(dtype);
  if (size == 1) return f.template operator()<uint8_t>();
  if (size == 2) return f.template operator()<uint16_t>();
  if (size == 4) return f.template operator()<uint32_t>();
  f.template operator()<uint64_t>();
}

/// A view that row functions read or write row by row, as elements of `dtype`. By default, `dtype` is f32 for bf16 and
/// f16 views, and otherwise the dtype of the view.
class RowOperand {
 public:
  RowOperand(const View& operand, DType dtype);
  RowOperand(const View& operand) : RowOperand(operand, widened(operand.dtype)) {}

  /// Returns whether row functions can read and write rows with this step in the view itself, without a buffer.
  bool in_place(int64_t step) const { return step == 1 && !load_; }
  /// Returns the address of `count` contiguous elements, starting at `offset`. The elements are in the view or are
  /// copied to `buffer`. `count` is at most kRowPiece if the elements are copied.
  const void* load(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
    return in_place(step) ? at(offset) : gather(offset, step, count, buffer);
  }
  /// Returns the memory where a row function writes its result. Call store() afterwards.
  void* target(int64_t offset, int64_t step, RowBuffer& buffer) const {
    return in_place(step) ? at(offset) : store_ ? buffer.converted : buffer.packed;
  }
  void store(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
    if (!in_place(step)) scatter(offset, step, count, buffer);
  }

  const View& view;

 private:
  std::byte* at(int64_t offset) const { return view.as<std::byte>() + offset * size_; }
  const void* gather(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const;
  void scatter(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const;

  int64_t size_;
  RowFunction load_;   // converts to `dtype`; null if the view has this dtype
  RowFunction store_;  // converts from `dtype`; null if the view has this dtype
};

/// Applies f to all rows. The first operand is the output.
void map_rows(RowFunction f, const void* state, std::initializer_list<RowOperand> operands);

// ---- channels of (N, C, D, H, W) views

/// Returns a pointer to the first element of channel number i, which is channel i % C of sample i / C.
template <class T>
T* channel_data(const View& view, int64_t i) {
  return view.as<T>() + i / view.size[1] * view.stride[0] + i % view.size[1] * view.stride[1];
}

/// Computes `view` from sums in compute_t<T>. A thread computes a whole channel, because several terms may belong to
/// the same voxel: add(sums, i) adds the terms of channel number i to the sums of its voxels, which are in row-major
/// order. `work` is the cost of a channel in memory accesses.
template <class T, class F>
void sum_by_channels(const View& view, int64_t work, F&& add) {
  parallel_for(view.size[0] * view.size[1], grain_of(work), [&](int64_t begin, int64_t end) {
    std::vector<compute_t<T>> sums(static_cast<size_t>(view.size[2] * view.size[3] * view.size[4]));
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sums.begin(), sums.end(), compute_t<T>(0));
      add(sums, i);
      T* out = channel_data<T>(view, i);
      auto sum = sums.begin();
      for (int64_t d = 0; d < view.size[2]; ++d)
        for (int64_t h = 0; h < view.size[3]; ++h)
          for (int64_t w = 0; w < view.size[4]; ++w)
            out[d * view.stride[2] + h * view.stride[3] + w * view.stride[4]] = convert<T>(*sum++);
    }
  });
}

}  // namespace voxgrad::cpu
