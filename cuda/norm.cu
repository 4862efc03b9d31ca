// Group normalisation: mean and variance of every group, then the normalised values.
//
// A group may be a whole volume, so several blocks share it: each makes the moments of a range, and the ranges are
// joined by Chan, Golub and LeVeque's update ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979) in a fixed order. The number of ranges follows from the shape alone. The sums of a range run in
// double about its first element: no difference of large squares anywhere.
#include <cmath>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {

struct Moments {
  double count, mean, squares;  // squares: the sum of squared deviations
};

__device__ Moments join(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  if (b.count == 0) return a;
  const double delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

template <class T, bool kDense>
__global__ void __launch_bounds__(kBlock)
    moments_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Volume x, Moments* partial) {
  __shared__ double2 shared[kBlock];
  for (int64_t block = blockIdx.x; block < shape.blocks(); block += gridDim.x) {
    const int64_t group = quotient(block, shape.ranges), begin = (block - group * shape.ranges) * shape.range;
    const int64_t count = min(shape.range, shape.elements() - begin);
    double pivot = 0;
    double2 sums{0, 0};  // of deviations from the pivot, and of their squares
    const auto take = [&](T element) {
      const double value = static_cast<double>(element) - pivot;
      sums.x += value;
      sums.y += value * value;
    };
    if constexpr (kDense) {
      const T* const data[] = {static_cast<const T*>(x.data) + group * shape.elements() + begin};
      const T first = count > 0 ? *data[0] : T(0);
      pivot = static_cast<double>(first);
      read_span<4>(data, count, first, threadIdx.x, kBlock, [&](const T(&value)[1]) { take(value[0]); });
    } else {
      const GroupWalk first(shape, block, 0);
      if (first.inside()) pivot = static_cast<double>(first.in<const T>(x));
      for (GroupWalk walk(shape, block, threadIdx.x); walk.inside(); walk.advance()) take(walk.in<const T>(x));
    }
    sums = combine_reducers(sums, BlockLayout{}, shared, add);
    if (threadIdx.x > 0) continue;
    const double elements = static_cast<double>(max(count, int64_t{0}));
    const double shift = elements > 0 ? sums.x / elements : 0;
    partial[block] = {elements, pivot + shift, sums.y - sums.x * shift};
  }
}

/// Joins the ranges of each group. `exact` keeps (mean, rstd) in double for normalize_kernel.
template <class T>
__global__ void __launch_bounds__(kBlock)
    statistics_kernel(const __grid_constant__ Groups shape, const Moments* partial, Matrix mean, Matrix rstd,
                      double2* exact, double eps) {
  __shared__ Moments shared[kBlock];
  for (int64_t group = blockIdx.x; group < shape.samples * shape.groups; group += gridDim.x) {
    Moments moments{0, 0, 0};
    for (int64_t range = threadIdx.x; range < shape.ranges; range += kBlock)
      moments = join(moments, partial[group * shape.ranges + range]);
    moments = combine_reducers(moments, BlockLayout{}, shared, join);
    if (threadIdx.x > 0) continue;
    // A sum of squares about a pivot may round to a little below zero.
    const double variance = fmax(moments.squares, 0.0) / fmax(moments.count, 1.0);
    const double scale = moments.squares == moments.squares ? 1 / sqrt(variance + eps) : moments.squares;
    exact[group] = {moments.mean, scale};
    mean.at<T>(group / shape.groups, group % shape.groups) = static_cast<T>(moments.mean);
    rstd.at<T>(group / shape.groups, group % shape.groups) = static_cast<T>(scale);
  }
}

/// y = (x - mean) * rstd * gamma + beta.
template <class T>
struct Normalize {
  const double2* exact;
  PerChannel gamma, beta;

  // The mean in two parts: subtracting it costs no accuracy even where it is large beside the deviations.
  struct Group {
    T high, low;
    double scale;
  };
  struct Channel {
    T factor, term;
  };
  __device__ Group group(const Groups&, int64_t number) const {
    const double mean = exact[number].x;
    const T high = static_cast<T>(mean);
    return {high, static_cast<T>(mean - static_cast<double>(high)), exact[number].y};
  }
  __device__ Channel channel(const Group& group, int64_t c) const {
    return {static_cast<T>(group.scale * static_cast<double>(gamma.at<T>(c, T(1)))), beta.at<T>(c, T(0))};
  }
  __device__ T operator()(const Group& group, const Channel& channel, T x) const {
    return ((x - group.high) - group.low) * channel.factor + channel.term;
  }
};

template <class T>
void forward(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
             double eps, const Launch& launch) {
  const Groups shape(x, mean.size[1]);
  const int64_t groups = shape.samples * shape.groups;
  const Workspace partial(launch, static_cast<size_t>(shape.blocks()) * sizeof(Moments));
  const Workspace exact(launch, static_cast<size_t>(groups) * sizeof(double2));
  const auto moments = are_dense<T>(x) ? moments_kernel<T, true> : moments_kernel<T, false>;
  moments<<<grid_size(shape.blocks(), 1), kBlock, 0, launch.stream>>>(shape, Volume(x), partial.as<Moments>());
  check_launch("group_norm");
  statistics_kernel<T><<<grid_size(groups, 1), kBlock, 0, launch.stream>>>(shape, partial.as<Moments>(), Matrix(mean),
                                                                           Matrix(rstd), exact.as<double2>(), eps);
  check_launch("group_norm");
  const Normalize<T> formula{exact.as<double2>(), PerChannel(gamma), PerChannel(beta)};
  apply_formula<T>("group_norm", shape, formula, launch, y, x);
}

}  // namespace

namespace kernel {

void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps) {
  if (x.size[1] == 0 || mean.numel() == 0) return;
  const Launch launch(x);
  dispatch(WideFloats(), x.dtype, "group_norm", "CUDA",
                          [&]<class T>() { forward<T>(y, mean, rstd, x, gamma, beta, eps, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
