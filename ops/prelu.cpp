// The operator prelu. One kernel computes the result, and another kernel computes the gradients. If the gradients are
// differentiated again, they are composed of differentiable operators instead.
#include <limits>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/autocast.h"
#include "ops/detail/checks.h"
#include "ops/detail/halves.h"
#include "ops/detail/kernels.h"
#include "ops/detail/unrecorded.h"
#include "ops/detail/volume.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

/// Returns the weight expanded to (C), one element per channel of x.
Tensor by_channels(const Tensor& weight, const Tensor& x) {
  return expand(reshape(weight, {weight.numel()}), {x.size(1)});
}

/// Computes the gradients of x and of the expanded weight (C) with one kernel.
Tensors gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  const Tensor dy = grad.contiguous(x.suggest_memory_format());
  Tensors grads{empty_like(x), empty({x.size(1)}, {widened(x.dtype()), x.device()})};
  kernels(x.device())
      .prelu_backward(as_rows(x, grads[0].view_out()), grads[1].view_out(), as_rows(x, dy.view_in()),
                      as_rows(x, x.view_in()), by_channels(weight, x).view_in());
  return grads;
}

/// Computes the same gradients with differentiable operators.
Tensors composed_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  Shape shape = Dims::filled(x.dim(), 1);
  shape[1] = weight.numel();
  // Clamp x instead of multiplying it by a mask: infinity * 0 would make the gradient of the weight NaN.
  const Tensor negative = clamp(x, -std::numeric_limits<double>::infinity(), 0);
  return {where(gt(x, 0.0), grad, grad * reshape(weight, shape)), sum(grad * negative, all_but_channels(x))};
}

}  // namespace

Tensor prelu(const Tensor& given, const Tensor& given_weight) {
  const Tensor x = autocasted("prelu", given), weight = autocasted("prelu", given_weight);
  check_defined("prelu", "input", x, "weight", weight);
  check_same_kind("prelu", {{"input", x}, {"weight", weight}});
  check_floating("prelu", x);
  const int64_t channels = x.dim() > 1 ? x.shape()[1] : 1;
  check(weight.numel() == 1 || (weight.dim() == 1 && weight.numel() == channels), "prelu",
        "weight must have one element or one per channel (C is ", channels, "), got ", weight.shape());
  // Treat (N, C) as one channels-last sample with N positions, so that the kernel can split the positions among
  // threads.
  if (x.dim() == 2) return transpose(squeeze(prelu(unsqueeze(transpose(x, 0, 1), 0), weight), 0), 0, 1);
  if (x.dim() < 2) return reshape(prelu(reshape(x, {1, 1, x.numel()}), weight), x.shape());
  const Tensor dense = is_dense_volume(x) ? x : x.contiguous(x.suggest_memory_format());
  const Tensor y = empty_like(dense);
  kernels(x.device())
      .prelu(as_rows(dense, y.view_out()), as_rows(dense, dense.view_in()), by_channels(weight, dense).view_in());
  return record("prelu", y, {dense, weight}, [x = Saved(dense), weight = Saved(weight)](const Tensor& grad) {
    Tensors grads = (grad_enabled() ? composed_gradients : gradients)(grad, x(), weight());
    const Tensor weight_grad = weight().numel() == 1 ? sum(grads[1]) : grads[1];
    grads[1] = reshape(weight_grad, weight().shape()).to(weight().dtype());
    return grads;
  });
}

}  // namespace voxgrad
