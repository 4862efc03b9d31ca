// Loops over views, and copies of rows to and from the buffers of row functions. This file is compiled once for all
// operators and dtypes.
#include "ops/cpu/loops.h"

#include <cstring>

namespace voxgrad::cpu {
namespace {

/// Returns whether an axis with strides `a` should be outside an axis with strides `b`. Compares the strides in the
/// first view where they are nonzero and differ.
bool is_outer(const Offsets& a, const Offsets& b) {
  for (size_t k = 0; k < kMaxViews; ++k)
    if (std::abs(a[k]) != std::abs(b[k]) && a[k] != 0 && b[k] != 0) return std::abs(a[k]) > std::abs(b[k]);
  return false;
}

/// Merges an axis with the inner axis of `nest` if all views have a constant stride over both axes. Returns false
/// otherwise.
bool try_merge(Nest& nest, int64_t inner, const Offsets& inner_step) {
  if (nest.rank == 0) return false;
  Offsets& last = nest.stride[static_cast<size_t>(nest.rank - 1)];
  for (size_t k = 0; k < kMaxViews; ++k)
    if (last[k] != inner_step[k] * inner) return false;
  last = inner_step;
  nest.size[static_cast<size_t>(nest.rank - 1)] *= inner;
  return true;
}

/// Implements for_each_row() for any type of function.
template <class F>
void walk(const Nest& nest, int64_t piece, int64_t work, F&& row) {
  if (nest.numel() == 0) return;
  const int64_t inner = nest.inner_size();
  const int64_t pieces = divide_up(inner, piece);
  const Offsets step = nest.inner_stride();
  parallel_for(nest.rows() * pieces, grain_of(std::min(inner, piece) * work), [&](int64_t begin, int64_t end) {
    RowCursor cursor(nest, begin / pieces);
    if (pieces > 1) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % pieces * piece;
        Offsets offset = cursor.offset();
        for (size_t k = 0; k < kMaxViews; ++k) offset[k] += first * step[k];
        row(offset, std::min(piece, inner - first));
        if (first + piece >= inner) cursor.next();
      }
      return;
    }
    const Offsets row_step = cursor.row_step();
    for (int64_t i = begin, rows; i < end; i += rows, cursor.next(rows)) {
      rows = std::min(end - i, cursor.rows_in_line());
      Offsets offset = cursor.offset();
      for (int64_t r = 0; r < rows; ++r) {
        row(offset, inner);
        for (size_t k = 0; k < kMaxViews; ++k) offset[k] += row_step[k];
      }
    }
  });
}

/// Computes to[i * to_step] = from[i * from_step]. One of the steps is 1.
void copy_steps(DType dtype, std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step, int64_t count) {
  with_word(dtype, [&]<class Word>() {
    auto* const y = reinterpret_cast<Word*>(to);
    const auto* const x = reinterpret_cast<const Word*>(from);
    if (from_step == 0)
      std::fill_n(y, count, *x);
    else if (to_step == 1 && from_step == -1)
      for (int64_t i = 0; i < count; ++i) y[i] = x[-i];
    else if (to_step == 1)
      for (int64_t i = 0; i < count; ++i) y[i] = x[i * from_step];
    else
      for (int64_t i = 0; i < count; ++i) y[i * to_step] = x[i];
  });
}

template <class To, class From>
void convert_row(const void*, int64_t count, void* y, const void* const* x) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(y, x[0], static_cast<size_t>(count) * sizeof(To));
  } else {
    VG_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) static_cast<To*>(y)[i] = convert<To>(static_cast<const From*>(x[0])[i]);
  }
}

}  // namespace

Nest Nest::simplified() const {
  Nest sorted, merged;
  if (std::find(size.begin(), size.begin() + rank, 0) != size.begin() + rank) {  // the views have no elements
    sorted.push(0, stride[0]);
    return sorted;
  }
  for (size_t i = 0; i < static_cast<size_t>(rank); ++i) {
    if (size[i] == 1) continue;
    size_t at = static_cast<size_t>(sorted.rank);
    sorted.push(size[i], stride[i]);
    for (; at > 0 && is_outer(stride[i], sorted.stride[at - 1]); --at) {
      std::swap(sorted.size[at], sorted.size[at - 1]);
      std::swap(sorted.stride[at], sorted.stride[at - 1]);
    }
  }
  for (size_t i = 0; i < static_cast<size_t>(sorted.rank); ++i)
    if (!try_merge(merged, sorted.size[i], sorted.stride[i])) merged.push(sorted.size[i], sorted.stride[i]);
  if (merged.rank == 0) merged.push(1, {1, 1, 1, 1});
  return merged;
}

RowCursor::RowCursor(const Nest& nest, int64_t row) : nest_(nest) {
  for (int i = nest.rank - 2; i >= 0; --i) {
    const auto axis = static_cast<size_t>(i);
    index_[axis] = row % nest.size[axis];
    row /= nest.size[axis];
    for (size_t k = 0; k < kMaxViews; ++k) offset_[k] += index_[axis] * nest.stride[axis][k];
  }
}

void for_each_row(const Nest& nest, const RowBody& row, int64_t piece, int64_t work) { walk(nest, piece, work, row); }

RowFunction conversion(DType to, DType from) {
  RowFunction result = nullptr;
  dispatch(Anything(), to, "copy", "CPU", [&]<class To>() {
    dispatch(Anything(), from, "copy", "CPU", [&]<class From>() {
      constexpr bool halves = std::is_class_v<To> || std::is_class_v<From>;
      if constexpr (!halves || std::is_same_v<To, From> || std::is_same_v<To, float> || std::is_same_v<From, float>)
        result = convert_row<To, From>;
    });
  });
  return result;
}

RowOperand::RowOperand(const View& operand, DType dtype)
    : view(operand),
      size_(item_size(view.dtype)),
      load_(dtype == view.dtype ? nullptr : conversion(dtype, view.dtype)),
      store_(dtype == view.dtype ? nullptr : conversion(view.dtype, dtype)) {}

const void* RowOperand::gather(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
  const void* x = at(offset);
  if (step != 1) {
    copy_steps(view.dtype, buffer.packed, 1, at(offset), step, count);
    x = buffer.packed;
  }
  if (!load_) return x;
  load_(nullptr, count, buffer.converted, &x);
  return buffer.converted;
}

void RowOperand::scatter(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
  const void* converted = buffer.converted;
  if (store_) store_(nullptr, count, step == 1 ? at(offset) : buffer.packed, &converted);
  if (step != 1) copy_steps(view.dtype, at(offset), step, buffer.packed, 1, count);
}

void map_rows(RowFunction f, const void* state, std::initializer_list<RowOperand> operands) {
  const size_t views = operands.size();
  const RowOperand& out = *operands.begin();
  Nest nest;
  for (int i = 0; i < out.view.rank; ++i) {
    Offsets strides{};
    for (size_t k = 0; k < views; ++k) strides[k] = operands.begin()[k].view.stride[i];
    nest.push(out.view.size[i], strides);
  }
  nest = nest.simplified();
  const Offsets step = nest.inner_stride();
  walk(nest, kRowPiece, 1, [&](const Offsets& offset, int64_t count) {
    RowBuffer buffers[kMaxViews];
    const void* x[kMaxViews];
    for (size_t k = 1; k < views; ++k) x[k - 1] = operands.begin()[k].load(offset[k], step[k], count, buffers[k]);
    f(state, count, out.target(offset[0], step[0], buffers[0]), x);
    out.store(offset[0], step[0], count, buffers[0]);
  });
}

}  // namespace voxgrad::cpu
