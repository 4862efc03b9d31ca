// The gradients of y = relu(z + bias) in z and in the bias, in one pass.
#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/relu_before.cuh"

namespace voxgrad::cuda {
namespace {

/// The gradient in y, as it is.
template <class T>
struct Unchanged {
  struct Group {};
  struct Channel {};
  __device__ Group group(const Groups&, int64_t) const { return {}; }
  __device__ Channel channel(const Group&, int64_t) const { return {}; }
  __device__ T operator()(const Group&, const Channel&, T dy, T) const { return dy; }
};

}  // namespace

void kernel::relu_bias_backward(const View& dz, const View& dbias, const View& dy, const View& y) {
  if (y.size[1] == 0) return;
  const Launch launch(y);
  dispatch(WideFloats(), y.dtype, "relu_bias_backward", "CUDA", [&]<class T>() {
    const Groups shape(y, 1);
    apply_through_relu<T>("relu_bias_backward", shape, ChannelSums(shape), Unchanged<T>{}, launch, dz, &dbias, dy, y);
  });
}

}  // namespace voxgrad::cuda
