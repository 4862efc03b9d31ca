// Sums and extrema over any axes.
//
// Each output is folded in a fixed order: long reductions in chunks whose number follows from the shape alone,
// chunks in lanes. Floats are summed in double.
#include <limits>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

struct Sum {
  template <class T>
  using Accumulator = std::conditional_t<std::is_floating_point_v<compute_t<T>>, double, int64_t>;
  template <class A>
  static constexpr A start() {
    return A(0);
  }
  template <class A>
  static A combine(A a, A b) {
    return static_cast<A>(wrapping(a) + wrapping(b));
  }
};

// Once NaN, an extremum stays NaN: nothing compares with it.
struct Max {
  template <class T>
  using Accumulator = compute_t<T>;
  template <class A>
  static constexpr A start() {
    return std::is_integral_v<A> ? std::numeric_limits<A>::lowest() : -std::numeric_limits<A>::infinity();
  }
  template <class A>
  static A combine(A a, A b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct Min {
  template <class T>
  using Accumulator = compute_t<T>;
  template <class A>
  static constexpr A start() {
    return std::is_integral_v<A> ? std::numeric_limits<A>::max() : std::numeric_limits<A>::infinity();
  }
  template <class A>
  static A combine(A a, A b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

constexpr int64_t kColumns = 1024;
constexpr int64_t kChunk = 65536;
// With this many groups of outputs or more, reductions are left in one chunk.
constexpr int64_t kManyGroups = 64;

/// Calls f(offset, count, step) for the rows, or parts of them, that hold the elements [begin, end) of a nest.
template <class F>
void for_range(const Nest<1>& nest, int64_t begin, int64_t end, F&& f) {
  if (begin == end) return;
  const int64_t inner = nest.inner_size(), step = nest.inner_stride()[0];
  RowCursor cursor(nest, begin / inner);
  for (int64_t first = begin % inner; begin < end; first = 0, cursor.next()) {
    const int64_t count = std::min(inner - first, end - begin);
    f(cursor.offset()[0] + first * step, count, step);
    begin += count;
  }
}

template <class Op, class T>
struct Reduction {
  using A = typename Op::template Accumulator<T>;

  const T* in;
  Nest<3> kept;     // in, out, slot in a dense array of the outputs
  Nest<1> reduced;  // in
  int64_t length;   // elements that make one output
  int64_t chunks = 1;
  double scale = 1;  // of sums
  bool columns;      // neighbouring outputs lie closer in memory than neighbouring terms: fold many outputs at once

  Reduction(const View& out, const View& input) : in(input.as<const T>()) {
    int64_t slot = out.numel();
    for (int i = 0; i < out.rank; ++i) {
      if (out.size[i] == input.size[i]) {
        slot /= std::max<int64_t>(1, out.size[i]);
        kept.push(out.size[i], {input.stride[i], out.stride[i], slot});
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

  /// One output: elements `begin` to `end` of its reduction.
  A fold_row(const T* x, int64_t begin, int64_t end) const {
    A total = Op::template start<A>();
    for_range(reduced, begin, end, [&](int64_t offset, int64_t count, int64_t step) {
      const T* row = x + offset;
      const A part = step == 1 ? fold_lanes(count, Op::template start<A>(), Op::template combine<A>,
                                            [row](int64_t i) { return convert<A>(row[i]); })
                               : fold_lanes(count, Op::template start<A>(), Op::template combine<A>,
                                            [row, step](int64_t i) { return convert<A>(row[i * step]); });
      total = Op::combine(total, part);
    });
    return total;
  }

  /// `count` outputs whose terms lie `column_step` apart.
  void fold_columns(A* result, const T* x, int64_t count, int64_t column_step, int64_t begin, int64_t end) const {
    std::fill_n(result, count, Op::template start<A>());
    for_range(reduced, begin, end, [&](int64_t offset, int64_t terms, int64_t step) {
      for (int64_t r = 0; r < terms; ++r) {
        const T* row = x + offset + r * step;
        if (column_step == 1)
          for (int64_t j = 0; j < count; ++j) result[j] = Op::combine(result[j], convert<A>(row[j]));
        else
          for (int64_t j = 0; j < count; ++j) result[j] = Op::combine(result[j], convert<A>(row[j * column_step]));
      }
    });
  }

  template <class Out>
  Out rounded(A total) const {
    if constexpr (std::is_floating_point_v<A>) return convert<Out>(total * static_cast<A>(scale));
    return convert<Out>(total);
  }

  template <class Out>
  void run(const View& out) const {
    const Offsets<3> step = kept.inner_stride();
    const int64_t outputs = kept.numel();
    std::vector<A> partial(chunks > 1 ? static_cast<size_t>(chunks * outputs) : 0);
    Nest<3> nest;
    if (chunks > 1) nest.push(chunks, {0, 0, outputs});
    for (size_t i = 0; i < static_cast<size_t>(kept.rank); ++i) nest.push(kept.size[i], kept.stride[i]);

    const auto fold = [&](const Offsets<3>& offset, int64_t count) {
      const int64_t chunk = chunks > 1 ? offset[2] / outputs : 0;
      const int64_t begin = length * chunk / chunks, end = length * (chunk + 1) / chunks;
      A result[kColumns];
      if (columns)
        fold_columns(result, in + offset[0], count, step[0], begin, end);
      else
        for (int64_t j = 0; j < count; ++j) result[j] = fold_row(in + offset[0] + j * step[0], begin, end);
      for (int64_t j = 0; j < count; ++j) {
        if (chunks > 1)
          partial[static_cast<size_t>(offset[2] + j * step[2])] = result[j];
        else
          out.as<Out>()[offset[1] + j * step[1]] = rounded<Out>(result[j]);
      }
    };
    const int64_t terms = std::max<int64_t>(1, length / chunks);
    for_each_row(nest, fold, columns ? kColumns : std::clamp<int64_t>(kGrain / terms, 1, kColumns), terms);
    if (chunks == 1) return;
    for_each_row(kept, [&](const Offsets<3>& offset, int64_t count) {
      for (int64_t j = 0; j < count; ++j) {
        A total = Op::template start<A>();
        for (int64_t c = 0; c < chunks; ++c)
          total = Op::combine(total, partial[static_cast<size_t>(c * outputs + offset[2] + j * step[2])]);
        out.as<Out>()[offset[1] + j * step[1]] = rounded<Out>(total);
      }
    });
  }
};

}  // namespace

void reduce(ReduceOp op, const View& out, const View& in) {
  if (out.numel() == 0) return;
  const auto run = [&]<class Op, class T, class Out>() {
    Reduction<Op, T> reduction(out, in);
    if (op == ReduceOp::mean) reduction.scale = 1 / static_cast<double>(reduction.length);
    reduction.template run<Out>(out);
  };
  if (op == ReduceOp::sum || op == ReduceOp::mean)
    return dispatch(Anything(), in.dtype, "sum", "CPU", [&]<class T>() {
      run.template operator()<Sum, T, std::conditional_t<std::is_floating_point_v<compute_t<T>>, T, int64_t>>();
    });
  dispatch(Numbers(), in.dtype, op == ReduceOp::amax ? "amax" : "amin", "CPU", [&]<class T>() {
    if (op == ReduceOp::amax)
      run.template operator()<Max, T, T>();
    else
      run.template operator()<Min, T, T>();
  });
}

}  // namespace voxgrad::cpu
