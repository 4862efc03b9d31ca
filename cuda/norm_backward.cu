// The gradients of group normalisation: sums over the positions of every (sample, channel), from which the parameters'
// gradients and the means over the groups follow, then the input's gradient.
#include <cmath>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/relu_before.cuh"

namespace voxgrad::cuda {
namespace {

/// Sums of (dy, dy * (x - mean)).
template <class T>
struct GradientSums {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = false, kSums = true;
  using Channel = compute_t<T>;  // the mean

  Groups shape;
  Matrix mean;

  __device__ Channel channel(int64_t n, int64_t c, int64_t) const { return mean.at<Channel>(n, shape.group(c)); }
  __device__ void operator()(Channel centre, Run<T>& run, const Channel (&x)[2]) const {
    using Sum = typename Run<T>::Sum;
    run.x += static_cast<Sum>(x[0]);
    run.y += static_cast<Sum>(x[0]) * static_cast<Sum>(x[1] - centre);
  }
};

/// group_means[sample, group] = means over the group of (h, h * n), n = (x - mean) * rstd, h = gamma * dy.
template <class T>
__global__ void __launch_bounds__(kBlock)
    group_means_kernel(const __grid_constant__ Groups shape, const BlockLayout layout, const double2* total,
                       Matrix rstd, PerChannel gamma, double2* group_means) {
  __shared__ double2 shared[kBlock];
  for (int64_t tile = blockIdx.x; tile * layout.columns < shape.count(); tile += gridDim.x) {
    const int64_t number = tile * layout.columns + layout.column();
    const bool inside = number < shape.count();
    double2 sum{0, 0};
    if (inside)
      for (int64_t i = layout.reducer(); i < shape.group_lines(); i += layout.reducers) {
        const int64_t line = shape.line(number, i);
        const double2 sums = total[line];
        const double weight = gamma.at<T>(line - quotient(line, shape.channels) * shape.channels, 1);
        sum = add(sum, {weight * sums.x, weight * sums.y});
      }
    sum = combine_reducers(sum, layout, shared, add);
    if (!inside || layout.reducer() > 0) continue;
    const int64_t n = quotient(number, shape.groups), group = number - n * shape.groups;
    const double count = fmax(static_cast<double>(shape.group_lines() * shape.length), 1.0);
    group_means[number] = {sum.x / count, sum.y * static_cast<double>(rstd.at<compute_t<T>>(n, group)) / count};
  }
}

/// dx = rstd * (h - mean(h) - n * mean(h * n)).
template <class T>
struct InputGradient {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = true, kSums = false;
  using Wide = compute_t<T>;

  Groups shape;
  Matrix mean, rstd;
  PerChannel gamma;
  const double2* group_means;

  struct Channel {
    Wide factor, centre, slope, offset;
  };
  __device__ Channel channel(int64_t n, int64_t c, int64_t) const {
    const int64_t group = shape.group(c);
    const double scale = static_cast<double>(rstd.at<Wide>(n, group));
    const double2 means = group_means[shape.number(n, c)];
    return {static_cast<Wide>(scale * gamma.at<T>(c, 1)), mean.at<Wide>(n, group),
            static_cast<Wide>(-scale * scale * means.y), static_cast<Wide>(-scale * means.x)};
  }
  __device__ T operator()(const Channel& channel, Run<T>&, const Wide (&x)[2]) const {
    return convert<T>(x[0] * channel.factor + ((x[1] - channel.centre) * channel.slope + channel.offset));
  }
};

template <class T>
void backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x, const View& mean,
              const View& rstd, const View* gamma, const ReluBefore& before, const Launch& launch) {
  constexpr const char* kOp = "group_norm_backward";
  const Groups shape(x, mean);
  const Workspace total(launch, static_cast<size_t>(shape.lines()) * sizeof(double2));
  const Workspace group_means(launch, static_cast<size_t>(shape.count()) * sizeof(double2));
  apply_formula<T>(kOp, GradientSums<T>{shape, Matrix(mean)}, launch, total.as<double2>(), nullptr, dy, x);
  const BlockLayout layout = BlockLayout::choose(shape.group_lines(), false);
  group_means_kernel<T><<<grid_size(shape.count(), layout.columns), kBlock, 0, launch.stream>>>(
      shape, layout, total.as<double2>(), Matrix(rstd), PerChannel(gamma), group_means.as<double2>());
  check_launch(kOp);
  parameter_gradients<T>(kOp, shape, total.as<double2>(), Matrix(rstd), dgamma, dbeta, launch);
  const InputGradient<T> formula{shape, Matrix(mean), Matrix(rstd), PerChannel(gamma), group_means.as<double2>()};
  if (before.relu)
    apply_through_relu<T>(kOp, shape, formula, launch, dx, before.dbias, dy, x);
  else
    apply_formula<T>(kOp, formula, launch, nullptr, &dx, dy, x);
}

}  // namespace

namespace kernel {

void group_norm_backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x,
                         const View& mean, const View& rstd, const View* gamma, const ReluBefore& before) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  dispatch(Floats(), x.dtype, "group_norm_backward", "CUDA",
           [&]<class T>() { backward<T>(dx, dgamma, dbeta, dy, x, mean, rstd, gamma, before, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
