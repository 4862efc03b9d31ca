// Running sums along an axis, in double or in unsigned 64-bit integers, which wrap around; always in the same order.
#include "core/detail/divide.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda::kernel {
namespace {

struct ScanProblem {
  Axes lines;  // a: strides in the input; b: in the result
  int64_t count, length, in_step, out_step;
  int threads;  // of a line: one, or a block, which share its elements
};

template <class T, class Out, class Sum>
__global__ void __launch_bounds__(kBlock)
    scan_lines(const __grid_constant__ ScanProblem problem, Out* __restrict__ out, const T* __restrict__ in) {
  __shared__ Sum shared[kBlock];
  const bool alone = problem.threads == 1;
  const int64_t share = divide_up(problem.length, problem.threads);
  const int64_t begin = alone ? 0 : min(threadIdx.x * share, problem.length), end = min(begin + share, problem.length);
  const int64_t first = alone ? thread_index() : blockIdx.x, step = alone ? thread_count() : gridDim.x;
  for (int64_t line = first; line < problem.count; line += step) {
    const T* from = in + problem.lines.offset(line, problem.lines.a);
    Out* to = out + problem.lines.offset(line, problem.lines.b);
    Sum sum = 0;
    if (!alone) {
#pragma unroll 8
      for (int64_t i = begin; i < end; ++i) sum += convert<Sum>(from[i * problem.in_step]);
      __syncthreads();
      shared[threadIdx.x] = sum;
      __syncthreads();
      sum = 0;
      for (unsigned before = 0; before < threadIdx.x; ++before) sum += shared[before];
    }
#pragma unroll 8
    for (int64_t i = begin; i < end; ++i) {
      sum += convert<Sum>(from[i * problem.in_step]);
      to[i * problem.out_step] = convert<Out>(sum);
    }
  }
}

}  // namespace

void cumsum(const View& out, const View& in, int axis, bool reverse) {
  if (out.numel() == 0) return;
  ScanProblem problem{};
  for (int other = in.rank - 1; other >= 0; --other)
    if (other != axis) problem.lines.add(in.size[other], in.stride[other], out.stride[other]);
  problem.lines.finish();
  problem.count = problem.lines.numel();
  problem.length = in.size[axis];
  const int direction = reverse ? -1 : 1;  // from the last element to the first
  const int64_t start = reverse ? problem.length - 1 : 0;
  problem.in_step = direction * in.stride[axis];
  problem.out_step = direction * out.stride[axis];
  const bool axis_inside = std::abs(problem.in_step) < std::abs(problem.lines.a[0]);
  problem.threads = problem.length < 128 || (problem.count >= 4096 && !axis_inside) ? 1 : kBlock;
  const Launch launch(out);
  dispatch_cuda(Anything(), in.dtype, "cumsum", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Out = std::conditional_t<floating, T, int64_t>;
    using Sum = std::conditional_t<floating, double, uint64_t>;
    scan_lines<T, Out, Sum><<<grid_size(problem.count, kBlock / problem.threads), kBlock, 0, launch.stream>>>(
        problem, out.as<Out>() + start * out.stride[axis], in.as<const T>() + start * in.stride[axis]);
    check_launch("cumsum");
  });
}

}  // namespace voxgrad::cuda::kernel
