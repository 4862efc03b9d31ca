// softmax and log_softmax along one axis.
#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/elementwise.h"
#include "ops/kernels.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

Tensor run(const char* op, const Tensor& x, int64_t axis, bool logarithm) {
  check_defined(op, "input", x);
  check_floating(op, x);
  axis = normalize_axis(axis, x.dim(), op);
  if (x.dim() == 0) return squeeze(run(op, unsqueeze(x, 0), 0, logarithm), 0);
  const Tensor y = empty_like(x);
  kernels(x.device()).softmax(y.view_out(), x.view_in(), static_cast<int>(axis), logarithm);
  return record(op, y, {x}, [axis, logarithm](const Tensor& grad, const Tensor& output) {
    const Dims axes{axis};
    if (logarithm) return Tensors{grad - exp(output) * sum(grad, axes, true)};
    return Tensors{output * (grad - sum(grad * output, axes, true))};
  });
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t axis) { return run("softmax", x, axis, false); }
Tensor log_softmax(const Tensor& x, int64_t axis) { return run("log_softmax", x, axis, true); }

}  // namespace voxgrad
