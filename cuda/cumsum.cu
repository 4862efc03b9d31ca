// Cumulative sums along an axis, in a fixed order. The elements along the axis at one position of the other axes are
// called a line. Floating-point elements are summed in double, all other elements in uint64_t, which wraps around.
#include "core/detail/divide.h"
#include "cuda/detail/kernels.h"
#include "cuda/detail/launch.h"
#include "cuda/nest.cuh"

namespace voxgrad::cuda::kernel {
namespace {

struct ScanProblem {
  Nest<2> lines;     ///< the axes other than the summed axis, with the strides of the input and the output
  int64_t count;     ///< number of lines
  int64_t length;    ///< elements of a line
  int64_t in_step;   ///< stride of the input along a line, negated if the order is reversed
  int64_t out_step;  ///< stride of the output along a line, negated if the order is reversed
  int threads;       ///< threads per line: 1 or kBlock
};

/// Computes the cumulative sums of all lines. With one thread per line, a thread scans the whole line. Otherwise a CTA
/// splits a line into equal ranges: a thread first sums its range and then scans it, starting from the sum of all
/// earlier ranges. Launch: one thread or one CTA per line in a 1-D grid-stride loop, kBlock threads per CTA. Static
/// shared memory: kBlock sums.
template <class T, class Out, class Sum>
__global__ void __launch_bounds__(kBlock)
    scan_lines(const __grid_constant__ ScanProblem problem, Out* out, const T* in) {
  wait_for_previous_kernels();
  __shared__ Sum shared[kBlock];
  const bool whole_line = problem.threads == 1;
  const int64_t share = divide_up(problem.length, problem.threads);
  const int64_t begin = whole_line ? 0 : min(threadIdx.x * share, problem.length);
  const int64_t end = min(begin + share, problem.length);
  const int64_t first = whole_line ? thread_index() : blockIdx.x;
  const int64_t step = whole_line ? thread_count() : gridDim.x;
  for (int64_t line = first; line < problem.count; line += step) {
    const T* from = in + problem.lines.offset(line, 0);
    Out* to = out + problem.lines.offset(line, 1);
    Sum sum = 0;
    if (!whole_line) {
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
  const auto is_other = [axis](int other) { return other != axis; };
  problem.lines = make_nest<2>({select_axes(in, is_other), select_axes(out, is_other)});
  problem.count = problem.lines.numel();
  problem.length = in.size[axis];
  const int direction = reverse ? -1 : 1;
  const int64_t start = reverse ? problem.length - 1 : 0;
  problem.in_step = direction * in.stride[axis];
  problem.out_step = direction * out.stride[axis];
  const bool axis_is_inner = std::abs(problem.in_step) < std::abs(problem.lines.stride[0][0]);
  problem.threads = problem.length < 128 || (problem.count >= 4096 && !axis_is_inner) ? 1 : kBlock;
  const Launch launch(out);
  dispatch_cuda(Anything(), in.dtype, "cumsum", [&]<class T>() {
    constexpr bool floating = std::is_floating_point_v<compute_t<T>>;
    using Out = std::conditional_t<floating, T, int64_t>;
    using Sum = std::conditional_t<floating, double, uint64_t>;
    launch_kernel("cumsum", scan_lines<T, Out, Sum>, grid_size(problem.count, kBlock / problem.threads), kBlock, 0,
                  launch.stream, problem, out.as<Out>() + start * out.stride[axis],
                  in.as<const T>() + start * in.stride[axis]);
  });
}

}  // namespace voxgrad::cuda::kernel
