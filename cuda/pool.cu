// Max pooling over (N, C, D, H, W) and its gradient. Both gather: a thread makes one output voxel, respectively one
// voxel of the gradient, to which it adds every window that named it, in order; where the channels are innermost in
// memory, 16 bytes of them. Windows that do not overlap: cuda/pool_pairs.cuh; other contiguous rows:
// cuda/pool_rows.cuh, and a gradient in up to 16 bytes along the width.
#include <limits>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/pool_pairs.cuh"
#include "cuda/pool_rows.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

using Indices = Types<int32_t, int64_t>;

/// Calls f(views) for parts of fewer than 2^31 voxels.
template <class F>
void for_each_pool_part(const PoolViews& views, const F& f) {
  if (views.out.numel() < int64_t{1} << 31) return f(views);
  const int axis = static_cast<int>(std::max_element(views.out.size, views.out.size + 5) - views.out.size);
  for_each_half(views, axis, [&](const PoolViews& part) { for_each_pool_part(part, f); });
}

/// A window of 2 x 2 x 2 (`pairs`) loads all its taps before it looks at them. 2 or 3 blocks of a multiprocessor have
/// enough loads under way.
template <class T, class Index, int width, bool pairs>
__global__ void __launch_bounds__(kBlock, width == 1 ? 3 : 2)
    max_pool_kernel(const __grid_constant__ PoolProblem p, uint32_t count) {
  using C = compute_t<T>;
  using Number = std::conditional_t<std::is_same_v<Index, NoIndex>, int32_t, Index>;
  using Place = std::make_unsigned_t<Number>;  // what lies in front of the input wraps around and is beyond its end
  const PoolGeometry& g = p.geometry;
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at);
    const T* volume = element<const T>(p.in, {at[0], at[1]});
    Place start[3];
    for (int i = 0; i < 3; ++i)
      start[i] = static_cast<Place>((p.first[i] + at[i + 2]) * g.stride.values[i] - g.padding.values[i]);
    Best<C, Index> best[width];
    /// The place of a tap, or -1, and its values.
    const auto fetch = [&](Place kd, Place kh, Place kw, T(&loaded)[width]) -> Number {
      const Place tap[3] = {kd, kh, kw};
      int64_t offset = 0;
      Place position = 0;
      bool inside = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const Place at_axis = start[i] + tap[i] * static_cast<Place>(g.dilation.values[i]);
        inside &= at_axis < static_cast<Place>(p.in.size[i + 2]);
        offset += static_cast<int64_t>(at_axis) * p.in.stride[i + 2];
        position = position * static_cast<Place>(p.in.size[i + 2]) + at_axis;
      }
      if (inside) load_values<width>(volume + offset, loaded);
      return inside ? static_cast<Number>(position) : Number(-1);
    };
    const auto offer = [&](Number position, const T(&loaded)[width]) {
      if (position >= 0)
#pragma unroll
        for (int j = 0; j < width; ++j) best[j].offer_next(static_cast<C>(loaded[j]), position);
    };
    if constexpr (pairs) {
      T loaded[8][width];
      Number position[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) position[k] = fetch(k / 4, k / 2 % 2, k % 2, loaded[k]);
#pragma unroll
      for (int k = 0; k < 8; ++k) offer(position[k], loaded[k]);
    } else {
      T loaded[width];
      for (int kd = 0; kd < g.kernel_size.values[0]; ++kd)
        for (int kh = 0; kh < g.kernel_size.values[1]; ++kh)
          for (int kw = 0; kw < g.kernel_size.values[2]; ++kw) offer(fetch(kd, kh, kw, loaded), loaded);
    }
    store_best(best, element<T>(p.out, at), element<Index>(p.indices, at));
  }
}

/// The windows [begin, end) along an axis that may cover input i.
struct WindowRange {
  int64_t begin, end;

  __device__ WindowRange(const PoolProblem& p, int axis, int64_t i) {
    const PoolGeometry& g = p.geometry;
    const auto divide = [&](int64_t n) {
      return n >> 31 ? n / g.stride.values[axis] : p.window_stride[axis].divide(static_cast<uint32_t>(n));
    };
    const int64_t last = i + g.padding.values[axis];
    const int64_t first = last - (g.kernel_size.values[axis] - 1) * g.dilation.values[axis];
    begin = first > 0 ? divide(first + g.stride.values[axis] - 1) : 0;
    end = min(divide(last) + 1, p.in.size[axis + 2]);
  }
};

/// `axis`: along which the `width` voxels of a thread lie, the channels or the width. `whole`: the volume that the
/// indices point into, of which p.out may be a part.
template <class T, class Index, int width, int axis>
__global__ void __launch_bounds__(kBlock) max_pool_backward_kernel(const __grid_constant__ PoolProblem p,
                                                                   const __grid_constant__ View whole, uint32_t count) {
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at, axis);
    const int64_t id = p.first[0] + at[2], ih = p.first[1] + at[3], iw = p.first[2] + at[4];
    const auto place = static_cast<Index>((id * whole.size[3] + ih) * whole.size[4] + iw);
    const WindowRange d(p, 0, id), h(p, 1, ih), w(p, 2, iw);
    const int64_t end = axis == 4 ? WindowRange(p, 2, iw + width - 1).end : w.end;
    compute_t<T> sum[width] = {};
    for (int64_t od = d.begin; od < d.end; ++od)
      for (int64_t oh = h.begin; oh < h.end; ++oh) {
        const int64_t row[5] = {at[0], at[1], od, oh, w.begin};
        const Index* indices = element<const Index>(p.indices, row);
        const T* gradients = element<const T>(p.in, row);
        for (int left = static_cast<int>(end - w.begin); left > 0; --left) {
          constexpr int read = axis == 4 ? 1 : width;
          Index named[read];
          T gradient[read];
          load_values<read>(indices, named);
          load_values<read>(gradients, gradient);
#pragma unroll
          for (int j = 0; j < width; ++j)
            if (named[j % read] == place + (axis == 4 ? j : 0)) sum[j] += gradient[j % read];
          indices += p.indices.stride[4];
          gradients += p.in.stride[4];
        }
      }
    T* out = element<T>(p.out, at);
    if constexpr (axis == 4) {
      if (at[4] + width > p.out.size[4] || reinterpret_cast<uintptr_t>(out) % (width * sizeof(T)) != 0) {
#pragma unroll
        for (int j = 0; j < width; ++j)
          if (at[4] + j < p.out.size[4]) out[j] = convert<T>(sum[j]);
        continue;
      }
    }
    store_values<width>(out, sum);
  }
}

/// Calls f<width, axis>(problem, threads' items) for every part; a gradient may also be made in runs along the
/// width, the last of which may be shorter.
template <class T, bool gradient, class F>
void run_pool(const char* op, const PoolViews& views, const F& f) {
  constexpr int width = kVectorWidth<T>;
  for_each_pool_part(views, [&](const PoolViews& part) {
    const auto elements = static_cast<uint32_t>(part.out.numel()), vectors = elements / width;
    const auto row = static_cast<uint32_t>(part.out.size[4]);
    if (has_vectors(part.out, 1, width) && has_vectors(part.in, 1, width) &&
        (!part.indices.data || has_vectors(part.indices, 1, width)))
      f.template operator()<width, 1>(PoolProblem(part, width), vectors);
    else if (gradient && part.out.stride[4] == 1)
      f.template operator()<width, gradient ? 4 : 1>(PoolProblem(part, width, 4),
                                                     elements / row * (divide_up(row, width)));
    else
      f.template operator()<1, 1>(PoolProblem(part, 1), elements);
    check_launch(op);
  });
}

template <class T, class Index>
void max_pool_with(const View& y, const View* indices, const View& x, const PoolGeometry& geometry,
                   cudaStream_t stream) {
  const PoolViews views{y, x, indices ? *indices : View(), geometry, true};
  if (launch_pairs<T, Index>(views, stream) || launch_max_pool_rows<T, Index>(y, indices, x, geometry, stream)) return;
  const Triple& size = geometry.kernel_size;
  const bool pairs = size[0] == 2 && size[1] == 2 && size[2] == 2;
  run_pool<T, false>("max_pool", views, [&]<int width, int>(const PoolProblem& problem, uint32_t count) {
    const auto kernel = pairs ? max_pool_kernel<T, Index, width, true> : max_pool_kernel<T, Index, width, false>;
    kernel<<<grid_size(count), kBlock, 0, stream>>>(problem, count);
  });
}

}  // namespace

namespace kernel {

void max_pool(const View& y, const View* indices, const View& x, const PoolGeometry& geometry) {
  if (y.numel() == 0) return;
  const Launch launch(y);
  dispatch_cuda(Floats(), y.dtype, "max_pool", [&]<class T>() {
    if (!indices) return max_pool_with<T, NoIndex>(y, indices, x, geometry, launch.stream);
    dispatch_cuda(Indices(), indices->dtype, "max_pool",
                  [&]<class Index>() { max_pool_with<T, Index>(y, indices, x, geometry, launch.stream); });
  });
}

void max_pool_backward(const View& dx, const View& dy, const View& indices, const PoolGeometry& geometry) {
  if (dx.numel() == 0) return;
  const Launch launch(dx);
  dispatch_cuda(Floats(), dx.dtype, "max_pool_backward", [&]<class T>() {
    dispatch_cuda(Indices(), indices.dtype, "max_pool_backward", [&]<class Index>() {
      const PoolViews views{dx, dy, indices, geometry, false};
      if (launch_cells<T, Index>(views, launch.stream)) return;
      run_pool<T, true>("max_pool_backward", views,
                        [&]<int width, int axis>(const PoolProblem& problem, uint32_t count) {
                          max_pool_backward_kernel<T, Index, width, axis>
                              <<<grid_size(count), kBlock, 0, launch.stream>>>(problem, dx, count);
                        });
    });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
