// Helpers of the operators on volumes: shapes, memory formats and optional operands. Private to the library.
#pragma once

#include <optional>

#include "../../core/tensor.h"
#include "../shape.h"
#include "kernels.h"

namespace voxgrad {

/// Returns the spatial size (D, H, W) of x (N, C, D, H, W).
inline Triple spatial_size(const Tensor& x) { return {x.size(2), x.size(3), x.size(4)}; }

/// Throws Error if the channel axis or one of the `axes` spatial axes of x is empty or has more than 2^62 elements.
/// The limit leaves room for padding in 64 bits.
inline void check_axes(const char* op, const Tensor& x, int64_t axes) {
  for (int64_t i = x.dim() - axes - 1; i < x.dim(); ++i) {
    check(x.size(i) > 0, op, "input has an empty axis other than the batch: ", x.shape());
    check(x.size(i) <= int64_t{1} << 62, op, "input has an axis of more than 2^62 elements: ", x.shape());
  }
}

/// Returns an uninitialized tensor (N, channels, size...) on the device and in the memory format of `like`
/// (N, C, D, H, W).
inline Tensor empty_volume(const Tensor& like, int64_t channels, const Triple& size, DType dtype) {
  return empty({like.size(0), channels, size[0], size[1], size[2]}, {dtype, like.device()},
               like.suggest_memory_format());
}

/// Returns x (N, C, spatial...) or (C, spatial...), with `axes` = 1 to 3 spatial axes, as a view (N, C, D, H, W).
/// Missing axes get size 1: an image (N, C, H, W) becomes (N, C, 1, H, W).
inline Tensor as_volume(Tensor x, int64_t axes) {
  if (x.dim() == axes + 1) x = unsqueeze(x, 0);
  while (x.dim() < 5) x = unsqueeze(x, 2);
  return x;
}
/// Inverts as_volume: removes the axes that as_volume added to an input with `axes` spatial axes. `batched` is true if
/// the input had a batch axis.
inline Tensor from_volume(Tensor y, int64_t axes, bool batched) {
  for (; axes < 3; ++axes) y = squeeze(y, 2);
  return batched ? y : squeeze(y, 0);
}
/// Prepends `fill` until there are three values: (H, W) becomes (fill, H, W).
inline Triple to_triple(const Dims& values, int64_t fill) {
  Triple triple(fill);
  for (int64_t i = 0, missing = 3 - values.size(); i < values.size(); ++i)
    triple[static_cast<int>(i + missing)] = values[i];
  return triple;
}

/// Returns the axes of x (N, C, spatial...) without the channel axis: {0, 2, 3, ...}.
inline Dims all_but_channels(const Tensor& x) {
  Dims axes{0};
  for (int64_t axis = 2; axis < x.dim(); ++axis) axes.push_back(axis);
  return axes;
}

/// Returns the number of voxels of one channel of x (N, C, spatial...).
inline int64_t voxel_count(const char* op, const Tensor& x) {
  return numel(Shape(std::span(x.shape().data() + 2, static_cast<size_t>(x.dim() - 2))), op);
}

/// Returns a view of the voxels [start, start + size) of x (..., D, H, W).
inline Tensor part_of(Tensor x, const Dims& start, const Dims& size) {
  for (int64_t axis = 0, lead = x.dim() - 3; axis < 3; ++axis) x = narrow(x, axis + lead, start[axis], size[axis]);
  return x;
}

/// Returns true if x (N, C, spatial...) is contiguous in one of the two memory formats.
inline bool is_dense_volume(const Tensor& x) {
  return x.is_contiguous() || x.is_contiguous(MemoryFormat::channels_last);
}

/// Returns `view` reshaped to (N, C, L), where L is the number of voxels. `view` is dense and has the shape and the
/// memory format of x.
inline View as_rows(const Tensor& x, View view) {
  const int64_t n = x.size(0), c = x.size(1), l = voxel_count("as_rows", x);
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

/// Applies a linear map along each spatial axis of x (N, C, D, H, W) and returns (N, C, size...). With `transposed`,
/// applies the transposed maps. The result is differentiable any number of times.
Tensor resample(const Tensor& x, const ResampleMaps& maps, const Triple& size, bool transposed = false);

/// Applies resample() to x (N, C, spatial...) or (C, spatial...) with `axes` spatial axes; the result has the same
/// axes.
inline Tensor resample_axes(const Tensor& x, int64_t axes, const ResampleMaps& maps, const Triple& size) {
  return from_volume(resample(as_volume(x, axes), maps, size), axes, x.dim() == axes + 2);
}

/// Returns true if t is defined and requires grad.
inline bool needs_gradient(const Tensor& t) { return t.defined() && t.requires_grad(); }

/// Returns the device of a view.
inline Device device_of(const View& view) { return view.device < 0 ? Device::cpu() : Device::cuda(view.device); }

/// A view of an operand that may be undefined, as an argument of a kernel. Converts to a pointer to the view, or to
/// null if the operand is undefined. The view is for writing if `write` is true.
class OptionalView {
 public:
  explicit OptionalView(const Tensor& t, bool write = false) {
    if (t.defined()) view_ = write ? t.view_out() : t.view_in();
  }
  operator const View*() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<View> view_;
};

}  // namespace voxgrad
