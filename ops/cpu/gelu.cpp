// The backward pass of GELU.
#include "ops/cpu/slabs.h"

namespace voxgrad::cpu {

void gelu_backward(const View& y, const View& dx, const View& sums, const View& dy, const View& x) {
  unary(UnaryOp::gelu, y, x, 0, 0);
  binary(BinaryOp::gelu_grad, dx, dy, x, 0, 0);
  sum_channels(Slabs(dx), sums, dx);
}

}  // namespace voxgrad::cpu
