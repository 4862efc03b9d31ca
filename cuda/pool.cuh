// What the kernels of max pooling share. Private to cuda/pool.cu and its headers.
#pragma once

#include <limits>

#include "core/dtype.h"
#include "cuda/map.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// In place of an index where none is wanted.
struct NoIndex {};

/// The larger of two; NaN wins.
template <class C>
__device__ C larger(C a, C b) {
  if constexpr (std::is_same_v<C, float>) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  } else {
    return a > b || a != a ? a : b;
  }
}

/// A value and where it stands: below zero if nowhere.
template <class C, class Index>
struct Best {
  C value = -std::numeric_limits<C>::infinity();
  Index place = -1;

  /// What comes after all that were offered before: wins if it is larger, or the first NaN.
  __device__ void offer_next(C other, Index at) {
    const bool wins = place < 0 || (!(other <= value) && value == value);
    value = wins ? other : value;
    place = wins ? at : place;
  }
  /// Of equal values, and of NaNs, the one that stands first wins.
  __device__ void offer(C other, Index at) {
    const bool beats = other > value || (other != other && value == value);
    const bool equals = other == value || (other != other && value != value);
    const bool wins = place < 0 || beats || (equals && at < place);
    value = wins ? other : value;
    place = wins ? at : place;
  }
};
template <class C>
struct Best<C, NoIndex> {
  C value = -std::numeric_limits<C>::infinity();
  __device__ void offer_next(C other, int64_t) { value = larger(other, value); }
  __device__ void offer(C other, int64_t) { value = larger(other, value); }
};

/// Writes neighbours, and where they stand if that is wanted.
template <int width, class T, class C, class Index>
__device__ void store_best(const Best<C, Index> (&best)[width], T* values, Index* places) {
  C value[width];
#pragma unroll
  for (int j = 0; j < width; ++j) value[j] = best[j].value;
  store_values<width>(values, value);
  if constexpr (!std::is_same_v<Index, NoIndex>) {
    Index place[width];
#pragma unroll
    for (int j = 0; j < width; ++j) place[j] = best[j].place;
    store_values<width>(places, place);
  }
}

/// Max pooling (out: y; in: x), or its gradient (out: dx; in: dy), or a part of either that begins at `first`.
struct PoolViews {
  View out, in, indices;  // indices.data is null where they are not wanted
  PoolGeometry geometry;
  bool indices_follow_out;       // rather than in
  int64_t first[3] = {0, 0, 0};  // depth, row and column of the part's first voxel

  void cut(int axis, int64_t begin, int64_t length) {
    cut_axis(out, axis, begin, length);
    if (axis >= 2) first[axis - 2] += begin;
    // The windows of a part of a volume lie anywhere in the other.
    if (axis < 2) cut_axis(in, axis, begin, length);
    if (indices.data && (axis < 2 || indices_follow_out)) cut_axis(indices, axis, begin, length);
  }
};

/// PoolViews as kernels use them. Numbers count voxels of the output; the channels come in vectors.
struct PoolProblem : PoolViews {
  Divider size[5], window_stride[3];
  bool channels_inner;

  /// `width` voxels along `axis`, the channels or the width, are one of the numbered.
  PoolProblem(const PoolViews& v, int width, int along = 1) : PoolViews(v) {
    for (int axis = 0; axis < 5; ++axis)
      size[axis] = Divider((out.size[axis] + (axis == along ? width - 1 : 0)) / (axis == along ? width : 1));
    for (int i = 0; i < 3; ++i) window_stride[i] = Divider(geometry.stride[i]);
    channels_inner = (width > 1 && along == 1) || std::abs(out.stride[1]) < std::abs(out.stride[4]);
  }
  /// Where voxel `number` stands.
  __device__ void locate(uint32_t number, int width, int64_t (&at)[5], int along = 1) const {
    const auto take = [&](int axis) { at[axis] = size[axis].take(number); };
    if (channels_inner) take(1);
    take(4);
    take(3);
    take(2);
    if (!channels_inner) take(1);
    at[0] = number;
    at[along] *= width;
  }
};

/// The element of `view` that stands at `at`.
template <class T>
__device__ T* element(const View& view, const int64_t (&at)[5]) {
  const int64_t(&s)[kMaxRank] = view.stride;
  return static_cast<T*>(view.data) + at[0] * s[0] + at[1] * s[1] + at[2] * s[2] + at[3] * s[3] + at[4] * s[4];
}

}  // namespace voxgrad::cuda
