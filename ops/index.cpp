// Picking and scattering by index.
#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/create.h"
#include "ops/kernels.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

int64_t check_index(const char* op, const Tensor& x, int64_t axis, const Tensor& index) {
  check_defined(op, "input", x);
  check_defined(op, "index", index);
  check(x.dim() > 0, op, "the tensor has no axes");
  check(index.dtype() == i64, op, "index must be i64, got ", describe(index));
  check(index.device() == x.device(), op, "tensors lie on different devices: ", describe(x), " and index ",
        describe(index));
  return normalize_axis(axis, x.dim(), op);
}

void check_outside_axis(const char* op, const Shape& shape, const Shape& index, int64_t axis) {
  bool fits = shape.size() == index.size();
  for (int64_t i = 0; fits && i < shape.size(); ++i) fits = i == axis || shape[i] == index[i];
  check(fits, op, "index ", index, " must have the sizes of ", shape, " outside axis ", axis);
}

}  // namespace

Tensor gather(const Tensor& x, int64_t axis, const Tensor& index) {
  axis = check_index("gather", x, axis, index);
  check_outside_axis("gather", x.shape(), index.shape(), axis);
  Tensor out = empty(index.shape(), x.options());
  kernels(x.device()).gather(out.view_out(), x.view_in(), index.view_in(), static_cast<int>(axis));
  return record("gather", out, {x}, [index = Saved(index), axis, size = x.shape()[axis]](const Tensor& g) {
    return Tensors{scatter_add(g, axis, index(), size)};
  });
}

Tensor scatter_add(const Tensor& source, int64_t axis, const Tensor& index, int64_t size) {
  axis = check_index("scatter_add", source, axis, index);
  check(index.shape() == source.shape(), "scatter_add", "index ", index.shape(), " and source ", source.shape(),
        " differ");
  check(size >= 0, "scatter_add", "size must not be negative, got ", size);
  Shape shape = source.shape();
  shape[axis] = size;
  Tensor out = empty(shape, source.options());
  kernels(source.device()).scatter_add(out.view_out(), source.view_in(), index.view_in(), static_cast<int>(axis));
  return record("scatter_add", out, {source},
                [index = Saved(index), axis](const Tensor& g) { return Tensors{gather(g, axis, index())}; });
}

Tensor index_select(const Tensor& x, int64_t axis, const Tensor& index) {
  axis = check_index("index_select", x, axis, index);
  check(index.dim() == 1, "index_select", "index must have one axis, got ", index.shape());
  if (index.device().is_cpu())  // gather would look too, but speak of itself
    for (int64_t i : index.to_vector<int64_t>())
      check(i >= 0 && i < x.size(axis), "index_select", "index ", i, " is out of range for axis ", axis, " of ",
            x.shape());
  Shape row = Dims::filled(x.dim(), 1), shape = x.shape();
  row[axis] = shape[axis] = index.numel();
  return gather(x, axis, expand(reshape(index, row), shape));
}

}  // namespace voxgrad
