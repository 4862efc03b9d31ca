// Sums and extrema over any axes.
//
// Axes are sorted by stride and merged; then either neighbouring threads take neighbouring elements of one output
// (reduced axes innermost in memory) or neighbouring outputs (kept axes innermost), 16 bytes at a time where they are
// contiguous. Long reductions with few outputs are cut into ranges, whose number follows from the shape alone, and
// the results of the ranges are joined by a second launch. Sums run in double or int64, and all orders are fixed.
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda {
namespace {

/// The type in which extrema of T are compared: at least a word, which threads exchange.
template <class T>
using ExtremumOf = std::conditional_t<std::is_same_v<T, uint8_t>, int32_t, compute_t<T>>;

struct Sum {
  template <class T>
  __device__ static T identity(bool) {
    return 0;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool) {
    return static_cast<T>(wrapping(x) + wrapping(y));
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
  void* partial;       // results of the ranges, (ranges, outputs), to be joined; null if there is one range
  Axes kept, reduced;  // a: strides in `in`; b: in `out`
  int64_t outputs, length;
  int64_t ranges, range;  // of the reduced elements
  BlockLayout layout;
  bool largest;
  double scale;  // of sums

  int64_t output_tiles(int width) const {
    const int64_t columns = int64_t{layout.columns} * width;
    return (outputs + columns - 1) / columns;
  }
};

template <class Accumulator, class Out>
__device__ void store_result(const ReduceProblem& problem, int64_t output, int64_t range, Accumulator value) {
  if constexpr (std::is_floating_point_v<Accumulator>)
    if (!problem.partial) value *= static_cast<Accumulator>(problem.scale);
  if (problem.partial)
    static_cast<Accumulator*>(problem.partial)[range * problem.outputs + output] = value;
  else
    static_cast<Out*>(problem.out)[problem.kept.offset(output, problem.kept.b)] = convert<Out>(value);
}

/// Vectors or elements that a thread has on their way at a time.
template <class In>
inline constexpr int kRowUnroll = sizeof(In) < 4 ? 2 : 4;
inline constexpr int kStridedUnroll = 8;

/// The reduced elements of an output are runs of contiguous memory (the inner reduced axis), read as vectors.
template <class Operation, class In, class Accumulator, class Out>
__global__ void __launch_bounds__(kBlock)
    reduce_rows(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t run_length = problem.reduced.size[0];
  const In neutral = convert<In>(Operation::template identity<compute_t<In>>(problem.largest));
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t output_tile = quotient(tile, problem.ranges), range = tile - output_tile * problem.ranges;
    const int64_t output = output_tile * layout.columns + layout.column();
    Accumulator value = Operation::template identity<Accumulator>(problem.largest);
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, problem.kept.a);
      const int64_t end = min((range + 1) * problem.range, problem.length);
      int64_t count;
      for (int64_t at = range * problem.range; at < end; at += count) {
        const int64_t run = quotient(at, run_length), start = at - run * run_length;
        count = min(run_length - start, end - at);
        const In* const data[] = {in + problem.reduced.offset(run, problem.reduced.a, 1) + start};
        read_span<kRowUnroll<In>>(data, count, neutral, layout.reducer(), layout.reducers, [&](const In(&x)[1]) {
          value = Operation::combine(value, convert<Accumulator>(x[0]), problem.largest);
        });
      }
    }
    value = combine_reducers(value, layout, shared,
                             [&](Accumulator x, Accumulator y) { return Operation::combine(x, y, problem.largest); });
    if (output < problem.outputs && layout.reducer() == 0)
      store_result<Accumulator, Out>(problem, output, range, value);
  }
}

/// Any strides. With width > 1 a thread has that many neighbouring outputs, whose elements are aligned vectors.
template <class Operation, class In, class Accumulator, class Out, int width>
__global__ void __launch_bounds__(kBlock)
    reduce_strided(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const auto combine = [&](Accumulator x, Accumulator y) { return Operation::combine(x, y, problem.largest); };
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t range = quotient(tile, output_tiles);
    const int64_t output = ((tile - range * output_tiles) * layout.columns + layout.column()) * width;
    const int64_t end = min((range + 1) * problem.range, problem.length);
    Accumulator value[width];
#pragma unroll
    for (Accumulator& v : value) v = Operation::template identity<Accumulator>(problem.largest);
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, problem.kept.a);
      int64_t index = range * problem.range + layout.reducer();
      for (Cursor cursor(problem.reduced, index); index < end; index += kStridedUnroll * layout.reducers) {
        Vector<In, width> loaded[kStridedUnroll];
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u) {
#pragma unroll
          for (In& x : loaded[u].v) x = convert<In>(Operation::template identity<compute_t<In>>(problem.largest));
          if (index + u * layout.reducers < end) loaded[u] = load_vector<In, width>(in + cursor.offset());
          cursor.advance(layout.reducers);
        }
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u)
#pragma unroll
          for (int j = 0; j < width; ++j) value[j] = combine(value[j], convert<Accumulator>(loaded[u].v[j]));
      }
    }
#pragma unroll
    for (int j = 0; j < width; ++j) {
      value[j] = combine_reducers(value[j], layout, shared, combine);
      if (output < problem.outputs && layout.reducer() == 0)
        store_result<Accumulator, Out>(problem, output + j, range, value[j]);
    }
  }
}

/// Reduces `from`, the results of the ranges.
template <class Operation, class Accumulator, class Out>
__global__ void __launch_bounds__(kBlock)
    join_ranges(const __grid_constant__ ReduceProblem problem, const Accumulator* from, int64_t output_tiles) {
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const auto combine = [&](Accumulator x, Accumulator y) { return Operation::combine(x, y, problem.largest); };
  for (int64_t tile = blockIdx.x; tile < output_tiles; tile += gridDim.x) {
    const int64_t output = tile * layout.columns + layout.column();
    Accumulator value = Operation::template identity<Accumulator>(problem.largest);
    if (output < problem.outputs) {
#pragma unroll 8
      for (int64_t range = layout.reducer(); range < problem.ranges; range += layout.reducers)
        value = combine(value, from[range * problem.outputs + output]);
    }
    value = combine_reducers(value, layout, shared, combine);
    if (output < problem.outputs && layout.reducer() == 0) store_result<Accumulator, Out>(problem, output, 0, value);
  }
}

/// The problem of reducing `in` to `out` in one range.
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
  problem.largest = largest;
  problem.scale = 1;
  return problem;
}

/// Neighbouring outputs are neighbours in memory, rather than the reduced elements of one.
bool columns_adjacent(const ReduceProblem& problem) {
  return problem.outputs > 1 && std::abs(problem.kept.a[0]) < std::abs(problem.reduced.a[0]);
}

/// The reduced elements come in runs that are worth being read as vectors.
bool has_rows(const ReduceProblem& problem) {
  constexpr int64_t kShortest = 32;
  return !columns_adjacent(problem) && problem.reduced.a[0] == 1 && problem.reduced.size[0] >= kShortest;
}

/// `width` neighbouring outputs are an aligned vector, wherever in the reduced elements.
bool has_vector_columns(const ReduceProblem& problem, int width, size_t item) {
  const Axes &kept = problem.kept, &reduced = problem.reduced;
  const auto divides = [width](int64_t n) { return n % width == 0; };
  return columns_adjacent(problem) && kept.a[0] == 1 && divides(kept.size[0]) &&
         std::all_of(kept.a + 1, kept.a + kept.rank, divides) &&
         std::all_of(reduced.a, reduced.a + reduced.rank, divides) &&
         reinterpret_cast<uintptr_t>(problem.in) % (static_cast<size_t>(width) * item) == 0;
}

BlockLayout strided_layout(const ReduceProblem& problem, int width) {
  const int64_t threads = problem.outputs / width;
  if (!columns_adjacent(problem)) return BlockLayout::choose(problem.length, false);
  constexpr int64_t kPlenty = int64_t{1} << 17;  // of threads: each output needs one only
  if (threads >= kPlenty) return {kBlock, 1, true};
  const int columns = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(threads, 32))));
  return {columns, kBlock / columns, true};
}

/// Cuts the reduced elements into ranges for some two thousand blocks, if every thread still has `thread_elements`.
void cut_into_ranges(ReduceProblem& problem, int64_t output_tiles, int64_t thread_elements) {
  constexpr int64_t kBlocks = 2112;  // twice as many as an H200 holds at a time
  const int64_t shortest = problem.layout.reducers * thread_elements;
  const int64_t most = std::max<int64_t>(kBlocks / std::max<int64_t>(output_tiles, 1), 1);
  const int64_t ranges = std::clamp<int64_t>((problem.length + shortest - 1) / shortest, 1, most);
  if (ranges == 1) return;
  problem.range = ((problem.length + ranges - 1) / ranges + shortest - 1) / shortest * shortest;
  problem.ranges = (problem.length + problem.range - 1) / problem.range;
}

template <class Operation, class In, class Accumulator, class Out>
void reduce_as(const View& out, const View& in, ReduceOp op, const Launch& launch) {
  ReduceProblem problem = make_problem(out, in, op == ReduceOp::amax);
  if (op == ReduceOp::mean) problem.scale = 1 / static_cast<double>(problem.length);
  int width = 1;
  auto kernel = reduce_strided<Operation, In, Accumulator, Out, 1>;
  int64_t thread_elements = 2 * kStridedUnroll;
  if (has_rows(problem)) {
    kernel = reduce_rows<Operation, In, Accumulator, Out>;
    const int64_t vectors = problem.reduced.size[0] / kVectorWidth<In>;
    const int reducers = vectors <= 32 ? 8 : vectors <= 256 ? 32 : kBlock;
    problem.layout = {kBlock / reducers, reducers, false};
    thread_elements = kRowUnroll<In> * kVectorWidth<In>;
  } else {
    if constexpr (std::is_floating_point_v<compute_t<In>>)
      if (has_vector_columns(problem, kVectorWidth<In>, sizeof(In))) {
        width = kVectorWidth<In>;
        kernel = reduce_strided<Operation, In, Accumulator, Out, kVectorWidth<In>>;
      }
    problem.layout = strided_layout(problem, width);
  }
  const int64_t tiles = problem.output_tiles(width);
  cut_into_ranges(problem, tiles, thread_elements);
  const bool cut = problem.ranges > 1;
  const Workspace partial(launch,
                          cut ? static_cast<size_t>(problem.ranges * problem.outputs) * sizeof(Accumulator) : 0);
  if (cut) problem.partial = partial.as<Accumulator>();
  kernel<<<grid_size(tiles * problem.ranges, 1), kBlock, 0, launch.stream>>>(problem, tiles);
  check_launch("reduce");
  if (!cut) return;

  problem.partial = nullptr;
  problem.layout = problem.ranges > 64 ? BlockLayout{1, kBlock, false} : BlockLayout{32, 8, true};
  const int64_t join_tiles = problem.output_tiles(1);
  join_ranges<Operation, Accumulator, Out>
      <<<grid_size(join_tiles, 1), kBlock, 0, launch.stream>>>(problem, partial.as<const Accumulator>(), join_tiles);
  check_launch("reduce");
}

}  // namespace

namespace kernel {

void reduce(ReduceOp op, const View& out, const View& in) {
  if (out.numel() == 0) return;
  const Launch launch(out);
  if (op == ReduceOp::sum || op == ReduceOp::mean) {
    dispatch(Anything(), in.dtype, "sum", "CUDA", [&]<class T>() {
      using Out = std::conditional_t<std::is_floating_point_v<compute_t<T>>, T, int64_t>;
      reduce_as<Sum, T, SumOf<T>, Out>(out, in, op, launch);
    });
    return;
  }
  dispatch(Numbers(), in.dtype, op == ReduceOp::amax ? "amax" : "amin", "CUDA",
           [&]<class T>() { reduce_as<Extremum, T, ExtremumOf<T>, T>(out, in, op, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
