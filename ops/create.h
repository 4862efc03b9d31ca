// Making tensors. The dtype is f32 unless the options name another, whatever the values: also for arange and tensor,
// where PyTorch makes i64 of whole numbers. An integer dtype cuts fractions off; it refuses NaN and values
// beyond its range.
#pragma once

#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "../core/random.h"
#include "../core/tensor.h"

namespace voxgrad {

Tensor zeros(const Shape& shape, TensorOptions options = {});
Tensor ones(const Shape& shape, TensorOptions options = {});
Tensor full(const Shape& shape, double value, TensorOptions options = {});
Tensor zeros_like(const Tensor& like);
Tensor ones_like(const Tensor& like);
Tensor full_like(const Tensor& like, double value);

/// start, start + step, ... below `end` (above, for a negative step). Throws for a zero or non-finite step.
Tensor arange(double start, double end, double step = 1, TensorOptions options = {});
/// `count` values from `start` to `end`, both included.
Tensor linspace(double start, double end, int64_t count, TensorOptions options = {});

/// Uniform on [0, 1); the same bits on every device for the same generator state. Floating dtypes; halves
/// are those of f32, rounded.
Tensor rand(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// Standard normals; the same on every device to rounding. Floating dtypes, as above.
Tensor randn(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// rand() and randn() in the shape, dtype, device and memory layout of `like`. The layout does not change which number
/// an element gets.
Tensor rand_like(const Tensor& like, Generator* generator = nullptr);
Tensor randn_like(const Tensor& like, Generator* generator = nullptr);
/// A random order of 0 .. n - 1, i64 on the CPU.
Tensor randperm(int64_t n, Generator* generator = nullptr);

/// A copy of `values` in row-major order; T (float, double, int64_t, int32_t, uint8_t, bool) gives the dtype.
/// Throws if their number does not fill the shape.
template <class T>
Tensor from_span(std::span<const T> values, const Shape& shape, Device device = Device::cpu());

/// A copy of `values` of shape (n); T gives the dtype as in from_span: tensor(std::vector<int64_t>{1, 2}) is i64.
template <class T>
requires std::is_arithmetic_v<T> Tensor tensor(const std::vector<T>& values, Device device = Device::cpu()) {
  if constexpr (std::is_same_v<T, bool>) {  // packed in bits
    return tensor(std::vector<uint8_t>(values.begin(), values.end()), device).to(b8);
  } else {
    return from_span(std::span<const T>(values), {std::ssize(values)}, device);
  }
}

/// From a nested list: tensor({{1, 2}, {3, 4}}). Throws if it is ragged.
class NestedList {
 public:
  NestedList(double value) : value_(value) {}
  NestedList(int value) : value_(value) {}
  NestedList(std::initializer_list<NestedList> children) : children_(children), leaf_(false) {}
  Shape shape() const;
  void collect(std::vector<double>& values) const;

 private:
  double value_ = 0;
  std::vector<NestedList> children_;
  bool leaf_ = true;
};
Tensor tensor(const NestedList& values, TensorOptions options = {});

}  // namespace voxgrad
