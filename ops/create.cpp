// Creation of tensors.
#include "ops/create.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "ops/detail/common.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad {

namespace {

/// Creates a tensor and calls write(view) to fill it. Error messages about the shape begin with `op`.
template <class F>
Tensor make(const char* op, const Shape& shape, TensorOptions options, F&& write) {
  numel(shape, op);
  const bool requires_grad = std::exchange(options.requires_grad, false);
  Tensor out = empty(shape, options);
  write(out.view_out());
  if (requires_grad) out.requires_grad_();
  return out;
}

Tensor constant(const char* op, const Shape& shape, double value, TensorOptions options) {
  check_fits(op, value, options.dtype);
  return make(op, shape, options, [&](const View& out) { kernels(options.device).fill(out, value); });
}

Tensor constant_like(const char* op, const Tensor& like, double value) {
  check_defined(op, "the tensor", like);
  check_fits(op, value, like.dtype());
  Tensor out = empty_like(like);
  kernels(out.device()).fill(out.view_out(), value);
  return out;
}

Tensor ramp(const char* op, double start, double step, double count, TensorOptions options) {
  check(count < 0x1p63, op, "too many elements");
  check_fits(op, start, options.dtype);
  if (count > 0) check_fits(op, arange_value(start, step, static_cast<int64_t>(count) - 1), options.dtype);
  return make(op, {static_cast<int64_t>(count)}, options,
              [&](const View& out) { kernels(options.device).arange(out, start, step); });
}

using RandomKernel = void (*Kernels::*)(const View&, GeneratorState);

Tensor draw(const char* op, RandomKernel kernel, const Shape& shape, TensorOptions options, Generator* generator) {
  check(is_floating(options.dtype), op, "needs a floating-point dtype, got ", options.dtype);
  Generator& source = generator ? *generator : default_generator();
  return make(op, shape, options, [&](const View& out) {
    (kernels(options.device).*kernel)(out, source.reserve(out.numel(), options.dtype));
  });
}

/// Calls draw() with the shape and options of `like`, and returns the numbers in the memory layout of `like`.
Tensor draw_like(const char* op, RandomKernel kernel, const Tensor& like, Generator* generator) {
  check_defined(op, "the tensor", like);
  const Tensor drawn = draw(op, kernel, like.shape(), like.options(), generator);
  return empty_like_strides(like) == drawn.strides() ? drawn : empty_like(like).copy_(drawn);
}

}  // namespace

Tensor full(const Shape& shape, double value, TensorOptions options) { return constant("full", shape, value, options); }
Tensor zeros(const Shape& shape, TensorOptions options) { return constant("zeros", shape, 0, options); }
Tensor ones(const Shape& shape, TensorOptions options) { return constant("ones", shape, 1, options); }

Tensor full_like(const Tensor& like, double value) { return constant_like("full_like", like, value); }
Tensor zeros_like(const Tensor& like) { return constant_like("zeros_like", like, 0); }
Tensor ones_like(const Tensor& like) { return constant_like("ones_like", like, 1); }

Tensor arange(double start, double end, double step, TensorOptions options) {
  check_finite("arange", "start", start);
  check_finite("arange", "end", end);
  check(std::isfinite(step) && step != 0, "arange", "step must be finite and not zero, got ", step);
  check(start == end || (start < end) == (step > 0), "arange", "step ", step, " does not lead from ", start, " to ",
        end);
  return ramp("arange", start, step, std::ceil((end - start) / step), options);
}

Tensor linspace(double start, double end, int64_t count, TensorOptions options) {
  check_finite("linspace", "start", start);
  check_finite("linspace", "end", end);
  check(std::isfinite(end - start), "linspace", "the distance from ", start, " to ", end, " overflows");
  check(count >= 0, "linspace", "count must not be negative, got ", count);
  check(is_floating(options.dtype), "linspace", "needs a floating-point dtype, got ", options.dtype);
  const double step = count > 1 ? (end - start) / static_cast<double>(count - 1) : 0;
  return ramp("linspace", start, step, static_cast<double>(count), options);
}

Tensor rand(const Shape& shape, TensorOptions options, Generator* generator) {
  return draw("rand", &Kernels::uniform, shape, options, generator);
}
Tensor randn(const Shape& shape, TensorOptions options, Generator* generator) {
  return draw("randn", &Kernels::normal, shape, options, generator);
}
Tensor rand_like(const Tensor& like, Generator* generator) {
  return draw_like("rand_like", &Kernels::uniform, like, generator);
}
Tensor randn_like(const Tensor& like, Generator* generator) {
  return draw_like("randn_like", &Kernels::normal, like, generator);
}

Tensor randperm(int64_t n, Generator* generator) {
  check(n >= 0, "randperm", "n must not be negative, got ", n);
  Generator& source = generator ? *generator : default_generator();
  Tensor out = empty({n}, {.dtype = i64});
  int64_t* order = out.mutable_data<int64_t>();
  for (int64_t i = 0; i < n; ++i) {  // inside-out Fisher-Yates shuffle
    const int64_t j = source.next_below(i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  return out;
}

template <class T>
Tensor from_span(std::span<const T> values, const Shape& shape, Device device) {
  check(static_cast<int64_t>(values.size()) == numel(shape, "from_span"), "from_span", "shape ", shape,
        " does not match the number of values, ", values.size());
  Tensor out = empty(shape, {.dtype = dtype_of<T>});
  if (!values.empty()) std::memcpy(out.mutable_raw_data(), values.data(), values.size_bytes());
  return out.to(device);
}
template Tensor from_span(std::span<const float>, const Shape&, Device);
template Tensor from_span(std::span<const double>, const Shape&, Device);
template Tensor from_span(std::span<const int64_t>, const Shape&, Device);
template Tensor from_span(std::span<const int32_t>, const Shape&, Device);
template Tensor from_span(std::span<const uint8_t>, const Shape&, Device);
template Tensor from_span(std::span<const bool>, const Shape&, Device);

Shape NestedList::shape() const {
  if (leaf_) return {};
  Shape shape{static_cast<int64_t>(children_.size())};
  if (children_.empty()) return shape;
  const Shape inner = children_[0].shape();
  for (const NestedList& child : children_)
    check(child.shape() == inner, "tensor", "the list is ragged: it contains parts of shape ", inner, " and ",
          child.shape());
  for (int64_t size : inner) shape.push_back(size);
  return shape;
}

void NestedList::collect(std::vector<double>& values) const {
  if (leaf_) values.push_back(value_);
  for (const NestedList& child : children_) child.collect(values);
}

Tensor tensor(const NestedList& list, TensorOptions options) {
  const bool requires_grad = std::exchange(options.requires_grad, false);
  std::vector<double> values;
  const Shape shape = list.shape();
  list.collect(values);
  for (double value : values) check_fits("tensor", value, options.dtype);
  Tensor out = from_span<double>(values, shape).to(options.device, options.dtype);
  if (requires_grad) out.requires_grad_();
  return out;
}

}  // namespace voxgrad
