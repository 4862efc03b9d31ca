// Kernels that process lines along an axis: cumsum, argmax and sort.
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/detail/sort_key.h"

namespace voxgrad::cpu {
namespace {

/// Largest number of lines that are processed together.
constexpr int64_t kLines = 256;

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

/// Calls f(lines) for all lines along `axis`, at most kLines at a time.
template <class Out, class In, class F>
void for_all_lines(const View& out, const View& in, int axis, F&& f) {
  const auto nest = make_nest(axis, in, out);
  const Offsets step = nest.inner_stride();
  const Offsets along{out.stride[axis], in.stride[axis]}, across{step[1], step[0]};
  for_each_row(
      nest,
      [&](const Offsets& offset, int64_t count) {
        f(Lines<Out, In>{out.as<Out>() + offset[1], in.as<const In>() + offset[0], along, across, in.size[axis],
                         count});
      },
      kLines, in.size[axis]);
}

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

}  // namespace

void cumsum(const View& out, const View& in, int axis, bool reverse) {
  if (out.numel() == 0) return;
  dispatch(Anything(), in.dtype, "cumsum", "CPU", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Sum = std::conditional_t<floating, double, uint64_t>;  // unsigned integers wrap around
    using Out = std::conditional_t<floating, T, int64_t>;
    for_all_lines<Out, T>(out, in, axis, [&](const Lines<Out, T>& lines) {
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
    for_all_lines<int64_t, T>(index, in, axis, largest ? find_extremum<true, T> : find_extremum<false, T>);
  });
}

void sort(const View& index, const View& in, int axis, bool descending) {
  if (index.numel() == 0) return;
  dispatch(Numbers(), ordered(in.dtype), "sort", "CPU", [&]<class T>() {
    for_all_lines<int64_t, T>(index, in, axis,
                              [&](const Lines<int64_t, T>& lines) { find_order(lines, index.size[axis], descending); });
  });
}

}  // namespace voxgrad::cpu
