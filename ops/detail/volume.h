// What the operators on volumes share: sizes, results that lie in memory as their input does, and operands that may be
// missing. Private to the library.
#pragma once

#include <optional>

#include "../../core/tensor.h"
#include "../shape.h"
#include "kernels.h"

namespace voxgrad {

/// D, H, W of (N, C, D, H, W).
inline Triple spatial_size(const Tensor& x) { return {x.size(2), x.size(3), x.size(4)}; }

/// The channels and the `axes` spatial axes of x have elements, and no more than leave room for padding in 64 bits.
inline void check_axes(const char* op, const Tensor& x, int64_t axes) {
  for (int64_t i = x.dim() - axes - 1; i < x.dim(); ++i) {
    check(x.size(i) > 0, op, "input has an empty axis other than the batch: ", x.shape());
    check(x.size(i) <= int64_t{1} << 62, op, "input has an axis of more than 2^62: ", x.shape());
  }
}

/// A new (N, channels, size...) in the memory format of `like`, an (N, C, D, H, W).
inline Tensor empty_volume(const Tensor& like, int64_t channels, const Triple& size, DType dtype) {
  const Shape shape{like.size(0), channels, size[0], size[1], size[2]};
  const bool last = like.suggest_memory_format() == MemoryFormat::channels_last;
  return empty_strided(shape, last ? channels_last_strides(shape) : contiguous_strides(shape), {dtype, like.device()});
}

/// (N, C, spatial...) with one to three spatial axes, or (C, spatial...), as (N, C, D, H, W): the axes that it lacks
/// have size 1. Back: lowered(result, axes, whether x had a batch).
inline Tensor lifted(Tensor x, int64_t axes) {
  if (x.dim() == axes + 1) x = unsqueeze(x, 0);
  while (x.dim() < 5) x = unsqueeze(x, 2);
  return x;
}
inline Tensor lowered(Tensor y, int64_t axes, bool batched) {
  for (; axes < 3; ++axes) y = squeeze(y, 2);
  return batched ? y : squeeze(y, 0);
}
/// The values of the axes that there are behind `fill` for those that are lacking.
inline Triple lifted(const Dims& values, int64_t fill) {
  Triple all(fill);
  for (int64_t i = 0, missing = 3 - values.size(); i < values.size(); ++i)
    all[static_cast<int>(i + missing)] = values[i];
  return all;
}

/// The voxels start .. start + size of (..., D, H, W).
inline Tensor part_of(Tensor x, const Dims& start, const Dims& size) {
  for (int64_t axis = 0, lead = x.dim() - 3; axis < 3; ++axis) x = narrow(x, axis + lead, start[axis], size[axis]);
  return x;
}

/// Whether `x` (N, C, spatial...) lies dense in one of the two memory formats.
inline bool is_dense_volume(const Tensor& x) {
  return x.is_contiguous() || x.is_contiguous(MemoryFormat::channels_last);
}

/// (N, C, L) as kernels see such a tensor: `view` is of one of x's shape and memory format.
inline View as_rows(const Tensor& x, View view) {
  const int64_t n = x.size(0), c = x.size(1);
  const int64_t l = numel(Shape(std::span(x.shape().data() + 2, static_cast<size_t>(x.dim() - 2))), "as_rows");
  const bool last = x.suggest_memory_format() == MemoryFormat::channels_last;
  const int64_t size[] = {n, c, l};
  const int64_t stride[] = {next_stride(l, c), last ? 1 : l, last ? c : 1};
  view.rank = 3;
  for (int i = 0; i < 3; ++i) {
    view.size[i] = size[i];
    view.stride[i] = stride[i];
  }
  return view;
}

/// x (N, C, D, H, W) through linear maps along its spatial axes, to `size`. transposed: through the transposed maps.
/// Differentiable.
Tensor resample(const Tensor& x, const ResampleMaps& maps, const Triple& size, bool transposed = false);

inline bool wants_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }

/// For kernels, which take a pointer that may be null.
inline std::optional<View> optional_view(const Tensor& t) {
  return t.defined() ? std::optional<View>(t.view_in()) : std::nullopt;
}
inline const View* pointer(const std::optional<View>& view) { return view ? &*view : nullptr; }

}  // namespace voxgrad
