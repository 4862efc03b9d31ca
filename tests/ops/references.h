// Reference implementations of operators. They are simple loops in double that follow the definitions, not the
// algorithms of the kernels. For example, conv_transpose adds each input to its outputs, but the kernels compute each
// output from its inputs.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "core/tensor.h"
#include "ops/conv.h"
#include "ops/pool.h"

namespace voxgrad::reference {

/// A dense row-major array.
struct Array {
  Shape shape;
  std::vector<double> values;

  double operator()(const Dims& index) const { return values[position(index)]; }
  double& operator()(const Dims& index) { return values[position(index)]; }
  int64_t size(int64_t axis) const { return shape[axis]; }
  /// Returns the offset of an element in `values`.
  size_t position(const Dims& index) const;
};
using Arrays = std::vector<Array>;

/// Copies a tensor to an array.
Array array_of(const Tensor& tensor);
/// Returns an array whose element at `index` is element(index). Calls `element` in row-major order.
Array build(const Shape& shape, const std::function<double(const Dims& index)>& element);
/// Returns the same elements in another shape.
Array reshaped(const Array& x, const Shape& shape);
/// Returns the element at `index` of `x` after broadcasting x to a larger shape.
double broadcast(const Array& x, const Dims& index);
/// Applies f to all elements.
Array map(const Array& x, double (*f)(double));
/// Applies f to all pairs of elements after broadcasting.
Array map(const Array& x, const Array& y, const std::function<double(double, double)>& f);
/// Applies f to each list of elements along `axes`, or to all elements if `axes` is empty.
Array reduce(const Array& x, const Dims& axes, bool keepdim,
             const std::function<double(const std::vector<double>&)>& f);

double sum(const std::vector<double>& values);
double mean(const std::vector<double>& values);

Array matmul(const Array& a, const Array& b);
Array softmax(const Array& x, int64_t axis, bool logarithm);

/// Convolutions with one to three spatial axes. `bias` may be null. The options always have three axes.
Array conv(const Array& x, const Array& w, const Array* bias, const ConvOptions<3>& options);
Array conv_transpose(const Array& x, const Array& w, const Array* bias, const ConvTransposeOptions<3>& options);

/// `weight` and `bias` may be null. layer_norm normalizes the last `axes` axes.
Array group_norm(const Array& x, int64_t groups, const Array* weight, const Array* bias, double eps);
Array layer_norm(const Array& x, int64_t axes, const Array* weight, const Array* bias, double eps);

/// max_pool returns the maxima, or their row-major positions within (D, H, W) if `indices` is true.
Array max_pool(const Array& x, const MaxPoolOptions<3>& options, bool indices);

Array avg_pool(const Array& x, const AvgPoolOptions<3>& options);
Array interpolate(const Array& x, const InterpolateOptions& options);

}  // namespace voxgrad::reference
