// The gradients of y = relu(z + bias) in z and in the bias, in one pass.
#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/relu_before.cuh"

namespace voxgrad::cuda {
namespace {

/// The gradient in y, as it is.
template <class T>
struct Unchanged {
  struct Channel {};
  __device__ Channel channel(int64_t, int64_t, int64_t) const { return {}; }
  __device__ T operator()(const Channel&, Run<T>&, const compute_t<T> (&x)[2]) const { return convert<T>(x[0]); }
};

}  // namespace

void kernel::relu_bias_backward(const View& dz, const View& dbias, const View& dy, const View& y) {
  if (y.size[1] == 0) return;
  const Launch launch(y);
  dispatch(Floats(), y.dtype, "relu_bias_backward", "CUDA", [&]<class T>() {
    apply_through_relu<T>("relu_bias_backward", Groups(y, 1), Unchanged<T>{}, launch, dz, &dbias, dy, y);
  });
}

}  // namespace voxgrad::cuda
