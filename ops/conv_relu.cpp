#include "ops/conv_relu.h"

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/kernels.h"
#include "ops/norm.h"
#include "ops/rectified.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/volume.h"

namespace voxgrad {
namespace {

/// One pass makes both gradients.
Tensors fused_gradients(const Tensor& grad, const Tensor& y) {
  const Tensor dy = grad.contiguous(y.suggest_memory_format());
  Tensors grads{empty_like(y), empty({y.size(1)}, y.options())};
  kernels(y.device())
      .relu_bias_backward(as_rows(y, grads[0].view_out()), grads[1].view_out(), as_rows(y, dy.view_in()),
                          as_rows(y, y.view_in()));
  return grads;
}

Tensor gradient_of_relu(const Tensor& grad, const Tensor& y) {
  Tensor dz = empty_like(y);
  kernels(y.device()).binary(BinaryOp::relu_grad, dz.view_out(), grad.view_in(), y.view_in(), 0, 0);
  return dz;
}

template <int N>
Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions<N>& options) {
  if constexpr (N == 1) return conv1d(x, weight, bias, options);
  if constexpr (N == 2) return conv2d(x, weight, bias, options);
  if constexpr (N == 3) return conv3d(x, weight, bias, options);
}
template <int N>
Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvTransposeOptions<N>& options) {
  if constexpr (N == 1) return conv_transpose1d(x, weight, bias, options);
  if constexpr (N == 2) return conv_transpose2d(x, weight, bias, options);
  if constexpr (N == 3) return conv_transpose3d(x, weight, bias, options);
}

template <class Options>
constexpr int64_t kAxes = static_cast<int64_t>(std::tuple_size_v<decltype(Options::stride.values)>);

/// Whether the fused kernels take it: a batch of floats.
template <class Options>
bool fuses(const Tensor& x) {
  return x.defined() && x.dim() == kAxes<Options> + 2 && is_floating(x.dtype());
}

}  // namespace

Tensors relu_gradients(const Tensor& grad, const Tensor& y, bool bias_wanted) {
  const Tensor dz = where(le(y, 0), full({}, 0, y.options()), grad);
  if (!bias_wanted) return {dz, Tensor()};
  Dims axes{0};
  for (int64_t axis = 2; axis < y.dim(); ++axis) axes.push_back(axis);
  return {dz, sum(dz, axes)};
}

Tensor record_relu(const Tensor& rectified, const Tensor& bias) {
  return record("relu", rectified.detach(), {rectified, bias},
                [y = Saved(rectified), with_bias = wants_grad(bias)](const Tensor& grad) -> Tensors {
                  if (grad_enabled() || (with_bias && !is_dense_volume(y())))
                    return relu_gradients(grad, y(), with_bias);
                  if (with_bias) return fused_gradients(grad, y());
                  return {gradient_of_relu(grad, y()), Tensor()};
                });
}

template <class Options>
Tensor conv_relu(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options) {
  if (!fuses<Options>(x)) return relu(conv(x, weight, bias, options));
  return record_relu(rectified_conv(x, weight, bias, options), bias);
}

template <class Options>
Tensor conv_relu_group_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const GroupNormArguments& norm) {
  if (!fuses<Options>(x))
    return group_norm(relu(conv(x, weight, bias, options)), norm.num_groups, norm.weight, norm.bias, norm.eps);
  return record_relu_group_norm(rectified_conv(x, weight, bias, options), bias, norm.num_groups, norm.weight, norm.bias,
                                norm.eps);
}

Tensor relu_group_norm(const Tensor& x, const GroupNormArguments& norm) {
  Tensor values;
  {
    NoGradGuard no_grad;
    values = relu(x);
  }
  const Tensor rectified = record("rectified", values, {x}, [](const Tensor& grad) { return Tensors{grad}; });
  return record_relu_group_norm(rectified, {}, norm.num_groups, norm.weight, norm.bias, norm.eps);
}

#define VG_INSTANTIATE(Options)                                                                     \
  template Tensor conv_relu(const Tensor&, const Tensor&, const Tensor&, const Options&);           \
  template Tensor conv_relu_group_norm(const Tensor&, const Tensor&, const Tensor&, const Options&, \
                                       const GroupNormArguments&);
VG_INSTANTIATE(ConvOptions<1>)
VG_INSTANTIATE(ConvOptions<2>)
VG_INSTANTIATE(ConvOptions<3>)
VG_INSTANTIATE(ConvTransposeOptions<1>)
VG_INSTANTIATE(ConvTransposeOptions<2>)
VG_INSTANTIATE(ConvTransposeOptions<3>)
#undef VG_INSTANTIATE

}  // namespace voxgrad
