// Max pooling over (N, C, D, H, W) and its gradient. Both gather: a thread makes one output voxel, respectively one
// voxel of the gradient, to which it adds every window that named it, in order.
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

/// A tensor (N, C, D, H, W).
struct Volume {
  void* data;
  int64_t size[5], stride[5];

  explicit Volume(const View& v) : data(v.data) {
    std::copy_n(v.size, 5, size);
    std::copy_n(v.stride, 5, stride);
  }
  /// Where number `index` in row-major order stands.
  __device__ void locate(int64_t index, int64_t (&at)[5]) const {
    for (int axis = 4; axis >= 0; --axis) {
      const int64_t rest = quotient(index, size[axis]);
      at[axis] = index - rest * size[axis];
      index = rest;
    }
  }
  __device__ int64_t offset(const int64_t (&at)[5]) const {
    int64_t result = 0;
    for (int axis = 0; axis < 5; ++axis) result += at[axis] * stride[axis];
    return result;
  }
};

/// The taps [begin, end) of output `o` that fall into an input axis of size n; tap k reads start + k * dilation.
struct TapRange {
  int64_t start, begin, end;

  __device__ TapRange(const PoolGeometry& g, int axis, int64_t o, int64_t n)
      : start(o * g.stride.values[axis] - g.padding.values[axis]) {
    const int64_t dilation = g.dilation.values[axis];
    begin = start < 0 ? (dilation - 1 - start) / dilation : 0;
    end = start < n ? min(g.kernel_size.values[axis], (n - 1 - start) / dilation + 1) : 0;
  }
};

template <class T>
__global__ void __launch_bounds__(kBlock)
    max_pool_kernel(const __grid_constant__ Volume y, const __grid_constant__ Volume indices,
                    const __grid_constant__ Volume x, const __grid_constant__ PoolGeometry geometry, int64_t count) {
  for (int64_t number = thread_index(); number < count; number += thread_count()) {
    int64_t at[5];
    y.locate(number, at);
    const TapRange d(geometry, 0, at[2], x.size[2]), h(geometry, 1, at[3], x.size[3]), w(geometry, 2, at[4], x.size[4]);
    const T* volume = static_cast<const T*>(x.data) + at[0] * x.stride[0] + at[1] * x.stride[1];
    using C = compute_t<T>;
    C best = -std::numeric_limits<C>::infinity();
    int64_t best_index = -1;  // the window holds padding only
    for (int64_t kd = d.begin; kd < d.end; ++kd)
      for (int64_t kh = h.begin; kh < h.end; ++kh)
        for (int64_t kw = w.begin; kw < w.end; ++kw) {
          const int64_t id = d.start + kd * geometry.dilation.values[0];
          const int64_t ih = h.start + kh * geometry.dilation.values[1];
          const int64_t iw = w.start + kw * geometry.dilation.values[2];
          const C value = volume[id * x.stride[2] + ih * x.stride[3] + iw * x.stride[4]];
          const bool first_nan = value != value && best == best;
          if (best_index >= 0 && !(value > best) && !first_nan) continue;
          best = value;
          best_index = (id * x.size[3] + ih) * x.size[4] + iw;
        }
    static_cast<T*>(y.data)[y.offset(at)] = convert<T>(best);
    static_cast<int64_t*>(indices.data)[indices.offset(at)] = best_index;
  }
}

/// The windows [begin, end) along an axis that may cover input i.
struct WindowRange {
  int64_t begin, end;

  __device__ WindowRange(const PoolGeometry& g, int axis, int64_t i, int64_t outputs) {
    const int64_t stride = g.stride.values[axis], last = i + g.padding.values[axis];
    const int64_t first = last - (g.kernel_size.values[axis] - 1) * g.dilation.values[axis];
    begin = first > 0 ? (first + stride - 1) / stride : 0;
    end = min(last / stride + 1, outputs);
  }
};

template <class T>
__global__ void __launch_bounds__(kBlock)
    max_pool_backward_kernel(const __grid_constant__ Volume dx, const __grid_constant__ Volume dy,
                             const __grid_constant__ Volume indices, const __grid_constant__ PoolGeometry geometry,
                             int64_t count) {
  for (int64_t number = thread_index(); number < count; number += thread_count()) {
    int64_t at[5];
    dx.locate(number, at);
    const int64_t position = (at[2] * dx.size[3] + at[3]) * dx.size[4] + at[4];
    const WindowRange d(geometry, 0, at[2], dy.size[2]), h(geometry, 1, at[3], dy.size[3]),
        w(geometry, 2, at[4], dy.size[4]);
    compute_t<T> sum = 0;
    for (int64_t od = d.begin; od < d.end; ++od)
      for (int64_t oh = h.begin; oh < h.end; ++oh)
        for (int64_t ow = w.begin; ow < w.end; ++ow) {
          const int64_t window[5] = {at[0], at[1], od, oh, ow};
          if (static_cast<const int64_t*>(indices.data)[indices.offset(window)] == position)
            sum += static_cast<const T*>(dy.data)[dy.offset(window)];
        }
    static_cast<T*>(dx.data)[dx.offset(at)] = convert<T>(sum);
  }
}

}  // namespace

namespace kernel {

void max_pool(const View& y, const View& indices, const View& x, const PoolGeometry& geometry) {
  const int64_t count = y.numel();
  if (count == 0) return;
  const Launch launch(y);
  dispatch(Floats(), y.dtype, "max_pool", "CUDA", [&]<class T>() {
    max_pool_kernel<T>
        <<<grid_size(count), kBlock, 0, launch.stream>>>(Volume(y), Volume(indices), Volume(x), geometry, count);
  });
  check_launch("max_pool");
}

void max_pool_backward(const View& dx, const View& dy, const View& indices, const PoolGeometry& geometry) {
  const int64_t count = dx.numel();
  if (count == 0) return;
  const Launch launch(dx);
  dispatch(Floats(), dx.dtype, "max_pool_backward", "CUDA", [&]<class T>() {
    max_pool_backward_kernel<T>
        <<<grid_size(count), kBlock, 0, launch.stream>>>(Volume(dx), Volume(dy), Volume(indices), geometry, count);
  });
  check_launch("max_pool_backward");
}

}  // namespace kernel
}  // namespace voxgrad::cuda
