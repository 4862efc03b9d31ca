// What the operators should compute, in plain loops over doubles: written for being seen to be right, and from
// the definitions, not from the kernels (a transposed convolution scatters where the kernels gather).
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
  size_t position(const Dims& index) const;
};
using Arrays = std::vector<Array>;

Array array_of(const Tensor& tensor);
/// The array whose element at `index` is element(index), visited in row-major order.
Array build(const Shape& shape, const std::function<double(const Dims& index)>& element);
/// The same elements in another shape.
Array reshaped(const Array& x, const Shape& shape);
/// The element of `x` that broadcasting shows at `index`.
double broadcast(const Array& x, const Dims& index);
/// f applied to all elements; to all pairs, broadcast; to the lists of elements that `axes` run through.
Array map(const Array& x, double (*f)(double));
Array map(const Array& x, const Array& y, const std::function<double(double, double)>& f);
Array reduce(const Array& x, const Dims& axes, bool keepdim,
             const std::function<double(const std::vector<double>&)>& f);

double sum(const std::vector<double>& values);
double mean(const std::vector<double>& values);

Array matmul(const Array& a, const Array& b);
Array softmax(const Array& x, int64_t axis, bool logarithm);

/// Any of one to three spatial axes; `bias` may be null. Transposed: `size` of the result is given.
Array conv(const Array& x, const Array& w, const Array* bias, const ConvOptions<3>& options);
Array conv_transpose(const Array& x, const Array& w, const Array* bias, const ConvTransposeOptions<3>& options);

Array group_norm(const Array& x, int64_t groups, const Array* weight, const Array* bias, double eps);
Array layer_norm(const Array& x, int64_t axes, const Array* weight, const Array* bias, double eps);

/// Values, or the positions of the maxima in D * H * W.
Array max_pool(const Array& x, const MaxPoolOptions<3>& options, bool indices);
Array avg_pool(const Array& x, const AvgPoolOptions<3>& options);
Array interpolate(const Array& x, const InterpolateOptions& options);

}  // namespace voxgrad::reference
