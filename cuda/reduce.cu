// Sums and extrema over any axes, and where extrema are along one.
//
// Axes are sorted by stride and merged; then either neighbouring threads take neighbouring elements of one output
// (reduced axes innermost in memory) or neighbouring outputs (kept axes innermost), 16 bytes at a time where they are
// contiguous. Long reductions with few outputs are cut into ranges, whose number follows from the shape alone, and
// the results of the ranges are joined by a second launch. Sums run in double or int64 (halves: a few in float first),
// and all orders are fixed.
#include <cmath>
#include <limits>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda {
namespace {

/// The type in which extrema of T are compared: at least a word, which threads exchange.
template <class T>
using ExtremumOf = std::conditional_t<std::is_same_v<T, uint8_t>, int32_t, compute_t<T>>;

// An operation joins accumulators, which it makes of elements and their places among the reduced ones, and makes a
// result of the last.

struct OfValues {
  static constexpr bool kPlaces = false;
  template <class Accumulator, class In>
  __device__ static Accumulator element(In x, int64_t) {
    return convert<Accumulator>(x);
  }
  template <class Out, class Accumulator>
  __device__ static Out result(Accumulator x, double scale) {
    if constexpr (std::is_floating_point_v<Accumulator>) x *= static_cast<Accumulator>(scale);
    return convert<Out>(x);
  }
};

struct Sum : OfValues {
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
struct Extremum : OfValues {
  template <class T>
  __device__ static T identity(bool largest) {
    using Limits = std::numeric_limits<T>;
    const T top = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const T bottom = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return largest ? bottom : top;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool largest) {
    if constexpr (std::is_same_v<T, float>) {  // an instruction each
      float most, least;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
      return largest ? most : least;
    }
    return x != x || (largest ? x > y : x < y) ? x : y;
  }
};

/// An element and its place.
template <class C>
struct Placed {
  int64_t place;
  C value;
};

/// The place of the first of the extrema. What stands for no element comes behind all that are equal to it.
struct Place {
  static constexpr bool kPlaces = true;
  template <class Accumulator>
  __device__ static Accumulator identity(bool largest) {
    return {std::numeric_limits<int64_t>::max(), Extremum::identity<decltype(Accumulator::value)>(largest)};
  }
  template <class Accumulator, class In>
  __device__ static Accumulator element(In x, int64_t place) {
    return {place, convert<decltype(Accumulator::value)>(x)};
  }
  template <class Accumulator>
  __device__ static Accumulator combine(const Accumulator& x, const Accumulator& y, bool largest) {
    const bool x_nan = is_nan(x.value), y_nan = is_nan(y.value);
    const bool equal = x.value == y.value || (x_nan && y_nan);
    const bool y_more = largest ? y.value > x.value : y.value < x.value;
    return (equal ? y.place < x.place : y_more || (y_nan && !x_nan)) ? y : x;
  }
  template <class Out, class Accumulator>
  __device__ static Out result(const Accumulator& x, double) {
    return x.place;
  }
};

/// An accumulator that takes elements. Adding halves to a double one by one takes longer than reading them: they are
/// summed in float between two calls of close(), which are a few elements apart, so that float's rounding, relative to
/// their sizes, stays far below that of a half.
template <class Operation, class In, class Accumulator>
struct Fold {
  static constexpr bool kParts = std::is_same_v<Accumulator, double> && sizeof(In) == 2;
  bool largest = false;
  Accumulator value = Operation::template identity<Accumulator>(largest);
  float part = 0;  // if kParts

  __device__ void take(In x, int64_t place = 0) {
    if constexpr (kParts)
      part += convert<float>(x);
    else
      value = Operation::combine(value, Operation::template element<Accumulator>(x, place), largest);
  }
  __device__ void close() {
    if constexpr (kParts) value += part;
    part = 0;
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
    return divide_up(outputs, columns);
  }
};

/// The results of neighbouring outputs, which lie along the first of the kept axes.
template <class Operation, class Out, class Accumulator, int width>
__device__ void store_results(const ReduceProblem& problem, int64_t output, int64_t range,
                              const Vector<Accumulator, width>& value) {
  if (problem.partial) {
    Accumulator* const to = static_cast<Accumulator*>(problem.partial) + range * problem.outputs + output;
#pragma unroll
    for (int j = 0; j < width; ++j) to[j] = value.v[j];
    return;
  }
  Out result[width];
#pragma unroll
  for (int j = 0; j < width; ++j) result[j] = Operation::template result<Out>(value.v[j], problem.scale);
  Out* const to = static_cast<Out*>(problem.out) + problem.kept.offset(output, problem.kept.b);
  const int64_t step = problem.kept.b[0];
  if (step == 1 && reinterpret_cast<uintptr_t>(to) % std::min<size_t>(sizeof(result), 16) == 0)
    return store_values(to, result);
#pragma unroll
  for (int j = 0; j < width; ++j) to[j * step] = result[j];
}

/// Vectors or elements that a thread has on their way at a time. For that the kernels ask for few blocks: left to
/// itself, the compiler takes fewer registers, and waits for each load.
inline constexpr int kRowUnroll = 4;
inline constexpr int kStridedUnroll = 8;

/// What stands for no element.
template <class Operation, class In>
__device__ In neutral_element(bool largest) {
  using Values = std::conditional_t<Operation::kPlaces, Extremum, Operation>;
  return convert<In>(Values::template identity<compute_t<In>>(largest));
}

/// The reduced elements of an output are runs of contiguous memory (the inner reduced axis), read as vectors.
template <class Operation, class In, class Accumulator, class Out>
__global__ void __launch_bounds__(kBlock, 4)
    reduce_rows(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t run_length = problem.reduced.size[0];
  const In neutral = neutral_element<Operation, In>(problem.largest);
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t output_tile = quotient(tile, problem.ranges), range = tile - output_tile * problem.ranges;
    const int64_t output = output_tile * layout.columns + layout.column();
    Fold<Operation, In, Accumulator> fold{problem.largest};
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, problem.kept.a);
      const int64_t end = min((range + 1) * problem.range, problem.length);
      int64_t count;
      for (int64_t at = range * problem.range; at < end; at += count) {
        const int64_t run = quotient(at, run_length), start = at - run * run_length;
        count = min(run_length - start, end - at);
        const In* const data = in + problem.reduced.offset(run, problem.reduced.a, 1) + start;
        read_span<kRowUnroll>(data, count, neutral, layout.reducer(), layout.reducers, fold);
      }
    }
    const Accumulator value = combine_reducers(fold.value, layout, shared, [&](Accumulator x, Accumulator y) {
      return Operation::combine(x, y, problem.largest);
    });
    if (output < problem.outputs && layout.reducer() == 0)
      store_results<Operation, Out, Accumulator, 1>(problem, output, range, {value});
  }
}

/// Any strides. With width > 1 a thread has that many neighbouring outputs, whose elements are aligned vectors.
template <class Operation, class In, class Accumulator, class Out, int width>
__global__ void __launch_bounds__(kBlock, width > 1 ? 2 : 3)
    reduce_strided(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  using Values = Vector<Accumulator, width>;
  __shared__ Values shared[kBlock];
  const BlockLayout layout = problem.layout;
  const In neutral = neutral_element<Operation, In>(problem.largest);
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t range = quotient(tile, output_tiles);
    const int64_t output = ((tile - range * output_tiles) * layout.columns + layout.column()) * width;
    const int64_t end = min((range + 1) * problem.range, problem.length);
    Fold<Operation, In, Accumulator> fold[width];
#pragma unroll
    for (auto& column : fold) column = {problem.largest};
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, problem.kept.a);
      int64_t index = range * problem.range + layout.reducer();
      for (Cursor cursor(problem.reduced, index); index < end; index += kStridedUnroll * layout.reducers) {
        Loading<In, width> loaded[kStridedUnroll];
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u) {
          loaded[u] = {in + cursor.offset(), index + u * layout.reducers < end, neutral};
          cursor.advance(layout.reducers);
        }
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u) {
          const Vector<In, width> vector = loaded[u].get();
#pragma unroll
          for (int j = 0; j < width; ++j) fold[j].take(vector.v[j], index + u * layout.reducers);
        }
#pragma unroll
        for (auto& column : fold) column.close();
      }
    }
    Values values;
#pragma unroll
    for (int j = 0; j < width; ++j) values.v[j] = fold[j].value;
    values = combine_reducers(values, layout, shared, [&](Values x, const Values& y) {
#pragma unroll
      for (int j = 0; j < width; ++j) x.v[j] = Operation::combine(x.v[j], y.v[j], problem.largest);
      return x;
    });
    if (output < problem.outputs && layout.reducer() == 0)
      store_results<Operation, Out>(problem, output, range, values);
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
    if (output < problem.outputs && layout.reducer() == 0)
      store_results<Operation, Out, Accumulator, 1>(problem, output, 0, {value});
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

/// The reduced elements come in runs that are worth being read as vectors: the ends of those that are no whole number
/// of vectors take as long as many elements.
bool has_rows(const ReduceProblem& problem, int width) {
  const int64_t run = problem.reduced.size[0], shortest = run % width == 0 ? 32 : 65;
  return !columns_adjacent(problem) && problem.reduced.a[0] == 1 && run >= shortest;
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
  if (!columns_adjacent(problem)) {
    if (problem.length > 8 * kStridedUnroll) return BlockLayout::choose(problem.length, false);
    const auto loads = static_cast<uint64_t>(divide_up(problem.length, kStridedUnroll));
    const int reducers = static_cast<int>(std::bit_ceil(std::max<uint64_t>(loads, 1)));
    return {kBlock / reducers, reducers, false};
  }
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
  const int64_t ranges = std::clamp<int64_t>(divide_up(problem.length, shortest), 1, most);
  if (ranges == 1) return;
  problem.range = round_up(divide_up(problem.length, ranges), shortest);
  problem.ranges = divide_up(problem.length, problem.range);
}

template <class Operation, class In, class Accumulator, class Out>
void reduce_as(const View& out, const View& in, bool mean, bool largest, const Launch& launch) {
  ReduceProblem problem = make_problem(out, in, largest);
  if (mean) problem.scale = 1 / static_cast<double>(problem.length);
  int width = 1;
  auto kernel = reduce_strided<Operation, In, Accumulator, Out, 1>;
  int64_t thread_elements = 2 * kStridedUnroll;
  const bool rows = !Operation::kPlaces && has_rows(problem, kVectorWidth<In>);
  if (rows) {
    if constexpr (!Operation::kPlaces) kernel = reduce_rows<Operation, In, Accumulator, Out>;
    const int64_t vectors = problem.reduced.size[0] / kVectorWidth<In>;
    const int reducers = vectors <= 32 ? 8 : vectors <= 256 ? 32 : kBlock;
    problem.layout = {kBlock / reducers, reducers, false};
    thread_elements = kRowUnroll * kVectorWidth<In>;
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
  const bool largest = op == ReduceOp::amax;
  if (op == ReduceOp::sum || op == ReduceOp::mean) {
    dispatch(Anything(), in.dtype, "sum", "CUDA", [&]<class T>() {
      using Out = std::conditional_t<std::is_floating_point_v<compute_t<T>>, T, int64_t>;
      reduce_as<Sum, T, SumOf<T>, Out>(out, in, op == ReduceOp::mean, largest, launch);
    });
    return;
  }
  dispatch(Numbers(), in.dtype, largest ? "amax" : "amin", "CUDA",
           [&]<class T>() { reduce_as<Extremum, T, ExtremumOf<T>, T>(out, in, false, largest, launch); });
}

void argmax(const View& index, const View& in, int, bool largest) {
  if (index.numel() == 0) return;
  const Launch launch(index);
  dispatch(Numbers(), in.dtype == b8 ? u8 : in.dtype, "argmax", "CUDA",
           [&]<class T>() { reduce_as<Place, T, Placed<ExtremumOf<T>>, int64_t>(index, in, false, largest, launch); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
