// Max pooling over (N, C, D, H, W) and its gradient. Both gather: a thread makes one output voxel, respectively one
// voxel of the gradient, to which it adds every window that named it, in order; where the channels are innermost in
// memory, 16 bytes of them.
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

using Indices = Types<int32_t, int64_t>;

/// Max pooling (out: y; in: x), or its gradient (out: dx; in: dy), or a part of either that begins at `first`.
struct PoolViews {
  View out, in, indices;  // indices.data is null where they are not wanted
  PoolGeometry geometry;
  bool indices_follow_out;       // rather than in
  int64_t first[3] = {0, 0, 0};  // depth, row and column of the part's first voxel

  /// Leaves `length` elements of an axis, from `begin` on.
  void cut(int axis, int64_t begin, int64_t length) {
    out.size[axis] = length;
    if (axis >= 2) first[axis - 2] += begin;
    for (View* view : {&out, &in, &indices}) {
      // The windows of a part of a volume lie anywhere in the other.
      const bool moves = view == &out || axis < 2 || (view == &indices && indices_follow_out);
      if (moves && view->data)
        view->data = static_cast<char*>(view->data) + begin * view->stride[axis] * item_size(view->dtype);
    }
  }
};

/// Calls f(views) for parts of fewer than 2^31 voxels.
template <class F>
void for_each_pool_part(const PoolViews& views, const F& f) {
  if (views.out.numel() < int64_t{1} << 31) return f(views);
  const int axis = static_cast<int>(std::max_element(views.out.size, views.out.size + 5) - views.out.size);
  const int64_t size = views.out.size[axis], half = size / 2;
  for (const bool second : {false, true}) {
    PoolViews part = views;
    part.cut(axis, second ? half : 0, second ? size - half : half);
    for_each_pool_part(part, f);
  }
}

/// PoolViews as kernels use them. Numbers count voxels of the output; the channels come in vectors.
struct PoolProblem {
  void *out, *indices;
  const void* in;
  int64_t out_stride[5], in_stride[5], indices_stride[5], in_size[3], first[3];
  Divider size[5], window_stride[3];
  PoolGeometry geometry;
  bool channels_inner;

  PoolProblem(const PoolViews& v, int width)
      : out(v.out.data), indices(v.indices.data), in(v.in.data), geometry(v.geometry) {
    for (int axis = 0; axis < 5; ++axis) {
      out_stride[axis] = v.out.stride[axis];
      in_stride[axis] = v.in.stride[axis];
      indices_stride[axis] = v.indices.stride[axis];
      size[axis] = Divider(axis == 1 ? v.out.size[1] / width : v.out.size[axis]);
    }
    for (int i = 0; i < 3; ++i) {
      in_size[i] = v.in.size[i + 2];
      first[i] = v.first[i];
      window_stride[i] = Divider(v.geometry.stride[i]);
    }
    channels_inner = width > 1 || std::abs(out_stride[1]) < std::abs(out_stride[4]);
  }
  /// Where voxel `number` stands.
  __device__ void locate(uint32_t number, int width, int64_t (&at)[5]) const {
    const auto take = [&](int axis) {
      const uint32_t rest = size[axis].divide(number);
      at[axis] = number - rest * size[axis].divisor;
      number = rest;
    };
    if (channels_inner) take(1);
    take(4);
    take(3);
    take(2);
    if (!channels_inner) take(1);
    at[0] = number;
    at[1] *= width;
  }
};

__device__ int64_t dot(const int64_t (&at)[5], const int64_t (&stride)[5]) {
  return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * stride[3] + at[4] * stride[4];
}

/// `width` neighbours, 16 bytes of them at a time.
template <int width, class T>
__device__ void load_values(const T* from, T (&to)[width]) {
  constexpr int part = std::min(width, kVectorWidth<T>);
#pragma unroll
  for (int k = 0; k < width; k += part) {
    const auto loaded = load_vector<T, part>(from + k);
#pragma unroll
    for (int j = 0; j < part; ++j) to[k + j] = loaded.v[j];
  }
}
template <int width, class T>
__device__ void store_values(T* to, const T (&from)[width]) {
  constexpr int part = std::min(width, kVectorWidth<T>);
#pragma unroll
  for (int k = 0; k < width; k += part) {
    Vector<T, part> stored;
#pragma unroll
    for (int j = 0; j < part; ++j) stored.v[j] = from[k + j];
    store_vector(to + k, stored);
  }
}

/// Blocks of a multiprocessor, so that enough loads are under way.
template <int width>
inline constexpr int kPoolBlocks = width == 1 ? 5 : 2;

/// A window of 2 x 2 x 2 (`pairs`) loads all its taps before it looks at them.
template <class T, class Index, int width, bool pairs>
__global__ void __launch_bounds__(kBlock, kPoolBlocks<width>)
    max_pool_kernel(const __grid_constant__ PoolProblem p, uint32_t count) {
  using C = compute_t<T>;
  using Place = std::make_unsigned_t<Index>;  // what lies in front of the input wraps around and is beyond its end
  const PoolGeometry& g = p.geometry;
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at);
    const T* volume = static_cast<const T*>(p.in) + at[0] * p.in_stride[0] + at[1] * p.in_stride[1];
    Place start[3];
    for (int i = 0; i < 3; ++i)
      start[i] = static_cast<Place>((p.first[i] + at[i + 2]) * g.stride.values[i] - g.padding.values[i]);
    C best[width];
    Index place[width];
#pragma unroll
    for (int j = 0; j < width; ++j) {
      best[j] = -std::numeric_limits<C>::infinity();
      place[j] = -1;  // the window holds padding only
    }
    /// The place of a tap, or -1, and its values.
    const auto fetch = [&](Place kd, Place kh, Place kw, T(&loaded)[width]) -> Index {
      const Place tap[3] = {kd, kh, kw};
      int64_t offset = 0;
      Place position = 0;
      bool inside = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const Place at_axis = start[i] + tap[i] * static_cast<Place>(g.dilation.values[i]);
        inside &= at_axis < static_cast<Place>(p.in_size[i]);
        offset += static_cast<int64_t>(at_axis) * p.in_stride[i + 2];
        position = position * static_cast<Place>(p.in_size[i]) + at_axis;
      }
      if (inside) load_values<width>(volume + offset, loaded);
      return inside ? static_cast<Index>(position) : Index(-1);
    };
    const auto offer = [&](Index position, const T(&loaded)[width]) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C value = loaded[j];
        // The first of equal ones, and the first NaN.
        const bool wins = position >= 0 && (place[j] < 0 || (!(value <= best[j]) && best[j] == best[j]));
        best[j] = wins ? value : best[j];
        place[j] = wins ? position : place[j];
      }
    };
    if constexpr (pairs) {
      T loaded[8][width];
      Index position[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) position[k] = fetch(k / 4, k / 2 % 2, k % 2, loaded[k]);
#pragma unroll
      for (int k = 0; k < 8; ++k) offer(position[k], loaded[k]);
    } else {
      T loaded[width];
      for (int kd = 0; kd < g.kernel_size.values[0]; ++kd)
        for (int kh = 0; kh < g.kernel_size.values[1]; ++kh)
          for (int kw = 0; kw < g.kernel_size.values[2]; ++kw) {
            const Index position = fetch(kd, kh, kw, loaded);
            if (position >= 0) offer(position, loaded);
          }
    }
    T result[width];
#pragma unroll
    for (int j = 0; j < width; ++j) result[j] = convert<T>(best[j]);
    store_values<width>(static_cast<T*>(p.out) + dot(at, p.out_stride), result);
    if (p.indices) store_values<width>(static_cast<Index*>(p.indices) + dot(at, p.indices_stride), place);
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
    end = min(divide(last) + 1, p.in_size[axis]);
  }
};

/// Sizes of the volume that `indices` point into.
struct VolumeSize {
  int64_t height, width;
};

template <class T, class Index, int width>
__global__ void __launch_bounds__(kBlock)
    max_pool_backward_kernel(const __grid_constant__ PoolProblem p, VolumeSize size, uint32_t count) {
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < count; number += gridDim.x * kBlock) {
    int64_t at[5];
    p.locate(number, width, at);
    const int64_t id = p.first[0] + at[2], ih = p.first[1] + at[3], iw = p.first[2] + at[4];
    const auto place = static_cast<Index>((id * size.height + ih) * size.width + iw);
    const WindowRange d(p, 0, id), h(p, 1, ih), w(p, 2, iw);
    compute_t<T> sum[width] = {};
    for (int64_t od = d.begin; od < d.end; ++od)
      for (int64_t oh = h.begin; oh < h.end; ++oh)
        for (int64_t ow = w.begin; ow < w.end; ++ow) {
          const int64_t window[5] = {at[0], at[1], od, oh, ow};
          Index named[width];
          T gradient[width];
          load_values<width>(static_cast<const Index*>(p.indices) + dot(window, p.indices_stride), named);
          load_values<width>(static_cast<const T*>(p.in) + dot(window, p.in_stride), gradient);
#pragma unroll
          for (int j = 0; j < width; ++j)
            if (named[j] == place) sum[j] += gradient[j];
        }
    T result[width];
#pragma unroll
    for (int j = 0; j < width; ++j) result[j] = convert<T>(sum[j]);
    store_values<width>(static_cast<T*>(p.out) + dot(at, p.out_stride), result);
  }
}

/// Whether 16-byte vectors of `width` channels are aligned everywhere.
bool has_vector_channels(const View& view, int width) {
  if (!view.data) return true;
  bool aligned = view.stride[1] == 1 && view.size[1] % width == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (const int axis : {0, 2, 3, 4}) aligned &= view.size[axis] == 1 || view.stride[axis] % width == 0;
  return aligned;
}

/// Calls f<T, Index, width>(problem, voxels or vectors of them, stream) for every part.
template <class F>
void run_pool(const char* op, const PoolViews& views, const F& f) {
  const Launch launch(views.out);
  const DType index = views.indices.data ? views.indices.dtype : DType::i32;
  dispatch_cuda(Floats(), views.out.dtype, op, [&]<class T>() {
    dispatch_cuda(Indices(), index, op, [&]<class Index>() {
      constexpr int width = kVectorWidth<T>;
      for_each_pool_part(views, [&](const PoolViews& part) {
        const bool vectors = has_vector_channels(part.out, width) && has_vector_channels(part.in, width) &&
                             has_vector_channels(part.indices, width);
        const auto count = static_cast<uint32_t>(part.out.numel() / (vectors ? width : 1));
        if (vectors)
          f.template operator()<T, Index, width>(PoolProblem(part, width), count, launch.stream);
        else
          f.template operator()<T, Index, 1>(PoolProblem(part, 1), count, launch.stream);
        check_launch(op);
      });
    });
  });
}

}  // namespace

namespace kernel {

void max_pool(const View& y, const View* indices, const View& x, const PoolGeometry& geometry) {
  if (y.numel() == 0) return;
  run_pool("max_pool", {y, x, indices ? *indices : View(), geometry, true},
           [&]<class T, class Index, int width>(const PoolProblem& problem, uint32_t count, cudaStream_t stream) {
             const Triple& size = problem.geometry.kernel_size;
             const bool pairs = size[0] == 2 && size[1] == 2 && size[2] == 2;
             const auto kernel =
                 pairs ? max_pool_kernel<T, Index, width, true> : max_pool_kernel<T, Index, width, false>;
             kernel<<<grid_size(count), kBlock, 0, stream>>>(problem, count);
           });
}

void max_pool_backward(const View& dx, const View& dy, const View& indices, const PoolGeometry& geometry) {
  if (dx.numel() == 0) return;
  const VolumeSize size{dx.size[3], dx.size[4]};
  run_pool("max_pool_backward", {dx, dy, indices, geometry, false},
           [&]<class T, class Index, int width>(const PoolProblem& problem, uint32_t count, cudaStream_t stream) {
             max_pool_backward_kernel<T, Index, width><<<grid_size(count), kBlock, 0, stream>>>(problem, size, count);
           });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
