// Sums and extrema over any axes.
//
// Axes are sorted by stride and merged; then either neighbouring threads take neighbouring elements of one output
// (reduced axes innermost in memory) or neighbouring outputs (kept axes innermost). Long reductions with few outputs
// are cut into ranges, whose number follows from the shape alone, and the results of the ranges are reduced by a
// second launch. Sums run in double or int64, and all orders are fixed.
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

/// The type that sums of T are made in.
template <class T>
using SumOf = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;

struct Sum {
  template <class T>
  __device__ static T identity(bool) {
    return 0;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool) {
    return x + y;
  }
};

/// The larger one, or the smaller one; NaN wins.
struct Extremum {
  template <class T>
  __device__ static T identity(bool largest) {
    using Limits = std::numeric_limits<T>;
    const T top = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const T bottom = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return largest ? bottom : top;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool largest) {
    return x != x || (largest ? x > y : x < y) ? x : y;
  }
};

struct ReduceProblem {
  const void* in;
  void* out;
  Axes kept, reduced;  // a: strides in `in`; b: in `out`
  int64_t outputs, length;
  int64_t ranges, range;  // of the reduced elements
  int64_t range_stride;   // between the results of the ranges in `out`
  BlockLayout layout;
  bool largest;
};

template <class Operation, class In, class Accumulator, class Out>
__global__ void __launch_bounds__(kBlock) reduce_kernel(const __grid_constant__ ReduceProblem problem) {
  constexpr int kUnroll = 4;  // loads on their way at a time
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t output_tiles = (problem.outputs + layout.columns - 1) / layout.columns;
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t range = tile / output_tiles;
    const int64_t output = (tile - range * output_tiles) * layout.columns + layout.column();
    const int64_t end = min((range + 1) * problem.range, problem.length);
    Accumulator value = Operation::template identity<Accumulator>(problem.largest);
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, problem.kept.a);
      int64_t index = range * problem.range + layout.reducer();
      for (Cursor cursor(problem.reduced, index); index < end; index += kUnroll * layout.reducers) {
        Accumulator loaded[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const bool inside = index + i * layout.reducers < end;
          loaded[i] = inside ? static_cast<Accumulator>(in[cursor.offset()])
                             : Operation::template identity<Accumulator>(problem.largest);
          cursor.advance(layout.reducers);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) value = Operation::combine(value, loaded[i], problem.largest);
      }
    }
    value = combine_reducers(value, layout, shared,
                             [&](Accumulator x, Accumulator y) { return Operation::combine(x, y, problem.largest); });
    if (output < problem.outputs && layout.reducer() == 0)
      static_cast<Out*>(problem.out)[range * problem.range_stride + problem.kept.offset(output, problem.kept.b)] =
          static_cast<Out>(value);
  }
}

template <class Operation, class In, class Accumulator, class Out>
void launch_reduce(const ReduceProblem& problem, cudaStream_t stream) {
  const int64_t tiles = (problem.outputs + problem.layout.columns - 1) / problem.layout.columns * problem.ranges;
  reduce_kernel<Operation, In, Accumulator, Out><<<grid_size(tiles, 1), kBlock, 0, stream>>>(problem);
  check_launch("reduce");
}

/// About a thousand blocks, if every thread still has 16 elements or more.
int64_t count_ranges(int64_t outputs, int64_t length, const BlockLayout& layout) {
  const int64_t tiles = (outputs + layout.columns - 1) / layout.columns;
  const int64_t shortest = layout.reducers * 16;
  return std::clamp<int64_t>((length + shortest - 1) / shortest, 1, std::max<int64_t>(1024 / tiles, 1));
}

/// The problem of reducing `in` to `out` in one launch.
ReduceProblem make_problem(const View& out, const View& in, bool largest) {
  ReduceProblem problem{};
  problem.in = in.data;
  problem.out = out.data;
  for (int axis = in.rank - 1; axis >= 0; --axis) {
    if (out.size[axis] == in.size[axis])
      problem.kept.add(in.size[axis], in.stride[axis], out.stride[axis]);
    else
      problem.reduced.add(in.size[axis], in.stride[axis], 0);
  }
  // The reduced axes have no strides in `out`; the same ones twice make finish() look at `in` alone.
  std::copy_n(problem.reduced.a, kMaxRank, problem.reduced.b);
  problem.length = problem.range = problem.reduced.numel();
  if (problem.length == 0) problem.reduced = {};
  problem.kept.finish();
  problem.reduced.finish();
  problem.outputs = out.numel();
  problem.ranges = 1;
  const bool columns_adjacent = problem.outputs > 1 && std::abs(problem.kept.a[0]) < std::abs(problem.reduced.a[0]);
  problem.layout = BlockLayout::choose(problem.length, columns_adjacent);
  problem.largest = largest;
  return problem;
}

template <class Operation, class In, class Accumulator, class Out>
void reduce_as(const View& out, const View& in, bool largest, const Launch& launch) {
  ReduceProblem problem = make_problem(out, in, largest);
  const int64_t ranges = count_ranges(problem.outputs, problem.length, problem.layout);
  if (ranges == 1) return launch_reduce<Operation, In, Accumulator, Out>(problem, launch.stream);

  const Workspace partial(launch, static_cast<size_t>(ranges * problem.outputs) * sizeof(Accumulator));
  ReduceProblem first = problem;
  first.out = partial.as<Accumulator>();
  first.range = (problem.length + ranges - 1) / ranges;
  first.ranges = ranges;
  first.range_stride = problem.outputs;
  int64_t dense = 1;
  for (int axis = 0; axis < first.kept.rank; dense *= first.kept.size[axis++]) first.kept.b[axis] = dense;
  launch_reduce<Operation, In, Accumulator, Accumulator>(first, launch.stream);

  ReduceProblem second = problem;
  second.in = first.out;
  std::copy_n(first.kept.b, kMaxRank, second.kept.a);
  second.reduced = {};
  second.reduced.add(ranges, problem.outputs, problem.outputs);
  second.reduced.finish();
  second.length = second.range = ranges;
  second.layout = BlockLayout::choose(ranges, problem.outputs > 1);
  launch_reduce<Operation, Accumulator, Accumulator, Out>(second, launch.stream);
}

}  // namespace

namespace kernel {

void reduce(ReduceOp op, const View& out, const View& in) {
  if (out.numel() == 0) return;
  const Launch launch(out);
  if (op == ReduceOp::sum) {
    dispatch<float, double, int64_t, int32_t, uint8_t, bool>(in.dtype, "sum", "CUDA", [&]<class T>() {
      using Out = std::conditional_t<std::is_floating_point_v<T>, T, int64_t>;
      reduce_as<Sum, T, SumOf<T>, Out>(out, in, false, launch);
    });
    return;
  }
  const bool largest = op == ReduceOp::amax;
  dispatch<float, double, int64_t, int32_t>(in.dtype, largest ? "amax" : "amin", "CUDA",
                                            [&]<class T>() { reduce_as<Extremum, T, T, T>(out, in, largest, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
