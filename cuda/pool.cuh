// Types and functions shared by the kernels of max pooling. Private to cuda/pool.cu and cuda/pool_disjoint.cuh.
#pragma once

#include <limits>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/map.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// The index type of kernels that compute no indices.
struct NoIndex {};

/// Returns the larger of two values, or NaN if one of them is NaN.
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

/// The maximum of the values offered so far, and its position in the volume.
template <class C, class Index>
struct Best {
  C value = -std::numeric_limits<C>::infinity();
  Index position = -1;  ///< -1 if no value was offered

  /// Offers the next value in the order of positions. The value replaces the maximum if the value is larger or the
  /// first NaN.
  __device__ void offer(C other, Index at) {
    const bool replaces = position < 0 || (!(other <= value) && value == value);
    value = replaces ? other : value;
    position = replaces ? at : position;
  }
};
template <class C>
struct Best<C, NoIndex> {
  C value = -std::numeric_limits<C>::infinity();
  __device__ void offer(C other, int64_t) { value = larger(other, value); }
};

/// Stores `width` neighboring maxima, and their positions unless Index is NoIndex.
template <int width, class T, class C, class Index>
__device__ void store_best(const Best<C, Index> (&best)[width], T* values, Index* positions) {
  C value[width];
#pragma unroll
  for (int j = 0; j < width; ++j) value[j] = best[j].value;
  store_values<width>(values, value);
  if constexpr (!std::is_same_v<Index, NoIndex>) {
    Index position[width];
#pragma unroll
    for (int j = 0; j < width; ++j) position[j] = best[j].position;
    store_values<width>(positions, position);
  }
}

/// The operands of max pooling (out: y, in: x) or of its gradient (out: dx, in: dy). After cut(), `out` is only a part
/// of the output.
struct PoolViews {
  View out;
  View in;
  View indices;  ///< data is null if no indices are requested
  PoolGeometry geometry;
  bool indices_follow_out;       ///< true: the indices have the shape of `out`; false: the shape of `in`
  int64_t first[3] = {0, 0, 0};  ///< position (d, h, w) of the part's first voxel

  /// Restricts the output to a range of an axis.
  void cut(int axis, int64_t begin, int64_t length) {
    cut_axis(out, axis, begin, length);
    if (axis >= 2) first[axis - 2] += begin;
    // A part of the output volume may need any part of the input volume.
    if (axis < 2) cut_axis(in, axis, begin, length);
    if (indices.data && (axis < 2 || indices_follow_out)) cut_axis(indices, axis, begin, length);
  }
};

/// The arguments of the kernels. An item is `width` neighboring elements of the output along one axis.
struct PoolProblem : PoolViews {
  Divisor size[5];  ///< items along each axis
  Divisor window_stride[3];
  bool channels_inner;  ///< neighboring items are neighboring channels

  /// Makes items of `width` elements along the axis `along`, which is the channels (1) or the width (4).
  PoolProblem(const PoolViews& v, int width, int along = 1) : PoolViews(v) {
    for (int axis = 0; axis < 5; ++axis) size[axis] = Divisor(divide_up(out.size[axis], axis == along ? width : 1));
    for (int i = 0; i < 3; ++i) window_stride[i] = Divisor(std::min<int64_t>(geometry.stride[i], INT32_MAX));
    channels_inner = (width > 1 && along == 1) || std::abs(out.stride[1]) < std::abs(out.stride[4]);
  }
  /// Sets `at` to the position of the first element of item `number`.
  __device__ void locate(uint32_t number, int width, int64_t (&at)[5], int along = 1) const {
    const auto locate_axis = [&](int axis) { at[axis] = size[axis].take_digit(number); };
    if (channels_inner) locate_axis(1);
    locate_axis(4);
    locate_axis(3);
    locate_axis(2);
    if (!channels_inner) locate_axis(1);
    at[0] = number;
    at[along] *= width;
  }
};

}  // namespace voxgrad::cuda
