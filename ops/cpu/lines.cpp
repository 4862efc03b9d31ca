// Kernels that process lines along an axis: cumsum, argmax, sort, gather, scatter_add and softmax. softmax subtracts
// the maximum first and sums the exponentials in double.
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/cpu/eigen.h"
#include "ops/cpu/loops.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

/// Largest number of lines that are processed together.
constexpr int64_t kLines = 256;

/// Returns the dtype in which elements are compared: u8 for bool, otherwise `dtype`.
DType ordered(DType dtype) { return dtype == b8 ? u8 : dtype; }

/// Finds the position of the extremum of each line. Visits the elements from last to first, so that the result is the
/// first of equal elements, or the first NaN.
template <bool largest, class T>
void find_extremum(const Lines<int64_t, T>& lines) {
  using C = compute_t<T>;
  C best[kLines];
  int64_t position[kLines];
  for (int64_t j = 0; j < lines.count; ++j) {
    position[j] = lines.length - 1;
    best[j] = lines.input(position[j], j);
  }
  lines.for_each([&](int64_t ascending, int64_t j) {
    const int64_t k = lines.length - 1 - ascending;
    const C x = lines.input(k, j);
    const bool taken = (largest ? x >= best[j] : x <= best[j]) | (x != x);
    best[j] = taken ? x : best[j];
    position[j] = taken ? k : position[j];
  });
  for (int64_t j = 0; j < lines.count; ++j) lines.output(0, j) = position[j];
}

/// (sort key, index within the line)
using Item = std::pair<uint64_t, int64_t>;

/// Finds the positions of the first `count` elements of each line in sorted order.
template <class T>
void find_order(const Lines<int64_t, T>& lines, int64_t count, bool descending) {
  std::vector<Item> items(static_cast<size_t>(lines.length));
  for (int64_t j = 0; j < lines.count; ++j) {
    for (int64_t k = 0; k < lines.length; ++k)
      items[static_cast<size_t>(k)] = {sort_key(lines.input(k, j), descending), k};
    std::nth_element(items.begin(), items.begin() + count, items.end());
    std::sort(items.begin(), items.begin() + count);
    for (int64_t k = 0; k < count; ++k) lines.output(k, j) = items[static_cast<size_t>(k)].second;
  }
}

/// Calls f(element of `plain`, element of `indexed`) for each element of `index`. `plain` has elements of type P and
/// the shape of `index`. `indexed` has elements of type Q, which `index` selects along `axis`.
template <class P, class Q, class F>
void for_indexed(const char* op, const View& plain, const View& indexed, const View& index, int axis, F&& f) {
  if (plain.numel() == 0) return;
  const auto nest = make_nest(axis, plain, indexed, index);
  const Offsets across = nest.inner_stride();
  const int64_t length = plain.size[axis], size = indexed.size[axis];
  const bool axis_inner = std::abs(plain.stride[axis]) < std::abs(across[0]);
  for_each_row(
      nest,
      [&](const Offsets& offset, int64_t count) {
        P* p = plain.as<P>() + offset[0];
        Q* q = indexed.as<Q>() + offset[1];
        const int64_t* at = index.as<const int64_t>() + offset[2];
        for_lines(length, count, axis_inner, [&](int64_t k, int64_t j) {
          const int64_t i = at[k * index.stride[axis] + j * across[2]];
          check(i >= 0 && i < size, op, "index ", i, " is out of range for axis ", axis, " of size ", size);
          f(p[k * plain.stride[axis] + j * across[0]], q[i * indexed.stride[axis] + j * across[1]]);
        });
      },
      kRowPiece, length);
}

/// Computes softmax or log_softmax of up to kBlock lines at once, with any strides.
template <class T>
void softmax_lines(const Lines<T, T>& lines, bool logarithm) {
  using C = compute_t<T>;
  const int64_t length = lines.length, count = lines.count;
  C element[kBlock];  // element k of each line
  C top[kBlock];      // the maximum of each line
  double total[kBlock] = {};
  const auto load = [&](int64_t k) {
    for (int64_t j = 0; j < count; ++j) element[j] = lines.input(k, j);
  };
  load(0);
  std::copy_n(element, count, top);
  for (int64_t k = 1; k < length; ++k) {
    load(k);
    for (int64_t j = 0; j < count; ++j) top[j] = extremum<true>(top[j], element[j]);
  }
  // The results before the division by the total are stored in y or, for bf16 and f16, in `wide`.
  std::vector<C> wide(std::is_same_v<T, C> ? 0 : static_cast<size_t>(length * count));
  const auto intermediate = [&](int64_t k, int64_t j) -> C& {
    if constexpr (std::is_same_v<T, C>)
      return lines.output(k, j);
    else
      return wide[static_cast<size_t>(k * count + j)];
  };
  for (int64_t k = 0; k < length; ++k) {
    load(k);
    C power[kBlock];
    map_blocks<C>([](const Block<C>& a, const Block<C>& b) -> Block<C> { return exp_block<C>(a - b); }, count, power,
                  static_cast<const C*>(element), static_cast<const C*>(top));
    for (int64_t j = 0; j < count; ++j) {
      total[j] += power[j];
      intermediate(k, j) = logarithm ? element[j] - top[j] : power[j];
    }
  }
  for (int64_t j = 0; j < count; ++j) total[j] = logarithm ? std::log(total[j]) : 1 / total[j];
  for (int64_t k = 0; k < length; ++k)
    for (int64_t j = 0; j < count; ++j) {
      const C value = intermediate(k, j);
      lines.output(k, j) = convert<T>(static_cast<C>(logarithm ? value - total[j] : value * total[j]));
    }
}

/// Computes softmax or log_softmax of a line of `length` contiguous elements.
template <class T>
void softmax_line(T* y, const T* x, int64_t length, bool logarithm) {
  const T top = fold_lanes(length, x[0], extremum<true, T>, [x](int64_t k) { return x[k]; });
  map_blocks<T>([top](const Block<T>& a) -> Block<T> { return exp_block<T>(a - top); }, length, y, x);
  const double total = sum_lanes(length, [y](int64_t k) { return static_cast<double>(y[k]); });
  if (logarithm) {
    const double shift = std::log(total);
    for (int64_t k = 0; k < length; ++k) y[k] = static_cast<T>(x[k] - top - shift);
  } else {
    const double scale = 1 / total;
    for (int64_t k = 0; k < length; ++k) y[k] = static_cast<T>(y[k] * scale);
  }
}

}  // namespace

void cumsum(const View& out, const View& in, int axis, bool reverse) {
  if (out.numel() == 0) return;
  dispatch(Anything(), in.dtype, "cumsum", "CPU", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Sum = std::conditional_t<floating, double, uint64_t>;  // unsigned integers wrap around
    using Out = std::conditional_t<floating, T, int64_t>;
    for_all_lines<Out, T>(out, in, axis, kLines, [&](const Lines<Out, T>& lines) {
      Sum total[kLines] = {};
      lines.for_each([&](int64_t k, int64_t j) {
        if (reverse) k = lines.length - 1 - k;
        total[j] += convert<Sum>(lines.input(k, j));
        lines.output(k, j) = convert<Out>(total[j]);
      });
    });
  });
}

void argmax(const View& index, const View& in, int axis, bool largest) {
  if (index.numel() == 0) return;
  dispatch(Numbers(), ordered(in.dtype), "argmax", "CPU", [&]<class T>() {
    for_all_lines<int64_t, T>(index, in, axis, kLines, largest ? find_extremum<true, T> : find_extremum<false, T>);
  });
}

void sort(const View& index, const View& in, int axis, bool descending) {
  if (index.numel() == 0) return;
  dispatch(Numbers(), ordered(in.dtype), "sort", "CPU", [&]<class T>() {
    for_all_lines<int64_t, T>(index, in, axis, kLines,
                              [&](const Lines<int64_t, T>& lines) { find_order(lines, index.size[axis], descending); });
  });
}

void gather(const char* op, const View& out, const View& in, const View& index, int axis) {
  with_word(out.dtype, [&]<class Word>() {
    for_indexed<Word, Word>(op, out, in, index, axis, [](Word& to, const Word& from) { to = from; });
  });
}

void scatter_add(const char* op, const View& out, const View& in, const View& index, int axis) {
  dispatch(Floats(), in.dtype, "scatter_add", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    std::vector<C> wide(std::is_same_v<T, C> ? 0 : static_cast<size_t>(out.numel()));
    const View sums = std::is_same_v<T, C> ? out : dense_like(out, wide.data(), dtype_of<C>);
    fill(sums, 0);
    for_indexed<T, C>(op, in, sums, index, axis, [](const T& from, C& to) { to += from; });
    if (sums.data != out.data) copy(out, sums);
  });
}

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  if (x.size[axis] == 0) return;
  dispatch(Floats(), x.dtype, logarithm ? "log_softmax" : "softmax", "CPU", [&]<class T>() {
    for_all_lines<T, T>(y, x, axis, kBlock, [&](const Lines<T, T>& lines) {
      if constexpr (std::is_floating_point_v<T>)
        if (lines.along[0] == 1 && lines.along[1] == 1 && lines.length >= kBlock) {
          for (int64_t j = 0; j < lines.count; ++j)
            softmax_line(&lines.output(0, j), &lines.input(0, j), lines.length, logarithm);
          return;
        }
      softmax_lines(lines, logarithm);
    });
  });
}

}  // namespace voxgrad::cpu
