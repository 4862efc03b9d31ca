// Losses, composed of elementwise operators and a reduction; in float32 if the input is of halves.
#include "ops/loss.h"

#include "ops/autocast.h"
#include "ops/checks.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/halves.h"
#include "ops/index.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

/// Input and target as the loss computes with them, in float32 for halves, and the dtype of its result.
struct Pair {
  Tensor input, target;
  DType dtype;
};
Pair checked_pair(const char* op, const Tensor& given_input, const Tensor& given_target) {
  const Tensor input = autocasted(op, given_input), target = autocasted(op, given_target);
  check_defined(op, "input", input);
  check_defined(op, "target", target);
  check_floating(op, input);
  check_same_kind(op, {{"input", input}, {"target", target}});
  check(input.shape() == target.shape(), op, "input ", input.shape(), " and target ", target.shape(),
        " differ in shape");
  return {widened(input), widened(target), input.dtype()};
}

/// The losses, or their sum or mean, rounded to `dtype`.
Tensor reduced(const Tensor& losses, Reduction reduction, DType dtype) {
  if (reduction == Reduction::none) return losses.to(dtype);
  return (reduction == Reduction::sum ? sum(losses) : mean(losses)).to(dtype);
}

}  // namespace

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  const auto [x, y, dtype] = checked_pair("mse_loss", input, target);
  const Tensor difference = x - y;
  return reduced(difference * difference, reduction, dtype);
}

Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  const auto [x, y, dtype] = checked_pair("l1_loss", input, target);
  return reduced(abs(x - y), reduction, dtype);
}

Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, Reduction reduction, double beta) {
  const auto [x, y, dtype] = checked_pair("smooth_l1_loss", input, target);
  check(std::isfinite(beta) && beta >= 0, "smooth_l1_loss", "beta must be finite and not negative, got ", beta);
  if (beta == 0) return l1_loss(input, target, reduction);
  const Tensor difference = x - y;
  const Tensor distance = abs(difference);
  const Tensor near = lt(distance, beta);
  return reduced(where(near, difference * difference * (0.5 / beta), distance - 0.5 * beta), reduction, dtype);
}

Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target, Reduction reduction) {
  const auto [x, y, dtype] = checked_pair("binary_cross_entropy_with_logits", input, target);
  // -log sigmoid(x) = softplus(-x) and -log(1 - sigmoid(x)) = softplus(x): neither overflows, and as both are
  // positive their sum cancels nothing. Beyond the threshold softplus(x) is x to the last bit of a double.
  constexpr double kThreshold = 40;
  const Tensor as_one = softplus(neg(x), 1, kThreshold), as_zero = softplus(x, 1, kThreshold);
  return reduced(y * as_one + (1.0 - y) * as_zero, reduction, dtype);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, Reduction reduction) {
  constexpr const char* kOp = "cross_entropy";
  check_defined(kOp, "input", input);
  check_defined(kOp, "target", target);
  check_floating(kOp, input);
  check(input.dim() >= 2, kOp, "input must be (N, C, ...), got ", describe(input));
  check(target.dtype() == i64, kOp, "target must hold i64 class numbers, got ", describe(target));
  check(target.device() == input.device(), kOp, "tensors lie on different devices: ", describe(input), " and ",
        describe(target));
  Shape expected = input.shape();
  expected.erase(1);
  check(target.shape() == expected, kOp, "target must have shape ", expected, " for input ", input.shape(), ", got ",
        target.shape());
  if (target.device().is_cpu() && target.numel() > 0) {  // on a GPU a look would wait for it
    const auto least = amin(target).item<int64_t>(), most = amax(target).item<int64_t>();
    check(least >= 0 && most < input.size(1), kOp, "target class ", least < 0 ? least : most, " is outside [0, ",
          input.size(1), ')');
  }
  const Tensor picked = gather_as(kOp, log_softmax(widened(input), 1), 1, unsqueeze(target, 1));
  return reduced(neg(squeeze(picked, 1)), reduction, input.dtype());
}

}  // namespace voxgrad
