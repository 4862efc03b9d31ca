// softmax and log_softmax along one axis. The elements along this axis at one position of the other axes are called a
// row. One kernel computes the maximum, the sum of the exponentials and the result of every row.
//
// Threads keep their elements in registers, so that a row is read once. Elements are read in vectors along the
// contiguous axis, which is the softmax axis or the axis of neighboring rows. Rows that are too long for the registers
// of a CTA are read three times, and their exponentials are summed in double.
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

/// The arguments of softmax_kernel.
struct SoftmaxProblem {
  const void* x;
  void* y;
  Nest<2> rows;      ///< the axes other than the softmax axis, with the strides of x and y
  int64_t count;     ///< number of rows
  int64_t length;    ///< elements of a row
  int64_t x_stride;  ///< stride of the softmax axis in x
  int64_t y_stride;  ///< stride of the softmax axis in y
  BlockLayout layout;
  bool same_rows;  ///< rows have the same offsets in x and y
  bool logarithm;
};

/// Maximum number of vectors that a thread holds in registers. Their elements occupy at most 32 registers.
template <class T, int width>
inline constexpr int kMaxHeld = width == 1 ? 8 : 128 / (width * static_cast<int>(sizeof(compute_t<T>)));

/// Returns e^x. For halves (bf16, f16), uses the GPU's instruction for powers of two. The relative error (2^-22, plus
/// |x| 2^-24 from the product) is far below the rounding of a half. Results below 2^-126 become 0.
template <class T>
__device__ compute_t<T> exponential(compute_t<T> x) {
  if constexpr (sizeof(T) > 2) return exp(x);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(static_cast<float>(x) * 1.44269504f));
  return power;
}

/// Calls f(0), ..., f(n - 1) in an unrolled loop.
template <int n, class F>
__device__ void unrolled(const F& f) {
#pragma unroll
  for (int i = 0; i < n; ++i) f(i);
}

/// The elements of one thread: the vectors with indices `reducer`, `reducer + reducers`, ... of one row if `along`,
/// otherwise of `width` neighboring rows. The thread holds up to `held` vectors in registers; if `held` is 0, every
/// pass reads the vectors from memory.
template <class T, int width, bool along, int held>
struct SoftmaxSlice {
  using C = compute_t<T>;
  static constexpr int kRows = along ? 1 : width;
  static constexpr int kStep = along ? width : 1;  ///< elements of a row in a vector
  static constexpr C kMinusInfinity = -std::numeric_limits<C>::infinity();
  using Maximum = Vector<C, kRows>;
  using Sum = Vector<std::conditional_t<held == 0, double, C>, kRows>;

  const T* x;       ///< start of the row
  int64_t x_step;   ///< elements from one vector of the row to the next
  int64_t vectors;  ///< number of vectors of the row
  int reducer;
  int reducers;
  int left;  ///< number of vectors from this thread's first vector to the end of the row
  C kept[held > 0 ? held : 1][width];

  /// Returns the row to which element j of a vector belongs.
  static __device__ int row_of(int j) { return along ? 0 : j; }

  /// Loads the vectors that the thread holds. Starts all loads before the first value is used. Sets vectors beyond the
  /// end of the row to minus infinity, whose exponential is 0.
  __device__ void load() {
    PackedVector<T, width> loaded[held > 0 ? held : 1];
    left = static_cast<int>(vectors) - reducer;
    const T* from = x + reducer * x_step;
    unrolled<held>([&](int k) {
      loaded[k] = {from, k * reducers < left, convert<T>(kMinusInfinity)};
      from += reducers * x_step;
    });
    unrolled<held>([&](int k) {
      const Vector<T, width> vector = loaded[k].get();
      unrolled<width>([&](int j) { kept[k][j] = vector.v[j]; });
    });
  }

  /// Calls f(elements, exists) for every vector of the thread. `exists` is false for vectors beyond the end of the row.
  template <class F>
  __device__ void each(const F& f) {
    if constexpr (held > 0) {
      unrolled<held>([&](int k) { f(kept[k], k * reducers < left); });
    } else {
      for (int64_t i = reducer; i < vectors; i += reducers) {
        const Vector<T, width> vector = load_vector<T, width>(x + i * x_step);
        unrolled<width>([&](int j) { kept[0][j] = vector.v[j]; });
        f(kept[0], true);
      }
    }
  }

  /// Returns the maxima of this thread's elements. The maxima ignore NaN; the sum of the exponentials propagates NaN.
  __device__ Maximum maximum() {
    Maximum highest;
    unrolled<kRows>([&](int r) { highest.v[r] = kMinusInfinity; });
    each([&](const C(&value)[width], bool) {
      unrolled<width>([&](int j) { highest.v[row_of(j)] = max(highest.v[row_of(j)], value[j]); });
    });
    return highest;
  }

  /// Returns the sums of exp(element - maximum). Elements in registers are replaced by exp(element - maximum), or, for
  /// log_softmax, by element - maximum.
  __device__ Sum sum_of_exponentials(const Maximum& highest, bool logarithm) {
    Sum sum{};
    each([&](C(&value)[width], bool) {
      unrolled<width>([&](int j) {
        const C shifted = value[j] - highest.v[row_of(j)], power = exponential<T>(shifted);
        sum.v[row_of(j)] += power;
        if (held > 0) value[j] = logarithm ? shifted : power;
      });
    });
    return sum;
  }

  /// Stores the results to the row that begins at `y`, after sum_of_exponentials().
  __device__ void store(T* y, int64_t y_step, const Maximum& highest, const Sum& sum, bool logarithm) {
    C scale[kRows], term[kRows];
    unrolled<kRows>([&](int r) {
      scale[r] = logarithm ? 1 : static_cast<C>(1 / sum.v[r]);
      term[r] = logarithm ? static_cast<C>(-log(sum.v[r])) : 0;
    });
    y += reducer * y_step;
    each([&](const C(&value)[width], bool exists) {
      C result[width];
      unrolled<width>([&](int j) {
        const int r = row_of(j);
        C v = value[j];
        if (held == 0) v = logarithm ? v - highest.v[r] : exponential<T>(v - highest.v[r]);
        result[j] = v * scale[r] + term[r];
      });
      if (exists) store_values(y, result);
      y += reducers * y_step;
    });
  }
};

/// Computes y = softmax(x) or log_softmax(x); see SoftmaxSlice for the template parameters. A tile is layout.columns
/// rows if `along`, otherwise layout.columns vectors of rows. Launch: one CTA per tile in a 1-D grid-stride loop,
/// kBlock threads per CTA. Static shared memory: kBlock maxima and sums.
template <class T, int width, bool along, int held>
__global__ void __launch_bounds__(kBlock, sizeof(T) > 4 ? 2 : 3)
    softmax_kernel(const __grid_constant__ SoftmaxProblem problem) {
  wait_for_previous_kernels();
  using Slice = SoftmaxSlice<T, width, along, held>;
  using Maximum = typename Slice::Maximum;
  using Sum = typename Slice::Sum;
  constexpr int rows = Slice::kRows;
  __shared__ Maximum shared_maximum[kBlock];
  __shared__ Sum shared_sum[kBlock];
  const BlockLayout layout = problem.layout;
  const int column = layout.column();
  Slice slice;
  slice.reducer = layout.reducer();
  slice.reducers = layout.reducers;
  slice.x_step = Slice::kStep * problem.x_stride;
  const int64_t y_step = Slice::kStep * problem.y_stride;
  for (int64_t tile = blockIdx.x; tile * layout.columns * rows < problem.count; tile += gridDim.x) {
    const int64_t row = (tile * layout.columns + column) * rows;
    slice.vectors = row < problem.count ? problem.length / Slice::kStep : 0;
    slice.x = static_cast<const T*>(problem.x) + (slice.vectors ? problem.rows.offset(row, 0) : 0);
    slice.load();
    const Maximum highest = combine_reducers(slice.maximum(), layout, shared_maximum, [](Maximum a, const Maximum& b) {
      unrolled<rows>([&](int r) { a.v[r] = max(a.v[r], b.v[r]); });
      return a;
    });
    const Sum sum = combine_reducers(slice.sum_of_exponentials(highest, problem.logarithm), layout, shared_sum,
                                     [](Sum a, const Sum& b) {
                                       unrolled<rows>([&](int r) { a.v[r] += b.v[r]; });
                                       return a;
                                     });
    const int64_t start = problem.same_rows ? slice.x - static_cast<const T*>(problem.x)
                          : slice.vectors   ? problem.rows.offset(row, 1)
                                            : 0;
    slice.store(static_cast<T*>(problem.y) + start, y_step, highest, sum, problem.logarithm);
  }
}

/// Returns whether x and y consist of aligned vectors of `width` elements. The elements of a vector are neighbors along
/// the softmax axis if `along`, otherwise elements of `width` neighboring rows.
bool has_row_vectors(const SoftmaxProblem& p, bool along, int width, size_t item) {
  const auto suits = [&](const void* data, int64_t step, size_t view) {
    const bool contiguous = along ? step == 1 : p.rows.stride[0][view] == 1 && step % width == 0;
    return contiguous && p.rows.has_stride_multiples(view, along ? 0 : 1, width) &&
           reinterpret_cast<uintptr_t>(data) % (static_cast<size_t>(width) * item) == 0;
  };
  return (along ? p.length : p.rows.size[0]) % width == 0 && suits(p.x, p.x_stride, 0) && suits(p.y, p.y_stride, 1);
}

/// Returns the kernel whose threads hold `vectors` vectors, rounded up to a power of two and limited to kMaxHeld.
template <class T, int width, bool along, int held = 1>
auto kernel_that_holds(int64_t vectors) {
  if constexpr (held < kMaxHeld<T, width>)
    if (vectors > held) return kernel_that_holds<T, width, along, 2 * held>(vectors);
  return softmax_kernel<T, width, along, held>;
}

template <class T, int width, bool along>
void launch_softmax(SoftmaxProblem problem, bool rows_adjacent, const Launch& launch) {
  constexpr int max_held = kMaxHeld<T, width>, kWarp = 32;
  const int64_t vectors = problem.length / (along ? width : 1), min_reducers = divide_up(vectors, max_held);
  auto kernel = softmax_kernel<T, 1, true, 0>;
  if (min_reducers > (rows_adjacent ? kBlock / 8 : kBlock)) {
    problem.layout = BlockLayout::choose(problem.length, rows_adjacent);
  } else {
    // If rows are adjacent, or if elements are halves (whose softmax is bound by instructions), a thread holds as many
    // elements as possible. Otherwise a thread holds half as many, unless a row would then need more than a warp.
    const int64_t share = rows_adjacent || sizeof(T) == 2 ? min_reducers : std::min<int64_t>(2 * min_reducers, kWarp);
    const int64_t threads = !rows_adjacent && min_reducers > kWarp ? kBlock : share;
    const int reducers = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(threads)));
    problem.layout = {kBlock / reducers, reducers, rows_adjacent};
    kernel = kernel_that_holds<T, width, along>(divide_up(vectors, reducers));
  }
  const int64_t columns = int64_t{problem.layout.columns} * (along ? 1 : width);
  launch_kernel("softmax", kernel, grid_size(divide_up(problem.count, columns), 1), kBlock, 0, launch.stream, problem);
}

}  // namespace

namespace kernel {

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  if (y.numel() == 0) return;
  SoftmaxProblem problem{};
  problem.x = x.data;
  problem.y = y.data;
  const auto is_other = [axis](int other) { return other != axis; };
  problem.rows = make_nest<2>({select_axes(x, is_other), select_axes(y, is_other)});
  problem.count = problem.rows.numel();
  problem.length = x.size[axis];
  problem.x_stride = x.stride[axis];
  problem.y_stride = y.stride[axis];
  problem.same_rows = std::all_of(problem.rows.stride, problem.rows.stride + problem.rows.rank,
                                  [](const int64_t(&stride)[2]) { return stride[0] == stride[1]; });
  problem.logarithm = logarithm;
  const bool rows_adjacent = problem.count > 1 && std::abs(problem.rows.stride[0][0]) < std::abs(problem.x_stride);

  const Launch launch(y);
  dispatch_cuda(Floats(), y.dtype, logarithm ? "log_softmax" : "softmax", [&]<class T>() {
    constexpr int width = kVectorWidth<T>;
    if (has_row_vectors(problem, true, width, sizeof(T))) return launch_softmax<T, width, true>(problem, false, launch);
    // If one thread can hold `width` whole rows, use vectors of `width` rows. Longer rows are read in vectors of two
    // rows: a thread can then hold more elements of a row, and threads that share the rows exchange fewer values.
    if (problem.length <= kMaxHeld<T, width> && has_row_vectors(problem, false, width, sizeof(T)))
      return launch_softmax<T, width, false>(problem, true, launch);
    if (has_row_vectors(problem, false, 2, sizeof(T))) return launch_softmax<T, 2, false>(problem, true, launch);
    launch_softmax<T, 1, true>(problem, rows_adjacent, launch);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
