// The operators gather, scatter_add, index_select and one_hot.
#include "ops/detail/common.h"

#include <limits>

namespace voxgrad {
namespace {

/// Checks the operands. Returns the axis as a nonnegative number.
int64_t check_index(const char* op, const Tensor& x, int64_t axis, const Tensor& index) {
  check_defined(op, "input", x, "index", index);
  check(index.dtype() == i64, op, "index must be i64, got ", describe(index));
  check_same_device(op, {"input", x}, {"index", index});
  return checked_axis(op, x, axis);
}

}  // namespace

Tensor gather_as(const char* op, const Tensor& x, int64_t axis, const Tensor& index) {
  axis = check_index(op, x, axis, index);
  bool fits = x.dim() == index.dim();
  for (int64_t i = 0; fits && i < x.dim(); ++i) fits = i == axis || x.shape()[i] == index.shape()[i];
  check(fits, op, "index ", index.shape(), " must match ", x.shape(), " in all axes except axis ", axis);
  Tensor out = empty(index.shape(), x.options(), x.suggest_memory_format());
  kernels(x.device()).gather(op, out.view_out(), x.view_in(), index.view_in(), static_cast<int>(axis));
  return record(op, out, {x}, [index = Saved(index), axis, size = x.shape()[axis]](const Tensor& g) {
    return Tensors{scatter_add(g, axis, index(), size)};
  });
}

Tensor gather(const Tensor& x, int64_t axis, const Tensor& index) { return gather_as("gather", x, axis, index); }

Tensor scatter_add(const Tensor& source, int64_t axis, const Tensor& index, int64_t size) {
  axis = check_index("scatter_add", source, axis, index);
  check(index.shape() == source.shape(), "scatter_add", "index ", index.shape(), " and source ", source.shape(),
        " must have the same shape");
  check(size >= 0, "scatter_add", "size must not be negative, got ", size);
  Shape shape = source.shape();
  shape[axis] = size;
  Tensor out = empty(shape, source.options(), source.suggest_memory_format());
  check(size > 0 || source.numel() == 0, "scatter_add", "size is 0, but source is not empty: ", describe(source));
  kernels(source.device())
      .scatter_add("scatter_add", out.view_out(), source.view_in(), index.view_in(), static_cast<int>(axis));
  return record("scatter_add", out, {source},
                [index = Saved(index), axis](const Tensor& g) { return Tensors{gather(g, axis, index())}; });
}

Tensor index_select(const Tensor& x, int64_t axis, const Tensor& index) {
  axis = check_index("index_select", x, axis, index);
  check(index.dim() == 1, "index_select", "index must have one axis, got ", index.shape());
  Shape row = Dims::filled(x.dim(), 1), shape = x.shape();
  row[axis] = shape[axis] = index.numel();
  return gather_as("index_select", x, axis, expand(reshape(index, row), shape));
}

Tensor one_hot(const Tensor& index, int64_t num_classes) {
  check_defined("one_hot", "index", index);
  check(index.dtype() == i64, "one_hot", "index must be i64, got ", describe(index));
  if (num_classes == -1) {
    check(index.numel() > 0, "one_hot", "an empty index requires num_classes");
    const auto largest = amax(index).item<int64_t>();
    check(largest < std::numeric_limits<int64_t>::max(), "one_hot", "index ", largest, " is too large for a class");
    num_classes = largest + 1;
  }
  check(num_classes > 0, "one_hot", "the number of classes must be positive, got ", num_classes);
  const Tensor at = unsqueeze(index, -1), one = expand(ones({}, {f32, index.device()}), at.shape());
  Shape shape = index.shape();
  shape.push_back(num_classes);
  const Tensor hot = empty(shape, one.options());
  kernels(index.device())
      .scatter_add("one_hot", hot.view_out(), one.view_in(), at.view_in(), static_cast<int>(index.dim()));
  return hot.to(i64);
}

}  // namespace voxgrad
