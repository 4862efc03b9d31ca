// softmax and log_softmax along one axis.
#include "core/autograd.h"
#include "ops/detail/autocast.h"
#include "ops/detail/checks.h"
#include "ops/detail/halves.h"
#include "ops/detail/kernels.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

/// Computes log_softmax if `logarithm` is true, otherwise softmax.
Tensor run(const char* op, const Tensor& input, int64_t axis, bool logarithm) {
  const Tensor x = autocasted(op, input);
  check_floating(op, x);
  axis = normalize_axis(axis, x.dim(), op);
  if (x.dim() == 0) return squeeze(run(op, unsqueeze(x, 0), 0, logarithm), 0);
  const Tensor y = empty_like(x);
  kernels(x.device()).softmax(y.view_out(), x.view_in(), static_cast<int>(axis), logarithm);
  return record(op, y, {x}, [axis, logarithm](const Tensor& grad, const Tensor& output) {
    const Dims axes{axis};
    const Tensor g = widened(grad), out = widened(output);
    const Tensor dx = logarithm ? g - exp(out) * sum(g, axes, true) : out * (g - sum(g * out, axes, true));
    return Tensors{dx.to(grad.dtype())};
  });
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t axis) { return run("softmax", x, axis, false); }
Tensor log_softmax(const Tensor& x, int64_t axis) { return run("log_softmax", x, axis, true); }

}  // namespace voxgrad
