// Sums, means and extrema over any axes.
//
// The order in which the terms of an output are combined depends only on the shape and strides. Long reductions are
// divided into chunks, whose results are combined at the end. Floating-point sums are in double.
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/cpu/loops.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

// The operations that combine partial results of type A. `kStart` is the identity.

template <class A>
struct Add {
  static constexpr A kStart = 0;
  A operator()(A a, A b) const { return static_cast<A>(wrapping(a) + wrapping(b)); }
};

template <class A, bool largest>
struct Extremum {
  using Limits = std::numeric_limits<A>;
  static constexpr A kLow = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  static constexpr A kStart = largest ? kLow : Limits::has_infinity ? Limits::infinity() : Limits::max();
  A operator()(A a, A b) const { return extremum<largest>(a, b); }
};

// Largest number of outputs that are computed together.
constexpr int64_t kColumns = 1024;
// Smallest number of elements per chunk.
constexpr int64_t kChunk = 65536;
// Reductions are divided into chunks only if there are fewer groups of outputs than this number. The outputs of a group
// are computed together.
constexpr int64_t kManyGroups = 64;

/// Calls f(offset, count, step) for the rows, or parts of rows, that contain the elements [begin, end) of a nest.
template <class F>
void for_range(const Nest& nest, int64_t begin, int64_t end, F&& f) {
  if (begin == end) return;
  const int64_t inner = nest.inner_size(), step = nest.inner_stride()[0];
  RowCursor cursor(nest, begin / inner);
  for (int64_t first = begin % inner; begin < end; first = 0, cursor.next()) {
    const int64_t count = std::min(inner - first, end - begin);
    f(cursor.offset()[0] + first * step, count, step);
    begin += count;
  }
}

/// A reduction that reads and writes elements as T: float, double or, for all integers, int64_t. Partial results have
/// type A.
template <class T, class A, class Combine>
struct Reduction {
  static constexpr A kStart = Combine::kStart;
  static constexpr Combine combine{};
  RowOperand in;
  RowOperand out;
  Nest kept;       // axes of the output, with strides in `in`, in `out` and in the row-major index of the output
  Nest reduced;    // reduced axes, with strides in `in`
  int64_t length;  // terms per output
  int64_t chunks = 1;
  double scale = 1;  // factor for floating-point results
  bool columns;  // whether fold_columns() combines many outputs at once: true if the first terms of neighboring outputs
                 // are closer in memory than the terms of one output

  Reduction(const View& result, const View& input) : in(input, dtype_of<T>), out(result, dtype_of<T>) {
    int64_t slot = result.numel();
    for (int i = 0; i < result.rank; ++i) {
      if (result.size[i] == input.size[i]) {
        slot /= std::max<int64_t>(1, result.size[i]);
        kept.push(result.size[i], {input.stride[i], result.stride[i], slot});
      } else {
        reduced.push(input.size[i], {input.stride[i]});
      }
    }
    kept = kept.simplified();
    reduced = reduced.simplified();
    length = reduced.numel();
    columns = kept.inner_size() > 1 &&
              (reduced.inner_size() == 1 || std::abs(kept.inner_stride()[0]) < std::abs(reduced.inner_stride()[0]));
    const int64_t width = columns ? std::min(kColumns, kept.inner_size()) : 1;
    if (kept.numel() / width < kManyGroups) chunks = std::max<int64_t>(1, length / (kChunk / width));
  }

  const T* load(int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
    return static_cast<const T*>(in.load(offset, step, count, buffer));
  }

  /// Combines the terms [begin, end) of one output, whose terms start at offset x.
  A fold_row(int64_t x, int64_t begin, int64_t end, RowBuffer& buffer) const {
    A total = kStart;
    for_range(reduced, begin, end, [&](int64_t offset, int64_t count, int64_t step) {
      const auto piece = [&](int64_t first, int64_t n) {
        return [row = load(x + offset + first * step, step, n, buffer)](int64_t i) { return static_cast<A>(row[i]); };
      };
      total = combine(total, fold_pieces(count, in.in_place(step) ? count : kRowPiece, kStart, combine, piece));
    });
    return total;
  }

  /// Combines the terms [begin, end) of `count` outputs. The terms of neighboring outputs are `column_step` apart.
  void fold_columns(A* result, int64_t x, int64_t count, int64_t column_step, int64_t begin, int64_t end,
                    RowBuffer& buffer) const {
    std::fill_n(result, count, kStart);
    for_range(reduced, begin, end, [&](int64_t offset, int64_t terms, int64_t step) {
      // Load several rows at once if they are contiguous.
      const int64_t max_rows = step == count && column_step == 1 ? kRowPiece / count : 1;
      for (int64_t r = 0; r < terms; r += max_rows) {
        const int64_t rows = std::min(max_rows, terms - r);
        const T* row = load(x + offset + r * step, column_step, rows * count, buffer);
        for (int64_t i = 0; i < rows; ++i, row += count)
          for (int64_t j = 0; j < count; ++j) result[j] = combine(result[j], static_cast<A>(row[j]));
      }
    });
  }

  void store(const A* totals, int64_t offset, int64_t step, int64_t count, RowBuffer& buffer) const {
    T* y = static_cast<T*>(out.target(offset, step, buffer));
    for (int64_t j = 0; j < count; ++j)
      y[j] = static_cast<T>(std::is_floating_point_v<A> ? totals[j] * static_cast<A>(scale) : totals[j]);
    out.store(offset, step, count, buffer);
  }

  /// Combines the chunks of all outputs in parallel, then the results of the chunks.
  void run() const {
    const Offsets step = kept.inner_stride();
    const int64_t outputs = kept.numel();
    std::vector<A> partial(chunks > 1 ? static_cast<size_t>(chunks * outputs) : 0);
    Nest nest;
    if (chunks > 1) nest.push(chunks, {0, 0, outputs});
    for (size_t i = 0; i < static_cast<size_t>(kept.rank); ++i) nest.push(kept.size[i], kept.stride[i]);

    const auto fold = [&](const Offsets& offset, int64_t count) {
      const int64_t chunk = chunks > 1 ? offset[2] / outputs : 0;
      const int64_t begin = length * chunk / chunks, end = length * (chunk + 1) / chunks;
      A result[kColumns];
      RowBuffer buffer;
      if (columns)
        fold_columns(result, offset[0], count, step[0], begin, end, buffer);
      else
        for (int64_t j = 0; j < count; ++j) result[j] = fold_row(offset[0] + j * step[0], begin, end, buffer);
      if (chunks == 1) return store(result, offset[1], step[1], count, buffer);
      for (int64_t j = 0; j < count; ++j) partial[static_cast<size_t>(offset[2] + j * step[2])] = result[j];
    };
    const int64_t terms = std::max<int64_t>(1, length / chunks);
    for_each_row(nest, fold, columns ? kColumns : std::clamp<int64_t>(kGrain / terms, 1, kColumns), terms);
    if (chunks == 1) return;
    for_each_row(kept, [&](const Offsets& offset, int64_t count) {
      A totals[kColumns];
      RowBuffer buffer;
      for (int64_t j = 0; j < count; ++j) {
        totals[j] = kStart;
        for (int64_t c = 0; c < chunks; ++c)
          totals[j] = combine(totals[j], partial[static_cast<size_t>(c * outputs + offset[2] + j * step[2])]);
      }
      store(totals, offset[1], step[1], count, buffer);
    });
  }
};
static_assert(kColumns <= kRowPiece);

/// The type T of a Reduction of elements of type `Element`.
template <class Element>
using reduced_t = std::conditional_t<std::is_integral_v<Element>, int64_t, compute_t<Element>>;

template <class T>
void sum(const View& out, const View& in, bool mean) {
  using A = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;
  Reduction<T, A, Add<A>> reduction(out, in);
  if (mean) reduction.scale = 1 / static_cast<double>(reduction.length);
  reduction.run();
}

}  // namespace

void reduce(ReduceOp op, const View& out, const View& in) {
  if (out.numel() == 0) return;
  if (op == ReduceOp::sum || op == ReduceOp::mean)
    return dispatch(Anything(), in.dtype, name(op), "CPU",
                    [&]<class T>() { sum<reduced_t<T>>(out, in, op == ReduceOp::mean); });
  dispatch(Numbers(), in.dtype, name(op), "CPU", [&]<class T>() {
    using C = reduced_t<T>;
    if (op == ReduceOp::max)
      Reduction<C, C, Extremum<C, true>>(out, in).run();
    else
      Reduction<C, C, Extremum<C, false>>(out, in).run();
  });
}

}  // namespace voxgrad::cpu
