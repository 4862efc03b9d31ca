// Sums, means, extrema and positions of extrema, over any axes.
//
// The host sorts the kept axes and the reduced axes by stride, and merges neighboring axes of each kind where possible.
// If the reduced axes are innermost in memory, neighboring threads read neighboring elements of one output. Otherwise,
// neighboring threads read elements of neighboring outputs. In both cases, contiguous elements are read in vectors of
// 16 bytes.
//
// A long reduction with few outputs is split into ranges, and the results of the ranges are reduced in the same way.
// The number of ranges depends only on the shape, the strides and the alignment of the input, and the order of
// operations is fixed, so that results are bitwise reproducible. Sums are accumulated in double or int64. Halves (bf16,
// f16) are first added in float, a few at a time.
//
// Outline: the operations (Sum, Extremum, ExtremumPosition), Fold, the kernels reduce_rows and reduce_strided, the
// choice of kernel and layout on the host, and the table entries.
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

/// The type in which extrema of T are compared. The type has at least 4 bytes, because threads exchange 32-bit words.
template <class T>
using ExtremumOf = std::conditional_t<std::is_same_v<T, uint8_t>, int32_t, compute_t<T>>;

/// True if a few elements are added in float before they are added to the accumulator.
template <class In, class Accumulator>
inline constexpr bool kAddsInFloat = std::is_same_v<Accumulator, double> && sizeof(In) == 2;

// The operations are types with the following members. kUsesPosition states whether the reduction uses the positions of
// elements. element() makes an accumulator from an element and its position among the reduced elements. combine() joins
// two accumulators, identity() returns the neutral accumulator, and result() converts the final accumulator to the
// result.

/// The members that Sum and Extremum share.
struct ValueOperation {
  static constexpr bool kUsesPosition = false;
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

struct Sum : ValueOperation {
  template <class T>
  __device__ static T identity(bool) {
    return 0;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool) {
    return static_cast<T>(wrapping(x) + wrapping(y));
  }
};

/// The larger or the smaller of two values, or NaN if one of them is NaN.
struct Extremum : ValueOperation {
  template <class T>
  __device__ static T identity(bool largest) {
    using Limits = std::numeric_limits<T>;
    const T top = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const T bottom = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return largest ? bottom : top;
  }
  template <class T>
  __device__ static T combine(T x, T y, bool largest) {
    if constexpr (std::is_same_v<T, float>) {  // one instruction each
      float larger, smaller;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
      return largest ? larger : smaller;
    }
    return x != x || (largest ? x > y : x < y) ? x : y;
  }
};

/// An element and its position among the reduced elements.
template <class C>
struct PositionedValue {
  int64_t position;
  C value;
};

/// The position of the first extremum. The identity has the highest position, so that combine() prefers every element
/// to the identity.
struct ExtremumPosition {
  static constexpr bool kUsesPosition = true;
  template <class Accumulator>
  __device__ static Accumulator identity(bool largest) {
    return {std::numeric_limits<int64_t>::max(), Extremum::identity<decltype(Accumulator::value)>(largest)};
  }
  template <class Accumulator, class In>
  __device__ static Accumulator element(In x, int64_t position) {
    if constexpr (std::is_same_v<In, Accumulator>)
      return x;
    else
      return {position, convert<decltype(Accumulator::value)>(x)};
  }
  template <class Accumulator>
  __device__ static Accumulator combine(const Accumulator& x, const Accumulator& y, bool largest) {
    const bool x_nan = is_nan(x.value), y_nan = is_nan(y.value);
    const bool equal = x.value == y.value || (x_nan && y_nan);
    const bool y_more = largest ? y.value > x.value : y.value < x.value;
    return (equal ? y.position < x.position : y_more || (y_nan && !x_nan)) ? y : x;
  }
  template <class Out, class Accumulator>
  __device__ static Out result(const Accumulator& x, double) {
    return x.position;
  }
};

/// Accumulates elements. Adding every half to a double would take longer than reading the halves, so halves are added
/// in float between two calls of flush(). The calls are a few elements apart, so that the rounding of the float sum
/// stays far below the rounding of a half.
template <class Operation, class In, class Accumulator>
struct Fold {
  bool largest = false;
  Accumulator value = Operation::template identity<Accumulator>(largest);
  float part = 0;  ///< sum of the elements since the last flush(); used only if kAddsInFloat

  __device__ void accumulate(In x, int64_t position = 0) {
    if constexpr (kAddsInFloat<In, Accumulator>)
      part += convert<float>(x);
    else
      value = Operation::combine(value, Operation::template element<Accumulator>(x, position), largest);
  }
  __device__ void flush() {
    if constexpr (kAddsInFloat<In, Accumulator>) value += part;
    part = 0;
  }
};

/// The arguments of the kernels.
struct ReduceProblem {
  const void* in;
  void* out;
  void* partial;    ///< results of the ranges, (ranges, outputs); null if there is one range
  Nest<2> kept;     ///< the axes of the outputs, with the strides of `in` and `out`
  Nest<1> reduced;  ///< the reduced axes of `in`
  int64_t outputs;  ///< number of outputs
  int64_t length;   ///< reduced elements of an output
  int64_t ranges;   ///< number of ranges of the reduced elements
  int64_t range;    ///< elements of a range
  BlockLayout layout;
  bool largest;  ///< true for maxima, false for minima; sums do not use the value
  double scale;  ///< factor of sums

  int64_t output_tiles(int width) const {
    const int64_t columns = int64_t{layout.columns} * width;
    return divide_up(outputs, columns);
  }
};

/// Stores the results of `width` neighboring outputs along the first kept axis, or their partial results.
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
  Out* const to = static_cast<Out*>(problem.out) + problem.kept.offset(output, 1);
  const int64_t step = problem.kept.stride[0][1];
  if (step == 1 && reinterpret_cast<uintptr_t>(to) % std::min<size_t>(sizeof(result), 16) == 0)
    return store_values(to, result);
#pragma unroll
  for (int j = 0; j < width; ++j) to[j * step] = result[j];
}

/// Loads (of vectors or single elements) that a thread keeps in flight. The kernels request few CTAs per SM in
/// __launch_bounds__, because the compiler would otherwise use fewer registers and wait for each load.
inline constexpr int kRowUnroll = 4;
inline constexpr int kStridedUnroll = 8;

/// Returns the neutral element of an operation: an element that does not change the result.
template <class Operation, class In, class Accumulator>
__device__ In neutral_element(bool largest) {
  using Values = std::conditional_t<Operation::kUsesPosition, Extremum, Operation>;
  if constexpr (std::is_same_v<In, Accumulator>)
    return Operation::template identity<In>(largest);
  else
    return convert<In>(Values::template identity<compute_t<In>>(largest));
}

/// Reduces elements that lie in contiguous runs along the innermost reduced axis. Each run is read in vectors. Launch:
/// one CTA per (tile of layout.columns outputs, range) in a 1-D grid-stride loop, kBlock threads per CTA. Static shared
/// memory: kBlock accumulators.
template <class Operation, class In, class Accumulator, class Out>
__global__ void __launch_bounds__(kBlock, 4)
    reduce_rows(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  wait_for_previous_kernels();
  __shared__ Accumulator shared[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t run_length = problem.reduced.size[0];
  const In neutral = neutral_element<Operation, In, Accumulator>(problem.largest);
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t output_tile = quotient(tile, problem.ranges), range = tile - output_tile * problem.ranges;
    const int64_t output = output_tile * layout.columns + layout.column();
    Fold<Operation, In, Accumulator> fold{problem.largest};
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, 0);
      const int64_t end = min((range + 1) * problem.range, problem.length);
      int64_t count;
      for (int64_t at = range * problem.range; at < end; at += count) {
        const int64_t run = quotient(at, run_length), start = at - run * run_length;
        count = min(run_length - start, end - at);
        const In* const data = in + problem.reduced.offset(run, 0, 1) + start;
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

/// Reduces elements of any strides, or accumulators (the results of ranges). A thread handles `width` neighboring
/// outputs, whose elements are aligned vectors. Launch: one CTA per (tile of layout.columns * width outputs, range) in
/// a 1-D grid-stride loop, kBlock threads per CTA. Static shared memory: kBlock * width accumulators.
template <class Operation, class In, class Accumulator, class Out, int width>
__global__ void __launch_bounds__(kBlock, width > 1 ? 2 : 3)
    reduce_strided(const __grid_constant__ ReduceProblem problem, int64_t output_tiles) {
  wait_for_previous_kernels();
  using Values = Vector<Accumulator, width>;
  __shared__ Values shared[kBlock];
  const BlockLayout layout = problem.layout;
  const In neutral = neutral_element<Operation, In, Accumulator>(problem.largest);
  for (int64_t tile = blockIdx.x; tile < output_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t range = quotient(tile, output_tiles);
    const int64_t output = ((tile - range * output_tiles) * layout.columns + layout.column()) * width;
    const int64_t end = min((range + 1) * problem.range, problem.length);
    Fold<Operation, In, Accumulator> fold[width];
#pragma unroll
    for (auto& column : fold) column = {problem.largest};
    if (output < problem.outputs) {
      const In* in = static_cast<const In*>(problem.in) + problem.kept.offset(output, 0);
      int64_t index = range * problem.range + layout.reducer();
      for (Cursor cursor(problem.reduced, index); index < end; index += kStridedUnroll * layout.reducers) {
        PackedVector<In, width> loaded[kStridedUnroll];
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u) {
          loaded[u] = {in + cursor.offset(), index + u * layout.reducers < end, neutral};
          cursor.advance(layout.reducers);
        }
#pragma unroll
        for (int u = 0; u < kStridedUnroll; ++u) {
          const Vector<In, width> vector = loaded[u].get();
#pragma unroll
          for (int j = 0; j < width; ++j) fold[j].accumulate(vector.v[j], index + u * layout.reducers);
        }
#pragma unroll
        for (auto& column : fold) column.flush();
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

/// Returns the problem of reducing `in` to `out` in one range.
ReduceProblem make_problem(const View& out, const View& in, bool largest) {
  ReduceProblem problem{};
  problem.in = in.data;
  problem.out = out.data;
  const auto is_kept = [&](int axis) { return out.size[axis] == in.size[axis]; };
  const auto is_reduced = [&](int axis) { return !is_kept(axis); };
  problem.kept = make_nest<2>({select_axes(in, is_kept), select_axes(out, is_kept)});
  problem.reduced = make_nest<1>({select_axes(in, is_reduced)});
  problem.length = problem.range = problem.reduced.numel();
  if (problem.length == 0) problem.reduced = make_nest<1>({View()});  // kernels divide by the sizes of `reduced`
  problem.outputs = out.numel();
  problem.ranges = 1;
  problem.largest = largest;
  problem.scale = 1;
  return problem;
}

/// Returns whether elements of neighboring outputs are closer in memory than reduced elements of one output.
bool columns_adjacent(const ReduceProblem& problem) {
  return problem.outputs > 1 && std::abs(problem.kept.stride[0][0]) < std::abs(problem.reduced.stride[0][0]);
}

/// Returns whether the reduced elements are contiguous runs that are long enough to be read as vectors. Runs whose
/// length is not a multiple of `width` must be longer, because their ends are read element by element.
bool has_rows(const ReduceProblem& problem, int width) {
  const int64_t run = problem.reduced.size[0];
  const int64_t min_run = run % width == 0 ? 32 : 65;
  return !columns_adjacent(problem) && problem.reduced.stride[0][0] == 1 && run >= min_run;
}

/// Returns whether the elements of `width` neighboring outputs are an aligned vector at every reduced position.
bool has_vector_columns(const ReduceProblem& problem, int width, size_t item) {
  return columns_adjacent(problem) && problem.kept.stride[0][0] == 1 && problem.kept.size[0] % width == 0 &&
         problem.kept.has_stride_multiples(0, 1, width) && problem.reduced.has_stride_multiples(0, 0, width) &&
         reinterpret_cast<uintptr_t>(problem.in) % (static_cast<size_t>(width) * item) == 0;
}

/// Returns the layout of reduce_strided.
BlockLayout strided_layout(const ReduceProblem& problem, int width) {
  const int64_t threads = problem.outputs / width;
  if (!columns_adjacent(problem)) {
    if (problem.length > 8 * kStridedUnroll) return BlockLayout::choose(problem.length, false);
    const auto loads = static_cast<uint64_t>(divide_up(problem.length, kStridedUnroll));
    const int reducers = static_cast<int>(std::bit_ceil(std::max<uint64_t>(loads, 1)));
    return {kBlock / reducers, reducers, false};
  }
  constexpr int64_t kManyThreads = int64_t{1} << 17;  // enough to use one thread per output
  if (threads >= kManyThreads) return {kBlock, 1, true};
  const int columns = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(threads, 32))));
  return {columns, kBlock / columns, true};
}

/// Splits the reduced elements into ranges, so that there are about kBlocks CTAs. A thread reduces at least
/// `thread_elements` elements of a range.
void cut_into_ranges(ReduceProblem& problem, int64_t output_tiles, int64_t thread_elements) {
  constexpr int64_t kBlocks = 2112;  // twice the number of CTAs of kBlock threads that fit on an H200
  const int64_t min_range = problem.layout.reducers * thread_elements;
  const int64_t max_ranges = std::max<int64_t>(kBlocks / std::max<int64_t>(output_tiles, 1), 1);
  const int64_t ranges = std::clamp<int64_t>(divide_up(problem.length, min_range), 1, max_ranges);
  if (ranges == 1) return;
  problem.range = round_up(divide_up(problem.length, ranges), min_range);
  problem.ranges = divide_up(problem.length, problem.range);
}

/// Returns the problem that combines the results of the ranges, which form a tensor (ranges, outputs).
ReduceProblem join_problem(const ReduceProblem& problem) {
  ReduceProblem join = problem;
  join.in = problem.partial;
  join.partial = nullptr;
  int64_t step = 1;
  for (int axis = 0; axis < join.kept.rank; step *= join.kept.size[axis++]) join.kept.stride[axis][0] = step;
  join.reduced.rank = 1;
  join.reduced.size[0] = join.length = join.range = problem.ranges;
  join.reduced.stride[0][0] = problem.outputs;
  join.ranges = 1;
  join.layout = problem.ranges > 64 ? BlockLayout{1, kBlock, false} : BlockLayout{32, 8, true};
  return join;
}

/// Reduces `in` to `out`, with the kernel that suits their layout.
template <class Operation, class In, class Accumulator, class Out>
void reduce_as(const View& out, const View& in, bool mean, bool largest, const Launch& launch) {
  ReduceProblem problem = make_problem(out, in, largest);
  if (mean) problem.scale = 1 / static_cast<double>(problem.length);

  // Choose the kernel and the layout of its threads.
  int width = 1;
  auto kernel = reduce_strided<Operation, In, Accumulator, Out, 1>;
  int64_t thread_elements = 2 * kStridedUnroll;
  const bool rows = !Operation::kUsesPosition && has_rows(problem, kVectorWidth<In>);
  if (rows) {
    if constexpr (!Operation::kUsesPosition) kernel = reduce_rows<Operation, In, Accumulator, Out>;
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

  // Reduce the ranges, then combine their results if there are several.
  const int64_t tiles = problem.output_tiles(width);
  cut_into_ranges(problem, tiles, thread_elements);
  const bool cut = problem.ranges > 1;
  const Workspace partial(launch,
                          cut ? static_cast<size_t>(problem.ranges * problem.outputs) * sizeof(Accumulator) : 0);
  if (cut) problem.partial = partial.as<Accumulator>();
  launch_kernel("reduce", kernel, grid_size(tiles * problem.ranges, 1), kBlock, 0, launch.stream, problem, tiles);
  if (!cut) return;
  const ReduceProblem join = join_problem(problem);
  const int64_t join_tiles = join.output_tiles(1);
  launch_kernel("reduce", reduce_strided<Operation, Accumulator, Accumulator, Out, 1>, grid_size(join_tiles, 1), kBlock,
                0, launch.stream, join, join_tiles);
}

}  // namespace

namespace kernel {

void reduce(ReduceOp op, const View& out, const View& in) {
  if (out.numel() == 0) return;
  const Launch launch(out);
  const bool largest = op == ReduceOp::max;
  if (op == ReduceOp::sum || op == ReduceOp::mean) {
    dispatch_cuda(Anything(), in.dtype, name(op), [&]<class T>() {
      using Out = std::conditional_t<std::is_floating_point_v<compute_t<T>>, T, int64_t>;
      reduce_as<Sum, T, SumOf<T>, Out>(out, in, op == ReduceOp::mean, largest, launch);
    });
    return;
  }
  dispatch_cuda(Numbers(), in.dtype, name(op),
                [&]<class T>() { reduce_as<Extremum, T, ExtremumOf<T>, T>(out, in, false, largest, launch); });
}

void argmax(const View& index, const View& in, int, bool largest) {
  if (index.numel() == 0) return;
  const Launch launch(index);
  dispatch_cuda(Numbers(), in.dtype == b8 ? u8 : in.dtype, "argmax", [&]<class T>() {
    reduce_as<ExtremumPosition, T, PositionedValue<ExtremumOf<T>>, int64_t>(index, in, false, largest, launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
