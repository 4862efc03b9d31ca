// The gradients of group normalisation: sums over the positions of every (sample, channel), from which the parameters'
// gradients and the means over the groups follow, then the input's gradient.
#include <cmath>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/relu_before.cuh"

namespace voxgrad::cuda {
namespace {

/// partial[range][sample, channel] = sums of (dy, dy * (x - mean)) over a range of positions.
template <class T, bool kDense>
__global__ void __launch_bounds__(kBlock)
    channel_sums_kernel(const __grid_constant__ Groups shape, const __grid_constant__ ChannelSums sums,
                        const __grid_constant__ Volume dy, const __grid_constant__ Volume x, Matrix mean,
                        double2* partial) {
  __shared__ double2 shared[kBlock];
  const BlockLayout layout = sums.layout;
  for (int64_t tile = blockIdx.x; tile < sums.tiles() * sums.ranges; tile += gridDim.x) {
    const int64_t range = quotient(tile, sums.tiles());
    const int64_t output = (tile - range * sums.tiles()) * layout.columns + layout.column();
    const int64_t begin = range * sums.range, end = min(begin + sums.range, shape.length);
    double2 sum{0, 0};
    if (output < sums.outputs) {
      const int64_t n = quotient(output, shape.channels), c = output - n * shape.channels;
      const T* dy_row = static_cast<const T*>(dy.data) + n * dy.sample + c * dy.channel;
      const T* x_row = static_cast<const T*>(x.data) + n * x.sample + c * x.channel;
      const T centre = mean.at<T>(n, c / shape.group_channels);
      const auto take = [&](T gradient, T value) {
        sum.x += static_cast<double>(gradient);
        sum.y += static_cast<double>(gradient) * static_cast<double>(value - centre);
      };
      if constexpr (kDense) {
        const T* const data[] = {dy_row + begin, x_row + begin};
        read_span<2>(data, end - begin, T(0), layout.reducer(), layout.reducers,
                     [&](const T(&value)[2]) { take(value[0], value[1]); });
      } else {
        for (int64_t l = begin + layout.reducer(); l < end; l += layout.reducers)
          take(dy_row[l * dy.position], x_row[l * x.position]);
      }
    }
    sum = combine_reducers(sum, layout, shared, add);
    if (output < sums.outputs && layout.reducer() == 0) partial[range * sums.outputs + output] = sum;
  }
}

/// total[sample, channel] = sums of (dy, dy * n), n = (x - mean) * rstd; group_means[sample, group] = means over the
/// group of (h, h * n), h = gamma * dy.
template <class T>
__global__ void __launch_bounds__(kBlock)
    group_means_kernel(const __grid_constant__ Groups shape, const __grid_constant__ ChannelSums sums,
                       const double2* partial, Matrix rstd, PerChannel gamma, double2* total, double2* group_means) {
  __shared__ double2 shared[kBlock];
  for (int64_t number = blockIdx.x; number < shape.samples * shape.groups; number += gridDim.x) {
    const int64_t n = number / shape.groups, group = number % shape.groups;
    const double scale = static_cast<double>(rstd.at<T>(n, group));
    double2 mean{0, 0};
    for (int64_t i = threadIdx.x; i < shape.group_channels; i += kBlock) {
      const int64_t channel = group * shape.group_channels + i, output = n * shape.channels + channel;
      double2 sum{0, 0};
      for (int64_t range = 0; range < sums.ranges; ++range) {
        sum.x += partial[range * sums.outputs + output].x;
        sum.y += partial[range * sums.outputs + output].y;
      }
      sum.y *= scale;
      total[output] = sum;
      const double weight = static_cast<double>(gamma.at<T>(channel, T(1)));
      mean.x += weight * sum.x;
      mean.y += weight * sum.y;
    }
    mean = combine_reducers(mean, BlockLayout{}, shared, add);
    const double count = fmax(static_cast<double>(shape.elements()), 1.0);
    if (threadIdx.x == 0) group_means[number] = {mean.x / count, mean.y / count};
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    parameter_gradients_kernel(const __grid_constant__ Groups shape, const double2* total, PerChannel dgamma,
                               PerChannel dbeta) {
  for (int64_t c = thread_index(); c < shape.channels; c += thread_count()) {
    double2 sum{0, 0};
    for (int64_t n = 0; n < shape.samples; ++n) {
      sum.x += total[n * shape.channels + c].x;
      sum.y += total[n * shape.channels + c].y;
    }
    if (dgamma.data) static_cast<T*>(dgamma.data)[c * dgamma.stride] = static_cast<T>(sum.y);
    if (dbeta.data) static_cast<T*>(dbeta.data)[c * dbeta.stride] = static_cast<T>(sum.x);
  }
}

/// dx = rstd * (h - mean(h) - n * mean(h * n)).
template <class T>
struct InputGradient {
  Matrix mean, rstd;
  PerChannel gamma;
  const double2* group_means;

  struct Group {
    T centre, offset, slope;
    double scale;
  };
  struct Channel {
    T factor;
  };
  __device__ Group group(const Groups& shape, int64_t number) const {
    const int64_t n = number / shape.groups, g = number - n * shape.groups;
    const double scale = static_cast<double>(rstd.at<T>(n, g));
    const double2 means = group_means[number];
    return {mean.at<T>(n, g), static_cast<T>(-scale * means.x), static_cast<T>(-scale * scale * means.y), scale};
  }
  __device__ Channel channel(const Group& group, int64_t c) const {
    return {static_cast<T>(group.scale * static_cast<double>(gamma.at<T>(c, T(1))))};
  }
  __device__ T operator()(const Group& group, const Channel& channel, T dy, T x) const {
    return dy * channel.factor + ((x - group.centre) * group.slope + group.offset);
  }
};

template <class T>
void backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x, const View& mean,
              const View& rstd, const View* gamma, const ReluBefore& before, const Launch& launch) {
  constexpr const char* kOp = "group_norm_backward";
  const Groups shape(x, mean.size[1]);
  const ChannelSums sums(shape);
  const int64_t groups = shape.samples * shape.groups;
  const Workspace partial(launch, static_cast<size_t>(sums.outputs * sums.ranges) * sizeof(double2));
  const Workspace total(launch, static_cast<size_t>(sums.outputs) * sizeof(double2));
  const Workspace group_means(launch, static_cast<size_t>(groups) * sizeof(double2));
  const auto channel_sums = are_dense<T>(dy, x) ? channel_sums_kernel<T, true> : channel_sums_kernel<T, false>;
  channel_sums<<<grid_size(sums.tiles() * sums.ranges, 1), kBlock, 0, launch.stream>>>(
      shape, sums, Volume(dy), Volume(x), Matrix(mean), partial.as<double2>());
  check_launch(kOp);
  group_means_kernel<T><<<grid_size(groups, 1), kBlock, 0, launch.stream>>>(
      shape, sums, partial.as<double2>(), Matrix(rstd), PerChannel(gamma), total.as<double2>(),
      group_means.as<double2>());
  check_launch(kOp);
  if (dgamma || dbeta) {
    parameter_gradients_kernel<T><<<grid_size(shape.channels), kBlock, 0, launch.stream>>>(
        shape, total.as<double2>(), PerChannel(dgamma), PerChannel(dbeta));
    check_launch(kOp);
  }
  const InputGradient<T> formula{Matrix(mean), Matrix(rstd), PerChannel(gamma), group_means.as<double2>()};
  if (before.relu)
    apply_through_relu<T>(kOp, shape, sums, formula, launch, dx, before.dbias, dy, x);
  else
    apply_formula<T>(kOp, shape, formula, launch, dx, dy, x);
}

}  // namespace

namespace kernel {

void group_norm_backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x,
                         const View& mean, const View& rstd, const View* gamma, const ReluBefore& before) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  dispatch(WideFloats(), x.dtype, "group_norm_backward", "CUDA",
                          [&]<class T>() { backward<T>(dx, dgamma, dbeta, dy, x, mean, rstd, gamma, before, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
