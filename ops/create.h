// Functions that create tensors.
//
// The default dtype is f32, also for arange and tensor, where PyTorch chooses i64 for integers. An integer dtype
// truncates fractions. The functions throw Error for NaN and for values outside the range of an integer dtype.
#pragma once

#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "../core/random.h"
#include "../core/tensor.h"

namespace voxgrad {

/// Return a tensor filled with 0, 1 or `value`. The _like functions take the shape, dtype, device and memory layout of
/// `like`.
Tensor zeros(const Shape& shape, TensorOptions options = {});
Tensor ones(const Shape& shape, TensorOptions options = {});
Tensor full(const Shape& shape, double value, TensorOptions options = {});
Tensor zeros_like(const Tensor& like);
Tensor ones_like(const Tensor& like);
Tensor full_like(const Tensor& like, double value);

/// Returns the values start, start + step, ... that are below `end`, or above `end` if step is negative. Throws Error
/// if an argument is not finite, if step is 0, or if step leads away from `end`.
Tensor arange(double start, double end, double step = 1, TensorOptions options = {});
/// Returns `count` evenly spaced values from `start` to `end`, both included. The dtype must be floating.
Tensor linspace(double start, double end, int64_t count, TensorOptions options = {});

/// Returns random numbers that are uniform on [0, 1). The same generator state gives the same bits on every device. The
/// dtype must be floating; bf16 and f16 numbers are rounded from f32. Uses default_generator() if `generator` is null.
Tensor rand(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// Returns random numbers with a standard normal distribution. The numbers of different devices agree up to rounding.
/// The dtype must be floating.
Tensor randn(const Shape& shape, TensorOptions options = {}, Generator* generator = nullptr);
/// Return rand() or randn() with the shape, dtype, device and memory layout of `like`. The number that an element gets
/// depends on its index, not on the layout.
Tensor rand_like(const Tensor& like, Generator* generator = nullptr);
Tensor randn_like(const Tensor& like, Generator* generator = nullptr);
/// Returns a random permutation of 0, ..., n - 1 as i64 on the CPU.
Tensor randperm(int64_t n, Generator* generator = nullptr);

/// Returns a tensor with a copy of `values` in row-major order. T (float, double, int64_t, int32_t, uint8_t or bool)
/// determines the dtype. Throws Error if the number of values is not the number of elements of `shape`.
template <class T>
Tensor from_span(std::span<const T> values, const Shape& shape, Device device = Device::cpu());

/// Returns a tensor of shape (n) with a copy of `values`. T determines the dtype as in from_span:
/// tensor(std::vector<int64_t>{1, 2}) is i64.
template <class T>
requires std::is_arithmetic_v<T> Tensor tensor(const std::vector<T>& values, Device device = Device::cpu()) {
  if constexpr (std::is_same_v<T, bool>) {  // std::vector<bool> stores bits
    return tensor(std::vector<uint8_t>(values.begin(), values.end()), device).to(b8);
  } else {
    return from_span(std::span<const T>(values), {std::ssize(values)}, device);
  }
}

/// A nested list of numbers, the argument of tensor({{1, 2}, {3, 4}}).
class NestedList {
 public:
  NestedList(double value) : value_(value) {}
  NestedList(int value) : value_(value) {}
  NestedList(std::initializer_list<NestedList> children) : children_(children), leaf_(false) {}
  /// Returns the shape of the list. Throws Error if the list is ragged.
  Shape shape() const;
  /// Appends all numbers to `values` in row-major order.
  void collect(std::vector<double>& values) const;

 private:
  double value_ = 0;
  std::vector<NestedList> children_;
  bool leaf_ = true;
};
/// Returns a tensor with the values and shape of a nested list: tensor({{1, 2}, {3, 4}}) has shape (2, 2). Throws Error
/// if the list is ragged.
Tensor tensor(const NestedList& values, TensorOptions options = {});

}  // namespace voxgrad
