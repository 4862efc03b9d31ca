// prelu, of operators that there are: what is saved for its gradient is no larger than theirs.
#include <limits>

#include "ops/autocast.h"
#include "ops/checks.h"
#include "ops/elementwise.h"
#include "ops/shape.h"

namespace voxgrad {

Tensor prelu(const Tensor& given, const Tensor& given_weight) {
  const Tensor x = autocasted("prelu", given), weight = autocasted("prelu", given_weight);
  check_defined("prelu", "input", x);
  check_defined("prelu", "weight", weight);
  check_same_kind("prelu", {{"input", x}, {"weight", weight}});
  check_floating("prelu", x);
  const int64_t channels = x.dim() > 1 ? x.shape()[1] : 1;
  check(weight.numel() == 1 || (weight.dim() == 1 && weight.numel() == channels), "prelu",
        "weight must have 1 element or one for each of the ", channels, " channels, got ", weight.shape());
  Shape shape = Dims::filled(x.dim(), 1);
  if (weight.numel() > 1) shape[1] = channels;
  // clamp keeps infinities of x out of the gradient of the weight.
  const Tensor negative = clamp(x, -std::numeric_limits<double>::infinity(), 0);
  return where(gt(x, 0.0), x, negative * reshape(weight, shape));
}

}  // namespace voxgrad
