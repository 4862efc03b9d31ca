// Where the first largest or smallest element along an axis is.
//
// A thread looks at `width` neighbouring elements at a time, of one line along the axis or of as many neighbouring
// lines, whichever lie in a row. Long lines, if few, are cut into ranges, whose number follows from the shape alone; a
// second launch chooses among the positions that were found in them.
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda {
namespace {

struct ArgProblem {
  const void* in;
  int64_t* out;
  int64_t* found;         // of the ranges, (ranges, lines): written by the first launch, if it is not the last
  const int64_t* among;   // `found`, for the second launch
  Axes lines;             // a: strides in `in`; b: in `out`
  int64_t count, stride;  // lines, and the step along them
  int64_t steps;          // loads that go through a line
  int64_t ranges, range;  // of the steps
  BlockLayout layout;
  bool largest;
};

/// A place without an element loses to all others.
template <class C>
struct Found {
  C value;
  int64_t place;

  __device__ bool beats(const Found& other, bool largest) const {
    if (place < 0 || other.place < 0) return place >= 0;
    const bool nan = is_nan(value), other_nan = is_nan(other.value);
    if (nan != other_nan) return nan;
    if (nan || value == other.value) return place < other.place;
    return largest ? value > other.value : value < other.value;
  }
};

template <class T, int width, bool along>
__global__ void __launch_bounds__(kBlock) find_extrema(const __grid_constant__ ArgProblem problem, int64_t line_tiles) {
  using C = compute_t<T>;
  using Wide = Found<std::conditional_t<std::is_floating_point_v<C>, double, int64_t>>;  // no gaps: lanes exchange it
  constexpr int lines = along ? 1 : width;
  __shared__ Wide shared[kBlock];
  const BlockLayout layout = problem.layout;
  for (int64_t tile = blockIdx.x; tile < line_tiles * problem.ranges; tile += gridDim.x) {
    const int64_t range = quotient(tile, line_tiles);
    const int64_t line = ((tile - range * line_tiles) * layout.columns + layout.column()) * lines;
    const int64_t end = min((range + 1) * problem.range, problem.steps);
    Found<C> best[lines];
#pragma unroll
    for (Found<C>& none : best) none = {C(0), -1};
    if (line < problem.count) {
      const T* in = static_cast<const T*>(problem.in) + problem.lines.offset(line, problem.lines.a);
#pragma unroll(along ? 4 : 2)
      for (int64_t step = range * problem.range + layout.reducer(); step < end; step += layout.reducers) {
        const int64_t first = problem.among ? problem.among[step * problem.count + line] : along ? step * width : step;
        const Vector<T, width> loaded = load_vector<T, width>(in + first * problem.stride);
#pragma unroll
        for (int j = 0; j < width; ++j) {
          Found<C>& mine = best[along ? 0 : j];
          const Found<C> other{static_cast<C>(loaded.v[j]), along ? first + j : first};
          // Places ascend: only what is larger, or the first NaN, replaces what there is.
          const bool more = problem.largest ? other.value > mine.value : other.value < mine.value;
          if (mine.place < 0 || more || (is_nan(other.value) && !is_nan(mine.value))) mine = other;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < lines; ++j) {
      const Wide mine{best[j].value, best[j].place};
      const Wide top = combine_reducers(
          mine, layout, shared, [&](const Wide& x, const Wide& y) { return y.beats(x, problem.largest) ? y : x; });
      if (line >= problem.count || layout.reducer() != 0) continue;
      if (problem.found)
        problem.found[range * problem.count + line + j] = top.place;
      else
        problem.out[problem.lines.offset(line + j, problem.lines.b)] = top.place;
    }
  }
}

/// Whether `width` elements in a row are an aligned vector: along the axis, respectively of neighbouring lines.
bool has_vectors(const ArgProblem& problem, bool along, int width, size_t item) {
  const Axes& lines = problem.lines;
  const auto divides = [width](int64_t n) { return n % width == 0; };
  const bool row = along ? problem.stride == 1 && divides(problem.steps)
                         : lines.a[0] == 1 && divides(lines.size[0]) && divides(problem.stride);
  return row && std::all_of(lines.a + (along ? 0 : 1), lines.a + lines.rank, divides) &&
         reinterpret_cast<uintptr_t>(problem.in) % (static_cast<size_t>(width) * item) == 0;
}

BlockLayout choose_layout(const ArgProblem& problem, int64_t threads, bool lines_adjacent) {
  constexpr int64_t kPlenty = int64_t{1} << 17;  // of threads: each line needs one only
  constexpr int64_t kEach = 4;                   // loads that a thread should have at least
  const auto shared_by = [&](int64_t most) {
    return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(problem.steps / kEach, 1, most))));
  };
  if (!lines_adjacent) {
    const int reducers = shared_by(problem.steps > 1024 ? kBlock : 32);
    return {kBlock / reducers, reducers, false};
  }
  const int reducers = threads >= kPlenty ? 1 : shared_by(8);
  return {kBlock / reducers, reducers, true};
}

template <class T, int width, bool along>
void launch_find(ArgProblem problem, bool lines_adjacent, const Launch& launch) {
  constexpr int64_t kBlocks = 2112, kSteps = 16;  // blocks that fill an H200 twice; least steps of a thread
  constexpr int lines = along ? 1 : width;
  if (along) problem.steps /= width;
  problem.layout = choose_layout(problem, problem.count / lines, lines_adjacent);
  const auto tiles_of = [&](int taken) {
    const int64_t columns = int64_t{problem.layout.columns} * taken;
    return (problem.count + columns - 1) / columns;
  };
  const int64_t tiles = tiles_of(lines), least = problem.layout.reducers * kSteps;
  problem.ranges = std::clamp<int64_t>(problem.steps / least, 1, std::max<int64_t>(1, kBlocks / tiles));
  problem.range = (problem.steps + problem.ranges - 1) / problem.ranges;
  problem.ranges = (problem.steps + problem.range - 1) / problem.range;
  const bool cut = problem.ranges > 1;
  const Workspace found(launch, cut ? static_cast<size_t>(problem.ranges * problem.count) * sizeof(int64_t) : 0);
  if (cut) problem.found = found.as<int64_t>();
  find_extrema<T, width, along><<<grid_size(tiles * problem.ranges, 1), kBlock, 0, launch.stream>>>(problem, tiles);
  check_launch("argmax");
  if (!cut) return;

  problem.among = std::exchange(problem.found, nullptr);
  problem.steps = problem.range = std::exchange(problem.ranges, 1);
  problem.layout = {8, 32, false};
  const int64_t join_tiles = tiles_of(1);
  find_extrema<T, 1, true><<<grid_size(join_tiles, 1), kBlock, 0, launch.stream>>>(problem, join_tiles);
  check_launch("argmax");
}

}  // namespace

namespace kernel {

void argmax(const View& index, const View& in, int axis, bool largest) {
  if (index.numel() == 0) return;
  ArgProblem problem{};
  problem.in = in.data;
  problem.out = index.as<int64_t>();
  for (int other = in.rank - 1; other >= 0; --other)
    if (other != axis) problem.lines.add(in.size[other], in.stride[other], index.stride[other]);
  problem.lines.finish();
  problem.count = problem.lines.numel();
  problem.steps = in.size[axis];
  problem.stride = in.stride[axis];
  problem.largest = largest;
  const bool lines_adjacent = problem.count > 1 && std::abs(problem.lines.a[0]) < std::abs(problem.stride);

  const Launch launch(index);
  dispatch(Numbers(), in.dtype == b8 ? u8 : in.dtype, "argmax", "CUDA", [&]<class T>() {
    constexpr int width = std::min(kVectorWidth<T>, 8);
    if (has_vectors(problem, true, width, sizeof(T))) return launch_find<T, width, true>(problem, false, launch);
    if (has_vectors(problem, false, width, sizeof(T))) return launch_find<T, width, false>(problem, true, launch);
    launch_find<T, 1, true>(problem, lines_adjacent, launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
