// The gradients of parameters per channel, from sums for every (sample, channel).
#pragma once

#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {  // several files instantiate kernels of the same name

/// Returns the sum of g * xhat from the sums of g and g * (v - mean) with the rounded mean. `group` is (mean, rstd).
template <class T>
__device__ double sum_of_products(const double2& sums, const double2& group) {
  return (sums.y - rest_of<T>(group.x) * sums.x) * group.y;
}

/// Computes dbeta[c] = the sum over the samples of total.x, and dgamma[c] = the sum over the samples of
/// sum_of_products(total). `total` has a pair of sums for every (sample, channel). Launch: one thread per channel in a
/// 1-D grid of any size, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock)
    parameter_gradients_kernel(const __grid_constant__ Groups shape, const double2* total, const double2* statistics,
                               PerChannel dgamma, PerChannel dbeta) {
  for (int64_t c = thread_index(); c < shape.channels; c += thread_count()) {
    double2 sum{0, 0};
    for (int64_t n = 0; n < shape.samples; ++n) {
      const double2 sums = total[n * shape.channels + c];
      sum.x += sums.x;
      if (dgamma.data) sum.y += sum_of_products<T>(sums, statistics[shape.number(n, c)]);
    }
    dgamma.set<T>(c, sum.y);
    dbeta.set<T>(c, sum.x);
  }
}

/// Launches parameter_gradients_kernel unless both outputs are null.
template <class T>
void parameter_gradients(const char* op, const Groups& shape, const double2* total, const double2* statistics,
                         const View* dgamma, const View* dbeta, const Launch& launch) {
  if (!dgamma && !dbeta) return;
  parameter_gradients_kernel<T><<<grid_size(shape.channels), kBlock, 0, launch.stream>>>(
      shape, total, statistics, PerChannel(dgamma), PerChannel(dbeta));
  check_launch(op);
}

}  // namespace
}  // namespace voxgrad::cuda
