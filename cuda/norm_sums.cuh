// Sums over samples and positions: the gradients of the parameters of a normalization, and the gradient of a bias. The
// bias was added to the input, so that its gradient is summed in the pass that computes the gradient of the input.
#pragma once

#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {  // several files instantiate kernels of the same name

/// The formula `Gradient`, and the sums of its rounded results.
template <class T, ElementFormula<T, 2> Gradient>
struct SummedGradient {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = true, kSums = true, kScalar = kHasScalar<Gradient>;
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

/// Computes dbeta[c] = the sum over the samples of total.x, and dgamma[c] = the sum of total.y times the rstd of the
/// channel's group. `total` has a pair of sums for every (sample, channel). Launch: one thread per channel in a 1-D
/// grid of any size, kBlock threads per CTA. No shared memory.
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

/// Launches parameter_gradients_kernel unless both outputs are null.
template <class T>
void parameter_gradients(const char* op, const Groups& shape, const double2* total, const Matrix& rstd,
                         const View* dgamma, const View* dbeta, const Launch& launch) {
  if (!dgamma && !dbeta) return;
  parameter_gradients_kernel<T><<<grid_size(shape.channels), kBlock, 0, launch.stream>>>(
      shape, total, rstd, PerChannel(dgamma), PerChannel(dbeta));
  check_launch(op);
}

/// Computes dx = gradient(dy, x), and sums (C) = the sums of dx over samples and positions.
template <class T, ElementFormula<T, 2> Gradient>
void apply_with_sums(const char* op, const Groups& shape, const Gradient& gradient, const Launch& launch,
                     const View& dx, const View& sums, const View& dy, const View& x) {
  const Workspace total(launch, static_cast<size_t>(shape.lines()) * sizeof(double2));
  apply_formula<T>(op, SummedGradient<T, Gradient>{gradient}, launch, total.as<double2>(), &dx, dy, x);
  parameter_gradients<T>(op, shape, total.as<double2>(), {}, nullptr, &sums, launch);
}

}  // namespace
}  // namespace voxgrad::cuda
