// Views and rearrangements. Views share storage; their gradients go back through the same geometry.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// A view if the strides allow it, else a copy. One size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape);
/// Like reshape, but throws where a copy would be needed.
Tensor view(const Tensor& x, const Shape& shape);
Tensor permute(const Tensor& x, const Dims& order);
Tensor transpose(const Tensor& x, int64_t a, int64_t b);
/// Drops an axis of size 1 (left as it is if larger).
Tensor squeeze(const Tensor& x, int64_t axis);
/// Drops all axes of size 1.
Tensor squeeze(const Tensor& x);
Tensor unsqueeze(const Tensor& x, int64_t axis);
/// Broadcasts to `shape` without a copy; -1 keeps a size.
Tensor expand(const Tensor& x, const Shape& shape);
Tensor narrow(const Tensor& x, int64_t axis, int64_t start, int64_t length);
/// [start, stop) with a positive step; negative bounds count from the end, bounds are clipped as in Python.
Tensor slice(const Tensor& x, int64_t axis, int64_t start, int64_t stop, int64_t step = 1);
/// One index of an axis, which is dropped.
Tensor select(const Tensor& x, int64_t axis, int64_t index);
/// Axes start_axis .. end_axis made one.
Tensor flatten(const Tensor& x, int64_t start_axis = 0, int64_t end_axis = -1);

/// Views of parts along `axis`: of these sizes, which add up to the axis; of `size`, but for a smaller last one;
/// `count` of one size, but for a smaller last one (fewer, where their sizes say so, as in PyTorch).
Tensors split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis = 0);
Tensors split(const Tensor& x, int64_t size, int64_t axis = 0);
Tensors chunk(const Tensor& x, int64_t count, int64_t axis = 0);
Tensor cat(const Tensors& tensors, int64_t axis = 0);
Tensor stack(const Tensors& tensors, int64_t axis = 0);
/// Adds `amounts` = {before last axis, after last axis, before second last, ...} elements of `value`;
/// negative amounts crop. PyTorch's pad(mode='constant').
Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, double value = 0);
/// Reverses the order along each of `axes`.
Tensor flip(const Tensor& x, const Dims& axes);
/// Moves the elements along each of `axes` by the shift of the same place, towards the end if it is positive; elements
/// beyond an end come in again at the other. Without axes, one shift in row-major order. Throws Error if the numbers of
/// shifts and axes differ.
Tensor roll(const Tensor& x, const Axes& shifts, const Axes& axes = {});
/// Copies x repeats[i] times along axis i, one copy after another; PyTorch's x.repeat and numpy's tile. With more
/// repeats than axes, x gets axes of size 1 in front. The result is contiguous. Throws Error for negative repeats and
/// fewer repeats than axes.
Tensor repeat(const Tensor& x, const Dims& repeats);

/// Picks by an i64 tensor: index_select takes a list of positions along `axis`; gather has an index for each
/// element of the result. An index out of range throws: on the CPU here, on CUDA at the next wait for the device that
/// happens anyway (item(), to(cpu), synchronize()); until then NaN or 0 stands in its place.
Tensor index_select(const Tensor& x, int64_t axis, const Tensor& index);
Tensor gather(const Tensor& x, int64_t axis, const Tensor& index);
/// A new last axis of `num_classes` (-1: the largest index and one, for which a GPU is waited for), i64: 1 at the
/// index, else 0. An index out of range throws as above.
Tensor one_hot(const Tensor& index, int64_t num_classes = -1);
/// Zeros of size `size` along `axis`, with source added at `index` (deterministic): gather's gradient. An index out of
/// range throws as above.
Tensor scatter_add(const Tensor& source, int64_t axis, const Tensor& index, int64_t size);

}  // namespace voxgrad
