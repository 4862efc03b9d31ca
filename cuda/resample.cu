// Resampling along one axis, and the transposed map, by gathering: a thread makes one element of several lines of the
// result, from the inputs that ops/resample_taps.h names, or from all the outputs of the map that read it.
#include "ops/resample_taps.h"

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

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

/// Calls f(position in a line of the input, its weight) for what makes element `place` of a line of the result.
template <bool transposed, class F>
__device__ void for_terms(const ResampleProblem& problem, int64_t place, const F& f) {
  const Resample& map = problem.map;
  if constexpr (!transposed) {
    const Taps taps = resample_taps(map, place, problem.in_size);
    for (int64_t i = taps.first; i < taps.first + taps.count; ++i)
      f(i, resample_weight(map, place, i, problem.in_size));
  } else {
    const int64_t n = problem.out_size;
    const Taps readers = resample_readers(map, place, n, problem.in_size);
    for (int64_t o = readers.first; o < readers.first + readers.count; ++o) {
      const Taps taps = resample_taps(map, o, n);
      if (place >= taps.first && place < taps.first + taps.count) f(o, resample_weight(map, o, place, n));
    }
  }
}

/// A thread makes one element of each of 16 bytes' worth of lines, which share their weights: neighbours in memory,
/// read as vectors, or any lines.
template <class T, bool transposed, bool vectors>
__global__ void __launch_bounds__(kBlock) resample_kernel(const __grid_constant__ ResampleProblem problem) {
  using C = compute_t<T>;
  constexpr int width = kVectorWidth<T>;
  const int64_t groups = (problem.line_count + width - 1) / width, count = groups * problem.out_size;
  for (int64_t number = thread_index(); number < count; number += thread_count()) {
    const int64_t inner = problem.lines_adjacent ? groups : problem.out_size;
    const int64_t outer = quotient(number, inner), rest = number - outer * inner;
    const int64_t group = problem.lines_adjacent ? rest : outer, place = problem.lines_adjacent ? outer : rest;
    // Lines of other groups than vectors lie apart, so that neighbouring threads read neighbours.
    const int64_t first = vectors ? group * width : group, step = vectors ? 1 : groups;
    const T* in[vectors ? 1 : width];
#pragma unroll
    for (int j = 0; j < (vectors ? 1 : width); ++j)
      in[j] = static_cast<const T*>(problem.in) +
              problem.lines.offset(min(first + j * step, problem.line_count - 1), problem.lines.b);
    C sum[width] = {};
    for_terms<transposed>(problem, place, [&](int64_t i, double weight) {
      Vector<T, width> loaded;
      if constexpr (vectors) {
        loaded = load_vector<T, width>(in[0] + i * problem.in_stride);
      } else {
#pragma unroll
        for (int j = 0; j < width; ++j) loaded.v[j] = in[j][i * problem.in_stride];
      }
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += static_cast<C>(weight) * static_cast<C>(loaded.v[j]);
    });
    Vector<T, width> result;
#pragma unroll
    for (int j = 0; j < width; ++j) result.v[j] = convert<T>(sum[j]);
    T* out = static_cast<T*>(problem.out) + place * problem.out_stride;
    if constexpr (vectors) {
      store_vector(out + problem.lines.offset(first, problem.lines.a), result);
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j)
        if (first + j * step < problem.line_count)
          out[problem.lines.offset(first + j * step, problem.lines.a)] = result.v[j];
    }
  }
}

/// Whether `width` neighbouring lines are aligned vectors everywhere.
bool has_vector_lines(const ResampleProblem& p, int width) {
  const auto divides = [width](int64_t n) { return n % width == 0; };
  const Axes& lines = p.lines;
  return p.lines_adjacent && lines.a[0] == 1 && lines.b[0] == 1 && divides(lines.size[0]) && divides(p.out_stride) &&
         divides(p.in_stride) && std::all_of(lines.a + 1, lines.a + lines.rank, divides) &&
         std::all_of(lines.b + 1, lines.b + lines.rank, divides) &&
         (reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.in)) % 16 == 0;
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
    constexpr int width = kVectorWidth<T>;
    const bool vectors = has_vector_lines(problem, width);
    const auto kernel = transposed ? vectors ? resample_kernel<T, true, true> : resample_kernel<T, true, false>
                        : vectors ? resample_kernel<T, false, true>
                                   : resample_kernel<T, false, false>;
    const int64_t groups = (problem.line_count + width - 1) / width;
    kernel<<<grid_size(groups * problem.out_size), kBlock, 0, launch.stream>>>(problem);
  });
  check_launch("resample");
}

}  // namespace kernel
}  // namespace voxgrad::cuda
