// Resampling along one axis, and the transposed map, by gathering: a thread makes one element of the result, from the
// inputs that ops/resample_taps.h names, or from all the outputs of the map that read it.
#include "ops/resample_taps.h"

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

struct ResampleProblem {
  void* out;
  const void* in;
  Axes lines;  // all axes but one; a: strides in out, b: in in
  int64_t line_count, out_size, in_size, out_stride, in_stride;
  bool lines_adjacent;  // rather than the elements of a line
  Resample map;
};

/// Element `o` of a line of the result.
template <class T>
__device__ double forward_sum(const ResampleProblem& problem, const T* in, int64_t o) {
  const Taps taps = resample_taps(problem.map, o, problem.in_size);
  double sum = 0;
  for (int64_t i = taps.first; i < taps.first + taps.count; ++i)
    sum += resample_weight(problem.map, o, i, problem.in_size) * static_cast<double>(in[i * problem.in_stride]);
  return sum;
}

/// The same of the transposed map: `i` is a position in the map's input.
template <class T>
__device__ double transposed_sum(const ResampleProblem& problem, const T* in, int64_t i) {
  const int64_t n = problem.out_size;
  const Taps readers = resample_readers(problem.map, i, n, problem.in_size);
  double sum = 0;
  for (int64_t o = readers.first; o < readers.first + readers.count; ++o) {
    const Taps taps = resample_taps(problem.map, o, n);
    if (i >= taps.first && i < taps.first + taps.count)
      sum += resample_weight(problem.map, o, i, n) * static_cast<double>(in[o * problem.in_stride]);
  }
  return sum;
}

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kBlock) resample_kernel(const __grid_constant__ ResampleProblem problem) {
  const int64_t count = problem.line_count * problem.out_size;
  for (int64_t number = thread_index(); number < count; number += thread_count()) {
    const int64_t inner = problem.lines_adjacent ? problem.line_count : problem.out_size;
    const int64_t outer = quotient(number, inner), rest = number - outer * inner;
    const int64_t line = problem.lines_adjacent ? rest : outer, place = problem.lines_adjacent ? outer : rest;
    const T* in = static_cast<const T*>(problem.in) + problem.lines.offset(line, problem.lines.b);
    const double sum = kTransposed ? transposed_sum(problem, in, place) : forward_sum(problem, in, place);
    static_cast<T*>(problem.out)[problem.lines.offset(line, problem.lines.a) + place * problem.out_stride] =
        convert<T>(sum);
  }
}

}  // namespace

namespace kernel {

void resample(const View& out, const View& in, int axis, const Resample& map, bool transposed) {
  const int64_t count = out.numel();
  if (count == 0) return;
  ResampleProblem problem{};
  problem.out = out.data;
  problem.in = in.data;
  for (int other = out.rank - 1; other >= 0; --other)
    if (other != axis) problem.lines.add(out.size[other], out.stride[other], in.stride[other]);
  problem.lines.finish();
  problem.out_size = out.size[axis];
  problem.in_size = in.size[axis];
  problem.line_count = count / problem.out_size;
  problem.out_stride = out.stride[axis];
  problem.in_stride = in.stride[axis];
  problem.lines_adjacent = problem.line_count > 1 && std::abs(problem.lines.a[0]) < std::abs(problem.out_stride);
  problem.map = map;

  const Launch launch(out);
  dispatch(Floats(), out.dtype, "resample", "CUDA", [&]<class T>() {
    const auto kernel = transposed ? resample_kernel<T, true> : resample_kernel<T, false>;
    kernel<<<grid_size(count), kBlock, 0, launch.stream>>>(problem);
  });
  check_launch("resample");
}

}  // namespace kernel
}  // namespace voxgrad::cuda
