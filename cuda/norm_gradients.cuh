// The kernel that adds the sums of gradients, which apply_formula() returned, for each group and each channel. It
// computes the gradients of parameters of normalizations and prelu.
#pragma once

#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {  // several .cu files instantiate kernels with the same names

/// With u and v as in Normalization (norm_shapes.cuh), let g be the gradient of u, and xhat = (v - mean) * rstd.
/// Returns the sum of g * xhat. `sums` are the sums of g and of g * (v - m), where m is the mean rounded to
/// compute_t<T>. `group` is (mean, rstd).
template <class T>
__device__ double sum_of_products(const double2& sums, const double2& group) {
  return (sums.y - rest_of<T>(group.x) * sums.x) * group.y;
}

/// The results of sum_gradients_kernel, all optional.
struct SummedGradients {
  double2* group_means = nullptr;  ///< for each group, the mean of h = gamma * g and the mean of h * xhat
  PerChannel dgamma{nullptr};      ///< the sums of g * xhat
  PerChannel dbeta{nullptr};       ///< the sums of g
  PerChannel zeros{nullptr};       ///< zeros

  VG_HOST_DEVICE int64_t channels(const Groups& shape) const {
    return dgamma.data || dbeta.data || zeros.data ? shape.channels : 0;
  }
  VG_HOST_DEVICE int64_t groups(const Groups& shape) const { return group_means ? shape.count() : 0; }
};

/// Adds the sums of g and of g * (v - m) of all ranges, for each group and then for each channel. `statistics` may be
/// null if only dbeta is computed. Launch: one CTA per layout.columns groups or channels in a 1-D grid-stride loop,
/// kBlock threads per CTA. Static shared memory: kBlock pairs of sums.
template <class T>
__global__ void __launch_bounds__(kBlock)
    sum_gradients_kernel(const __grid_constant__ Groups shape, const BlockLayout layout, const RangeSums sums,
                         const double2* statistics, PerChannel gamma, const __grid_constant__ SummedGradients to) {
  wait_for_previous_kernels();
  __shared__ double2 shared[kBlock];
  const int64_t groups = to.groups(shape), all = groups + to.channels(shape);
  for (int64_t tile = blockIdx.x; tile * layout.columns < all; tile += gridDim.x) {
    const int64_t number = tile * layout.columns + layout.column();
    const bool of_group = number < groups;
    const int64_t lines = number >= all ? 0 : of_group ? shape.group_lines() : shape.samples;
    double2 sum{0, 0};
    for (int64_t i = layout.reducer(); i < lines * sums.ranges; i += layout.reducers) {
      const int64_t of_line = quotient(i, sums.ranges), range = i - of_line * sums.ranges;
      const int64_t line = of_group ? shape.line(number, of_line) : of_line * shape.channels + number - groups;
      const int64_t n = quotient(line, shape.channels), c = line - n * shape.channels;
      const double2 own = sums.at(line, range);
      const double weight = of_group ? gamma.at<T>(c, 1) : 1;
      const double products = statistics ? sum_of_products<T>(own, statistics[shape.number(n, c)]) : 0;
      sum = add(sum, {weight * own.x, weight * products});
    }
    sum = combine_reducers(sum, layout, shared, add);
    if (number >= all || layout.reducer() > 0) continue;
    if (of_group) {
      const double count = fmax(static_cast<double>(shape.group_lines() * shape.length), 1.0);
      to.group_means[number] = {sum.x / count, sum.y / count};
    } else {
      to.dgamma.set<T>(number - groups, sum.y);
      to.dbeta.set<T>(number - groups, sum.x);
      to.zeros.set<T>(number - groups, 0);
    }
  }
}

/// Launches sum_gradients_kernel unless there are no results.
template <class T>
void sum_gradients(const char* op, const Groups& shape, const RangeSums& sums, const double2* statistics,
                   const PerChannel& gamma, const SummedGradients& to, const Launch& launch) {
  const int64_t all = to.groups(shape) + to.channels(shape);
  if (all == 0) return;
  const int64_t lines = std::max(to.group_means ? shape.group_lines() : 0, shape.samples);
  const BlockLayout layout = layout_of_sums(lines * sums.ranges);
  launch_kernel(op, sum_gradients_kernel<T>, grid_size(all, layout.columns), kBlock, 0, launch.stream, shape, layout,
                sums, statistics, gamma, to);
}

}  // namespace
}  // namespace voxgrad::cuda
