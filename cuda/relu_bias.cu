// The gradients of y = relu(z + bias) with respect to z and the bias, in one pass.
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/norm_sums.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda {
namespace {

/// Computes dz, an element of the gradient, from elements of dy and y.
template <class T>
struct ReluGradient {
  struct Channel {};
  __device__ Channel channel(int64_t, int64_t, int64_t) const { return {}; }
  __device__ T operator()(const Channel&, Run<T>&, const compute_t<T> (&x)[2]) const {
    return convert<T>(apply<BinaryOp::relu_grad>(x[0], x[1], compute_t<T>(0), compute_t<T>(0)));
  }
};

}  // namespace

void kernel::relu_bias_backward(const View& dz, const View& dbias, const View& dy, const View& y) {
  if (y.size[1] == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), y.dtype, "relu_bias_backward", [&]<class T>() {
    apply_with_sums<T>("relu_bias_backward", Groups(y, 1), ReluGradient<T>{}, launch, dz, dbias, dy, y);
  });
}

}  // namespace voxgrad::cuda
