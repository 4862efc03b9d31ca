// What is summed over samples too, the gradients in the parameters, and gradients that go on through a ReLU, to z from
// y = relu(z + bias): masked by y in the pass that makes them, which sums them for the gradient of the bias.
#pragma once

#include "cuda/norm.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda {
namespace {  // kernels of one name in two files

/// dz = relu_grad(gradient(dy, y), y), and its sums.
template <class T, class Gradient>
struct ThroughRelu {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = true, kSums = true;
  using Channel = typename Gradient::Channel;
  using Wide = compute_t<T>;

  Gradient gradient;

  __device__ Channel channel(int64_t n, int64_t c, int64_t l) const { return gradient.channel(n, c, l); }
  __device__ T operator()(const Channel& channel, Run<T>& run, const Wide (&x)[2]) const {
    const Wide dy = convert<Wide>(gradient(channel, run, x));
    const T dz = convert<T>(apply<BinaryOp::relu_grad>(dy, x[1], Wide(0), Wide(0)));
    run.x += convert<typename Run<T>::Sum>(dz);
    return dz;
  }
};

/// dbeta[c] and dgamma[c], where there are such: sums over the samples of total.x, and of total.y times the rstd of the
/// channel's group.
template <class T>
__global__ void __launch_bounds__(kBlock)
    parameter_gradients_kernel(const __grid_constant__ Groups shape, const double2* total, Matrix rstd,
                               PerChannel dgamma, PerChannel dbeta) {
  for (int64_t c = thread_index(); c < shape.channels; c += thread_count()) {
    const int64_t group = shape.group(c);
    double2 sum{0, 0};
    for (int64_t n = 0; n < shape.samples; ++n) {
      const double2 sums = total[n * shape.channels + c];
      sum.x += sums.x;
      if (dgamma.data) sum.y += sums.y * static_cast<double>(rstd.at<compute_t<T>>(n, group));
    }
    dgamma.set<T>(c, sum.y);
    dbeta.set<T>(c, sum.x);
  }
}

template <class T>
void parameter_gradients(const char* op, const Groups& shape, const double2* total, const Matrix& rstd,
                         const View* dgamma, const View* dbeta, const Launch& launch) {
  if (!dgamma && !dbeta) return;
  parameter_gradients_kernel<T><<<grid_size(shape.channels), kBlock, 0, launch.stream>>>(
      shape, total, rstd, PerChannel(dgamma), PerChannel(dbeta));
  check_launch(op);
}

/// dz = relu_grad(gradient(dy, y), y), dbias (or null) = its sums over samples and positions.
template <class T, class Gradient>
void apply_through_relu(const char* op, const Groups& shape, const Gradient& gradient, const Launch& launch,
                        const View& dz, const View* dbias, const View& dy, const View& y) {
  const Workspace total(launch, dbias ? static_cast<size_t>(shape.lines()) * sizeof(double2) : 0);
  apply_formula<T>(op, ThroughRelu<T, Gradient>{gradient}, launch, dbias ? total.as<double2>() : nullptr, &dz, dy, y);
  parameter_gradients<T>(op, shape, total.as<double2>(), {}, nullptr, dbias, launch);
}

}  // namespace
}  // namespace voxgrad::cuda
