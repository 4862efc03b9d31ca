// Gradients that go on through a ReLU, to z from y = relu(z + bias): masked by y in the pass that makes them, and
// summed in that pass over the positions of every (sample, channel), for the gradient of the bias.
#pragma once

#include "cuda/norm.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda {
namespace {  // kernels of one name in two files

/// How the sums over positions of every (sample, channel) are shared by threads, and cut into ranges.
struct ChannelSums {
  BlockLayout layout;
  int64_t outputs, ranges, range;

  explicit ChannelSums(const Groups& shape)
      : layout(BlockLayout::choose(shape.length, shape.channels_inner)), outputs(shape.samples * shape.channels) {
    const int64_t shortest = layout.reducers * 16;
    ranges = std::clamp<int64_t>((shape.length + shortest - 1) / shortest, 1,
                                 std::max<int64_t>(4096 / std::max<int64_t>(tiles(), 1), 1));
    range = (shape.length + ranges - 1) / ranges;
  }
  VG_HOST_DEVICE int64_t tiles() const { return (outputs + layout.columns - 1) / layout.columns; }
};

/// dz = relu_grad(formula(dy, y), y) and, unless `partial` is null, partial[range][sample, channel] = its sums.
template <class T, bool kDense, class Formula>
__global__ void __launch_bounds__(kBlock)
    through_relu_kernel(const __grid_constant__ Groups shape, const __grid_constant__ ChannelSums sums,
                        const __grid_constant__ Formula formula, const __grid_constant__ Volume dz,
                        const __grid_constant__ Volume dy, const __grid_constant__ Volume y, double* partial) {
  __shared__ double shared[kBlock];
  constexpr int width = Span<T>::kWidth, kUnroll = 2;
  const BlockLayout layout = sums.layout;
  for (int64_t i = blockIdx.x; i < sums.tiles() * sums.ranges; i += gridDim.x) {
    // From behind, where the pass before this one ended: some of that is still in the cache.
    const int64_t tile = sums.tiles() * sums.ranges - 1 - i, range = quotient(tile, sums.tiles());
    const int64_t output = (tile - range * sums.tiles()) * layout.columns + layout.column();
    const int64_t begin = range * sums.range, end = min(begin + sums.range, shape.length);
    double sum = 0;
    if (output < sums.outputs && begin < end) {
      const int64_t n = quotient(output, shape.channels), c = output - n * shape.channels;
      const auto row = [&](const Volume& v) { return static_cast<T*>(v.data) + n * v.sample + c * v.channel; };
      T* const to = row(dz);
      const T *const from = row(dy), *const gate = row(y);
      const auto group = formula.group(shape, n * shape.groups + quotient(c, shape.group_channels));
      const auto constants = formula.channel(group, c);
      const auto gradient = [&](T above, T value) {
        const T result = apply<BinaryOp::relu_grad>(formula(group, constants, above, value), value, T(0), T(0));
        sum += static_cast<double>(result);
        return result;
      };
      if constexpr (kDense) {
        const Span<T> span(to + begin, end - begin);
        const int64_t first = begin + span.head;
        for (int64_t v = layout.reducer(); v < span.vectors; v += kUnroll * layout.reducers) {
          Vector<T, width> above[kUnroll], values[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (const int64_t at = v + u * layout.reducers; at < span.vectors) {
              above[u] = load_vector<T, width>(from + first + at * width);
              values[u] = load_vector<T, width>(gate + first + at * width);
            }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (const int64_t at = v + u * layout.reducers; at < span.vectors) {
#pragma unroll
              for (int j = 0; j < width; ++j) above[u].v[j] = gradient(above[u].v[j], values[u].v[j]);
              store_vector(to + first + at * width, above[u]);
            }
        }
        for (int64_t s = layout.reducer(); s < span.scalars(); s += layout.reducers) {
          const int64_t at = begin + span.scalar(s);
          to[at] = gradient(from[at], gate[at]);
        }
      } else {
        for (int64_t l = begin + layout.reducer(); l < end; l += layout.reducers)
          to[l * dz.position] = gradient(from[l * dy.position], gate[l * y.position]);
      }
    }
    if (!partial) continue;
    sum = combine_reducers(sum, layout, shared, [](double a, double b) { return a + b; });
    if (output < sums.outputs && layout.reducer() == 0) partial[range * sums.outputs + output] = sum;
  }
}

/// dbias[c] = the sum of partial over ranges and samples.
template <class T>
__global__ void __launch_bounds__(kBlock) bias_gradient_kernel(const __grid_constant__ Groups shape, int64_t ranges,
                                                               const double* partial, PerChannel dbias) {
  __shared__ double shared[kBlock];
  for (int64_t c = blockIdx.x; c < shape.channels; c += gridDim.x) {
    double sum = 0;
    for (int64_t row = threadIdx.x; row < ranges * shape.samples; row += kBlock)
      sum += partial[row * shape.channels + c];
    sum = combine_reducers(sum, BlockLayout{}, shared, [](double a, double b) { return a + b; });
    if (threadIdx.x == 0) static_cast<T*>(dbias.data)[c * dbias.stride] = static_cast<T>(sum);
  }
}

/// dz = relu_grad(formula(dy, y), y), dbias (or null) = its sums over samples and positions.
template <class T, class Formula>
void apply_through_relu(const char* op, const Groups& shape, const ChannelSums& sums, const Formula& formula,
                        const Launch& launch, const View& dz, const View* dbias, const View& dy, const View& y) {
  const Workspace partial(launch, dbias ? static_cast<size_t>(sums.outputs * sums.ranges) * sizeof(double) : 0);
  const auto kernel =
      are_dense<T>(dz, dy, y) ? through_relu_kernel<T, true, Formula> : through_relu_kernel<T, false, Formula>;
  kernel<<<grid_size(sums.tiles() * sums.ranges, 1), kBlock, 0, launch.stream>>>(
      shape, sums, formula, Volume(dz), Volume(dy), Volume(y), partial.template as<double>());
  check_launch(op);
  if (!dbias) return;
  bias_gradient_kernel<T><<<grid_size(shape.channels, 1), kBlock, 0, launch.stream>>>(
      shape, sums.ranges, partial.template as<double>(), PerChannel(dbias));
  check_launch(op);
}

}  // namespace
}  // namespace voxgrad::cuda
