// Resampling that doubles or halves width and height, and the depth or not: nearest and linear upsampling by 2, average
// pooling of 2, and their gradients. Terms follow from the position, so that nothing is looked up. A thread steps along
// one axis, the width where the channels are innermost in memory, else the height; for each step it sums inputs over
// the axes outside of it into slabs, a vector of channels or a few columns of the width, and keeps those that the next
// step reads too. Private to cuda/resample.cu.
#pragma once

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {

/// Axes are in order of memory: the innermost, in vectors; the one stepped along; two outside of it; the outermost.
struct ByTwoProblem {
  const void* in;
  void* out;
  int64_t in_stride[5], out_stride[5];
  int in_size[5];
  bool resampled[5];
  Divider vectors, runs, outside[2];
  int steps, length;  // along the axis, and of a run
  uint32_t items;
  double scale;
};

/// A step reads, of each axis, `fresh` new inputs and `lead` more at both ends, and makes `made` outputs. Outside, the
/// border's input stands for those of a linear map.
template <bool up, bool linear>
struct ByTwoStep {
  static constexpr int fresh = up ? 1 : 2, made = up ? 2 : 1, lead = linear ? 1 : 0;
  static constexpr int taps = up ? fresh + lead : fresh + 2 * lead;  // of one output

  /// Output j of a step, whose k-th input is x(k).
  template <class F>
  static __device__ auto output(int j, F x) {
    using C = decltype(x(0));
    if constexpr (linear && up) return C(0.75) * x(1) + C(0.25) * x(2 * j);
    if constexpr (linear && !up) return C(0.25) * x(0) + C(0.75) * x(1) + C(0.75) * x(2) + C(0.25) * x(3);
    if constexpr (!linear && up) return x(0);
    if constexpr (!linear && !up) return x(0) + x(1);
  }
};

/// What output o takes along an axis outside: offsets and weights. Along one that stays as it is, o alone, in parts
/// whose sums are exact; ByTwoProblem::scale makes up for those that have no weights.
template <class Step, int taps, class C>
struct ByTwoTaps {
  int offset[taps];
  C weight[taps];

  __device__ ByTwoTaps(const ByTwoProblem& p, int axis, int o) {
    const bool resampled = p.resampled[axis];
    const int first = Step::made == 2 ? (o + Step::lead) / 2 - Step::lead : 2 * o - Step::lead;
#pragma unroll
    for (int k = 0; k < taps; ++k) {
      const int place = resampled ? min(max(first + k, 0), p.in_size[axis] - 1) : o;
      offset[k] = place * static_cast<int>(p.in_stride[axis]);
      const C part = C(0.5) / (1 << max(0, min(taps - 1 - k, taps - 2)));  // 1/2, 1/2; 1/8, 1/8, 1/4, 1/2
      weight[k] = !resampled ? part : (taps == 2 ? k == o % 2 : k % 3 == 0) ? C(0.25) : C(0.75);
    }
  }
};

/// `channels`: of a vector, or 0: the innermost axis is the width, of which a thread makes `columns` steps.
template <class T, bool up, bool linear, int channels, int columns>
__global__ void __launch_bounds__(kBlock, 2) by_two_kernel(const __grid_constant__ ByTwoProblem p) {
  using C = compute_t<T>;
  using Step = ByTwoStep<up, linear>;
  constexpr bool rows = channels == 0;
  constexpr int fresh = Step::fresh, made = Step::made, lead = Step::lead, outer_taps = rows ? 1 : Step::taps;
  constexpr int read = rows ? columns * fresh : channels, write = rows ? columns * made : channels;
  constexpr int border = rows ? lead : 0, slab = read + 2 * border;
  constexpr int batch = std::clamp((rows && columns == 1 ? 16 : 8) / (fresh * Step::taps * outer_taps), 1, 4);
  for (uint32_t item = blockIdx.x * kBlock + threadIdx.x; item < p.items; item += gridDim.x * kBlock) {
    uint32_t number = item;
    const int vector = static_cast<int>(p.vectors.take(number)), o2 = static_cast<int>(p.outside[0].take(number));
    int run = rows ? static_cast<int>(p.runs.take(number)) : 0;
    const int o3 = static_cast<int>(p.outside[1].take(number));
    if (!rows) run = static_cast<int>(p.runs.take(number));
    const T* in = static_cast<const T*>(p.in) + number * p.in_stride[4] + vector * read;
    T* out = static_cast<T*>(p.out) + number * p.out_stride[4] + o3 * p.out_stride[3] + o2 * p.out_stride[2] +
             vector * write;
    if (rows) in += o3 * p.in_stride[3];
    const ByTwoTaps<Step, Step::taps, C> near(p, 2, o2);
    const ByTwoTaps<Step, outer_taps, C> far(p, 3, rows ? 0 : o3);
    const T *left = vector == 0 ? in : in - 1, *right = in + ((vector + 1) * read < p.in_size[0] ? read : read - 1);
    /// Sums the inputs at `place` of the axis stepped along.
    const auto sum_slab = [&](int place, C(&sum)[slab]) {
      const int along = min(max(place, 0), p.in_size[1] - 1) * static_cast<int>(p.in_stride[1]);
#pragma unroll
      for (int j = 0; j < slab; ++j) sum[j] = 0;
#pragma unroll
      for (int a = 0; a < outer_taps; ++a) {
        Vector<T, read> inside[Step::taps];
        T edge[Step::taps][2];
#pragma unroll
        for (int b = 0; b < Step::taps; ++b) {
          const int offset = along + near.offset[b] + (rows ? 0 : far.offset[a]);
          inside[b] = load_vector<T, read>(in + offset);
          if (border > 0) edge[b][0] = left[offset], edge[b][1] = right[offset];
        }
#pragma unroll
        for (int b = 0; b < Step::taps; ++b) {
          const C weight = rows ? near.weight[b] : far.weight[a] * near.weight[b];
#pragma unroll
          for (int j = 0; j < slab; ++j) {
            const bool within = j >= border && j < border + read;
            const C x = static_cast<C>(within ? inside[b].v[within ? j - border : 0] : edge[b][j > 0]);
            sum[j] += linear ? weight * x : x;
          }
        }
      }
    };
    C slabs[batch * fresh + 2 * lead][slab];
    const int begin = run * p.length, end = min(begin + p.length, p.steps);
#pragma unroll
    for (int i = 0; i < 2 * lead; ++i) sum_slab(begin * fresh - lead + i, slabs[batch * fresh + i]);
    for (int step = begin; step < end; step += batch) {
#pragma unroll
      for (int i = 0; i < 2 * lead; ++i)
#pragma unroll
        for (int j = 0; j < slab; ++j) slabs[i][j] = slabs[batch * fresh + i][j];
#pragma unroll
      for (int i = 0; i < batch * fresh; ++i) sum_slab(step * fresh + lead + i, slabs[2 * lead + i]);
#pragma unroll
      for (int i = 0; i < batch * made; ++i) {
        if (step + i / made >= end) break;
        const auto line = [&](int j) {
          return Step::output(i % made, [&](int k) { return slabs[i / made * fresh + k][j]; });
        };
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
    }
  }
}

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
    if (i == 2 || i == 3) p.outside[i - 2] = Divider(out.size[axis]);
  }
  const int64_t vectors = p.in_size[0] / (rows ? columns * ByTwoStep<up, linear>::fresh : channels);
  p.vectors = Divider(vectors);
  p.steps = p.in_size[1] / ByTwoStep<up, linear>::fresh;
  // Long runs share slabs and what is worked out once, as long as there are threads enough.
  const int64_t lines = vectors * p.outside[0].divisor * p.outside[1].divisor * out.size[0];
  int64_t runs = (p.steps + 15) / 16;
  while (lines * runs < int64_t{1} << 19 && p.steps / runs > 4) ++runs;
  p.length = static_cast<int>(divide_up(p.steps, runs) + 3) / 4 * 4;  // whole batches
  runs = divide_up(p.steps, p.length);
  p.runs = Divider(runs);
  p.items = static_cast<uint32_t>(lines * runs);
  by_two_kernel<T, up, linear, channels, columns><<<grid_size(p.items), kBlock, 0, stream>>>(p);
  check_launch("resample");
}

/// What a map does to an axis.
enum class ByTwo : uint8_t { other, same, nearest_up, nearest_down, linear_up, linear_down };

/// `from` and `to`: sizes of the map's sides.
inline ByTwo by_two(const Resample& m, bool transposed, int64_t from, int64_t to) {
  using enum Resample::Mode;
  const bool tiles = m.mode == box && m.kernel == m.stride && m.padding == 0;
  if (from == to && ((m.mode == nearest && m.scale == 1) || (tiles && m.kernel == 1))) return ByTwo::same;
  const bool halves = tiles && m.kernel == 2 && from == 2 * to;
  const bool doubles = m.mode <= linear && m.scale == 0.5 && !m.align_corners && to == 2 * from;
  if (!halves && !doubles) return ByTwo::other;
  if (m.mode == linear) return transposed ? ByTwo::linear_down : ByTwo::linear_up;
  return halves == transposed ? ByTwo::nearest_up : ByTwo::nearest_down;
}

/// Launches it where maps and layout allow, and offsets inside a sample fit into 32 bits.
template <class T>
bool resample_by_two(const View& out, const View& in, const ResampleMaps& maps, bool transposed, cudaStream_t stream) {
  ByTwoProblem p{};
  p.in = in.data;
  p.out = out.data;
  p.scale = 1;
  ByTwo kinds[3];
  bool fits = out.numel() < int64_t{1} << 31;
  for (size_t i = 0; i < 3; ++i) {
    kinds[i] = by_two(maps[i], transposed, (transposed ? out : in).size[i + 2], (transposed ? in : out).size[i + 2]);
    if (maps[i].mode == Resample::Mode::box)
      p.scale *= maps[i].weight != 0 ? maps[i].weight : 1 / static_cast<double>(maps[i].kernel);
    for (const View* view : {&out, &in})
      fits &= static_cast<double>(view->size[i + 2]) * std::abs(static_cast<double>(view->stride[i + 2])) < 0x1p29;
  }
  const ByTwo kind = kinds[2];
  p.resampled[0] = kinds[0] != ByTwo::same;
  if (!fits || kinds[1] != kind || (kinds[0] != kind && p.resampled[0])) return false;
  if (kind >= ByTwo::linear_up && p.scale != 1) return false;
  if (kind == ByTwo::nearest_down && !p.resampled[0]) p.scale /= 2;  // two taps at one place
  const auto launch = [&]<bool up, bool linear>() {
    constexpr int width = kVectorWidth<T>;
    using Step = ByTwoStep<up, linear>;
    if (has_vectors(out, 1, width) && has_vectors(in, 1, width))
      return launch_by_two<T, up, linear, width, 1>(out, in, p, stream), true;
    return with_widest<width / 2>(
        [&](int n) { return has_vectors(in, 4, n * Step::fresh) && has_vectors(out, 4, n * Step::made); },
        [&]<int columns>() { launch_by_two<T, up, linear, 0, columns>(out, in, p, stream); });
  };
  if (kind == ByTwo::nearest_up) return launch.template operator()<true, false>();
  if (kind == ByTwo::nearest_down) return launch.template operator()<false, false>();
  if (kind == ByTwo::linear_up) return launch.template operator()<true, true>();
  return kind == ByTwo::linear_down && launch.template operator()<false, true>();
}

}  // namespace voxgrad::cuda
