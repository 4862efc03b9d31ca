// Views, concatenation, padding, reordering and indexing.
//
// A view shares its storage with x. Negative axes count from the end. All functions except one_hot can be
// differentiated any number of times.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Returns x in another shape: a view if the strides allow it, otherwise a contiguous copy. One size may be -1 and is
/// computed from the others. Throws Error if the number of elements differs.
Tensor reshape(const Tensor& x, const Shape& shape);
/// Returns a view of x in another shape. Throws Error if the strides of x do not allow it.
Tensor view(const Tensor& x, const Shape& shape);
/// Returns a view whose axis i is axis order[i] of x.
Tensor permute(const Tensor& x, const Dims& order);
/// Returns a view with axes a and b exchanged.
Tensor transpose(const Tensor& x, int64_t a, int64_t b);
/// Returns a view without `axis` if its size is 1; otherwise returns x.
Tensor squeeze(const Tensor& x, int64_t axis);
/// Returns a view without all axes of size 1.
Tensor squeeze(const Tensor& x);
/// Returns a view with a new axis of size 1 at position `axis`.
Tensor unsqueeze(const Tensor& x, int64_t axis);
/// Returns a view that is broadcast to `shape`. A size of -1 keeps the size of x.
Tensor expand(const Tensor& x, const Shape& shape);
/// Returns a view of the elements [start, start + length) along `axis`. Throws Error if they are out of range.
Tensor narrow(const Tensor& x, int64_t axis, int64_t start, int64_t length);
/// Returns a view of every step-th element of [start, stop) along `axis`, with step > 0. Negative bounds count from the
/// end, and bounds are clipped, as in Python.
Tensor slice(const Tensor& x, int64_t axis, int64_t start, int64_t stop, int64_t step = 1);
/// Returns a view of one index of `axis`, without that axis.
Tensor select(const Tensor& x, int64_t axis, int64_t index);
/// Merges the axes from start_axis to end_axis, both included. Returns a view or a copy like reshape.
Tensor flatten(const Tensor& x, int64_t start_axis = 0, int64_t end_axis = -1);

/// Returns views of consecutive parts along `axis` with the given sizes, whose sum must be the size of the axis.
Tensors split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis = 0);
/// Returns views of consecutive parts of `size` along `axis`; the last part may be smaller. An empty axis gives one
/// empty part. As in PyTorch, `size` may be 0 only if the axis is empty.
Tensors split(const Tensor& x, int64_t size, int64_t axis = 0);
/// Returns views of `count` consecutive parts of equal size along `axis`; the last part may be smaller. As in PyTorch,
/// there may be fewer parts: with count = 4, 5 elements become parts of sizes 2, 2 and 1.
Tensors chunk(const Tensor& x, int64_t count, int64_t axis = 0);
/// Concatenates tensors along an existing axis. Different dtypes are promoted. Throws Error if the sizes of other axes
/// or the devices differ.
Tensor cat(const Tensors& tensors, int64_t axis = 0);
/// Concatenates tensors of equal shape along a new axis at position `axis`.
Tensor stack(const Tensors& tensors, int64_t axis = 0);
/// Pads with `value`, as PyTorch's pad(mode='constant'): amounts = {before the last axis, after the last axis, before
/// the second-to-last axis, ...}. Negative amounts crop.
Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, double value = 0);
/// Reverses the order along each of `axes`.
Tensor flip(const Tensor& x, const Dims& axes);
/// Moves the elements along axes[i] by shifts[i] positions, towards the end if the shift is positive. Elements that
/// leave one end enter at the other. Without axes, moves the elements of the flattened tensor by the only shift. Throws
/// Error if the numbers of shifts and axes differ.
Tensor roll(const Tensor& x, const Axes& shifts, const Axes& axes = {});
/// Repeats x repeats[i] times along axis i, like PyTorch's x.repeat and numpy.tile. If there are more repeats than
/// axes, axes of size 1 are prepended to x. The result is contiguous. Throws Error for negative repeats and for fewer
/// repeats than axes.
Tensor repeat(const Tensor& x, const Dims& repeats);

// In the functions below, the index is i64, and an index out of range causes an Error. On the CPU, the function throws
// the Error. On CUDA, the affected element of the result is NaN (0 for integers), scatter_add skips the source element,
// and the next operation that waits for the GPU (item(), to(cpu), synchronize()) throws the Error.

/// Returns the elements of x at the positions index (n) along `axis`.
Tensor index_select(const Tensor& x, int64_t axis, const Tensor& index);
/// Returns out[..., i, ...] = x[..., index[..., i, ...], ...] along `axis`, in the shape of index. Outside of `axis`,
/// index must have the sizes of x.
Tensor gather(const Tensor& x, int64_t axis, const Tensor& index);
/// Returns an i64 tensor with a new last axis of size num_classes that is 1 at the index and 0 elsewhere. If
/// num_classes is -1, the size is the largest index plus 1, and the function waits for the GPU.
Tensor one_hot(const Tensor& index, int64_t num_classes = -1);
/// Computes out[..., index[..., i, ...], ...] += source[..., i, ...] along `axis` and returns out, which is initially
/// zero and has `size` elements along `axis`. The order of the additions is deterministic. This is the gradient of
/// gather.
Tensor scatter_add(const Tensor& source, int64_t axis, const Tensor& index, int64_t size);

}  // namespace voxgrad
