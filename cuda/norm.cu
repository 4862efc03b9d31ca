// Group normalisation, forward and backward, over (N, C, L) in either memory order.
//
// A group may be a whole volume, so several blocks share it: each makes the moments of a range, and the ranges are
// joined by Chan, Golub and LeVeque's update ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979) in a fixed order. The number of ranges follows from the shape alone. A thread's own sums run in
// double about its first element: no difference of large squares anywhere.
#include <cmath>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

/// One tensor (N, C, L) as the kernels address it.
struct Volume {
  void* data = nullptr;
  int64_t sample = 0, channel = 0, position = 0;  // strides

  Volume() = default;
  explicit Volume(const View& v) : data(v.data), sample(v.stride[0]), channel(v.stride[1]), position(v.stride[2]) {}
};

/// A vector over the channels, or `otherwise` for each of them.
struct Vector {
  void* data = nullptr;
  int64_t stride = 0;

  explicit Vector(const View* v) : data(v ? v->data : nullptr), stride(v ? v->stride[0] : 0) {}
  template <class T>
  __device__ T at(int64_t channel, T otherwise) const {
    return data ? static_cast<const T*>(data)[channel * stride] : otherwise;
  }
};

/// A matrix (N, groups).
struct Matrix {
  void* data;
  int64_t stride[2];

  explicit Matrix(const View& v) : data(v.data), stride{v.stride[0], v.stride[1]} {}
  template <class T>
  __device__ T& at(int64_t n, int64_t group) const {
    return static_cast<T*>(data)[n * stride[0] + group * stride[1]];
  }
};

/// The sizes, and how each group's elements are cut into ranges.
struct Groups {
  int64_t samples, channels, length, groups;
  int64_t group_channels;
  bool channels_inner;
  int64_t ranges, range;

  Groups(const View& x, int64_t group_count)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        groups(group_count),
        group_channels(channels / groups),
        channels_inner(channels > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2])) {
    constexpr int64_t kShortest = 16 * kBlock;
    const int64_t most = std::max<int64_t>(2048 / std::max<int64_t>(samples * groups, 1), 1);
    ranges = std::clamp<int64_t>((elements() + kShortest - 1) / kShortest, 1, most);
    range = (elements() + ranges - 1) / ranges;
  }
  VG_HOST_DEVICE int64_t elements() const { return group_channels * length; }  // of a group
  int64_t blocks() const { return samples * groups * ranges; }
};

/// Walks through the elements of one range of one group, the inner axis first, in steps of a block.
class GroupWalk {
 public:
  __device__ GroupWalk(const Groups& shape, int64_t block)
      : shape_(shape),
        group_number_(block / shape.ranges),
        columns_(shape.channels_inner ? shape.group_channels : shape.length) {
    const int64_t begin = (block - group_number_ * shape.ranges) * shape.range;
    const int64_t end = min(begin + shape.range, shape.elements());
    left_ = end - begin - threadIdx.x;
    row_ = 0;
    column_ = begin + threadIdx.x;
    carry();
  }
  __device__ bool inside() const { return left_ > 0; }
  __device__ void advance() {
    left_ -= blockDim.x;
    column_ += blockDim.x;
    carry();
  }
  __device__ int64_t sample() const { return group_number_ / shape_.groups; }
  __device__ int64_t group() const { return group_number_ % shape_.groups; }
  /// Of all channels.
  __device__ int64_t channel() const {
    return group() * shape_.group_channels + (shape_.channels_inner ? column_ : row_);
  }
  template <class T>
  __device__ T& in(const Volume& v) const {
    const int64_t position = shape_.channels_inner ? row_ : column_;
    return static_cast<T*>(v.data)[sample() * v.sample + channel() * v.channel + position * v.position];
  }

 private:
  __device__ void carry() {
    if (column_ < columns_ || left_ <= 0) return;
    const int64_t rows = quotient(column_, columns_);
    row_ += rows;
    column_ -= rows * columns_;
  }

  const Groups& shape_;
  int64_t group_number_, columns_, left_, row_, column_;
};

struct Moments {
  double count, mean, squares;  // squares: the sum of squared deviations
};

__device__ Moments join(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  if (b.count == 0) return a;
  const double delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    moments_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Volume x, Moments* partial) {
  __shared__ Moments shared[kBlock];
  for (int64_t block = blockIdx.x; block < shape.samples * shape.groups * shape.ranges; block += gridDim.x) {
    GroupWalk walk(shape, block);
    const double pivot = walk.inside() ? static_cast<double>(walk.in<const T>(x)) : 0;
    double count = 0, sum = 0, squares = 0;
    for (; walk.inside(); walk.advance()) {
      const double value = static_cast<double>(walk.in<const T>(x)) - pivot;
      count += 1;
      sum += value;
      squares += value * value;
    }
    const double shift = count > 0 ? sum / count : 0;
    const Moments moments =
        combine_reducers(Moments{count, pivot + shift, squares - sum * shift}, BlockLayout{}, shared, join);
    if (threadIdx.x == 0) partial[block] = moments;
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

template <class T>
__global__ void __launch_bounds__(kBlock)
    normalize_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Volume y,
                     const __grid_constant__ Volume x, const double2* exact, Vector gamma, Vector beta) {
  for (int64_t block = blockIdx.x; block < shape.samples * shape.groups * shape.ranges; block += gridDim.x) {
    const double2 statistics = exact[block / shape.ranges];
    // The mean in two parts: subtracting it costs no accuracy even where it is large beside the deviations.
    const T high = static_cast<T>(statistics.x), low = static_cast<T>(statistics.x - static_cast<double>(high));
    int64_t channel = -1;
    T factor = 0, term = 0;
    for (GroupWalk walk(shape, block); walk.inside(); walk.advance()) {
      if (walk.channel() != channel) {
        channel = walk.channel();
        factor = static_cast<T>(statistics.y * static_cast<double>(gamma.at<T>(channel, T(1))));
        term = beta.at<T>(channel, T(0));
      }
      walk.in<T>(y) = ((walk.in<const T>(x) - high) - low) * factor + term;
    }
  }
}

/// How the sums over positions of every (sample, channel) are shared by threads, and cut into ranges.
struct ChannelSums {
  BlockLayout layout;
  int64_t outputs, ranges, range;

  explicit ChannelSums(const Groups& shape)
      : layout(BlockLayout::choose(shape.length, shape.channels_inner)), outputs(shape.samples * shape.channels) {
    const int64_t shortest = layout.reducers * 16;
    ranges = std::clamp<int64_t>((shape.length + shortest - 1) / shortest, 1,
                                 std::max<int64_t>(2048 / std::max<int64_t>(tiles(), 1), 1));
    range = (shape.length + ranges - 1) / ranges;
  }
  VG_HOST_DEVICE int64_t tiles() const { return (outputs + layout.columns - 1) / layout.columns; }
};

/// partial[range][sample, channel] = sums of (dy, dy * (x - mean)) over a range of positions.
template <class T>
__global__ void __launch_bounds__(kBlock)
    channel_sums_kernel(const __grid_constant__ Groups shape, const __grid_constant__ ChannelSums sums,
                        const __grid_constant__ Volume dy, const __grid_constant__ Volume x, Matrix mean,
                        double2* partial) {
  __shared__ double2 shared[kBlock];
  const BlockLayout layout = sums.layout;
  for (int64_t tile = blockIdx.x; tile < sums.tiles() * sums.ranges; tile += gridDim.x) {
    const int64_t range = tile / sums.tiles();
    const int64_t output = (tile - range * sums.tiles()) * layout.columns + layout.column();
    const int64_t end = output < sums.outputs ? min((range + 1) * sums.range, shape.length) : 0;
    const int64_t n = output / shape.channels, c = output % shape.channels;
    const T* dy_row = static_cast<const T*>(dy.data) + n * dy.sample + c * dy.channel;
    const T* x_row = static_cast<const T*>(x.data) + n * x.sample + c * x.channel;
    const T centre = end ? mean.at<T>(n, c / shape.group_channels) : T(0);
    double2 sum{0, 0};
    for (int64_t l = range * sums.range + layout.reducer(); l < end; l += layout.reducers) {
      const double gradient = static_cast<double>(dy_row[l * dy.position]);
      sum.x += gradient;
      sum.y += gradient * static_cast<double>(x_row[l * x.position] - centre);
    }
    sum = combine_reducers(sum, layout, shared, [](const double2& a, const double2& b) {
      return double2{a.x + b.x, a.y + b.y};
    });
    if (output < sums.outputs && layout.reducer() == 0) partial[range * sums.outputs + output] = sum;
  }
}

/// total[sample, channel] = sums of (dy, dy * n), n = (x - mean) * rstd; group_means[sample, group] = means over the
/// group of (h, h * n), h = gamma * dy.
template <class T>
__global__ void __launch_bounds__(kBlock)
    group_means_kernel(const __grid_constant__ Groups shape, const __grid_constant__ ChannelSums sums,
                       const double2* partial, Matrix rstd, Vector gamma, double2* total, double2* group_means) {
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
    mean = combine_reducers(mean, BlockLayout{}, shared, [](const double2& a, const double2& b) {
      return double2{a.x + b.x, a.y + b.y};
    });
    const double count = fmax(static_cast<double>(shape.elements()), 1.0);
    if (threadIdx.x == 0) group_means[number] = {mean.x / count, mean.y / count};
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    parameter_gradients_kernel(const __grid_constant__ Groups shape, const double2* total, Vector dgamma,
                               Vector dbeta) {
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
__global__ void __launch_bounds__(kBlock)
    input_gradient_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Volume dx,
                          const __grid_constant__ Volume dy, const __grid_constant__ Volume x, Matrix mean, Matrix rstd,
                          Vector gamma, const double2* group_means) {
  for (int64_t block = blockIdx.x; block < shape.samples * shape.groups * shape.ranges; block += gridDim.x) {
    GroupWalk walk(shape, block);
    const T centre = mean.at<T>(walk.sample(), walk.group());
    const double scale = static_cast<double>(rstd.at<T>(walk.sample(), walk.group()));
    const double2 means = group_means[block / shape.ranges];
    const T offset = static_cast<T>(-scale * means.x), slope = static_cast<T>(-scale * scale * means.y);
    int64_t channel = -1;
    T factor = 0;
    for (; walk.inside(); walk.advance()) {
      if (walk.channel() != channel) {
        channel = walk.channel();
        factor = static_cast<T>(scale * static_cast<double>(gamma.at<T>(channel, T(1))));
      }
      walk.in<T>(dx) = walk.in<const T>(dy) * factor + ((walk.in<const T>(x) - centre) * slope + offset);
    }
  }
}

template <class T>
void forward(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
             double eps, const Launch& launch) {
  const Groups shape(x, mean.size[1]);
  const int64_t groups = shape.samples * shape.groups;
  const Workspace partial(launch, static_cast<size_t>(shape.blocks()) * sizeof(Moments));
  const Workspace exact(launch, static_cast<size_t>(groups) * sizeof(double2));
  moments_kernel<T>
      <<<grid_size(shape.blocks(), 1), kBlock, 0, launch.stream>>>(shape, Volume(x), partial.as<Moments>());
  check_launch("group_norm");
  statistics_kernel<T><<<grid_size(groups, 1), kBlock, 0, launch.stream>>>(shape, partial.as<Moments>(), Matrix(mean),
                                                                           Matrix(rstd), exact.as<double2>(), eps);
  check_launch("group_norm");
  normalize_kernel<T><<<grid_size(shape.blocks(), 1), kBlock, 0, launch.stream>>>(
      shape, Volume(y), Volume(x), exact.as<double2>(), Vector(gamma), Vector(beta));
  check_launch("group_norm");
}

template <class T>
void backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x, const View& mean,
              const View& rstd, const View* gamma, const Launch& launch) {
  constexpr const char* kOp = "group_norm_backward";
  const Groups shape(x, mean.size[1]);
  const ChannelSums sums(shape);
  const int64_t groups = shape.samples * shape.groups;
  const Workspace partial(launch, static_cast<size_t>(sums.outputs * sums.ranges) * sizeof(double2));
  const Workspace total(launch, static_cast<size_t>(sums.outputs) * sizeof(double2));
  const Workspace group_means(launch, static_cast<size_t>(groups) * sizeof(double2));
  channel_sums_kernel<T><<<grid_size(sums.tiles() * sums.ranges, 1), kBlock, 0, launch.stream>>>(
      shape, sums, Volume(dy), Volume(x), Matrix(mean), partial.as<double2>());
  check_launch(kOp);
  group_means_kernel<T><<<grid_size(groups, 1), kBlock, 0, launch.stream>>>(
      shape, sums, partial.as<double2>(), Matrix(rstd), Vector(gamma), total.as<double2>(), group_means.as<double2>());
  check_launch(kOp);
  if (dgamma || dbeta) {
    parameter_gradients_kernel<T><<<grid_size(shape.channels), kBlock, 0, launch.stream>>>(
        shape, total.as<double2>(), Vector(dgamma), Vector(dbeta));
    check_launch(kOp);
  }
  input_gradient_kernel<T><<<grid_size(shape.blocks(), 1), kBlock, 0, launch.stream>>>(
      shape, Volume(dx), Volume(dy), Volume(x), Matrix(mean), Matrix(rstd), Vector(gamma), group_means.as<double2>());
  check_launch(kOp);
}

}  // namespace

namespace kernel {

void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps) {
  if (x.size[1] == 0 || mean.numel() == 0) return;
  const Launch launch(x);
  dispatch<float, double>(x.dtype, "group_norm", "CUDA",
                          [&]<class T>() { forward<T>(y, mean, rstd, x, gamma, beta, eps, launch); });
}

void group_norm_backward(const View& dx, const View* dgamma, const View* dbeta, const View& dy, const View& x,
                         const View& mean, const View& rstd, const View* gamma) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  dispatch<float, double>(x.dtype, "group_norm_backward", "CUDA",
                          [&]<class T>() { backward<T>(dx, dgamma, dbeta, dy, x, mean, rstd, gamma, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
