// gather, which reads elements by index along an axis, and its adjoint scatter_add. Each sum of scatter_add is computed
// by a single thread in the order of the index, without atomic operations, so that results are bitwise reproducible.
#include <limits>

#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda::kernel {
namespace {

/// Size and stride of the indexed axis of a view.
struct Axis {
  int64_t size;
  int64_t stride;
};

/// Returns `view` in the shape of `like`, with stride 0 along `axis`: all positions along the axis refer to the first
/// element of the axis.
View hold_axis(const View& view, const View& like, int axis) {
  View held = like;
  held.data = view.data;
  held.dtype = view.dtype;
  std::copy_n(view.stride, view.rank, held.stride);
  held.stride[axis] = 0;
  return held;
}

/// Computes out[i] = in[index[i]] along an axis. Where the index is out of range, reports the error and stores NaN, or
/// 0 for integers. `stride` is the stride of the axis in `in`. `offsets` holds the offsets in `out`, in `in` (without
/// the indexed axis) and in `index`. Launch: one thread per element of the output, `count` in all, in a 1-D grid-stride
/// loop, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock) gather_elements(T* out, const T* in, const int64_t* index, int64_t stride,
                                                          IndexCheck inside, uint32_t count, Offsets<3> offsets) {
  wait_for_previous_kernels();
  constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
  const T missing = convert<T>(floating ? std::numeric_limits<double>::quiet_NaN() : 0);
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < count; i += gridDim.x * kBlock) {
    int64_t at[3];
    offsets.at(i, at);
    const int64_t chosen = index[at[2]];
    out[at[0]] = inside(chosen) ? in[at[1] + chosen * stride] : missing;
  }
}

/// Adds the elements of `in` to the elements of `out` that the index selects; sums are in compute_t. A thread handles
/// one line along the axis. `offsets` are the offsets of the lines in `out`, `in` and `index`. Launch: one thread per
/// line in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock)
    scatter_lines(compute_t<T>* out, const T* in, const int64_t* index, Axis out_axis, Axis in_axis,
                  int64_t index_stride, IndexCheck inside, uint32_t lines, Offsets<3> offsets) {
  wait_for_previous_kernels();
  for (uint32_t line = blockIdx.x * kBlock + threadIdx.x; line < lines; line += gridDim.x * kBlock) {
    int64_t at[3];
    offsets.at(line, at);
    for (int64_t i = 0; i < in_axis.size; ++i) {
      const int64_t chosen = index[at[2] + i * index_stride];
      if (inside(chosen)) out[at[0] + chosen * out_axis.stride] += in[at[1] + i * in_axis.stride];
    }
  }
}

/// Computes the same as scatter_lines for an `out` of zeros, with one thread per element of `out`. The thread reads the
/// whole line of the index. Used for few lines, because one thread per line would leave most of the GPU idle. Launch: a
/// 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock)
    scatter_elements(compute_t<T>* out, const T* in, const int64_t* index, Axis out_axis, Axis in_axis,
                     int64_t index_stride, IndexCheck inside, uint32_t lines, Offsets<3> offsets) {
  wait_for_previous_kernels();
  const int64_t count = lines * out_axis.size;
  for (int64_t e = thread_index(); e < count; e += thread_count()) {
    const auto line = static_cast<uint32_t>(e / out_axis.size);
    const int64_t position = e % out_axis.size;
    int64_t at[3];
    offsets.at(line, at);
    compute_t<T> sum = 0;
    for (int64_t i = 0; i < in_axis.size; ++i) {
      const int64_t chosen = index[at[2] + i * index_stride];
      if (chosen == position) sum += in[at[1] + i * in_axis.stride];
      if (position == 0) inside(chosen);  // one thread per line reports indices out of range
    }
    out[at[0] + position * out_axis.stride] = sum;
  }
}

/// Below this number of lines, scatter_elements is used.
constexpr int64_t kFewLines = 4096;

template <class T>
void scatter_typed(const char* op, const View& out, const View& in, const View& index, int axis) {
  const Launch launch(out);
  const Axis out_axis{out.size[axis], out.stride[axis]};
  const Axis in_axis{in.size[axis], in.stride[axis]};
  const IndexCheck inside(out_axis.size, op, launch);
  // Enumerate the lines with a view that contains only the first element of each line.
  View line = in;
  line.size[axis] = 1;
  const Nest<3> nest =
      make_nest<3>({hold_axis(out, line, axis), hold_axis(in, line, axis), hold_axis(index, line, axis)});
  for_each_part(nest, [&](const Nest<3>& part, const std::array<int64_t, 3>& base) {
    const auto lines = static_cast<uint32_t>(part.numel());
    const bool few = lines < kFewLines;
    const auto kernel = few ? scatter_elements<T> : scatter_lines<T>;
    const unsigned grid = grid_size(few ? lines * out_axis.size : lines);
    launch_kernel(op, kernel, grid, kBlock, 0, launch.stream, out.as<compute_t<T>>() + base[0],
                  in.as<const T>() + base[1], index.as<const int64_t>() + base[2], out_axis, in_axis,
                  index.stride[axis], inside, lines, Offsets<3>(part));
  });
}

}  // namespace

void gather(const char* op, const View& out, const View& in, const View& index, int axis) {
  if (out.numel() == 0) return;
  const Launch launch(out);
  const IndexCheck inside(in.size[axis], op, launch);
  const Nest<3> nest = make_nest<3>({out, hold_axis(in, out, axis), index});
  dispatch_cuda(Anything(), out.dtype, op, [&]<class T>() {
    for_each_part(nest, [&](const Nest<3>& part, const std::array<int64_t, 3>& base) {
      const auto count = static_cast<uint32_t>(part.numel());
      launch_kernel(op, gather_elements<T>, grid_size(count), kBlock, 0, launch.stream, out.as<T>() + base[0],
                    in.as<const T>() + base[1], index.as<const int64_t>() + base[2], in.stride[axis], inside, count,
                    Offsets<3>(part));
    });
  });
}

void scatter_add(const char* op, const View& out, const View& in, const View& index, int axis) {
  dispatch_cuda(Floats(), out.dtype, "scatter_add", [&]<class T>() {
    using C = compute_t<T>;
    if (out.numel() == 0) return;
    const bool direct = std::is_same_v<T, C>;
    const Workspace wide(Launch(out), direct ? 0 : static_cast<size_t>(out.numel()) * sizeof(C));
    const View sums = direct ? out : dense_like(out, wide.as<void>(), dtype_of<C>);
    fill(sums, 0);
    if (in.numel() > 0) scatter_typed<T>(op, sums, in, index, axis);
    if (!direct) copy(out, sums);
  });
}

}  // namespace voxgrad::cuda::kernel
