// What is summed over samples too: the gradients in the parameters, and, in the pass that makes an input's gradient,
// that in a bias which was added to make the input.
#pragma once

#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {  // kernels of one name in two files

/// A gradient, and its sums as it is rounded.
template <class T, class Gradient>
struct Summed {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = true, kSums = true, kWalks = may_walk<Gradient>();
  using Channel = typename Gradient::Channel;
  using Wide = compute_t<T>;

  Gradient gradient;

  __device__ Channel channel(int64_t n, int64_t c, int64_t l) const { return gradient.channel(n, c, l); }
  __device__ T operator()(const Channel& channel, Run<T>& run, const Wide (&x)[2]) const {
    const T dx = gradient(channel, run, x);
    run.x += convert<typename Run<T>::Sum>(dx);
    return dx;
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

/// dx = gradient(dy, x), sums (C) = its sums over samples and positions.
template <class T, class Gradient>
void apply_with_sums(const char* op, const Groups& shape, const Gradient& gradient, const Launch& launch,
                     const View& dx, const View& sums, const View& dy, const View& x) {
  const Workspace total(launch, static_cast<size_t>(shape.lines()) * sizeof(double2));
  apply_formula<T>(op, Summed<T, Gradient>{gradient}, launch, total.as<double2>(), &dx, dy, x);
  parameter_gradients<T>(op, shape, total.as<double2>(), {}, nullptr, &sums, launch);
}

}  // namespace
}  // namespace voxgrad::cuda
