// What group normalisation's forward and backward passes share: one kernel over the elements of tensors (N, C, L) that
// applies a formula with constants for every (sample, channel), writes its results, sums something up for every
// (sample, channel), or both.
//
// It has three forms. rows: contiguous tensors; a thread reads 16 bytes of one channel at a time. columns: channels
// innermost; a thread keeps 16 bytes of neighbouring channels, with their constants and sums, and steps through the
// positions. walk: single elements of any strides.
//
// A formula has kInputs, kWrites and kSums; Channel, what a thread keeps for a (sample, channel), from
// channel(n, c, l), where l is about the first position that the thread reads; operator()(channel, run, x), the result
// for an element of each input, which may add to the sums of the run; and, where sums need it, finish(n, c, channel,
// count, total). is_lost(total): sums of bfloat16 overflowed in float, and the kernel makes them again in double;
// optional. kHeavy: it has many constants for a channel, so that fewer blocks share a
// multiprocessor's registers. kWalks, false: its elements come in vectors.
//
// Vectors of 16 bytes come to shared memory by cp.async, several ahead for each thread, which reads those that it asked
// for itself: no barrier, and no registers for what is on its way.
#pragma once

#include <cuda_pipeline.h>

#include <bit>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/norm_activations.h"

namespace voxgrad::cuda {
namespace {  // kernels of one name in two files

/// One tensor (N, C, L) as the kernels address it.
struct Volume {
  void* data = nullptr;
  int64_t sample = 0, channel = 0, position = 0;  // strides

  Volume() = default;
  explicit Volume(const View& v) : data(v.data), sample(v.stride[0]), channel(v.stride[1]), position(v.stride[2]) {}
  template <class T>
  __device__ T* at(int64_t n, int64_t c, int64_t l) const {
    return static_cast<T*>(data) + n * sample + c * channel + l * position;
  }
};

template <int kInputs>
struct Volumes {
  Volume in[kInputs], out;
};

/// A vector over the channels, of dtype T or compute_t<T>, or null.
struct PerChannel {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = f32;

  explicit PerChannel(const View* v)
      : data(v ? v->data : nullptr), stride(v ? v->stride[0] : 0), dtype(v ? v->dtype : f32) {}
  template <class T>
  __device__ double at(int64_t channel, double otherwise) const {
    if (!data) return otherwise;
    if (dtype == dtype_of<T>) return convert<double>(static_cast<const T*>(data)[channel * stride]);
    return static_cast<double>(static_cast<const compute_t<T>*>(data)[channel * stride]);
  }
  template <class T>
  __device__ void set(int64_t channel, double value) const {
    if (!data) return;
    if (dtype == dtype_of<T>)
      static_cast<T*>(data)[channel * stride] = convert<T>(value);
    else
      static_cast<compute_t<T>*>(data)[channel * stride] = static_cast<compute_t<T>>(value);
  }
};

/// A matrix (N, groups), or (1, groups) for all samples.
struct Matrix {
  void* data = nullptr;
  int64_t stride[2] = {};

  Matrix() = default;
  explicit Matrix(const View& v) : data(v.data), stride{v.size[0] == 1 ? 0 : v.stride[0], v.stride[1]} {}
  template <class T>
  __device__ T& at(int64_t n, int64_t group) const {
    return static_cast<T*>(data)[n * stride[0] + group * stride[1]];
  }
};

/// The sizes. A group has some channels of one sample or, if `joined`, of all samples.
struct Groups {
  int64_t samples, channels, length, groups, group_channels;
  bool joined;

  Groups(const View& x, int64_t group_count, bool over_samples = false)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        groups(group_count),
        group_channels(channels / groups),
        joined(over_samples) {}
  /// From the shape of its statistics.
  Groups(const View& x, const View& mean) : Groups(x, mean.size[1], mean.size[0] != x.size[0]) {}
  VG_HOST_DEVICE int64_t lines() const { return samples * channels; }
  VG_HOST_DEVICE int64_t count() const { return joined ? groups : samples * groups; }
  VG_HOST_DEVICE int64_t group_lines() const { return joined ? samples * group_channels : group_channels; }
  __device__ int64_t group(int64_t channel) const { return quotient(channel, group_channels); }
  __device__ int64_t number(int64_t n, int64_t channel) const { return (joined ? 0 : n * groups) + group(channel); }
  /// The i-th line, n * channels + c, of group `number`.
  __device__ int64_t line(int64_t number, int64_t i) const {
    const int64_t first = quotient(number, groups), sample = quotient(i, group_channels);
    return (first + sample) * channels + (number - first * groups - sample) * group_channels + i;
  }
};

/// The share that each rank has in the elements of a group, from the statistics of all ranks, (ranks, groups + 1),
/// whose last rows begin with the elements of each rank.
struct RankShares {
  const double2* all;
  int64_t groups;
  double total = 0;

  __device__ RankShares(const double2* of_ranks, int64_t ranks, int64_t group_count)
      : all(of_ranks), groups(group_count) {
    for (int64_t rank = 0; rank < ranks; ++rank) total += elements(rank);
    total = fmax(total, 1.0);
  }
  __device__ double elements(int64_t rank) const { return all[rank * (groups + 1) + groups].x; }
  __device__ double operator[](int64_t rank) const { return elements(rank) / total; }
};

enum class Form { walk, rows, columns };

/// All are contiguous, and their vectors begin at the same elements.
template <class T, class... Views>
bool are_rows(const Views&... views) {
  size_t places = 0;
  for (const void* start : {static_cast<const void*>(views.data)...})
    places |= size_t{1} << (reinterpret_cast<uintptr_t>(start) / sizeof(T) % kVectorWidth<T>);
  const auto is_contiguous = [](const View& v) {
    return v.stride[2] == 1 && v.stride[1] == v.size[2] && v.stride[0] == v.size[1] * v.size[2];
  };
  return (is_contiguous(views) && ...) && std::has_single_bit(places);
}

/// The channels of every position are whole vectors.
template <class T>
bool is_columns(const View& v) {
  constexpr int64_t width = kVectorWidth<T>;
  const auto steps_evenly = [&](int axis) { return v.size[axis] == 1 || v.stride[axis] % width == 0; };
  return v.stride[1] == 1 && v.size[1] % width == 0 && steps_evenly(0) && steps_evenly(2) &&
         reinterpret_cast<uintptr_t>(v.data) % (width * sizeof(T)) == 0;
}

/// Doubles, which are for checks, have no vectors.
template <class T, class... Views>
Form choose_form(const Views&... views) {
  if (sizeof(T) == 8) return Form::walk;
  return (is_columns<T>(views) && ...) ? Form::columns : are_rows<T>(views...) ? Form::rows : Form::walk;
}

/// with_activations() of ops/detail/norm_activations.h, but single elements (of `views`, all that a formula reads and
/// writes) have one class for all activations.
template <class T, class F, class... Views>
void with_vector_activations(const NormActivations& activations, const F& f, const Views&... views) {
  if (choose_form<T>(views...) == Form::walk) return f(AnyActivations(activations));
  if constexpr (sizeof(T) < 8) with_activations<T>(activations, f);
}

/// How blocks and their threads share the lines, which are channels of a sample, or vectors of channels, and cut the
/// positions into ranges. Follows from shapes and the form alone.
struct Tiling {
  BlockLayout layout;
  int64_t length, sample_lines, lines, tiles, ranges, range;

  Tiling(Form form, const View& x, int width)
      : length(x.size[2]), sample_lines(form == Form::columns ? x.size[1] / width : x.size[1]) {
    const bool columns = form == Form::columns;
    lines = x.size[0] * sample_lines;
    if (columns) {  // the channels of a sample, or an even part of them
      const int64_t side = divide_up(sample_lines, divide_up(sample_lines, 64));
      layout = {static_cast<int>(side), static_cast<int>(kBlock / side), true};
    } else {
      layout = BlockLayout::choose(length, x.size[1] > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2]));
    }
    tiles = divide_up(lines, layout.columns);
    // Enough work for a thread to pay for its constants and sums; of columns, whose blocks have a sum for each of many
    // channels, fewer blocks: two or three at a time fill an SM.
    const int64_t shortest = layout.reducers * (columns ? 16 : 4 * width);
    const int64_t most = (columns ? 528 : 4096) / std::max<int64_t>(tiles, 1);
    const int64_t wanted = std::clamp<int64_t>(divide_up(length, shortest), 1, std::max<int64_t>(most, 1));
    range = std::max<int64_t>(divide_up(divide_up(length, wanted), 64), 1) * 64;  // whole cache lines
    ranges = std::max<int64_t>(divide_up(length, range), 1);
  }
  VG_HOST_DEVICE int64_t blocks() const { return tiles * ranges; }
};

/// Sums over up to kLongestRun elements, before they are added to sums in double. Halves are summed in float: sixteen
/// conversions to double a cycle would hold up an SM.
inline constexpr int kLongestRun = 32;
template <class S>
struct RunOf {
  using Sum = S;
  Sum x = 0, y = 0;
};
template <class T>
using Run = RunOf<std::conditional_t<sizeof(T) == 2, float, double>>;

__device__ inline double2 add(const double2& a, const double2& b) { return {a.x + b.x, a.y + b.y}; }

/// What a thread does for its channels of a sample.
template <class T, Form form, class Formula>
struct Lane {
  static constexpr int kInputs = Formula::kInputs, kChannels = form == Form::columns ? kVectorWidth<T> : 1;
  static constexpr int kStages = 8 / kInputs;
  using Stage = uint4[kInputs][kBlock];

  const Formula& formula;
  const Volumes<kInputs>& volumes;
  int64_t n, c;  // the first channel
  typename Formula::Channel channel[kChannels];
  double2 total[kChannels];
  int count;  // positions done

  __device__ void begin(int64_t position) {
    count = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) channel[i] = formula.channel(n, c + i, position);
  }

  /// The vectors of 16 bytes that fall to `thread` of `threads` among those that begin at position `first`, fewer than
  /// 2^31. Of each input kStages are on their way to this thread's places in shared memory.
  __device__ void take_vectors(int64_t first, int64_t vectors, int thread, int threads, Stage (&stages)[kStages]) {
    constexpr int width = kVectorWidth<T>, step = form == Form::columns ? 1 : width;  // positions of a vector
    const auto stride = [](const Volume& volume) { return form == Form::rows ? 1 : volume.position; };
    const int64_t start = first + thread * step;
    const T* in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = volumes.in[k].template at<const T>(n, c, start);
    T* out = volumes.out.template at<T>(n, c, start);
    int left = static_cast<int>(vectors) - thread, coming = left, stage = 0, summed = 0;
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
      if constexpr (Formula::kWrites) {
        store_vector(out, result);
        out += threads * step * stride(volumes.out);
      }
      count += step;
      if (Formula::kSums && (summed += step) >= kLongestRun) {
        end_runs(run);
        summed = 0;
      }
    }
    if constexpr (Formula::kSums) end_runs(run);
  }

  /// The same of vectors of any width, with runs summed in `Sum`.
  template <int width, int kUnroll, class Sum = typename Run<T>::Sum>
  __device__ void take(int64_t first, int64_t vectors, int thread, int threads) {
    constexpr int step = form == Form::columns ? 1 : width;  // positions of a vector
    const auto stride = [](const Volume& volume) { return form == Form::rows ? 1 : volume.position; };
    const int64_t start = first + thread * step;
    const T* in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = volumes.in[k].template at<const T>(n, c, start);
    T* out = volumes.out.template at<T>(n, c, start);
    RunOf<Sum> run[kChannels];
    int summed = 0;  // elements of a run
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
        if constexpr (Formula::kWrites) {
          store_vector(out, result);
          out += threads * step * stride(volumes.out);
        }
        count += step;
      }
      if (Formula::kSums && (summed += kUnroll * step) >= kLongestRun) {
        end_runs(run);
        summed = 0;
      }
    }
    if constexpr (Formula::kSums) end_runs(run);
  }

  __device__ void finish() {
    if constexpr (requires { formula.finish(n, c, channel[0], count, total[0]); })
#pragma unroll
      for (int i = 0; i < kChannels; ++i) formula.finish(n, c + i, channel[i], count, total[i]);
  }

 private:
  template <class Sum>
  __device__ void end_runs(RunOf<Sum> (&run)[kChannels]) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      total[i] = add(total[i], {static_cast<double>(run[i].x), static_cast<double>(run[i].y)});
      run[i] = {};
    }
  }
  template <int width, class Sum>
  __device__ Vector<T, width> apply(const Vector<T, width> (&loaded)[kInputs], RunOf<Sum> (&run)[kChannels]) const {
    Vector<T, width> result{};  // stays so if nothing is written
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const int i = kChannels > 1 ? j : 0;
      compute_t<T> x[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) x[k] = convert<compute_t<T>>(loaded[k].v[j]);
      if constexpr (Formula::kWrites)
        result.v[j] = formula(channel[i], run[i], x);
      else
        formula(channel[i], run[i], x);
    }
    return result;
  }
};

template <class Formula>
constexpr bool is_heavy() {
  if constexpr (requires { Formula::kHeavy; }) return Formula::kHeavy;
  return false;
}
template <class Formula>
constexpr bool may_walk() {
  if constexpr (requires { Formula::kWalks; }) return Formula::kWalks;
  return true;
}

/// Returns the sums of channel c over the elements of [begin, end) that fall to `thread`, added in double throughout;
/// the kernel calls it where is_lost() rejects sums in float. It is not inlined and reads single elements, so that it
/// takes few registers from the kernel's loop.
template <class T, Form form, class Formula>
__device__ __noinline__ double2 sum_in_double(const Formula& formula, const Volumes<Formula::kInputs>& volumes,
                                              int64_t n, int64_t c, int64_t begin, int64_t end, int thread,
                                              int threads) {
  Lane<T, Form::walk, Formula> lane{formula, volumes, n, c};
  if constexpr (form == Form::rows) {
    constexpr int kVector = kVectorWidth<T>;
    const Span<T> span(volumes.in[0].template at<const T>(n, c, begin), end - begin);
    const int64_t first = begin + span.head, behind = first + span.vectors * kVector;
    lane.begin(min(first + thread * kVector, end - 1));
#pragma unroll 1
    for (int i = 0; i < kVector; ++i)
      lane.template take<1, 1, double>(first, behind - first, thread * kVector + i, threads * kVector);
    lane.template take<1, 1, double>(begin, span.head, thread, threads);
    lane.template take<1, 1, double>(behind, end - behind, thread, threads);
  } else {
    lane.begin(min(begin + thread, end - 1));
    lane.template take<1, 1, double>(begin, end - begin, thread, threads);
  }
  return lane.total[0];
}

/// partial[range][sample, channel] = the formula's sums, unless it is null.
template <class T, Form form, class Formula>
__global__ void __launch_bounds__(kBlock, form == Form::columns && (sizeof(T) == 2 || is_heavy<Formula>()) ? 2 : 3)
    channels_kernel(const __grid_constant__ Tiling tiling, const __grid_constant__ Formula formula,
                    const __grid_constant__ Volumes<Formula::kInputs> volumes, double2* partial) {
  using Thread = Lane<T, form, Formula>;
  constexpr int kVector = kVectorWidth<T>;
  __shared__ typename Thread::Stage stages[form == Form::walk ? 1 : Thread::kStages];
  __shared__ double2 shared[Formula::kSums ? kBlock : 1];
  const BlockLayout layout = tiling.layout;
  const int thread = layout.reducer(), threads = layout.reducers;
  for (int64_t i = blockIdx.x; i < tiling.blocks(); i += gridDim.x) {
    // What writes goes from behind, where the pass before it ended: some of that is still in the cache.
    const int64_t block = Formula::kWrites ? tiling.blocks() - 1 - i : i, range = quotient(block, tiling.tiles);
    const int64_t line = (block - range * tiling.tiles) * layout.columns + layout.column();
    const int64_t begin = range * tiling.range, end = min(begin + tiling.range, tiling.length);
    const int64_t n = quotient(line, tiling.sample_lines);
    Thread lane{formula, volumes, n, (line - n * tiling.sample_lines) * Thread::kChannels};
    if (line < tiling.lines && thread < threads && begin < end) {
      if constexpr (form == Form::rows) {
        const Span<T> span(volumes.in[0].template at<const T>(lane.n, lane.c, begin), end - begin);
        const int64_t first = begin + span.head, behind = first + span.vectors * kVector;
        lane.begin(min(first + thread * kVector, end - 1));
        lane.take_vectors(first, span.vectors, thread, threads, stages);
        lane.template take<1, 1>(begin, span.head, thread, threads);
        lane.template take<1, 1>(behind, end - behind, thread, threads);
      } else {
        lane.begin(min(begin + thread, end - 1));
        if constexpr (form == Form::columns)
          lane.take_vectors(begin, end - begin, thread, threads, stages);
        else
          lane.template take<1, 4 / Thread::kInputs>(begin, end - begin, thread, threads);
      }
      if constexpr (std::is_same_v<T, BFloat16> && requires { Formula::is_lost(lane.total[0]); })
#pragma unroll
        for (int c = 0; c < Thread::kChannels; ++c)
          if (Formula::is_lost(lane.total[c]))
            lane.total[c] = sum_in_double<T, form>(formula, volumes, lane.n, lane.c + c, begin, end, thread, threads);
      lane.finish();
    }
    if constexpr (Formula::kSums) {
      if (!partial) continue;
#pragma unroll
      for (int c = 0; c < Thread::kChannels; ++c) {
        const double2 sum = combine_reducers(lane.total[c], layout, shared, add);
        if (line < tiling.lines && thread == 0) partial[(range * tiling.lines + line) * Thread::kChannels + c] = sum;
      }
    }
  }
}

/// total[line] = the sum of partial[range][line] over the ranges.
__global__ void __launch_bounds__(kBlock)
    ranges_kernel(int64_t lines, int64_t ranges, const double2* partial, double2* total) {
  __shared__ double2 shared[kBlock];
  const BlockLayout layout{4, kBlock / 4, true};
  for (int64_t tile = blockIdx.x; tile * layout.columns < lines; tile += gridDim.x) {
    const int64_t line = tile * layout.columns + layout.column();
    double2 sum{0, 0};
    if (line < lines)
#pragma unroll 16
      for (int64_t range = layout.reducer(); range < ranges; range += layout.reducers)
        sum = add(sum, partial[range * lines + line]);
    sum = combine_reducers(sum, layout, shared, add);
    if (line < lines && layout.reducer() == 0) total[line] = sum;
  }
}

/// out = formula(in...), unless it is null; total[sample, channel] = the formula's sums, unless it is null.
template <class T, class Formula, class... Views>
void apply_formula(const char* op, const Formula& formula, const Launch& launch, double2* total, const View* out,
                   const View& first, const Views&... in) {
  const Form form = out ? choose_form<T>(*out, first, in...) : choose_form<T>(first, in...);
  const Tiling tiling(form, first, kVectorWidth<T>);
  const int64_t lines = first.size[0] * first.size[1];
  const bool joins = total && tiling.ranges > 1;
  const Workspace partial(launch, joins ? static_cast<size_t>(lines * tiling.ranges) * sizeof(double2) : 0);
  void (*kernel)(Tiling, Formula, Volumes<Formula::kInputs>, double2*) = nullptr;
  if constexpr (may_walk<Formula>()) kernel = channels_kernel<T, Form::walk, Formula>;
  if constexpr (sizeof(T) < 8)
    if (form != Form::walk)
      kernel =
          form == Form::columns ? channels_kernel<T, Form::columns, Formula> : channels_kernel<T, Form::rows, Formula>;
  kernel<<<grid_size(tiling.blocks(), 1), kBlock, 0, launch.stream>>>(
      tiling, formula, {{Volume(first), Volume(in)...}, out ? Volume(*out) : Volume()},
      joins ? partial.template as<double2>() : total);
  check_launch(op);
  if (!joins) return;
  ranges_kernel<<<grid_size(lines, 4), kBlock, 0, launch.stream>>>(lines, tiling.ranges, partial.template as<double2>(),
                                                                   total);
  check_launch(op);
}

}  // namespace
}  // namespace voxgrad::cuda
