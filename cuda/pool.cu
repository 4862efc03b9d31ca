// Max pooling over (N, C, D, H, W) and its gradient. A thread computes one element of the output, or a vector of
// channels if the channels are innermost in memory. In the backward pass, a thread computes one element of dx: it adds
// the gradients of all windows whose maximum is this element, in a fixed order. For windows that do not overlap,
// cuda/pool_disjoint.cuh has faster kernels.
#include <limits>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/pool_disjoint.cuh"

namespace voxgrad::cuda {
namespace {

using Indices = Types<int32_t, int64_t>;

/// Returns the longest axis of the output if the output has 2^31 elements or more, otherwise -1.
int axis_to_split(const PoolViews& views) {
  if (views.out.numel() < int64_t{1} << 31) return -1;
  return static_cast<int>(std::max_element(views.out.size, views.out.size + 5) - views.out.size);
}

/// Computes max pooling with any windows. A thread handles `width` channels. For windows of 2 x 2 x 2 (`pairs`), a
/// thread loads all elements of a window before the first comparison, so that enough loads are in flight with 2 or 3
/// CTAs per SM. Launch: one thread per item, `count` in all, in a 1-D grid-stride loop, kBlock threads per CTA. No
/// shared memory.
template <class T, class Index, int width, bool pairs>
__global__ void __launch_bounds__(kBlock, width == 1 ? 3 : 2)
    max_pool_kernel(const __grid_constant__ PoolProblem p, uint32_t count) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  using Number = std::conditional_t<std::is_same_v<Index, NoIndex>, int32_t, Index>;
  // Negative positions wrap around, so that one comparison checks both ends of the input.
  using Unsigned = std::make_unsigned_t<Number>;
  const PoolGeometry& g = p.geometry;
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at);
    const T* volume = element<const T>(p.in, at[0], at[1]);
    Unsigned start[3];
    for (int i = 0; i < 3; ++i)
      start[i] = static_cast<Unsigned>((p.first[i] + at[i + 2]) * g.stride.values[i] - g.padding.values[i]);
    Best<C, Index> best[width];
    // Loads a tap (an element of the window). Returns -1 if the tap is in the padding, otherwise its position in the
    // volume. Without indices, the position is 0, because positions of 2^31 and more would not fit.
    const auto fetch = [&](Unsigned kd, Unsigned kh, Unsigned kw, T(&loaded)[width]) -> Number {
      const Unsigned tap[3] = {kd, kh, kw};
      int64_t offset = 0;
      Unsigned position = 0;
      bool inside = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const Unsigned at_axis = start[i] + tap[i] * static_cast<Unsigned>(g.dilation.values[i]);
        inside &= at_axis < static_cast<Unsigned>(p.in.size[i + 2]);
        offset += static_cast<int64_t>(at_axis) * p.in.stride[i + 2];
        position = position * static_cast<Unsigned>(p.in.size[i + 2]) + at_axis;
      }
      if (inside) load_values<width>(volume + offset, loaded);
      if (std::is_same_v<Index, NoIndex>) position = 0;
      return inside ? static_cast<Number>(position) : Number(-1);
    };
    const auto offer = [&](Number position, const T(&loaded)[width]) {
      if (position >= 0)
#pragma unroll
        for (int j = 0; j < width; ++j) best[j].offer(static_cast<C>(loaded[j]), position);
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
    store_best(best, element<T>(p.out, at[0], at[1], at[2], at[3], at[4]),
               element<Index>(p.indices, at[0], at[1], at[2], at[3], at[4]));
  }
}

/// The windows [begin, end) along an axis that may contain input i.
struct WindowRange {
  int64_t begin;
  int64_t end;

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

/// Computes the gradient of max pooling with any windows. A thread handles `width` channels. The indices refer to the
/// volume `whole`; p.out is this volume or a part of it. Launch: one thread per item, `count` in all, in a 1-D
/// grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, class Index, int width>
__global__ void __launch_bounds__(kBlock) max_pool_backward_kernel(const __grid_constant__ PoolProblem p,
                                                                   const __grid_constant__ View whole, uint32_t count) {
  wait_for_previous_kernels();
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at);
    const int64_t id = p.first[0] + at[2], ih = p.first[1] + at[3], iw = p.first[2] + at[4];
    const auto position = static_cast<Index>((id * whole.size[3] + ih) * whole.size[4] + iw);
    const WindowRange d(p, 0, id), h(p, 1, ih), w(p, 2, iw);
    compute_t<T> sum[width] = {};
    for (int64_t od = d.begin; od < d.end; ++od)
      for (int64_t oh = h.begin; oh < h.end; ++oh) {
        const Index* indices = element<const Index>(p.indices, at[0], at[1], od, oh, w.begin);
        const T* gradients = element<const T>(p.in, at[0], at[1], od, oh, w.begin);
        for (int left = static_cast<int>(w.end - w.begin); left > 0; --left) {
          Index maximum[width];
          T gradient[width];
          load_values<width>(indices, maximum);
          load_values<width>(gradients, gradient);
#pragma unroll
          for (int j = 0; j < width; ++j)
            if (maximum[j] == position) sum[j] += gradient[j];
          indices += p.indices.stride[4];
          gradients += p.in.stride[4];
        }
      }
    store_values<width>(element<T>(p.out, at[0], at[1], at[2], at[3], at[4]), sum);
  }
}

/// Calls f<width>(problem, number of items) for every part of the output. Items are vectors of channels if all views
/// have aligned vectors of channels, otherwise single elements.
template <class T, class F>
void run_pool(const PoolViews& views, const F& f) {
  constexpr int width = kVectorWidth<T>;
  for_each_part(views, axis_to_split, [&](const PoolViews& part) {
    const auto elements = static_cast<uint32_t>(part.out.numel());
    if (has_vectors(part.out, 1, width) && has_vectors(part.in, 1, width) &&
        (!part.indices.data || has_vectors(part.indices, 1, width)))
      f.template operator()<width>(PoolProblem(part, width), elements / width);
    else
      f.template operator()<1>(PoolProblem(part, 1), elements);
  });
}

/// Launches the kernel that suits the windows and the layout.
template <class T, class Index>
void max_pool_with(const View& y, const View* indices, const View& x, const PoolGeometry& geometry,
                   cudaStream_t stream) {
  const PoolViews views{y, x, indices ? *indices : View(), geometry, true};
  if (launch_pairs<T, Index>(views, stream)) return;
  const Triple& size = geometry.kernel_size;
  const bool pairs = size[0] == 2 && size[1] == 2 && size[2] == 2;
  run_pool<T>(views, [&]<int width>(const PoolProblem& problem, uint32_t count) {
    const auto kernel = pairs ? max_pool_kernel<T, Index, width, true> : max_pool_kernel<T, Index, width, false>;
    launch_kernel("max_pool", kernel, grid_size(count), kBlock, 0, stream, problem, count);
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
      run_pool<T>(views, [&]<int width>(const PoolProblem& problem, uint32_t count) {
        launch_kernel("max_pool_backward", max_pool_backward_kernel<T, Index, width>, grid_size(count), kBlock, 0,
                      launch.stream, problem, dx, count);
      });
    });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
