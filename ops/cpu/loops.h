// Loops over views of one shape. The axes are ordered by the strides of the first view and merged where all
// views allow it, so that most calls end as one long contiguous row. Work is cut at fixed places: which
// elements share a vector, a tail or a partial sum never depends on the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>

#include "core/thread_pool.h"
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

/// A place, or a step, in each view of a loop; those that a loop has fewer of stay 0.
inline constexpr size_t kMaxViews = 4;
using Offsets = std::array<int64_t, kMaxViews>;

/// The axes that some views have in common, outermost first; axis rank - 1 is the inner one. rank is at least 1.
struct Nest {
  int rank = 0;
  std::array<int64_t, kMaxRank> size{};
  std::array<Offsets, kMaxRank> stride{};  // by axis, then by view

  int64_t inner_size() const { return size[static_cast<size_t>(rank - 1)]; }
  const Offsets& inner_stride() const { return stride[static_cast<size_t>(rank - 1)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= size[static_cast<size_t>(i)];
    return count;
  }
  int64_t rows() const { return numel() / std::max<int64_t>(1, inner_size()); }

  /// Adds an axis inside of those there are.
  void push(int64_t axis_size, const Offsets& axis_stride) {
    size[static_cast<size_t>(rank)] = axis_size;
    stride[static_cast<size_t>(rank++)] = axis_stride;
  }

  /// Drops axes of size 1, orders and merges the others; an empty nest is left with one axis.
  Nest simplified() const;
};

/// The nest of views of one shape, without axis `without` (-1: with all).
template <class... Views>
Nest make_nest(int without, const View& first, const Views&... rest) {
  Nest nest;
  for (int i = 0; i < first.rank; ++i)
    if (i != without) nest.push(first.size[i], {first.stride[i], rest.stride[i]...});
  return nest.simplified();
}

/// Steps through the rows of a nest, from any of them on, keeping each view's offset.
class RowCursor {
 public:
  RowCursor(const Nest& nest, int64_t row);
  const Offsets& offset() const { return offset_; }
  /// By so many rows, at most rows_in_line().
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
  /// Rows from this one on that lie row_step() apart.
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

/// Calls row(offsets, count) for all rows, cut into pieces of at most `piece` elements, in parallel. `work` is what
/// one element costs, in units of a memory access.
using RowBody = std::function<void(const Offsets& offset, int64_t count)>;
void for_each_row(const Nest& nest, const RowBody& row, int64_t piece = kRowPiece, int64_t work = 1);

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

/// combine(start, x_0, ..., x_(count - 1)) in a fixed number of lanes, which the compiler keeps in vectors. The
/// elements come in pieces of `piece`, a multiple of kFoldLanes: f(first, n) is a function of their numbers in the
/// piece.
inline constexpr int64_t kFoldLanes = 32;
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

/// The same of f(0), ..., f(count - 1).
template <class A, class Combine, class F>
A fold_lanes(int64_t count, A start, Combine combine, const F& f) {
  return fold_pieces(count, count, start, combine, [&f](int64_t, int64_t) { return f; });
}

/// f(0) + ... + f(count - 1).
template <class F>
double sum_lanes(int64_t count, const F& f) {
  return fold_lanes(
      count, 0.0, [](double a, double b) { return a + b; }, f);
}

/// Computes y from x... over `count` contiguous elements; `state` is what the caller gave with it.
using RowFunction = void (*)(const void* state, int64_t count, void* y, const void* const* x);

/// The row function y = convert(x). Between a half and another dtype there is one for f32 only.
RowFunction conversion(DType to, DType from);

/// Room for one piece of a row of any dtype: as it lies in memory but for its step, and converted.
struct RowBuffer {
  alignas(64) std::byte packed[kRowPiece * 8], converted[kRowPiece * 8];
};

/// f32 for halves, as compute_t.
inline DType computed(DType dtype) { return dtype == bf16 || dtype == f16 ? f32 : dtype; }

/// Calls f.template operator()<Word>() with an unsigned integer of the size of the dtype's elements.
template <class F>
void with_word(DType dtype, F&& f) {
  switch (item_size(dtype)) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

/// A view whose rows row functions take or give as elements of `dtype`: its own dtype or, of a half, f32.
class RowOperand {
 public:
  RowOperand(const View& operand, DType dtype);
  RowOperand(const View& operand) : RowOperand(operand, computed(operand.dtype)) {}

  /// Whether rows of this step are taken and given where they lie, of any length.
  bool in_place(int64_t step) const { return step == 1 && !load_; }
  /// `count` elements from `offset` on, at most kRowPiece: where they lie if that serves, else in `buffer`.
  const void* load(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
    return in_place(step) ? at(offset) : gather(offset, step, count, buffer);
  }
  /// Where a row function leaves what store() is then given.
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
  RowFunction load_, store_;  // null, both: not converted
};

/// The first is f of the others, everywhere.
void map_rows(RowFunction f, const void* state, std::initializer_list<RowOperand> operands);

}  // namespace voxgrad::cpu
