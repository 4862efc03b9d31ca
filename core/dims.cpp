// Implements the computations with shapes and strides: sizes, overlap, broadcasting.
#include "core/dims.h"

namespace voxgrad {

int64_t numel(const Shape& shape, const char* op) {
  int64_t count = 1;
  bool overflow = false;
  bool zero = false;
  for (int64_t size : shape) {
    check(size >= 0, op, "sizes must not be negative, got ", shape);
    zero |= size == 0;
    overflow |= __builtin_mul_overflow(count, size, &count);
  }
  if (zero) return 0;
  check(!overflow, op, "the number of elements of ", shape, " does not fit in 64 bits");
  return count;
}

int64_t next_stride(int64_t step, int64_t size) {
  return static_cast<int64_t>(static_cast<uint64_t>(step) * static_cast<uint64_t>(size > 0 ? size : 1));
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  int64_t step = 1;
  for (int64_t i = shape.size() - 1; i >= 0; --i) {
    strides[i] = step;
    step = next_stride(step, shape[i]);
  }
  return strides;
}

Strides channels_last_strides(const Shape& shape) {
  check(shape.size() >= 3, "channels_last", "needs (N, C, spatial...), got shape ", shape);
  Shape last = shape;  // (N, spatial..., C)
  last.erase(1);
  last.push_back(shape[1]);
  Strides strides = contiguous_strides(last);
  strides.erase(shape.size() - 1);
  strides.insert(1, 1);
  return strides;
}

bool may_overlap(const Shape& shape, const Strides& strides) {
  const auto step = [&](int64_t axis) {  // the absolute value; unsigned, because -INT64_MIN overflows int64_t
    const auto bits = static_cast<uint64_t>(strides[axis]);
    return strides[axis] < 0 ? 0 - bits : bits;
  };
  Dims order;
  for (int64_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return false;
    if (shape[i] > 1) insert_sorted(order, i, step);
  }
  uint64_t reach = 0;  // largest offset within the axes so far
  for (int64_t axis : order) {
    if (step(axis) <= reach) return true;
    uint64_t extent = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(shape[axis] - 1), step(axis), &extent) ||
        __builtin_add_overflow(reach, extent, &reach))
      return true;  // the offset overflows
  }
  return false;
}

int64_t normalize_axis(int64_t axis, int64_t rank, const char* op) {
  const int64_t reach = rank > 0 ? rank : 1;
  check(axis >= -reach && axis < reach, op, "axis ", axis, " is out of range for ", rank,
        rank == 1 ? " axis" : " axes");
  return axis < 0 ? axis + reach : axis;
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op) {
  const Shape& longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  Shape shape = longer;
  const int64_t lead = longer.size() - shorter.size();
  for (int64_t i = 0; i < shorter.size(); ++i) {
    const int64_t size = shorter[i];
    int64_t& target = shape[lead + i];
    check(size == target || size == 1 || target == 1, op, "shapes ", a, " and ", b, " do not broadcast");
    if (target == 1) target = size;
  }
  return shape;
}

}  // namespace voxgrad
