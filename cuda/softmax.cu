// softmax and log_softmax along one axis: maximum, sum of exponentials, result, in one launch. Threads keep their
// elements in registers, so that a row is read once, as vectors along whichever axis is contiguous: the softmax's, or
// that of neighbouring rows. Rows that are too long for that are read three times, and summed in double.
#include <bit>
#include <cmath>
#include <limits>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
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
  bool alike;  // the rows of y lie as those of x
  bool logarithm;
};

/// Vectors that a thread keeps at most: 32 registers of elements.
template <class T, int width>
inline constexpr int kHeld = width == 1 ? 8 : 128 / (width * static_cast<int>(sizeof(compute_t<T>)));

/// e^x. Of halves by the GPU's power of two, whose error (2^-22, and |x| 2^-24 by the product) is far below theirs; it
/// takes what is below 2^-126 as 0.
template <class T>
__device__ compute_t<T> power_of_e(compute_t<T> x) {
  if constexpr (sizeof(T) > 2) return exp(x);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(static_cast<float>(x) * 1.44269504f));
  return power;
}

/// f(0), ..., f(n - 1) in code without a loop.
template <int n, class F>
__device__ void unrolled(const F& f) {
#pragma unroll
  for (int i = 0; i < n; ++i) f(i);
}

/// A thread has the vectors reducer, reducer + reducers, ... of a row (`along`) or of `width` neighbouring rows; `held`
/// of them at most, or, where that is 0, any number.
template <class T, int width, bool along, int held>
__global__ void __launch_bounds__(kBlock, sizeof(T) > 4 ? 2 : 3)
    softmax_kernel(const __grid_constant__ SoftmaxProblem problem) {
  using C = compute_t<T>;
  constexpr int rows = along ? 1 : width;
  using Highest = Vector<C, rows>;
  using Sum = Vector<std::conditional_t<held == 0, double, C>, rows>;
  constexpr int slots = held > 0 ? held : 1;
  constexpr C kLeast = -std::numeric_limits<C>::infinity();
  __shared__ Highest shared_highest[kBlock];
  __shared__ Sum shared_sum[kBlock];
  const BlockLayout layout = problem.layout;
  const int column = layout.column(), reducer = layout.reducer(), reducers = layout.reducers;
  constexpr int taken = along ? width : 1;  // elements of a row in a vector
  const int64_t x_step = taken * problem.x_stride, y_step = taken * problem.y_stride;
  for (int64_t tile = blockIdx.x; tile * layout.columns * rows < problem.count; tile += gridDim.x) {
    const int64_t row = (tile * layout.columns + column) * rows;
    const int64_t vectors = row < problem.count ? problem.length / taken : 0;
    const T* x = static_cast<const T*>(problem.x) + (vectors ? problem.rows.offset(row, problem.rows.a) : 0);

    // All loads are on their way before the first is used. What stands for no element adds nothing.
    C kept[slots][width];
    Loading<T, width> loaded[slots];
    const int left = static_cast<int>(vectors) - reducer;
    const T* from = x + reducer * x_step;
    unrolled<held>([&](int k) {
      loaded[k] = {from, k * reducers < left, convert<T>(kLeast)};
      from += reducers * x_step;
    });
    unrolled<held>([&](int k) {
      const Vector<T, width> vector = loaded[k].get();
      unrolled<width>([&](int j) { kept[k][j] = vector.v[j]; });
    });
    // f(elements of a vector, whether there is such a vector)
    const auto each = [&](const auto& f) {
      if constexpr (held > 0) {
        unrolled<held>([&](int k) { f(kept[k], k * reducers < left); });
      } else {
        for (int64_t i = reducer; i < vectors; i += reducers) {
          const Vector<T, width> vector = load_vector<T, width>(x + i * x_step);
          unrolled<width>([&](int j) { kept[0][j] = vector.v[j]; });
          f(kept[0], true);
        }
      }
    };

    Highest highest;
    unrolled<rows>([&](int r) { highest.v[r] = kLeast; });
    each([&](const C(&value)[width], bool) {
      unrolled<width>([&](int j) {  // a NaN reaches the row through its sum
        highest.v[along ? 0 : j] = max(highest.v[along ? 0 : j], value[j]);
      });
    });
    highest = combine_reducers(highest, layout, shared_highest, [](Highest a, const Highest& b) {
      unrolled<rows>([&](int r) { a.v[r] = max(a.v[r], b.v[r]); });
      return a;
    });

    Sum sum{};
    each([&](C(&value)[width], bool) {
      unrolled<width>([&](int j) {
        const C shifted = value[j] - highest.v[along ? 0 : j], power = power_of_e<T>(shifted);
        sum.v[along ? 0 : j] += power;
        if (held > 0) value[j] = problem.logarithm ? shifted : power;
      });
    });
    sum = combine_reducers(sum, layout, shared_sum, [](Sum a, const Sum& b) {
      unrolled<rows>([&](int r) { a.v[r] += b.v[r]; });
      return a;
    });

    C scale[rows], term[rows];
    unrolled<rows>([&](int r) {
      scale[r] = problem.logarithm ? 1 : static_cast<C>(1 / sum.v[r]);
      term[r] = problem.logarithm ? static_cast<C>(-log(sum.v[r])) : 0;
    });
    const int64_t start = problem.alike ? x - static_cast<const T*>(problem.x)
                          : vectors     ? problem.rows.offset(row, problem.rows.b)
                                        : 0;
    T* y = static_cast<T*>(problem.y) + start + reducer * y_step;
    each([&](const C(&value)[width], bool inside) {
      C result[width];
      unrolled<width>([&](int j) {
        const int r = along ? 0 : j;
        C v = value[j];
        if (held == 0) v = problem.logarithm ? v - highest.v[r] : power_of_e<T>(v - highest.v[r]);
        result[j] = v * scale[r] + term[r];
      });
      if (inside) store_values(y, result);
      y += reducers * y_step;
    });
  }
}

/// Whether the rows consist of aligned vectors along the axis, respectively across it.
bool has_vectors(const SoftmaxProblem& p, bool along, int width, size_t item) {
  const auto divides = [width](int64_t n) { return n % width == 0; };
  const auto suits = [&](const void* data, int64_t step, const int64_t(&stride)[kMaxRank]) {
    return (along ? step == 1 : stride[0] == 1 && divides(step)) &&
           std::all_of(stride + (along ? 0 : 1), stride + p.rows.rank, divides) &&
           reinterpret_cast<uintptr_t>(data) % (static_cast<size_t>(width) * item) == 0;
  };
  return divides(along ? p.length : p.rows.size[0]) && suits(p.x, p.x_stride, p.rows.a) &&
         suits(p.y, p.y_stride, p.rows.b);
}

/// The kernel whose threads hold `vectors`, at most kHeld of them, and a few more where there is none for so many.
template <class T, int width, bool along, int held = 1>
auto holding(int64_t vectors) {
  if constexpr (held < kHeld<T, width>)
    if (vectors > held) return holding<T, width, along, 2 * held>(vectors);
  return softmax_kernel<T, width, along, held>;
}

template <class T, int width, bool along>
void launch_softmax(SoftmaxProblem problem, bool rows_adjacent, const Launch& launch) {
  constexpr int most = kHeld<T, width>, kWarp = 32;
  const int64_t vectors = problem.length / (along ? width : 1), slots = divide_up(vectors, most);
  auto kernel = softmax_kernel<T, 1, true, 0>;
  if (slots > (rows_adjacent ? kBlock / 8 : kBlock)) {
    problem.layout = BlockLayout::choose(problem.length, rows_adjacent);
  } else {
    // A thread takes as much as it can of neighbouring rows, and of halves, whose rate instructions limit; else half of
    // that, unless a warp is too few.
    const int64_t share = rows_adjacent || sizeof(T) == 2 ? slots : std::min<int64_t>(2 * slots, kWarp);
    const int64_t threads = !rows_adjacent && slots > kWarp ? kBlock : share;
    const int reducers = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(threads)));
    problem.layout = {kBlock / reducers, reducers, rows_adjacent};
    kernel = holding<T, width, along>(divide_up(vectors, reducers));
  }
  const int64_t columns = int64_t{problem.layout.columns} * (along ? 1 : width);
  kernel<<<grid_size(divide_up(problem.count, columns), 1), kBlock, 0, launch.stream>>>(problem);
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
  problem.alike = std::equal(problem.rows.a, problem.rows.a + problem.rows.rank, problem.rows.b);
  problem.logarithm = logarithm;
  const bool rows_adjacent = problem.count > 1 && std::abs(problem.rows.a[0]) < std::abs(problem.x_stride);

  const Launch launch(y);
  dispatch(Floats(), y.dtype, logarithm ? "log_softmax" : "softmax", "CUDA", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    if (has_vectors(problem, true, width, sizeof(T))) return launch_softmax<T, width, true>(problem, false, launch);
    // Where a thread cannot hold a wide vector of rows, several share a narrow one: they exchange less.
    if (problem.length <= kHeld<T, width> && has_vectors(problem, false, width, sizeof(T)))
      return launch_softmax<T, width, false>(problem, true, launch);
    if (has_vectors(problem, false, 2, sizeof(T))) return launch_softmax<T, 2, false>(problem, true, launch);
    launch_softmax<T, 1, true>(problem, rows_adjacent, launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
