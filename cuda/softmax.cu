// softmax and log_softmax along one axis: maximum, sum of exponentials, result, in one launch. Threads keep their
// elements in registers, so that a row is read once, as vectors along whichever axis is contiguous: the softmax's, or
// that of neighbouring rows. Rows that are too long for that are read three times, and summed in double.
#include <bit>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {

struct SoftmaxProblem {
  const void* x;
  void* y;
  Axes rows;  // a: strides in x; b: in y
  int64_t count, length, x_stride, y_stride;
  BlockLayout layout;
  bool logarithm;
};

/// Vectors that a thread keeps: 32 registers of elements.
template <class T, int width>
inline constexpr int kHeld = width == 1 ? 8 : 128 / (width * static_cast<int>(sizeof(compute_t<T>)));

/// f(0), ..., f(n - 1) in code without a loop.
template <int n, class F>
__device__ void unrolled(const F& f) {
#pragma unroll
  for (int i = 0; i < n; ++i) f(i);
}

/// A thread has the vectors reducer, reducer + reducers, ... of a row (`along`) or of `width` neighbouring rows; `held`
/// of them at most, or, where that is 0, any number.
template <class T, int width, bool along, int held>
__global__ void __launch_bounds__(kBlock) softmax_kernel(const __grid_constant__ SoftmaxProblem problem) {
  using C = compute_t<T>;
  constexpr int rows = along ? 1 : width;
  using Highest = Vector<C, rows>;
  using Sum = Vector<std::conditional_t<held == 0, double, C>, rows>;
  constexpr int slots = held > 0 ? held : 1;
  __shared__ Highest shared_highest[kBlock];
  __shared__ Sum shared_sum[kBlock];
  const BlockLayout layout = problem.layout;
  const int64_t tiles = (problem.count / rows + layout.columns - 1) / layout.columns;
  constexpr int taken = along ? width : 1;  // elements of a row in a vector
  const int64_t x_step = taken * problem.x_stride, y_step = taken * problem.y_stride;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row = (tile * layout.columns + layout.column()) * rows;
    const int64_t vectors = row < problem.count ? problem.length / taken : 0;
    const T* x = static_cast<const T*>(problem.x) + (vectors ? problem.rows.offset(row, problem.rows.a) : 0);
    T* y = static_cast<T*>(problem.y) + (vectors ? problem.rows.offset(row, problem.rows.b) : 0);

    C kept[slots][width];
    const auto load = [&](int64_t i, C(&to)[width]) {
      const Vector<T, width> loaded = load_vector<T, width>(x + i * x_step);
      unrolled<width>([&](int j) { to[j] = loaded.v[j]; });
    };
    if constexpr (held > 0)
      unrolled<held>([&](int k) {
        const int64_t i = layout.reducer() + k * layout.reducers;
        if (i < vectors) load(i, kept[k]);
      });
    // f(number of a vector, its elements)
    const auto each = [&](const auto& f) {
      if constexpr (held > 0) {
        unrolled<held>([&](int k) {
          const int64_t i = layout.reducer() + k * layout.reducers;
          if (i < vectors) f(i, kept[k]);
        });
      } else {
        for (int64_t i = layout.reducer(); i < vectors; i += layout.reducers) {
          load(i, kept[0]);
          f(i, kept[0]);
        }
      }
    };

    Highest highest;
    unrolled<rows>([&](int r) { highest.v[r] = -std::numeric_limits<C>::infinity(); });
    each([&](int64_t, const C(&value)[width]) {
      unrolled<width>([&](int j) {  // a NaN reaches the row through its sum
        C& top = highest.v[along ? 0 : j];
        if (value[j] > top) top = value[j];
      });
    });
    highest = combine_reducers(highest, layout, shared_highest, [](Highest a, const Highest& b) {
      unrolled<rows>([&](int r) { a.v[r] = a.v[r] > b.v[r] ? a.v[r] : b.v[r]; });
      return a;
    });

    Sum sum{};
    each([&](int64_t, C(&value)[width]) {
      unrolled<width>([&](int j) {
        const C shifted = value[j] - highest.v[along ? 0 : j], power = exp(shifted);
        sum.v[along ? 0 : j] += power;
        if (held > 0) value[j] = problem.logarithm ? shifted : power;
      });
    });
    sum = combine_reducers(sum, layout, shared_sum, [](Sum a, const Sum& b) {
      unrolled<rows>([&](int r) { a.v[r] += b.v[r]; });
      return a;
    });

    C scale[rows];
    unrolled<rows>([&](int r) { scale[r] = static_cast<C>(problem.logarithm ? log(sum.v[r]) : 1 / sum.v[r]); });
    each([&](int64_t i, const C(&value)[width]) {
      Vector<T, width> result;
      unrolled<width>([&](int j) {
        const int r = along ? 0 : j;
        C v = value[j];
        if (held == 0) v = problem.logarithm ? v - highest.v[r] : exp(v - highest.v[r]);
        result.v[j] = convert<T>(problem.logarithm ? v - scale[r] : v * scale[r]);
      });
      store_vector(y + i * y_step, result);
    });
  }
}

/// Whether the rows consist of aligned vectors along the axis, respectively across it.
bool has_vectors(const SoftmaxProblem& p, bool along, int width, size_t item) {
  const auto divides = [width](int64_t n) { return n % width == 0; };
  const auto all = [&](const int64_t(&stride)[kMaxRank]) {
    return std::all_of(stride + (along ? 0 : 1), stride + p.rows.rank, divides);
  };
  const auto aligned = [&](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (static_cast<size_t>(width) * item) == 0;
  };
  const bool dense = along ? p.x_stride == 1 && p.y_stride == 1 && divides(p.length)
                           : p.rows.a[0] == 1 && p.rows.b[0] == 1 && divides(p.rows.size[0]) && divides(p.x_stride) &&
                                 divides(p.y_stride);
  return dense && all(p.rows.a) && all(p.rows.b) && aligned(p.x) && aligned(p.y);
}

template <class T, int width, bool along>
void launch_softmax(SoftmaxProblem problem, bool rows_adjacent, const Launch& launch) {
  constexpr int most = kHeld<T, width>, kWarp = 32;
  const int64_t vectors = problem.length / (along ? width : 1), slots = (vectors + most - 1) / most;
  auto kernel = softmax_kernel<T, width, along, most>;
  if (slots > (rows_adjacent ? kBlock / 4 : kBlock)) {
    kernel = softmax_kernel<T, 1, true, 0>;
    problem.layout = BlockLayout::choose(problem.length, rows_adjacent);
  } else {
    // Of neighbouring rows a thread takes as much as it can; the elements of one are spread over a warp.
    const int64_t threads = rows_adjacent ? slots : slots > kWarp ? kBlock : std::min<int64_t>(vectors, kWarp);
    const int reducers = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(threads)));
    problem.layout = {kBlock / reducers, reducers, rows_adjacent};
    if (vectors <= reducers) kernel = softmax_kernel<T, width, along, 1>;
  }
  const int64_t columns = int64_t{problem.layout.columns} * (along ? 1 : width);
  kernel<<<grid_size((problem.count + columns - 1) / columns, 1), kBlock, 0, launch.stream>>>(problem);
  check_launch("softmax");
}

}  // namespace

namespace kernel {

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  if (y.numel() == 0) return;
  SoftmaxProblem problem{};
  problem.x = x.data;
  problem.y = y.data;
  for (int other = x.rank - 1; other >= 0; --other)
    if (other != axis) problem.rows.add(x.size[other], x.stride[other], y.stride[other]);
  problem.rows.finish();
  problem.count = problem.rows.numel();
  problem.length = x.size[axis];
  problem.x_stride = x.stride[axis];
  problem.y_stride = y.stride[axis];
  problem.logarithm = logarithm;
  const bool rows_adjacent = problem.count > 1 && std::abs(problem.rows.a[0]) < std::abs(problem.x_stride);

  const Launch launch(y);
  dispatch(Floats(), y.dtype, logarithm ? "log_softmax" : "softmax", "CUDA", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    if (has_vectors(problem, true, width, sizeof(T))) return launch_softmax<T, width, true>(problem, false, launch);
    if (has_vectors(problem, false, width, sizeof(T))) return launch_softmax<T, width, false>(problem, true, launch);
    launch_softmax<T, 1, true>(problem, rows_adjacent, launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
