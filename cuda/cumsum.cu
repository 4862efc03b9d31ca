// Running sums along an axis, in double or in unsigned 64-bit integers, which wrap around; always in the same order.
// Where there are many lines, or short ones, a thread goes along each, else a block.
#include <cub/block/block_scan.cuh>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda::kernel {
namespace {

struct ScanProblem {
  Axes lines;  // a: strides in the input; b: in the result
  int64_t count, length, in_step, out_step;
};

template <class T, class Out, class Sum>
__global__ void __launch_bounds__(kBlock)
    scan_lines(const __grid_constant__ ScanProblem problem, Out* __restrict__ out, const T* __restrict__ in) {
  for (int64_t line = thread_index(); line < problem.count; line += thread_count()) {
    const T* from = in + problem.lines.offset(line, problem.lines.a);
    Out* to = out + problem.lines.offset(line, problem.lines.b);
    Sum sum = 0;
#pragma unroll 8
    for (int64_t i = 0; i < problem.length; ++i) {
      sum += convert<Sum>(from[i * problem.in_step]);
      to[i * problem.out_step] = convert<Out>(sum);
    }
  }
}

template <class T, class Out, class Sum>
__global__ void __launch_bounds__(kBlock)
    scan_long_lines(const __grid_constant__ ScanProblem problem, Out* __restrict__ out, const T* __restrict__ in) {
  constexpr int kItems = 16;
  using Scan = cub::BlockScan<Sum, kBlock>;
  __shared__ typename Scan::TempStorage storage;
  for (int64_t line = blockIdx.x; line < problem.count; line += gridDim.x) {
    const T* from = in + problem.lines.offset(line, problem.lines.a);
    Out* to = out + problem.lines.offset(line, problem.lines.b);
    Sum before = 0;
    for (int64_t begin = 0; begin < problem.length; begin += kItems * kBlock) {
      const int64_t first = begin + threadIdx.x * kItems;
      Sum sum[kItems], total;
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        sum[k] = first + k < problem.length ? convert<Sum>(from[(first + k) * problem.in_step]) : Sum(0);
      Scan(storage).InclusiveSum(sum, sum, total);
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (first + k < problem.length) to[(first + k) * problem.out_step] = convert<Out>(before + sum[k]);
      before += total;
      __syncthreads();
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
  const bool short_lines = problem.length < 128 || (problem.count >= 4096 && !axis_inside);
  const Launch launch(out);
  dispatch_cuda(Anything(), in.dtype, "cumsum", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Out = std::conditional_t<floating, T, int64_t>;
    using Sum = std::conditional_t<floating, double, uint64_t>;
    const auto kernel = short_lines ? scan_lines<T, Out, Sum> : scan_long_lines<T, Out, Sum>;
    kernel<<<grid_size(problem.count, short_lines ? kBlock : 1), kBlock, 0, launch.stream>>>(
        problem, out.as<Out>() + start * out.stride[axis], in.as<const T>() + start * in.stride[axis]);
    check_launch("cumsum");
  });
}

}  // namespace voxgrad::cuda::kernel
