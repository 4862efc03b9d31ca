// Running sums along an axis, in double or in unsigned 64-bit integers, which wrap around; always in the same order.
//
// Where there are many lines, or short ones, a thread goes along each. Else a block does, or several, each over a range
// of the line: a first launch sums the ranges, and every block of the second starts from those before its own.
#include <cub/block/block_scan.cuh>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda::kernel {
namespace {

struct ScanProblem {
  Axes lines;  // a: strides in the input; b: in the result
  int64_t count, length, in_step, out_step;
  int64_t ranges, range;  // of a line's elements
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

/// f(0) + f(1) + ... + f(count - 1), by a block; every thread gets it.
template <class Sum, class F>
__device__ Sum block_sum(int64_t count, Sum* shared, const F& f) {
  Sum sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kBlock) sum += f(i);
  return combine_reducers(sum, BlockLayout{1, kBlock, false}, shared, [](Sum a, Sum b) { return a + b; });
}

template <class T, class Sum>
__global__ void __launch_bounds__(kBlock)
    sum_ranges(const __grid_constant__ ScanProblem problem, Sum* sums, const T* in) {
  __shared__ Sum shared[kBlock];
  for (int64_t tile = blockIdx.x; tile < problem.count * problem.ranges; tile += gridDim.x) {
    const int64_t line = quotient(tile, problem.ranges), start = (tile - line * problem.ranges) * problem.range;
    const T* from = in + problem.lines.offset(line, problem.lines.a) + start * problem.in_step;
    const Sum sum = block_sum(min(problem.range, problem.length - start), shared,
                              [&](int64_t i) { return convert<Sum>(from[i * problem.in_step]); });
    if (threadIdx.x == 0) sums[tile] = sum;
  }
}

/// `sums` are those of sum_ranges(), or null where a line is one range.
template <class T, class Out, class Sum>
__global__ void __launch_bounds__(kBlock) scan_ranges(const __grid_constant__ ScanProblem problem, const Sum* sums,
                                                      Out* __restrict__ out, const T* __restrict__ in) {
  using Scan = cub::BlockScan<Sum, kBlock>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ Sum shared[kBlock];
  for (int64_t tile = blockIdx.x; tile < problem.count * problem.ranges; tile += gridDim.x) {
    const int64_t line = quotient(tile, problem.ranges), range = tile - line * problem.ranges;
    const T* from = in + problem.lines.offset(line, problem.lines.a);
    Out* to = out + problem.lines.offset(line, problem.lines.b);
    const Sum* before = sums + line * problem.ranges;
    Sum start = sums ? block_sum(range, shared, [&](int64_t i) { return before[i]; }) : Sum(0);
    const int64_t end = min((range + 1) * problem.range, problem.length);
    for (int64_t first = range * problem.range; first < end; first += kBlock) {
      const int64_t i = first + threadIdx.x;
      Sum sum = i < end ? convert<Sum>(from[i * problem.in_step]) : Sum(0), total;
      Scan(storage).InclusiveSum(sum, sum, total);
      if (i < end) to[i * problem.out_step] = convert<Out>(start + sum);
      start += total;
      __syncthreads();
    }
  }
}

template <class T, class Out, class Sum>
void scan(ScanProblem problem, Out* out, const T* in, const Launch& launch) {
  constexpr int64_t kManyLines = 4096, kShort = 128, kBlocks = 2112, kRange = 16 * kBlock;
  const bool axis_inside = std::abs(problem.in_step) < std::abs(problem.lines.a[0]);
  if (problem.length < kShort || (problem.count >= kManyLines && !axis_inside)) {
    scan_lines<T, Out, Sum><<<grid_size(problem.count), kBlock, 0, launch.stream>>>(problem, out, in);
    return check_launch("cumsum");
  }
  problem.ranges = std::clamp<int64_t>(problem.length / kRange, 1, std::max<int64_t>(1, kBlocks / problem.count));
  problem.range = (problem.length + problem.ranges - 1) / problem.ranges;
  problem.ranges = (problem.length + problem.range - 1) / problem.range;
  const bool cut = problem.ranges > 1;
  const unsigned grid = grid_size(problem.count * problem.ranges, 1);
  const Workspace sums(launch, cut ? static_cast<size_t>(problem.count * problem.ranges) * sizeof(Sum) : 0);
  if (cut) {
    sum_ranges<T, Sum><<<grid, kBlock, 0, launch.stream>>>(problem, sums.as<Sum>(), in);
    check_launch("cumsum");
  }
  scan_ranges<T, Out, Sum><<<grid, kBlock, 0, launch.stream>>>(problem, sums.as<const Sum>(), out, in);
  check_launch("cumsum");
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
  const Launch launch(out);
  dispatch_cuda(Anything(), in.dtype, "cumsum", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Out = std::conditional_t<floating, T, int64_t>;
    using Sum = std::conditional_t<floating, double, uint64_t>;
    scan<T, Out, Sum>(problem, out.as<Out>() + start * out.stride[axis], in.as<const T>() + start * in.stride[axis],
                      launch);
  });
}

}  // namespace voxgrad::cuda::kernel
