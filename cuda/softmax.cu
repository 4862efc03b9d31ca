// softmax and log_softmax along one axis: maximum, sum of exponentials, result, in one launch. A block has one row
// or several of them (reduce.cuh), so a row is read three times but comes from memory only once while it fits the
// caches.
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

struct SoftmaxProblem {
  const void* x;
  void* y;
  Axes rows;  // a: strides in x; b: in y
  int64_t count, length, x_stride, y_stride;
  BlockLayout layout;
  bool logarithm;
};

template <class T>
__global__ void __launch_bounds__(kBlock) softmax_kernel(const __grid_constant__ SoftmaxProblem problem) {
  __shared__ T shared_max[kBlock];
  __shared__ double shared_sum[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t tiles = (problem.count + layout.columns - 1) / layout.columns;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row = tile * layout.columns + layout.column();
    const int64_t length = row < problem.count ? problem.length : 0;
    const T* x = static_cast<const T*>(problem.x) + (length ? problem.rows.offset(row, problem.rows.a) : 0);
    T* y = static_cast<T*>(problem.y) + (length ? problem.rows.offset(row, problem.rows.b) : 0);

    T highest = -std::numeric_limits<T>::infinity();
    for (int64_t i = layout.reducer(); i < length; i += layout.reducers) {
      const T value = x[i * problem.x_stride];
      if (value > highest) highest = value;  // a NaN reaches the row through its sum
    }
    highest = combine_reducers(highest, layout, shared_max, [](T a, T b) { return a > b ? a : b; });

    double sum = 0;
    for (int64_t i = layout.reducer(); i < length; i += layout.reducers) sum += exp(x[i * problem.x_stride] - highest);
    sum = combine_reducers(sum, layout, shared_sum, [](double a, double b) { return a + b; });

    const T divisor = static_cast<T>(sum), log_sum = static_cast<T>(log(sum));
    for (int64_t i = layout.reducer(); i < length; i += layout.reducers) {
      const T shifted = x[i * problem.x_stride] - highest;
      y[i * problem.y_stride] = problem.logarithm ? shifted - log_sum : exp(shifted) / divisor;
    }
  }
}

}  // namespace

namespace kernel {

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  if (y.numel() == 0) return;
  SoftmaxProblem problem{};
  problem.x = x.data;
  problem.y = y.data;
  for (int other = x.rank - 1; other >= 0; --other)
    if (other != axis) problem.rows.add(x.size[other], x.stride[other], y.stride[other]);
  problem.rows.finish();
  problem.count = problem.rows.numel();
  problem.length = x.size[axis];
  problem.x_stride = x.stride[axis];
  problem.y_stride = y.stride[axis];
  problem.logarithm = logarithm;
  const bool rows_adjacent = problem.count > 1 && std::abs(problem.rows.a[0]) < std::abs(problem.x_stride);
  problem.layout = BlockLayout::choose(problem.length, rows_adjacent);

  const Launch launch(y);
  dispatch(WideFloats(), y.dtype, logarithm ? "log_softmax" : "softmax", "CUDA", [&]<class T>() {
    const int64_t tiles = (problem.count + problem.layout.columns - 1) / problem.layout.columns;
    softmax_kernel<T><<<grid_size(tiles, 1), kBlock, 0, launch.stream>>>(problem);
  });
  check_launch("softmax");
}

}  // namespace kernel
}  // namespace voxgrad::cuda
