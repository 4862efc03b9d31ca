// PReLU and its gradients. The gradient of the weight is summed in the pass that computes the gradient of the input.
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/norm_gradients.cuh"

namespace voxgrad::cuda {
namespace {

/// Computes y = x where x > 0, otherwise weight * x.
template <class T>
struct PReLU {
  static constexpr FormulaTraits kTraits{.inputs = 1, .writes = true};
  using Channel = compute_t<T>;  ///< type of the slope, which channel() returns

  PerChannel weight;

  __device__ Channel channel(int64_t, int64_t c, int64_t) const { return static_cast<Channel>(weight.at<T>(c, 0)); }
  __device__ T operator()(Channel slope, Run<T>&, const Channel (&x)[1]) const {
    const Channel below = slope * x[0];
    return convert<T>(x[0] > 0 ? x[0] : below);
  }
};

/// Computes dx from dy and x, and sums dy * x where x is not positive.
template <class T>
struct PReLUGradients {
  static constexpr FormulaTraits kTraits{.inputs = 2, .writes = true, .sums = true};
  using Channel = compute_t<T>;

  PerChannel weight;

  __device__ Channel channel(int64_t, int64_t c, int64_t) const { return static_cast<Channel>(weight.at<T>(c, 0)); }
  __device__ T operator()(Channel slope, Run<T>& run, const Channel (&x)[2]) const {
    using Sum = typename Run<T>::Sum;
    const Channel below = slope * x[0];
    const Sum term = static_cast<Sum>(x[0]) * static_cast<Sum>(x[1]);
    const bool is_above = x[1] > 0;
    run.x += is_above ? Sum(0) : term;
    return convert<T>(is_above ? x[0] : below);
  }
};

}  // namespace

namespace kernel {

void prelu(const View& y, const View& x, const View& weight) {
  if (x.numel() == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, "prelu",
                [&]<class T>() { apply_formula<T>("prelu", PReLU<T>{PerChannel(&weight)}, launch, nullptr, &y, x); });
}

void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, "prelu_backward", [&]<class T>() {
    const Groups shape(x, 1);
    std::optional<Workspace> memory;
    const RangeSums sums =
        apply_formula<T>("prelu_backward", PReLUGradients<T>{PerChannel(&weight)}, launch, &memory, &dx, dy, x);
    sum_gradients<T>("prelu_backward", shape, sums, nullptr, PerChannel(nullptr), {.dbeta = PerChannel(&dweight)},
                     launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
