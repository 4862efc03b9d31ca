// Views, concatenation, padding and reordering.
#include "ops/shape.h"

#include <algorithm>
#include <optional>
#include <span>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Returns `shape` with -1 replaced by the size that the number of elements of x requires.
Shape resolve(const char* op, const Tensor& x, const Shape& shape) {
  Shape resolved = shape;
  int64_t known = 1, unknown = -1;
  for (int64_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      check(unknown < 0, op, "only one size may be -1, got ", shape);
      unknown = i;
    } else {
      check(shape[i] >= 0, op, "sizes must not be negative, got ", shape);
      check(!__builtin_mul_overflow(known, shape[i], &known), op, "sizes ", shape, " overflow");
    }
  }
  if (unknown >= 0) {
    check(known > 0 && x.numel() % known == 0, op, "cannot reshape ", x.shape(), " to ", shape);
    resolved[unknown] = x.numel() / known;
  }
  check(numel(resolved, op) == x.numel(), op, "cannot reshape ", x.shape(), " to ", shape);
  return resolved;
}

/// Returns the strides of a view of x with `shape`, or nullopt if the reshape needs a copy. Groups neighboring axes of
/// x whose elements are evenly spaced; such a group is called a run. A view exists if the axes of `shape` can be
/// grouped into runs of the same sizes.
std::optional<Strides> view_strides(const Tensor& x, const Shape& shape) {
  if (x.numel() == 0) return contiguous_strides(shape);
  Strides strides = Dims::filled(shape.size(), 0);
  int64_t i = x.dim(), axis = shape.size();  // the axes from i and from `axis` on have been grouped
  do {
    const int64_t step = i > 0 ? x.strides()[i - 1] : 1;
    int64_t chunk = i > 0 ? x.shape()[--i] : 1;  // number of elements of the run
    while (i > 0 && (x.shape()[i - 1] == 1 || x.strides()[i - 1] == chunk * step)) chunk *= x.shape()[--i];
    int64_t taken = 1;
    while (axis > 0 && (taken < chunk || shape[axis - 1] == 1)) {
      strides[--axis] = taken * step;
      taken *= shape[axis];
    }
    if (taken != chunk) return std::nullopt;
  } while (i > 0);
  return axis > 0 ? std::nullopt : std::optional(strides);
}

/// Returns a view of x and records it with the gradient function `back`.
template <class F>
Tensor make_view(const char* op, const Tensor& x, const Shape& shape, const Strides& strides, int64_t offset, F back) {
  return record(op, as_strided(x, shape, strides, offset), {x}, std::move(back));
}

/// Copies `source` to `target`, which is usually a view of the result. Autograd does not record the copy.
void place(const Tensor& target, const Tensor& source) {
  kernels(target.device()).copy(target.view_out(), source.view_in());
}

/// Returns a tensor of `shape` that contains `part` in the slice of `axis` that begins at `start`, and zeros elsewhere.
/// This is the gradient of slice() and select(). The operation is differentiable.
Tensor embed(const Tensor& part, const Shape& shape, int64_t axis, int64_t start, int64_t step) {
  const Tensor out = empty(shape, part.options(), part.suggest_memory_format());
  out.zero_();
  const int64_t stop = start + part.shape()[axis] * step;
  {
    NoGradGuard no_grad;
    if (part.numel() > 0) place(slice(out, axis, start, std::min(stop, shape[axis]), step), part);
  }
  return record("embed", out, {part}, [axis, start, stop, step, size = shape[axis]](const Tensor& g) {
    return Tensors{slice(g, axis, start, std::min(stop, size), step)};
  });
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  check_defined("reshape", "input", x);
  const Shape target = resolve("reshape", x, shape);
  return view(view_strides(x, target) ? x : x.contiguous(), target);
}

Tensor view(const Tensor& x, const Shape& shape) {
  check_defined("view", "input", x);
  const Shape target = resolve("view", x, shape);
  const auto strides = view_strides(x, target);
  check(strides.has_value(), "view", "shape ", target, " needs a copy of ", x.shape(), " with strides ", x.strides(),
        "; use reshape");
  return make_view("view", x, target, *strides, x.storage_offset(),
                   [shape = x.shape()](const Tensor& g) { return Tensors{reshape(g, shape)}; });
}

Tensor permute(const Tensor& x, const Dims& order) {
  check_defined("permute", "input", x);
  check(order.size() == x.dim(), "permute", "order ", order, " must list each axis of ", x.shape(), " once");
  Shape shape = x.shape();
  Strides strides = x.strides();
  Dims inverse = Dims::filled(x.dim(), -1);
  for (int64_t i = 0; i < x.dim(); ++i) {
    const int64_t from = normalize_axis(order[i], x.dim(), "permute");
    check(inverse[from] < 0, "permute", "order ", order, " contains an axis twice");
    inverse[from] = i;
    shape[i] = x.shape()[from];
    strides[i] = x.strides()[from];
  }
  return make_view("permute", x, shape, strides, x.storage_offset(),
                   [inverse](const Tensor& g) { return Tensors{permute(g, inverse)}; });
}

Tensor transpose(const Tensor& x, int64_t a, int64_t b) {
  check_defined("transpose", "input", x);
  a = normalize_axis(a, x.dim(), "transpose");
  b = normalize_axis(b, x.dim(), "transpose");
  Dims order = Dims::filled(x.dim(), 0);
  for (int64_t i = 0; i < x.dim(); ++i) order[i] = i;
  if (x.dim() > 0) std::swap(order[a], order[b]);
  return permute(x, order);
}

Tensor squeeze(const Tensor& x, int64_t axis) {
  check_defined("squeeze", "input", x);
  axis = normalize_axis(axis, x.dim(), "squeeze");
  if (x.dim() == 0 || x.shape()[axis] != 1) return x;
  return select(x, axis, 0);
}

Tensor squeeze(const Tensor& x) {
  check_defined("squeeze", "input", x);
  Tensor out = x;
  for (int64_t axis = x.dim() - 1; axis >= 0; --axis) out = squeeze(out, axis);
  return out;
}

Tensor unsqueeze(const Tensor& x, int64_t axis) {
  check_defined("unsqueeze", "input", x);
  axis = normalize_axis(axis, x.dim() + 1, "unsqueeze");
  Shape shape = x.shape();
  Strides strides = x.strides();
  strides.insert(axis, axis < x.dim() ? next_stride(x.strides()[axis], x.shape()[axis]) : 1);
  shape.insert(axis, 1);
  return make_view("unsqueeze", x, shape, strides, x.storage_offset(),
                   [axis](const Tensor& g) { return Tensors{select(g, axis, 0)}; });
}

Tensor expand(const Tensor& x, const Shape& shape) {
  check_defined("expand", "input", x);
  const int64_t lead = shape.size() - x.dim();
  check(lead >= 0, "expand", "cannot expand ", x.shape(), " to ", shape);
  Shape target = shape;
  Strides strides = Dims::filled(shape.size(), 0);
  for (int64_t i = 0; i < x.dim(); ++i) {
    const int64_t size = x.shape()[i];
    if (target[lead + i] == -1) target[lead + i] = size;
    check(size == target[lead + i] || size == 1, "expand", "cannot expand ", x.shape(), " to ", shape);
    if (size == target[lead + i]) strides[lead + i] = x.strides()[i];
  }
  numel(target, "expand");
  return make_view("expand", x, target, strides, x.storage_offset(),
                   [from = x.shape()](const Tensor& g) { return Tensors{sum_to(g, from)}; });
}

Tensor narrow(const Tensor& x, int64_t axis, int64_t start, int64_t length) {
  axis = checked_axis("narrow", x, axis);
  const int64_t size = x.shape()[axis];
  if (start < 0) start += size;
  check(start >= 0 && length >= 0 && start <= size - length, "narrow", "start ", start, " and length ", length,
        " do not fit axis ", axis, " of ", x.shape());
  return slice(x, axis, start, start + length);
}

Tensor slice(const Tensor& x, int64_t axis, int64_t start, int64_t stop, int64_t step) {
  axis = checked_axis("slice", x, axis);
  check(step > 0, "slice", "step must be positive, got ", step);
  const int64_t size = x.shape()[axis];
  step = std::min(step, std::max<int64_t>(1, size));  // a larger step selects the same elements
  start = std::clamp<int64_t>(start < 0 ? start + size : start, 0, size);
  stop = std::clamp<int64_t>(stop < 0 ? stop + size : stop, start, size);
  Shape shape = x.shape();
  Strides strides = x.strides();
  shape[axis] = stop > start ? (stop - start - 1) / step + 1 : 0;
  strides[axis] = next_stride(strides[axis], step);
  const int64_t offset = x.storage_offset() + (numel(shape) > 0 ? start * x.strides()[axis] : 0);
  return make_view("slice", x, shape, strides, offset, [from = x.shape(), axis, start, step](const Tensor& g) {
    return Tensors{embed(g, from, axis, start, step)};
  });
}

Tensor select(const Tensor& x, int64_t axis, int64_t index) {
  axis = checked_axis("select", x, axis);
  const int64_t size = x.shape()[axis];
  check(index >= -size && index < size, "select", "index ", index, " is out of range for axis ", axis, " of ",
        x.shape());
  if (index < 0) index += size;
  Shape shape = x.shape();
  Strides strides = x.strides();
  shape.erase(axis);
  strides.erase(axis);
  const int64_t offset = x.storage_offset() + (x.numel() > 0 ? index * x.strides()[axis] : 0);
  return make_view("select", x, shape, strides, offset, [from = x.shape(), axis, index](const Tensor& g) {
    const Tensor row = unsqueeze(g, axis);
    return Tensors{from[axis] == 1 ? row : embed(row, from, axis, index, 1)};
  });
}

Tensor flatten(const Tensor& x, int64_t start_axis, int64_t end_axis) {
  check_defined("flatten", "input", x);
  const int64_t first = normalize_axis(start_axis, x.dim(), "flatten");
  const int64_t last = normalize_axis(end_axis, x.dim(), "flatten");
  check(first <= last, "flatten", "start_axis ", start_axis, " comes after end_axis ", end_axis);
  Shape shape = x.shape(), merged;
  for (int64_t i = first; i <= last && i < x.dim(); ++i) {
    merged.push_back(shape[first]);
    shape.erase(first);
  }
  shape.insert(first, numel(merged, "flatten"));
  return reshape(x, shape);
}

Tensors split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis) {
  axis = checked_axis("split", x, axis);
  int64_t left = x.shape()[axis];
  for (int64_t size : sizes) {
    check(size >= 0, "split", "sizes must not be negative, got ", size);
    left = size <= left ? left - size : -1;
    if (left < 0) break;
  }
  check(left == 0, "split", "the sizes do not add up to the size of axis ", axis, " of ", x.shape());
  Tensors parts;
  int64_t start = 0;
  for (int64_t size : sizes) {
    parts.push_back(narrow(x, axis, start, size));
    start += size;
  }
  return parts;
}

Tensors split(const Tensor& x, int64_t size, int64_t axis) {
  check_defined("split", "input", x);
  const int64_t whole = x.size(axis);
  check(size > 0 || (size == 0 && whole == 0), "split", "size must be positive, got ", size);
  std::vector<int64_t> sizes(static_cast<size_t>(whole > 0 ? (whole - 1) / size + 1 : 1), size);
  sizes.back() = whole - size * static_cast<int64_t>(sizes.size() - 1);
  return split(x, sizes, axis);
}

Tensors chunk(const Tensor& x, int64_t count, int64_t axis) {
  check_defined("chunk", "input", x);
  check(count > 0, "chunk", "the number of parts must be positive, got ", count);
  const int64_t whole = x.size(axis);
  if (whole == 0) return split(x, std::vector<int64_t>(static_cast<size_t>(count), 0), axis);
  return split(x, (whole - 1) / count + 1, axis);
}

Tensor cat(const Tensors& given, int64_t axis) {
  check(!given.empty(), "cat", "the list of tensors is empty");
  for (const Tensor& tensor : given) check_defined("cat", "a tensor", tensor);
  DType dtype = given[0].dtype();
  for (const Tensor& tensor : given) dtype = promote_types(dtype, tensor.dtype());
  Tensors tensors;
  for (const Tensor& tensor : given) tensors.push_back(tensor.to(dtype));
  const Tensor& first = tensors[0];
  check(first.dim() > 0, "cat", "tensors without axes cannot be joined; use stack");
  axis = normalize_axis(axis, first.dim(), "cat");
  Shape shape = first.shape();
  shape[axis] = 0;
  std::vector<int64_t> sizes;
  for (const Tensor& tensor : tensors) {
    check_same_device("cat", {"the first tensor", first}, {"another tensor", tensor});
    bool fits = tensor.dim() == first.dim();
    for (int64_t i = 0; fits && i < first.dim(); ++i) fits = i == axis || tensor.shape()[i] == first.shape()[i];
    check(fits, "cat", "shapes ", first.shape(), " and ", tensor.shape(), " differ in axes other than ", axis);
    sizes.push_back(tensor.shape()[axis]);
    check(!__builtin_add_overflow(shape[axis], sizes.back(), &shape[axis]), "cat", "the sum of the sizes along axis ",
          axis, " does not fit in 64 bits");
  }
  Tensor out = empty(shape, first.options(), first.suggest_memory_format());
  int64_t start = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    place(narrow(out, axis, start, sizes[i]), tensors[i]);
    start += sizes[i];
  }
  return record("cat", out, tensors, [sizes, axis](const Tensor& g) { return split(g, sizes, axis); });
}

Tensor stack(const Tensors& tensors, int64_t axis) {
  check(!tensors.empty(), "stack", "the list of tensors is empty");
  Tensors unsqueezed;
  for (const Tensor& tensor : tensors) {
    check_defined("stack", "a tensor", tensor);
    check(tensor.shape() == tensors[0].shape(), "stack", "shapes ", tensors[0].shape(), " and ", tensor.shape(),
          " differ");
    unsqueezed.push_back(unsqueeze(tensor, axis));
  }
  return cat(unsqueezed, normalize_axis(axis, unsqueezed[0].dim(), "stack"));
}

Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, double value) {
  check_within_slab("pad", !x.defined() || x.dim() < 4 || amounts.size() < 6 || (amounts[4] == 0 && amounts[5] == 0));
  check_defined("pad", "input", x);
  check(amounts.size() % 2 == 0 && static_cast<int64_t>(amounts.size()) <= 2 * x.dim(), "pad",
        "the number of amounts, ", amounts.size(), ", does not fit shape ", x.shape(),
        ": expected two amounts for each padded axis");
  Shape shape = x.shape();
  Tensor inside = x;  // x without the cropped elements
  Dims start = Dims::filled(x.dim(), 0);
  for (size_t i = 0; i < amounts.size(); i += 2) {
    const int64_t axis = x.dim() - 1 - static_cast<int64_t>(i / 2);
    const int64_t before = amounts[i], after = amounts[i + 1];
    const bool fits = std::abs(static_cast<double>(before)) < 0x1p61 && std::abs(static_cast<double>(after)) < 0x1p61 &&
                      shape[axis] < int64_t{1} << 61;
    check(fits, "pad", "amounts ", before, " and ", after, " are too large for axis ", axis, " of ", x.shape());
    shape[axis] += before + after;
    check(shape[axis] >= 0, "pad", "amounts ", before, " and ", after, " leave a negative size of axis ", axis, " of ",
          x.shape());
    const int64_t crop_before = std::min(std::max<int64_t>(-before, 0), x.shape()[axis]);
    const int64_t crop_after = std::min(std::max<int64_t>(-after, 0), x.shape()[axis] - crop_before);
    inside = narrow(inside, axis, crop_before, x.shape()[axis] - crop_before - crop_after);
    start[axis] = std::max<int64_t>(before, 0);
  }
  check_fits("pad", value, x.dtype());
  numel(shape, "pad");
  Tensor out = empty(shape, x.options(), x.suggest_memory_format());
  out.fill_(value);
  Tensor target = out;
  for (int64_t axis = 0; axis < x.dim(); ++axis) target = narrow(target, axis, start[axis], inside.shape()[axis]);
  place(target, inside);
  return record("pad", out, {inside}, [start, sizes = inside.shape()](const Tensor& g) {
    Tensor part = g;
    for (int64_t axis = 0; axis < start.size(); ++axis) part = narrow(part, axis, start[axis], sizes[axis]);
    return Tensors{part};
  });
}

Tensor flip(const Tensor& x, const Dims& axes) {
  check_defined("flip", "input", x);
  View view = x.view_in();
  std::vector<bool> seen(kMaxRank);
  for (int64_t given : axes) {
    check(x.dim() > 0, "flip", "the tensor has no axes");
    const int64_t axis = normalize_axis(given, x.dim(), "flip");
    check(!seen[static_cast<size_t>(axis)], "flip", "axes ", axes, " contain an axis twice");
    seen[static_cast<size_t>(axis)] = true;
    if (view.size[axis] <= 1) continue;
    view.data = static_cast<char*>(view.data) + (view.size[axis] - 1) * view.stride[axis] * item_size(x.dtype());
    view.stride[axis] = -view.stride[axis];
  }
  Tensor out = empty_like(x);
  kernels(x.device()).copy(out.view_out(), view);
  return record("flip", out, {x}, [axes](const Tensor& g) { return Tensors{flip(g, axes)}; });
}

Tensor roll(const Tensor& x, const Axes& shifts, const Axes& axes) {
  check_defined("roll", "input", x);
  if (axes.empty()) {
    check(shifts.size() == 1, "roll", "requires exactly one shift if no axes are given, got ", shifts);
    return reshape(roll(flatten(x), shifts, 0), x.shape());
  }
  check(shifts.size() == axes.size(), "roll", "shifts ", shifts, " and axes ", axes, " differ in number");
  Tensor rolled = x;
  for (int64_t i = 0; i < axes.size(); ++i) {
    const int64_t axis = normalize_axis(axes[i], x.dim(), "roll");
    const int64_t size = x.size(axis), shift = size > 0 ? shifts[i] % size : 0;
    const int64_t start = shift > 0 ? size - shift : -shift;  // index of the element that becomes the first
    if (start > 0) rolled = cat({narrow(rolled, axis, start, size - start), narrow(rolled, axis, 0, start)}, axis);
  }
  return rolled.is_same(x) ? x.clone() : rolled;
}

Tensor repeat(const Tensor& x, const Dims& repeats) {
  check_defined("repeat", "input", x);
  check(repeats.size() >= x.dim(), "repeat", "repeats ", repeats, " must have a value for each axis of ", x.shape());
  Shape shape = x.shape(), result;
  while (shape.size() < repeats.size()) shape.insert(0, 1);
  for (int64_t i = 0; i < shape.size(); ++i) {
    check(repeats[i] >= 0, "repeat", "repeats must not be negative, got ", repeats);
    result.push_back(checked_product("repeat", shape[i], repeats[i]));
  }
  if (numel(result, "repeat") == 0) return reshape(narrow(flatten(x), 0, 0, 0), result);
  Tensor repeated = reshape(x, shape);
  for (int64_t i = shape.size() - 1; i >= 0; --i) {  // from the last axis to the first, so that early copies are small
    if (repeats[i] == 1) continue;
    const int64_t inner = numel(Shape(std::span(shape.data() + i, static_cast<size_t>(shape.size() - i))));
    const Tensor rows = reshape(repeated, {-1, 1, inner});
    shape[i] = result[i];
    repeated = reshape(expand(rows, {-1, repeats[i], inner}), shape);
  }
  repeated = repeated.contiguous();
  return repeated.storage() == x.storage() ? repeated.clone() : repeated;
}

}  // namespace voxgrad
