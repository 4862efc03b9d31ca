// The kernel that normalizations and prelu share. The kernel applies a formula to every element of tensors (N, C, L),
// where L is the number of positions (voxels). The constants of the formula may differ for every (sample, channel). A
// formula may have results, which the kernel stores, and sums over the positions of every (sample, channel).
//
// The kernel has three forms (Form). Two of them copy vectors of 16 bytes to shared memory with cp.async. A thread has
// several such copies in flight, which occupy no registers. Each thread reads only the vectors that it copied itself,
// so that no barrier is needed.
//
// Outline: Tiling; the members of a formula; Lane, the work of one thread; channels_kernel and its launch,
// apply_formula(), which returns the sums of all ranges. norm_shapes.cuh has the shapes and the forms, and
// norm_gradients.cuh adds the sums of gradients.
#pragma once

#include <cuda_pipeline.h>

#include <optional>

#include "core/detail/divide.h"
#include "cuda/norm_shapes.cuh"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {  // several .cu files instantiate kernels with the same names

/// The division of the work among CTAs and threads. A line is the positions of one (sample, channel). A tile has
/// layout.columns lines or, in the form `columns`, layout.columns vectors of neighboring lines. The positions are split
/// into ranges. A CTA handles one range of one tile. The tiling depends only on the shape, the order of the strides and
/// the form, so that sums are bitwise reproducible.
struct Tiling {
  BlockLayout layout;
  int64_t length;        ///< positions of a line
  int64_t sample_lines;  ///< lines, or vectors of lines, of a sample
  int64_t lines;         ///< lines, or vectors of lines, of all samples
  int64_t tiles;         ///< number of tiles
  int64_t ranges;        ///< number of ranges
  int64_t range;         ///< positions of a range

  Tiling(Form form, const View& x, int width)
      : length(x.size[2]), sample_lines(form == Form::columns ? x.size[1] / width : x.size[1]) {
    const bool columns = form == Form::columns;
    lines = x.size[0] * sample_lines;
    if (columns) {  // a tile is all channels of a sample, or an equal part of them
      const int64_t side = divide_up(sample_lines, divide_up(sample_lines, 64));
      layout = {static_cast<int>(side), static_cast<int>(kBlock / side), true};
    } else {
      layout = BlockLayout::choose(length, x.size[1] > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2]));
    }
    tiles = divide_up(lines, layout.columns);
    // Give a thread enough work to pay for its constants and sums. The form `columns` uses only as many CTAs as run at
    // a time, two on each SM of an H200, because each CTA has sums for many channels.
    const int64_t min_range = layout.reducers * (columns ? 16 : 4 * width);
    const int64_t max_ranges = (columns ? 2 * 132 : 4096) / std::max<int64_t>(tiles, 1);
    const int64_t wanted = std::clamp<int64_t>(divide_up(length, min_range), 1, std::max<int64_t>(max_ranges, 1));
    range = std::max<int64_t>(round_up(divide_up(length, wanted), 64), 64);  // whole cache lines
    ranges = std::max<int64_t>(divide_up(length, range), 1);
  }
  VG_HOST_DEVICE int64_t blocks() const { return tiles * ranges; }
};

/// Maximum number of elements that a thread adds to a Run (below) before it adds the Run to its totals in double.
inline constexpr int kMaxRun = 32;

/// Two sums of up to kMaxRun elements.
template <class S>
struct RunOf {
  using Sum = S;
  Sum x = 0;
  Sum y = 0;
};
/// Halves (bf16, f16) are summed in float, because an SM converts only sixteen numbers to double per cycle.
template <class T>
using Run = RunOf<std::conditional_t<sizeof(T) == 2, float, double>>;

__device__ inline double2 add(const double2& a, const double2& b) { return {a.x + b.x, a.y + b.y}; }

/// The properties of a formula.
struct FormulaTraits {
  int inputs;           ///< number of tensors that the formula reads
  bool writes = false;  ///< the formula has results
  bool sums = false;    ///< the formula has sums
  bool heavy = false;   ///< the formula needs so many registers that fewer CTAs fit on an SM
  bool scalar = true;   ///< the formula is compiled for the scalar form
};

// A formula that channels_kernel applies is a function of one element of each input. It has these members:
// - kTraits: FormulaTraits.
// - Channel: constants of a (sample, channel), which a thread keeps in registers.
// - channel(n, c, l): computes the constants. l is a position close to the first position that the thread reads.
// - operator()(channel, run, x): returns the result for one element of each input, and may add terms to the run.
// - finish(n, c, channel, count, total), optional: corrects `total`, the sums of a thread over `count` elements, after
//   the last element.
// - is_lost(total), optional: returns whether sums of bfloat16 have overflowed in float. The kernel then computes the
//   sums again in double.

/// The work of a thread on its channels of a sample: one channel, or a vector of channels in the form `columns`.
template <class T, Form form, class Formula>
struct Lane {
  static constexpr int kInputs = Formula::kTraits.inputs;
  static constexpr int kChannels = form == Form::columns ? kVectorWidth<T> : 1;
  static constexpr int kStages = 8 / kInputs;
  using Stage = uint4[kInputs][kBlock];

  const Formula& formula;
  const Volumes<kInputs>& volumes;
  int64_t n;
  int64_t c;  ///< the first channel
  typename Formula::Channel channel[kChannels];
  double2 total[kChannels];
  int count;  ///< positions processed

  /// Computes the constants of the channels. `position` is close to the first position that the thread reads.
  __device__ void begin(int64_t position) {
    count = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) channel[i] = formula.channel(n, c + i, position);
  }

  /// Processes this thread's share of the `vectors` vectors of 16 bytes that begin at position `first`. The thread is
  /// number `thread` of `threads` threads, and there are fewer than 2^31 vectors. For each input, the thread keeps
  /// kStages vectors in flight to its own slots of shared memory.
  __device__ void process_pipelined(int64_t first, int64_t vectors, int thread, int threads, Stage (&stages)[kStages]) {
    constexpr int width = kVectorWidth<T>, step = form == Form::columns ? 1 : width;  // positions of a vector
    const auto stride = [](const View& view) { return form == Form::rows ? 1 : view.stride[2]; };
    const int64_t start = first + thread * step;
    const T* in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = element<const T>(volumes.in[k], n, c, start);
    T* out = element<T>(volumes.out, n, c, start);
    int left = static_cast<int>(vectors) - thread;  // vectors not yet processed
    int coming = left;                              // vectors not yet requested
    int stage = 0;
    int summed = 0;  // elements of the current run
    const auto load = [&] {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (coming > 0) __pipeline_memcpy_async(&stages[stage][k][threadIdx.x], in[k], 16);
        in[k] += threads * step * stride(volumes.in[k]);
      }
      __pipeline_commit();
      coming -= threads;
      if (++stage == kStages) stage = 0;
    };
    for (int i = 0; i < kStages; ++i) load();
    Run<T> run[kChannels];
    for (; left > 0; left -= threads) {
      __pipeline_wait_prior(kStages - 1);
      Vector<T, width> loaded[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) loaded[k] = std::bit_cast<Vector<T, width>>(stages[stage][k][threadIdx.x]);
      load();
      const Vector<T, width> result = apply(loaded, run);
      if constexpr (Formula::kTraits.writes) {
        store_vector(out, result);
        out += threads * step * stride(volumes.out);
      }
      count += step;
      if (Formula::kTraits.sums && (summed += step) >= kMaxRun) {
        end_runs(run);
        summed = 0;
      }
    }
    if constexpr (Formula::kTraits.sums) end_runs(run);
  }

  /// Processes the thread's share like process_pipelined(), but supports vectors of any width, loads them to registers
  /// instead of shared memory, and sums runs in `Sum`. kUnroll vectors are in flight.
  template <int width, int kUnroll, class Sum = typename Run<T>::Sum>
  __device__ void process(int64_t first, int64_t vectors, int thread, int threads) {
    constexpr int step = form == Form::columns ? 1 : width;  // positions of a vector
    const auto stride = [](const View& view) { return form == Form::rows ? 1 : view.stride[2]; };
    const int64_t start = first + thread * step;
    const T* in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = element<const T>(volumes.in[k], n, c, start);
    T* out = element<T>(volumes.out, n, c, start);
    RunOf<Sum> run[kChannels];
    int summed = 0;  // elements of the current run
    for (int left = static_cast<int>(vectors) - thread; left > 0; left -= kUnroll * threads) {
      Vector<T, width> loaded[kUnroll][kInputs];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
          if (u * threads < left) loaded[u][k] = load_vector<T, width>(in[k]);
          in[k] += threads * step * stride(volumes.in[k]);
        }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u * threads >= left) continue;
        const Vector<T, width> result = apply(loaded[u], run);
        if constexpr (Formula::kTraits.writes) {
          store_vector(out, result);
          out += threads * step * stride(volumes.out);
        }
        count += step;
      }
      if (Formula::kTraits.sums && (summed += kUnroll * step) >= kMaxRun) {
        end_runs(run);
        summed = 0;
      }
    }
    if constexpr (Formula::kTraits.sums) end_runs(run);
  }

  /// Applies the formula's correction to the sums.
  __device__ void finish() {
    if constexpr (requires { &Formula::finish; })
#pragma unroll
      for (int i = 0; i < kChannels; ++i) formula.finish(n, c + i, channel[i], count, total[i]);
  }

 private:
  /// Adds the runs to the totals and clears the runs.
  template <class Sum>
  __device__ void end_runs(RunOf<Sum> (&run)[kChannels]) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      total[i] = add(total[i], {static_cast<double>(run[i].x), static_cast<double>(run[i].y)});
      run[i] = {};
    }
  }
  /// Applies the formula to one vector of each input.
  template <int width, class Sum>
  __device__ Vector<T, width> apply(const Vector<T, width> (&loaded)[kInputs], RunOf<Sum> (&run)[kChannels]) const {
    Vector<T, width> result{};  // unused if the formula has no results
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const int i = kChannels > 1 ? j : 0;
      compute_t<T> x[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) x[k] = convert<compute_t<T>>(loaded[k].v[j]);
      if constexpr (Formula::kTraits.writes)
        result.v[j] = formula(channel[i], run[i], x);
      else
        formula(channel[i], run[i], x);
    }
    return result;
  }
};

/// Returns the sums of channel c over the elements of [begin, end) that belong to `thread`, accumulated in double. The
/// kernel calls this function if is_lost() detects an overflow in float. The function is not inlined and reads single
/// elements, so that the kernel's loop needs no registers for it.
template <class T, Form form, class Formula>
__device__ __noinline__ double2 sum_in_double(const Formula& formula, const Volumes<Formula::kTraits.inputs>& volumes,
                                              int64_t n, int64_t c, int64_t begin, int64_t end, int thread,
                                              int threads) {
  Lane<T, Form::scalar, Formula> lane{formula, volumes, n, c};
  if constexpr (form == Form::rows) {
    constexpr int kVector = kVectorWidth<T>;
    const Span<T> span(element<const T>(volumes.in[0], n, c, begin), end - begin);
    const int64_t first = begin + span.head, tail = first + span.vectors * kVector;
    lane.begin(min(first + thread * kVector, end - 1));
#pragma unroll 1
    for (int i = 0; i < kVector; ++i)
      lane.template process<1, 1, double>(first, tail - first, thread * kVector + i, threads * kVector);
    lane.template process<1, 1, double>(begin, span.head, thread, threads);
    lane.template process<1, 1, double>(tail, end - tail, thread, threads);
  } else {
    lane.begin(min(begin + thread, end - 1));
    lane.template process<1, 1, double>(begin, end - begin, thread, threads);
  }
  return lane.total[0];
}

/// Processes a thread's share of the positions [begin, end), for the channels of the lane. The thread is number
/// `thread` of `threads` threads.
template <class T, Form form, class Formula, class Stages>
__device__ void process_range(Lane<T, form, Formula>& lane, int64_t begin, int64_t end, int thread, int threads,
                              Stages& stages) {
  constexpr int kVector = kVectorWidth<T>;
  if constexpr (form == Form::rows) {
    const Span<T> span(element<const T>(lane.volumes.in[0], lane.n, lane.c, begin), end - begin);
    const int64_t first = begin + span.head, tail = first + span.vectors * kVector;
    lane.begin(min(first + thread * kVector, end - 1));
    lane.process_pipelined(first, span.vectors, thread, threads, stages);
    lane.template process<1, 1>(begin, span.head, thread, threads);
    lane.template process<1, 1>(tail, end - tail, thread, threads);
  } else {
    lane.begin(min(begin + thread, end - 1));
    if constexpr (form == Form::columns)
      lane.process_pipelined(begin, end - begin, thread, threads, stages);
    else
      lane.template process<1, 4 / Formula::kTraits.inputs>(begin, end - begin, thread, threads);
  }
  if constexpr (std::is_same_v<T, BFloat16> && requires { &Formula::is_lost; })
#pragma unroll
    for (int c = 0; c < lane.kChannels; ++c)
      if (Formula::is_lost(lane.total[c]))
        lane.total[c] =
            sum_in_double<T, form>(lane.formula, lane.volumes, lane.n, lane.c + c, begin, end, thread, threads);
  lane.finish();
}

/// Adds the totals of the reducers of each column in a fixed order. Calls store(column, channel, sum) for each sum.
/// `shared` has kBlock * kChannels pairs. All threads of the CTA must call this function together.
template <int kChannels, class Store>
__device__ void sum_columns(const double2 (&total)[kChannels], const BlockLayout& layout, double2* shared,
                            const Store& store) {
  const int thread = static_cast<int>(threadIdx.x), columns = layout.columns, sums = columns * kChannels;
  const int parts = max(min(min(kBlock / sums, layout.reducers), 16), 1);  // threads that share a sum
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kChannels; ++c) shared[c * kBlock + layout.reducer() * columns + layout.column()] = total[c];
  __syncthreads();
  for (int i = thread; i < max(sums * parts, kBlock); i += kBlock) {
    const int part = i / sums, channel = i % sums / columns, column = i % columns;
    double2 sum{0, 0};
    if (part < parts)
      for (int r = part; r < layout.reducers; r += parts)
        sum = add(sum, shared[channel * kBlock + r * columns + column]);
    if (parts > 1) {
      __syncthreads();
      shared[i] = sum;
      __syncthreads();
      for (int other = 1; part == 0 && other < parts; ++other) sum = add(sum, shared[other * sums + i]);
    }
    if (part == 0) store(column, channel, sum);
  }
  __syncthreads();
}

/// Applies a formula to `volumes`. Computes out = formula(in...) if the formula has results. Computes
/// partial[range][sample, channel] = the sums if the formula has sums and `partial` is not null. Launch: one CTA per
/// (range, tile) in a 1-D grid-stride loop, kBlock threads per CTA. Static shared memory: the vectors in flight (8 per
/// thread) or, in the form `scalar`, kBlock pairs of sums.
template <class T, Form form, class Formula>
__global__ void __launch_bounds__(kBlock, form == Form::columns && (sizeof(T) == 2 || Formula::kTraits.heavy) ? 2 : 3)
    channels_kernel(const __grid_constant__ Tiling tiling, const __grid_constant__ Formula formula,
                    const __grid_constant__ Volumes<Formula::kTraits.inputs> volumes, double2* partial) {
  wait_for_previous_kernels();
  using Thread = Lane<T, form, Formula>;
  constexpr int kChannels = Thread::kChannels;
  union Shared {
    typename Thread::Stage stages[form == Form::scalar ? 1 : Thread::kStages];
    double2 totals[Formula::kTraits.sums ? kBlock * kChannels : 1];
    __device__ Shared() {}
  };
  __shared__ Shared shared;
  const BlockLayout layout = tiling.layout;
  const int thread = layout.reducer(), threads = layout.reducers;
  for (int64_t i = blockIdx.x; i < tiling.blocks(); i += gridDim.x) {
    // If the formula writes results, process the blocks in reverse order. The previous pass over the tensors ended with
    // the last blocks, so part of their data is still in the L2 cache.
    const int64_t block = Formula::kTraits.writes ? tiling.blocks() - 1 - i : i, range = quotient(block, tiling.tiles);
    const int64_t first_line = (block - range * tiling.tiles) * layout.columns, line = first_line + layout.column();
    const int64_t begin = range * tiling.range, end = min(begin + tiling.range, tiling.length);
    const int64_t n = quotient(line, tiling.sample_lines);
    Thread lane{formula, volumes, n, (line - n * tiling.sample_lines) * kChannels};
    if (line < tiling.lines && thread < threads && begin < end)
      process_range<T, form, Formula>(lane, begin, end, thread, threads, shared.stages);
    if constexpr (Formula::kTraits.sums) {
      if (!partial) continue;
      const auto store = [&](int column, int channel, const double2& sum) {
        if (first_line + column < tiling.lines)
          partial[(range * tiling.lines + first_line + column) * kChannels + channel] = sum;
      };
      sum_columns(lane.total, layout, shared.totals, store);
    }
  }
}

/// Returns the layout of a kernel that adds `count` sums of ranges and lines for each result. A thread adds few of
/// them, because the loads of a thread wait for each other.
inline BlockLayout layout_of_sums(int64_t count) { return BlockLayout::choose(8 * count, false); }

/// Computes out = formula(first, in...), unless `out` is null. All views are (N, C, L). If `memory` is not null,
/// allocates it and returns the formula's sums, which lie in this memory.
template <class T, class Formula, class... Views>
RangeSums apply_formula(const char* op, const Formula& formula, const Launch& launch, std::optional<Workspace>* memory,
                        const View* out, const View& first, const Views&... in) {
  const Form form = out ? choose_form<T>(*out, first, in...) : choose_form<T>(first, in...);
  const Tiling tiling(form, first, kVectorWidth<T>);
  const int64_t lines = first.size[0] * first.size[1];
  if (memory) memory->emplace(launch, static_cast<size_t>(lines * tiling.ranges) * sizeof(double2));
  auto* const sums = memory ? (*memory)->template as<double2>() : nullptr;
  void (*kernel)(Tiling, Formula, Volumes<Formula::kTraits.inputs>, double2*) = nullptr;
  if constexpr (Formula::kTraits.scalar) kernel = channels_kernel<T, Form::scalar, Formula>;
  if constexpr (sizeof(T) < 8)
    if (form != Form::scalar)
      kernel =
          form == Form::columns ? channels_kernel<T, Form::columns, Formula> : channels_kernel<T, Form::rows, Formula>;
  launch_kernel(op, kernel, grid_size(tiling.blocks(), 1), kBlock, 0, launch.stream, tiling, formula,
                {{first, in...}, out ? *out : View()}, sums);
  return {sums, lines, tiling.ranges, tiling.range, tiling.length};
}

}  // namespace
}  // namespace voxgrad::cuda
