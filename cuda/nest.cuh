// Iteration over strided views of one shape: axes are sorted and merged on the host, and kernels turn the index of an
// element into its offsets.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "core/dtype.h"
#include "core/view.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda {

/// Returns numerator / denominator for non-negative integers. Uses the 32-bit division, which is several times faster,
/// if both integers fit into 32 bits.
VG_HOST_DEVICE inline int64_t quotient(int64_t numerator, int64_t denominator) {
  if ((numerator | denominator) >> 32) return numerator / denominator;
  return static_cast<uint32_t>(numerator) / static_cast<uint32_t>(denominator);
}

/// The axes that N views have in common, innermost first. make_nest() returns at least one axis.
template <size_t N>
struct Nest {
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank][N] = {};  ///< in elements, for each view

  int64_t numel() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= size[axis];
    return count;
  }
  /// Returns whether all views are one contiguous row.
  bool contiguous() const {
    return rank == 1 && std::all_of(stride[0], stride[0] + N, [](int64_t s) { return s == 1; });
  }
  /// Returns whether the strides of `view` along the axes first, first + 1, ... are multiples of `width`.
  bool has_stride_multiples(size_t view, int first, int width) const {
    for (int axis = first; axis < rank; ++axis)
      if (size[axis] != 1 && stride[axis][view] % width != 0) return false;
    return true;
  }
  /// Returns the nest without one axis. The result may have no axes.
  Nest without(int axis) const {
    Nest rest;
    for (int other = 0; other < rank; ++other) {
      if (other == axis) continue;
      rest.size[rest.rank] = size[other];
      std::copy_n(stride[other], N, rest.stride[rest.rank++]);
    }
    return rest;
  }
  /// Returns the offset of an element in `view`. `index` enumerates the elements along the axes first, first + 1, ...;
  /// the position along earlier axes is 0. Supports indices of 64 bits. Offsets is faster for nests of fewer than 2^31
  /// elements.
  __device__ int64_t offset(int64_t index, size_t view, int first = 0) const {
    int64_t result = 0;
#pragma unroll 1
    for (int axis = first; axis < rank; ++axis) {
      const int64_t rest = axis + 1 < rank ? quotient(index, size[axis]) : 0;
      result += (index - rest * size[axis]) * stride[axis][view];
      index = rest;
    }
    return result;
  }
};

/// Makes a nest of views of one shape. Drops axes of size 1 and sorts the others by the strides of the first view.
/// Merges two neighboring axes if a single stride covers both axes in every view.
template <size_t N>
Nest<N> make_nest(const std::array<View, N>& views) {
  int order[kMaxRank];
  int count = 0;
  for (int axis = views[0].rank - 1; axis >= 0; --axis)
    if (views[0].size[axis] != 1) order[count++] = axis;
  std::stable_sort(order, order + count,
                   [&](int a, int b) { return std::abs(views[0].stride[a]) < std::abs(views[0].stride[b]); });

  Nest<N> nest;
  for (int i = 0; i < count; ++i) {
    const int axis = order[i];
    const int last = nest.rank - 1;
    bool can_merge = nest.rank > 0;
    for (size_t k = 0; can_merge && k < N; ++k)
      can_merge = views[k].stride[axis] == nest.stride[last][k] * nest.size[last];
    if (can_merge) {
      nest.size[last] *= views[0].size[axis];
      continue;
    }
    nest.size[nest.rank] = views[0].size[axis];
    for (size_t k = 0; k < N; ++k) nest.stride[nest.rank][k] = views[k].stride[axis];
    ++nest.rank;
  }
  if (nest.rank == 0) {
    nest.rank = 1;
    nest.size[0] = 1;
    std::fill_n(nest.stride[0], N, 1);
  }
  return nest;
}

/// Returns `view` with only those axes for which keep(axis) is true.
template <class Predicate>
View select_axes(const View& view, const Predicate& keep) {
  View selected = view;
  selected.rank = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (!keep(axis)) continue;
    selected.size[selected.rank] = view.size[axis];
    selected.stride[selected.rank++] = view.stride[axis];
  }
  return selected;
}

/// Calls f(part, base) for parts of fewer than 2^31 elements that together make up the nest. base[k] is the offset of
/// the part in view k.
template <size_t N, class F>
void for_each_part(const Nest<N>& nest, const F& f, std::array<int64_t, N> base = {}) {
  if (nest.numel() < (int64_t{1} << 31)) return f(nest, base);
  const auto axis = std::max_element(nest.size, nest.size + nest.rank) - nest.size;
  Nest<N> part = nest;
  part.size[axis] = nest.size[axis] / 2;
  for_each_part(part, f, base);
  for (size_t k = 0; k < N; ++k) base[k] += part.size[axis] * nest.stride[axis][k];
  part.size[axis] = nest.size[axis] - part.size[axis];
  for_each_part(part, f, base);
}

/// A nest of fewer than 2^31 elements as a kernel argument. Replaces divisions by multiplications (Divisor).
template <size_t N>
struct Offsets {
  int rank;
  Divisor size[kMaxRank];
  int64_t stride[kMaxRank][N];

  explicit Offsets(const Nest<N>& nest) : rank(nest.rank) {
    for (int axis = 0; axis < rank; ++axis) {
      size[axis] = Divisor(nest.size[axis]);
      std::copy_n(nest.stride[axis], N, stride[axis]);
    }
  }
  /// Sets offset[k] to the offset of element `index` in view k.
  __device__ void at(uint32_t index, int64_t (&offset)[N]) const {
#pragma unroll
    for (size_t k = 0; k < N; ++k) offset[k] = 0;
#pragma unroll
    for (int axis = 0; axis < kMaxRank; ++axis) {
      if (axis == rank) break;
      const uint32_t rest = axis + 1 == rank ? 0 : size[axis].divide(index);
      const int64_t position = index - rest * static_cast<uint32_t>(size[axis].value());
#pragma unroll
      for (size_t k = 0; k < N; ++k) offset[k] += position * stride[axis][k];
      index = rest;
    }
  }
};

/// Restricts `view` to `length` elements of `axis`, starting at `begin`.
inline void cut_axis(View& view, int axis, int64_t begin, int64_t length) {
  view.data = static_cast<char*>(view.data) + begin * view.stride[axis] * item_size(view.dtype);
  view.size[axis] = length;
}

/// Splits a call into halves along the output axis axis_to_split(call), recursively, until axis_to_split(part) is
/// negative for every part. Calls f(part) for every part. call.cut(axis, begin, length) must restrict call.out, and all
/// inputs that have the same axis, to a range of the axis.
template <class Call, class AxisToSplit, class F>
void for_each_part(const Call& call, const AxisToSplit& axis_to_split, const F& f) {
  const int axis = axis_to_split(call);
  if (axis < 0) return f(call);
  const int64_t size = call.out.size[axis];
  const int64_t half = size / 2;
  for (const bool second : {false, true}) {
    Call part = call;
    part.cut(axis, second ? half : 0, second ? size - half : half);
    for_each_part(part, axis_to_split, f);
  }
}

}  // namespace voxgrad::cuda
