// Resampling along three axes at once, and the transposed map, which computes gradients. In both directions, a thread
// reads all inputs of its outputs, so that no atomic operations are needed.
//
// First, write_terms writes a table of terms for each axis: the inputs of every output position, and their weights
// (ops/detail/resample_taps.h). Then resample_runs computes a vector of channels (or one element) per thread, at a few
// neighboring positions along the width. A thread keeps the last two sums over depth and height, because the next
// position may use the same sums.
//
// Resampling by a factor of two has faster kernels without a table (cuda/resample_by_two.cuh).
#include "core/detail/divide.h"
#include "ops/detail/resample_taps.h"

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/resample_by_two.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {

/// One input of an output position.
template <class C>
struct alignas(2 * sizeof(C)) Term {
  C weight;
  int position;  ///< index along the axis of the input
};

/// The map of one axis.
struct AxisMap {
  Resample map;
  bool transposed;
  int64_t first;    ///< first output position of this part of the result
  int64_t inputs;   ///< input size of the map; if `transposed`, the size of the result
  int64_t outputs;  ///< output size of the map; if `transposed`, the size of the input tensor
};

/// The terms of the output positions of one axis.
template <class C>
struct AxisTerms {
  AxisMap from;
  int size;        ///< number of output positions in this part of the result
  int* count;      ///< number of terms of each position
  Term<C>* terms;  ///< term k of position o is terms[k * size + o]

  /// Returns term k of position o, with one load.
  __device__ Term<C> get(int o, int k) const {
    constexpr int words = sizeof(C) == 8 ? 16 : 8;
    return std::bit_cast<Term<C>>(*(reinterpret_cast<const Word<words>*>(terms) + (int64_t{k} * size + o)));
  }
};

/// Sums vectors of the input over depth and height, with the weights of the output position (od, oh). `in` points to
/// the vector at depth 0 and height 0. kRowsInFlight rows are loaded together.
template <class T, int width, class C = compute_t<T>>
__device__ void sum_column(const AxisTerms<C>& depth, const AxisTerms<C>& height, int od, int oh, const T* in,
                           const int64_t (&stride)[kMaxRank], C (&sum)[width]) {
#pragma unroll
  for (int j = 0; j < width; ++j) sum[j] = 0;
  constexpr int kRowsInFlight = 4;
  const int planes = depth.count[od], rows = height.count[oh];
  for (int kd = 0; kd < planes; ++kd) {
    const Term<C> plane = depth.get(od, kd);
    const T* from = in + plane.position * stride[2];
    for (int kh = 0; kh < rows; kh += kRowsInFlight) {
      Vector<T, width> loaded[kRowsInFlight];
      C weight[kRowsInFlight];
#pragma unroll
      for (int k = 0; k < kRowsInFlight; ++k) {
        const Term<C> row = height.get(oh, min(kh + k, rows - 1));
        weight[k] = plane.weight * row.weight;
        if (kh + k < rows) loaded[k] = load_vector<T, width>(from + row.position * stride[3]);
      }
#pragma unroll
      for (int k = 0; k < kRowsInFlight; ++k)
        if (kh + k < rows)
#pragma unroll
          for (int j = 0; j < width; ++j) sum[j] += weight[k] * static_cast<C>(loaded[k].v[j]);
    }
  }
}

/// The arguments of the kernels, for a part of the result that has fewer than 2^31 elements.
template <class C>
struct ResampleProblem {
  View out;
  View in;
  AxisTerms<C> terms[3];
  Divisor channels;     ///< channels, or vectors of channels
  Divisor height;       ///< height of the output
  Divisor depth;        ///< depth of the output
  uint32_t length;      ///< positions of a run; a run lies along the width
  Divisor runs;         ///< runs of a row
  bool channels_inner;  ///< neighboring threads compute neighboring channels
  uint32_t items;       ///< total number of runs
};

/// Writes the tables of terms of all three axes. Launch: one thread per output position of the longest axis, in a 1-D
/// grid-stride loop, kBlock threads per CTA. No shared memory.
template <class C>
__global__ void __launch_bounds__(kBlock) write_terms(const __grid_constant__ ResampleProblem<C> p) {
  wait_for_previous_kernels();
  for (const AxisTerms<C>& to : p.terms) {
    const AxisMap& m = to.from;
    for (int64_t o = thread_index(); o < to.size; o += thread_count()) {
      int count = 0;
      for_terms(m.map, m.transposed, m.first + o, m.inputs, m.outputs, [&](int64_t position, double weight) {
        to.terms[int64_t{count++} * to.size + o] = {static_cast<C>(weight), static_cast<int>(position)};
      });
      to.count[o] = count;
    }
  }
}

/// Resamples runs of neighboring positions along the width; a thread computes vectors of `width` channels. Launch: one
/// thread per run in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, int width>
__global__ void __launch_bounds__(kBlock) resample_runs(const __grid_constant__ ResampleProblem<compute_t<T>> p) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  for (uint32_t item = blockIdx.x * kBlock + threadIdx.x; item < p.items; item += gridDim.x * kBlock) {
    uint32_t number = item;
    const uint32_t inner = p.channels_inner ? p.channels.take_digit(number) : 0;
    const int begin = static_cast<int>(p.runs.take_digit(number) * p.length);
    const int oh = static_cast<int>(p.height.take_digit(number)), od = static_cast<int>(p.depth.take_digit(number));
    const int64_t channel = int64_t{p.channels_inner ? inner : p.channels.take_digit(number)} * width;
    const T* in = static_cast<const T*>(p.in.data) + number * p.in.stride[0] + channel * p.in.stride[1];
    T* out = static_cast<T*>(p.out.data) + number * p.out.stride[0] + channel * p.out.stride[1] + od * p.out.stride[2] +
             oh * p.out.stride[3];
    int positions_held[2] = {-1, -1};
    C columns[2][width];  // sums over depth and height at positions_held; the newer sum is first
    const int end = min(begin + static_cast<int>(p.length), p.terms[2].size);
    for (int ow = begin; ow < end; ++ow) {
      C sum[width] = {};
      const int count = p.terms[2].count[ow];
      for (int k = 0; k < count; ++k) {
        const Term<C> term = p.terms[2].get(ow, k);
        if (term.position != positions_held[0] && term.position != positions_held[1]) {
          positions_held[1] = positions_held[0];
          positions_held[0] = term.position;
#pragma unroll
          for (int j = 0; j < width; ++j) columns[1][j] = columns[0][j];
          sum_column<T, width>(p.terms[0], p.terms[1], od, oh, in + term.position * p.in.stride[4], p.in.stride,
                               columns[0]);
        }
        const bool newer = term.position == positions_held[0];
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] += term.weight * (newer ? columns[0][j] : columns[1][j]);
      }
      store_values<width>(out + ow * p.out.stride[4], sum);
    }
  }
}

/// The arguments of resample(). After cut(), `out` is only a part of the output.
struct ResampleCall {
  View out;
  View in;
  AxisMap map[3];
  int64_t max_terms[3];  ///< upper bound of the number of terms of an output position

  int64_t term_count(int i) const { return out.size[i + 2] * max_terms[i]; }
  /// Restricts the output to a range of an axis.
  void cut(int axis, int64_t begin, int64_t length) {
    cut_axis(out, axis, begin, length);
    if (axis >= 2)
      map[axis - 2].first += begin;
    else
      cut_axis(in, axis, begin, length);
  }
};

/// Returns the axis along which to split a call whose output has 2^31 elements or more, or whose tables of terms are
/// large; otherwise -1.
int axis_to_split(const ResampleCall& call) {
  int axis = -1;
  for (int i = 0; i < 3; ++i)
    if (call.term_count(i) > int64_t{1} << 22 && call.out.size[i + 2] > 1) axis = i + 2;
  if (axis < 0 && call.out.numel() >= int64_t{1} << 31) {
    const auto outer = [&](int a) { return call.out.size[a] > 1 ? std::abs(call.out.stride[a]) : 0; };
    axis = 0;
    for (int other = 1; other < 5; ++other)
      if (outer(other) > outer(axis)) axis = other;
  }
  return axis;
}

template <class T>
void launch_runs(const ResampleCall& call, ResampleProblem<compute_t<T>> p, cudaStream_t stream) {
  constexpr int width = kVectorWidth<T>;
  const bool vectors = has_vectors(call.out, 1, width) && has_vectors(call.in, 1, width);
  const int64_t* size = call.out.size;
  p.channels = Divisor(size[1] / (vectors ? width : 1));
  p.channels_inner = vectors || std::abs(call.out.stride[1]) < std::abs(call.out.stride[4]);
  const int64_t items = call.out.numel() / (vectors ? width : 1);
  constexpr int64_t kEnoughThreads = int64_t{1} << 19;
  // If the width is innermost, keep runs of length 1, so that neighboring threads compute neighboring elements.
  p.length = 1;
  while (p.channels_inner && p.length < 8 && p.length < size[4] && items / p.length > kEnoughThreads) p.length *= 2;
  const int64_t runs = divide_up(size[4], p.length);
  p.runs = Divisor(runs);
  p.items = static_cast<uint32_t>(items / size[4] * runs);
  const auto kernel = vectors ? resample_runs<T, width> : resample_runs<T, 1>;
  launch_kernel("resample", kernel, grid_size(p.items), kBlock, 0, stream, p);
}

/// Writes the tables of terms for one part of the result and launches its kernel.
template <class T>
void resample_part(const Launch& launch, const ResampleCall& call) {
  using C = compute_t<T>;
  ResampleProblem<C> p{};
  p.out = call.out;
  p.in = call.in;
  int64_t terms = 0, positions = 0;
  for (int i = 0; i < 3; ++i) {
    terms += call.term_count(i);
    positions += call.out.size[i + 2];
  }
  const Workspace workspace(launch, terms * sizeof(Term<C>) + positions * sizeof(int));
  auto* term = workspace.as<Term<C>>();
  auto* count = reinterpret_cast<int*>(term + terms);
  for (int i = 0; i < 3; ++i) {
    p.terms[i] = {call.map[i], static_cast<int>(call.out.size[i + 2]), count, term};
    term += call.term_count(i);
    count += call.out.size[i + 2];
  }
  launch_kernel("resample", write_terms<C>, grid_size(*std::max_element(call.out.size + 2, call.out.size + 5)), kBlock,
                0, launch.stream, p);
  p.depth = Divisor(call.out.size[2]);
  p.height = Divisor(call.out.size[3]);
  launch_runs<T>(call, p, launch.stream);
}

}  // namespace

namespace kernel {

void resample(const View& out, const View& in, const ResampleMaps& maps, bool transposed) {
  if (out.numel() == 0) return;
  ResampleCall call{out, in, {}, {}};
  for (int i = 0; i < 3; ++i) {
    const int64_t inputs = transposed ? out.size[i + 2] : in.size[i + 2];
    const int64_t outputs = transposed ? in.size[i + 2] : out.size[i + 2];
    check(std::max(inputs, outputs) < int64_t{1} << 31, "resample",
          "CUDA supports axes of fewer than 2^31 elements, got ", std::max(inputs, outputs));
    call.map[i] = {maps[static_cast<size_t>(i)], transposed, 0, inputs, outputs};
    call.max_terms[i] = max_terms(call.map[i].map, transposed, inputs, outputs);
  }
  const Launch launch(out);
  dispatch_cuda(Floats(), out.dtype, "resample", [&]<class T>() {
    if (resample_by_two<T>(out, in, maps, transposed, launch.stream)) return;
    for_each_part(call, axis_to_split, [&](const ResampleCall& part) { resample_part<T>(launch, part); });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
