// Resampling by a factor of two along height, width and, optionally, depth: nearest and linear upsampling, average
// pooling with a kernel of 2, and their gradients. Nearest upsampling, average pooling and their gradients are called
// nearest maps here. Private to cuda/resample.cu.
//
// The kernel computes the positions and weights of the inputs from the output position, whereas the general kernels of
// cuda/resample.cu read positions and weights from a table. A thread steps along one axis: the width if the channels
// are innermost in memory, otherwise the height. For each position along this axis, the thread sums the inputs over the
// outer axes that are resampled. Such a sum is called a slab: a vector of channels, or a few columns along the width.
// The thread keeps the slabs that the next step also reads.
#pragma once

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {

/// The arguments of by_two_kernel. The axes are in memory order, innermost first. Axis 0 is read in vectors. Axis 1 is
/// divided into steps (see ByTwoStep) and runs of consecutive steps; a thread computes one run at a time. Axes 2 and 3
/// are the outer axes, and axis 4 is the samples.
struct ByTwoProblem {
  const void* in;
  void* out;
  int64_t in_stride[5];
  int64_t out_stride[5];
  int in_size[5];
  bool resampled[5];
  Divisor vectors;     ///< vectors along axis 0
  Divisor runs;        ///< runs along axis 1
  Divisor outside[2];  ///< output sizes of axes 2 and 3
  int steps;           ///< steps along axis 1
  int length;          ///< steps per run
  uint32_t items;      ///< total number of runs
  double scale;        ///< factor of all results of nearest maps
};

/// One step along an axis. A step computes `made` outputs from `fresh` new inputs and the `lead` inputs on each side of
/// the new inputs. Linear maps clamp positions outside of the input to its border.
template <bool up, bool linear>
struct ByTwoStep {
  static constexpr int fresh = up ? 1 : 2;
  static constexpr int made = up ? 2 : 1;
  static constexpr int lead = linear ? 1 : 0;
  static constexpr int taps = up ? fresh + lead : fresh + 2 * lead;  ///< inputs of one output along the axis

  /// Returns output j of a step whose k-th input is x(k).
  template <class F>
  static __device__ auto output(int j, F x) {
    using C = decltype(x(0));
    if constexpr (linear && up) return C(0.75) * x(1) + C(0.25) * x(2 * j);
    if constexpr (linear && !up) return C(0.25) * x(0) + C(0.75) * x(1) + C(0.75) * x(2) + C(0.25) * x(3);
    if constexpr (!linear && up) return x(0);
    if constexpr (!linear && !up) return x(0) + x(1);
  }
};

/// Offsets and weights of the inputs (taps) of output o along axis 2 or 3. If the axis is not resampled, all taps read
/// input o. The weights are then powers of two that add up to 1, so that the result is exactly the input. Nearest maps
/// do not use the weights, because ByTwoProblem::scale includes them.
template <class Step, int taps, class C>
struct ByTwoTaps {
  int offset[taps];
  C weight[taps];

  __device__ ByTwoTaps(const ByTwoProblem& p, int axis, int o) {
    const bool resampled = p.resampled[axis];
    const int first = Step::made == 2 ? (o + Step::lead) / 2 - Step::lead : 2 * o - Step::lead;
#pragma unroll
    for (int k = 0; k < taps; ++k) {
      const int position = resampled ? min(max(first + k, 0), p.in_size[axis] - 1) : o;
      offset[k] = position * static_cast<int>(p.in_stride[axis]);
      const C same = C(0.5) / (1 << max(0, min(taps - 1 - k, taps - 2)));  // (1/2, 1/2) or (1/8, 1/8, 1/4, 1/2)
      weight[k] = !resampled ? same : (taps == 2 ? k == o % 2 : k % 3 == 0) ? C(0.25) : C(0.75);
    }
  }
};

/// The position of the run that one thread computes.
struct ByTwoItem {
  int vector;       ///< index of the vector along axis 0
  int run;          ///< index of the run along axis 1
  int o2;           ///< output position along axis 2
  int o3;           ///< output position along axis 3
  uint32_t sample;  ///< index along axis 4

  __device__ ByTwoItem(const ByTwoProblem& p, uint32_t item, bool rows) : run(0) {
    vector = static_cast<int>(p.vectors.take_digit(item));
    o2 = static_cast<int>(p.outside[0].take_digit(item));
    if (rows) run = static_cast<int>(p.runs.take_digit(item));
    o3 = static_cast<int>(p.outside[1].take_digit(item));
    if (!rows) run = static_cast<int>(p.runs.take_digit(item));
    sample = item;
  }
};

/// The work of one thread on a run. `channels` is the number of channels of a vector. If `channels` is 0, the innermost
/// axis is the width of the volume, and a thread also makes `columns` steps along the width.
template <class T, bool up, bool linear, int channels, int columns>
struct ByTwoRun {
  using C = compute_t<T>;
  using Step = ByTwoStep<up, linear>;
  static constexpr bool rows = channels == 0;
  static constexpr int fresh = Step::fresh, made = Step::made, lead = Step::lead;
  static constexpr int taps3 = rows ? 1 : Step::taps;             ///< taps along axis 3
  static constexpr int read = rows ? columns * fresh : channels;  ///< elements of a vector of the input
  static constexpr int write = rows ? columns * made : channels;  ///< elements of a vector of the output
  static constexpr int border = rows ? lead : 0;  ///< additional columns of a slab on each side of a vector
  static constexpr int slab = read + 2 * border;  ///< elements of a slab
  /// Steps whose loads are in flight together.
  static constexpr int batch = std::clamp((rows && columns == 1 ? 16 : 8) / (fresh * Step::taps * taps3), 1, 4);
  static constexpr int slabs = batch * fresh + 2 * lead;  ///< slabs that a batch reads

  const ByTwoProblem& p;
  const T* in;
  T* out;
  const T* left;   ///< the column to the left of a vector
  const T* right;  ///< the column to the right of a vector
  ByTwoTaps<Step, Step::taps, C> axis2;
  ByTwoTaps<Step, taps3, C> axis3;

  __device__ ByTwoRun(const ByTwoProblem& problem, const ByTwoItem& item)
      : p(problem), axis2(problem, 2, item.o2), axis3(problem, 3, rows ? 0 : item.o3) {
    in = static_cast<const T*>(p.in) + item.sample * p.in_stride[4] + item.vector * read;
    out = static_cast<T*>(p.out) + item.sample * p.out_stride[4] + item.o3 * p.out_stride[3] +
          item.o2 * p.out_stride[2] + item.vector * write;
    if (rows) in += item.o3 * p.in_stride[3];
    left = item.vector == 0 ? in : in - 1;
    right = in + ((item.vector + 1) * read < p.in_size[0] ? read : read - 1);
  }

  /// Sums the inputs at position `position` along axis 1 over axes 2 and 3.
  __device__ void sum_slab(int position, C (&sum)[slab]) const {
    const int along = min(max(position, 0), p.in_size[1] - 1) * static_cast<int>(p.in_stride[1]);
#pragma unroll
    for (int j = 0; j < slab; ++j) sum[j] = 0;
#pragma unroll
    for (int a = 0; a < taps3; ++a) {
      Vector<T, read> inside[Step::taps];
      T edge[Step::taps][2];
#pragma unroll
      for (int b = 0; b < Step::taps; ++b) {
        const int offset = along + axis2.offset[b] + (rows ? 0 : axis3.offset[a]);
        inside[b] = load_vector<T, read>(in + offset);
        if (border > 0) {
          edge[b][0] = left[offset];
          edge[b][1] = right[offset];
        }
      }
#pragma unroll
      for (int b = 0; b < Step::taps; ++b) {
        const C weight = rows ? axis2.weight[b] : axis3.weight[a] * axis2.weight[b];
#pragma unroll
        for (int j = 0; j < slab; ++j) {
          const bool within = j >= border && j < border + read;
          const C x = static_cast<C>(within ? inside[b].v[within ? j - border : 0] : edge[b][j > 0]);
          sum[j] += linear ? weight * x : x;
        }
      }
    }
  }

  /// Stores output i of the batch that begins at `step`.
  __device__ void store_output(const C (&x)[slabs][slab], int step, int i) const {
    const auto line = [&](int j) { return Step::output(i % made, [&](int k) { return x[i / made * fresh + k][j]; }); };
    C result[write];
#pragma unroll
    for (int j = 0; j < write; ++j) {
      if constexpr (rows)
        result[j] = Step::output(j % made, [&](int k) { return line(j / made * fresh + k); });
      else
        result[j] = line(j);
      if (!linear) result[j] *= static_cast<C>(p.scale);
    }
    store_values<write>(out + (step * made + i) * static_cast<int>(p.out_stride[1]), result);
  }
};

/// Resamples by two; see ByTwoRun for the template parameters. Launch: one thread per run in a 1-D grid-stride loop,
/// kBlock threads per CTA. No shared memory.
template <class T, bool up, bool linear, int channels, int columns>
__global__ void __launch_bounds__(kBlock, 2) by_two_kernel(const __grid_constant__ ByTwoProblem p) {
  wait_for_previous_kernels();
  using Run = ByTwoRun<T, up, linear, channels, columns>;
  constexpr int fresh = Run::fresh, made = Run::made, lead = Run::lead, batch = Run::batch, slab = Run::slab;
  for (uint32_t number = blockIdx.x * kBlock + threadIdx.x; number < p.items; number += gridDim.x * kBlock) {
    const ByTwoItem item(p, number, Run::rows);
    const Run run(p, item);
    typename Run::C slabs[Run::slabs][slab];
    const int begin = item.run * p.length, end = min(begin + p.length, p.steps);
#pragma unroll
    for (int i = 0; i < 2 * lead; ++i) run.sum_slab(begin * fresh - lead + i, slabs[batch * fresh + i]);
    for (int step = begin; step < end; step += batch) {
      // The last slabs of a batch are the first of the next batch.
#pragma unroll
      for (int i = 0; i < 2 * lead; ++i)
#pragma unroll
        for (int j = 0; j < slab; ++j) slabs[i][j] = slabs[batch * fresh + i][j];
#pragma unroll
      for (int i = 0; i < batch * fresh; ++i) run.sum_slab(step * fresh + lead + i, slabs[2 * lead + i]);
#pragma unroll
      for (int i = 0; i < batch * made; ++i) {
        if (step + i / made >= end) break;
        run.store_output(slabs, step, i);
      }
    }
  }
}

/// Launches by_two_kernel for views whose layout suits `channels` and `columns`.
template <class T, bool up, bool linear, int channels, int columns>
void launch_by_two(const View& out, const View& in, ByTwoProblem p, cudaStream_t stream) {
  constexpr int axes[2][5] = {{1, 4, 3, 2, 0}, {4, 3, 2, 1, 0}};
  constexpr bool rows = channels == 0;
  const bool depth = p.resampled[0];
  for (int i = 0; i < 5; ++i) {
    const int axis = axes[rows][i];
    p.in_stride[i] = in.stride[axis];
    p.out_stride[i] = out.stride[axis];
    p.in_size[i] = static_cast<int>(in.size[axis]);
    p.resampled[i] = axis > 2 || (axis == 2 && depth);
    if (i == 2 || i == 3) p.outside[i - 2] = Divisor(out.size[axis]);
  }
  const int64_t vectors = p.in_size[0] / (rows ? columns * ByTwoStep<up, linear>::fresh : channels);
  p.vectors = Divisor(vectors);
  p.steps = p.in_size[1] / ByTwoStep<up, linear>::fresh;
  // In long runs, more steps share slabs and address arithmetic. Use shorter runs only if there are too few threads.
  const int64_t lines = vectors * p.outside[0].value() * p.outside[1].value() * out.size[0];
  int64_t runs = divide_up(p.steps, 16);
  while (lines * runs < int64_t{1} << 19 && p.steps / runs > 4) ++runs;
  p.length = static_cast<int>(round_up(divide_up(p.steps, runs), 4));  // whole batches
  runs = divide_up(p.steps, p.length);
  p.runs = Divisor(runs);
  p.items = static_cast<uint32_t>(lines * runs);
  launch_kernel("resample", by_two_kernel<T, up, linear, channels, columns>, grid_size(p.items), kBlock, 0, stream, p);
}

/// The kind of the map along one axis.
enum class ByTwoKind : uint8_t { other, same, nearest_up, nearest_down, linear_up, linear_down };

/// Classifies a map from `from` to `to` elements, or the transpose of this map if `transposed`.
inline ByTwoKind classify_by_two(const Resample& m, bool transposed, int64_t from, int64_t to) {
  using enum Resample::Mode;
  const bool tiles = m.mode == box && m.kernel == m.stride && m.padding == 0;
  if (from == to && ((m.mode == nearest && m.scale == 1) || (tiles && m.kernel == 1))) return ByTwoKind::same;
  const bool halves = tiles && m.kernel == 2 && from == 2 * to;
  const bool doubles = m.mode <= linear && m.scale == 0.5 && !m.align_corners && to == 2 * from;
  if (!halves && !doubles) return ByTwoKind::other;
  if (m.mode == linear) return transposed ? ByTwoKind::linear_down : ByTwoKind::linear_up;
  return halves == transposed ? ByTwoKind::nearest_up : ByTwoKind::nearest_down;
}

/// Resamples with by_two_kernel and returns true if the kernel supports the maps and the layout, and if offsets within
/// a sample fit into 32 bits. Otherwise returns false.
template <class T>
bool resample_by_two(const View& out, const View& in, const ResampleMaps& maps, bool transposed, cudaStream_t stream) {
  ByTwoProblem p{};
  p.in = in.data;
  p.out = out.data;
  p.scale = 1;
  ByTwoKind kinds[3];
  bool fits = out.numel() < int64_t{1} << 31;
  for (size_t i = 0; i < 3; ++i) {
    kinds[i] =
        classify_by_two(maps[i], transposed, (transposed ? out : in).size[i + 2], (transposed ? in : out).size[i + 2]);
    if (maps[i].mode == Resample::Mode::box)
      p.scale *= maps[i].weight != 0 ? maps[i].weight : 1 / static_cast<double>(maps[i].kernel);
    for (const View* view : {&out, &in})
      fits &= static_cast<double>(view->size[i + 2]) * std::abs(static_cast<double>(view->stride[i + 2])) < 0x1p29;
  }
  const ByTwoKind kind = kinds[2];
  p.resampled[0] = kinds[0] != ByTwoKind::same;
  if (!fits || kinds[1] != kind || (kinds[0] != kind && p.resampled[0])) return false;
  if (kind >= ByTwoKind::linear_up && p.scale != 1) return false;
  if (kind == ByTwoKind::nearest_down && !p.resampled[0])
    p.scale /= 2;  // both taps along the depth read the same input
  const auto launch = [&]<bool up, bool linear>() {
    constexpr int width = kVectorWidth<T>;
    using Step = ByTwoStep<up, linear>;
    if (has_vectors(out, 1, width) && has_vectors(in, 1, width)) {
      launch_by_two<T, up, linear, width, 1>(out, in, p, stream);
      return true;
    }
    return with_widest<width / 2>(
        [&](int n) { return has_vectors(in, 4, n * Step::fresh) && has_vectors(out, 4, n * Step::made); },
        [&]<int columns>() { launch_by_two<T, up, linear, 0, columns>(out, in, p, stream); });
  };
  if (kind == ByTwoKind::nearest_up) return launch.template operator()<true, false>();
  if (kind == ByTwoKind::nearest_down) return launch.template operator()<false, false>();
  if (kind == ByTwoKind::linear_up) return launch.template operator()<true, true>();
  return kind == ByTwoKind::linear_down && launch.template operator()<false, true>();
}

}  // namespace voxgrad::cuda
