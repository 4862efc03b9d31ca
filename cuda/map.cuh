// Loops over views of one shape on the GPU: out[i] = f(in[i]...). The host orders and merges the axes, so that most
// calls end as one contiguous row, which is read and written 16 bytes at a time; so are long rows of copies and fills,
// and of two operands of which one may be broadcast. What remains strided turns its index into offsets with 32-bit
// arithmetic. No launch covers 2^31 strided elements: the host cuts larger views.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "core/view.h"
#include "cuda/detail/launch.h"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {

/// Quotients by a run-time divisor as a multiplication and a shift, for dividends below 2^31.
/// Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;

  Divider() = default;
  explicit Divider(int64_t value) : divisor(static_cast<uint32_t>(value)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
  /// The remainder; n becomes the quotient.
  __device__ uint32_t take(uint32_t& n) const {
    const uint32_t quotient = divide(n), remainder = n - quotient * divisor;
    n = quotient;
    return remainder;
  }
};

/// The axes that N views have in common, the inner one first; at least one.
template <size_t N>
struct Nest {
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank][N] = {};

  int64_t numel() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= size[axis];
    return count;
  }
  bool contiguous() const {
    return rank == 1 && std::all_of(stride[0], stride[0] + N, [](int64_t s) { return s == 1; });
  }
};

/// Axes of size 1 are dropped, the others ordered by the strides of the first view and merged where all views step
/// evenly over two of them.
template <size_t N>
Nest<N> make_nest(const std::array<View, N>& views) {
  int order[kMaxRank];
  int count = 0;
  for (int axis = views[0].rank - 1; axis >= 0; --axis)
    if (views[0].size[axis] != 1) order[count++] = axis;
  std::stable_sort(order, order + count,
                   [&](int a, int b) { return std::abs(views[0].stride[a]) < std::abs(views[0].stride[b]); });

  Nest<N> nest;
  for (int i = 0; i < count; ++i) {
    const int axis = order[i];
    const int last = nest.rank - 1;
    bool even = nest.rank > 0;
    for (size_t k = 0; even && k < N; ++k) even = views[k].stride[axis] == nest.stride[last][k] * nest.size[last];
    if (even) {
      nest.size[last] *= views[0].size[axis];
      continue;
    }
    nest.size[nest.rank] = views[0].size[axis];
    for (size_t k = 0; k < N; ++k) nest.stride[nest.rank][k] = views[k].stride[axis];
    ++nest.rank;
  }
  if (nest.rank == 0) {
    nest.rank = 1;
    nest.size[0] = 1;
    std::fill_n(nest.stride[0], N, 1);
  }
  return nest;
}

/// Calls f(nest, base) for parts of fewer than 2^31 elements; base[k] is where the part starts in view k.
template <size_t N, class F>
void for_each_part(const Nest<N>& nest, const F& f, std::array<int64_t, N> base = {}) {
  if (nest.numel() < (int64_t{1} << 31)) return f(nest, base);
  const auto axis = std::max_element(nest.size, nest.size + nest.rank) - nest.size;
  Nest<N> part = nest;
  part.size[axis] = nest.size[axis] / 2;
  for_each_part(part, f, base);
  for (size_t k = 0; k < N; ++k) base[k] += part.size[axis] * nest.stride[axis][k];
  part.size[axis] = nest.size[axis] - part.size[axis];
  for_each_part(part, f, base);
}

/// A Nest as kernels use it.
template <size_t N>
struct Offsets {
  int rank;
  Divider size[kMaxRank];
  int64_t stride[kMaxRank][N];

  explicit Offsets(const Nest<N>& nest) : rank(nest.rank) {
    for (int axis = 0; axis < rank; ++axis) {
      size[axis] = Divider(nest.size[axis]);
      std::copy_n(nest.stride[axis], N, stride[axis]);
    }
  }
  /// Where element `index` lies in each view.
  __device__ void at(uint32_t index, int64_t (&offset)[N]) const {
#pragma unroll
    for (size_t k = 0; k < N; ++k) offset[k] = 0;
#pragma unroll
    for (int axis = 0; axis < kMaxRank; ++axis) {
      if (axis == rank) break;
      const uint32_t rest = axis + 1 == rank ? 0 : size[axis].divide(index);
      const int64_t position = index - rest * size[axis].divisor;
#pragma unroll
      for (size_t k = 0; k < N; ++k) offset[k] += position * stride[axis][k];
      index = rest;
    }
  }
};

/// The addresses of an output and its inputs.
template <size_t N>
struct Pointers {
  void* out;
  const void* in[N > 0 ? N : 1];
};

template <class Out, class... In, class F, size_t... k>
__device__ void map_one(const F& f, const Pointers<sizeof...(In)>& p, int64_t i, std::index_sequence<k...>) {
  static_cast<Out*>(p.out)[i] = static_cast<Out>(f(static_cast<const In*>(p.in[k])[i]...));
}

template <class Out, class... In, class F, size_t... k>
__device__ void map_vector(const F& f, const Pointers<sizeof...(In)>& p, int64_t i, std::index_sequence<k...>) {
  constexpr int width = kVectorWidth<Out, In...>;
  const auto apply_to = [&f](const Vector<In, width>&... x) {
    Vector<Out, width> y;
#pragma unroll
    for (int j = 0; j < width; ++j) y.v[j] = static_cast<Out>(f(x.v[j]...));
    return y;
  };
  *reinterpret_cast<Vector<Out, width>*>(static_cast<Out*>(p.out) + i) =
      apply_to(load_vector<In, width>(static_cast<const In*>(p.in[k]) + i)...);
}

/// Elements [head, head + vectors * width) as vectors, the others one by one by the first threads.
template <class F, class Out, class... In>
__global__ void __launch_bounds__(kBlock)
    map_contiguous(F f, Pointers<sizeof...(In)> p, int64_t count, int64_t head, int64_t vectors) {
  constexpr int width = kVectorWidth<Out, In...>;
  constexpr std::index_sequence_for<In...> inputs;
  const int64_t step = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += step) map_vector<Out, In...>(f, p, head + i * width, inputs);
  const int64_t vector_elements = vectors * width;
#pragma unroll 1
  for (int64_t i = thread_index(); i < count - vector_elements; i += step)
    map_one<Out, In...>(f, p, i < head ? i : i + vector_elements, inputs);
}

template <class F, class Out, class... In, size_t... k>
__device__ void map_at(const F& f, const Pointers<sizeof...(In)>& p, const int64_t (&offset)[sizeof...(In) + 1],
                       std::index_sequence<k...>) {
  static_cast<Out*>(p.out)[offset[0]] = static_cast<Out>(f(static_cast<const In*>(p.in[k])[offset[k + 1]]...));
}

template <class F, class Out, class... In>
__global__ void __launch_bounds__(kBlock)
    map_strided(F f, Pointers<sizeof...(In)> p, uint32_t count, Offsets<sizeof...(In) + 1> offsets) {
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < count; i += gridDim.x * kBlock) {
    int64_t offset[sizeof...(In) + 1];
    offsets.at(i, offset);
    map_at<F, Out, In...>(f, p, offset, std::index_sequence_for<In...>());
  }
}

/// For operands of one type and rows that are contiguous in the output: in an input, a row is contiguous too
/// or one element, as of a bias that is broadcast over a volume.
template <size_t N>
struct Rows {
  uint32_t length;
  bool one_element[N];
  Divider slots;      // vectors that a row may touch, wherever it begins
  Offsets<N> starts;  // of the rows

  static Nest<N> outer(const Nest<N>& nest) {
    Nest<N> rest = nest;
    std::copy(nest.size + 1, nest.size + nest.rank, rest.size);
    for (int axis = 1; axis < nest.rank; ++axis) std::copy_n(nest.stride[axis], N, rest.stride[axis - 1]);
    rest.rank = nest.rank - 1;
    return rest;
  }
  Rows(const Nest<N>& nest, int width)
      : length(static_cast<uint32_t>(nest.size[0])),
        slots((nest.size[0] + width - 2) / width + 1),
        starts(outer(nest)) {
    for (size_t k = 0; k < N; ++k) one_element[k] = nest.stride[0][k] == 0;
  }
  static bool suit(const Nest<N>& nest) {
    constexpr int64_t kShortest = 32;
    return nest.size[0] >= kShortest && nest.stride[0][0] == 1 &&
           std::all_of(nest.stride[0], nest.stride[0] + N, [](int64_t s) { return s == 0 || s == 1; });
  }
};

/// Elements [first, first + width) of a row, as one vector if they are `whole` and aligned; those outside are left.
template <int width, class T>
__device__ Loading<T, width> load_slot(const T* row, bool one_element, int first, bool whole, uint32_t length) {
  if (!one_element && whole && reinterpret_cast<uintptr_t>(row + first) % sizeof(Vector<T, width>) == 0)
    return {row + first, true, T()};
  if (one_element) return {nullptr, false, *row};
  Vector<T, width> x{};
#pragma unroll
  for (int j = 0; j < width; ++j)
    if (static_cast<uint32_t>(first + j) < length) x.v[j] = row[first + j];
  return Loading<T, width>(x);
}

template <class F, class T, size_t N>
__global__ void __launch_bounds__(kBlock)
    map_rows(F f, Pointers<N> p, uint32_t count, const __grid_constant__ Rows<N + 1> rows) {
  constexpr int width = kVectorWidth<T>;
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < count; i += gridDim.x * kBlock) {
    const uint32_t row = rows.slots.divide(i);
    int64_t start[N + 1];
    rows.starts.at(row, start);
    T* out = static_cast<T*>(p.out) + start[0];
    const auto lead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(T) % width);
    const auto first = static_cast<int>((i - row * rows.slots.divisor) * width - lead);
    if (first >= static_cast<int>(rows.length)) continue;
    const bool whole = first >= 0 && static_cast<uint32_t>(first) + width <= rows.length;
    Vector<T, width> result;
    [&]<size_t... k>(std::index_sequence<k...>) {
      const Loading<T, width> loaded[N + 1] = {load_slot<width>(static_cast<const T*>(p.in[k]) + start[k + 1],
                                                                rows.one_element[k + 1], first, whole, rows.length)...};
      const Vector<T, width> in[N + 1] = {loaded[k].get()...};
#pragma unroll
      for (int j = 0; j < width; ++j) result.v[j] = static_cast<T>(f(in[k].v[j]...));
    }
    (std::make_index_sequence<N>());
    if (whole) {
      store_vector(out + first, result);
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j)
        if (static_cast<uint32_t>(first + j) < rows.length) out[first + j] = result.v[j];
    }
  }
}

/// Arithmetic of two operands, and copies and fills, which move words.
template <class Out, class... In>
inline constexpr bool kHasRows = false;
template <class T>
inline constexpr bool kHasRows<T, T, T> = std::is_floating_point_v<compute_t<T>>;
template <class T>
inline constexpr bool kHasRows<T, T> = std::is_unsigned_v<T>;
template <class T>
inline constexpr bool kHasRows<T> = std::is_unsigned_v<T>;

/// The kernels of a map of N views and what their launch needs to know.
template <size_t N>
struct MapKernels {
  const void *contiguous, *rows, *strided;  // no rows: null
  int64_t width;                            // of vectors, in elements
  std::array<int64_t, N> item;              // bytes of an element of each view
};

/// Launches the kernel that suits the views, of which the first is the output. `f` is the kernels' first parameter.
/// This is compiled once, not for each operator and dtype.
template <size_t N>
void launch_map(const char* op, const MapKernels<N>& kernels, const void* f, const std::array<View, N>& views);

/// out[i] = f(in[i]...), converted to Out; Out and In are the C++ types of the views' dtypes.
template <class Out, class... In, class F, class... Views>
void map(const char* op, const F& f, const View& out, const Views&... in) {
  static_assert(sizeof...(In) == sizeof...(Views));
  constexpr size_t inputs = sizeof...(In);
  const void* rows = nullptr;
  if constexpr (kHasRows<Out, In...>) rows = reinterpret_cast<const void*>(&map_rows<F, Out, inputs>);
  launch_map<inputs + 1>(op,
                         {reinterpret_cast<const void*>(&map_contiguous<F, Out, In...>),
                          rows,
                          reinterpret_cast<const void*>(&map_strided<F, Out, In...>),
                          kVectorWidth<Out, In...>,
                          {sizeof(Out), sizeof(In)...}},
                         &f, {out, in...});
}

/// Calls f.template operator()<op>() if `op` is among `ops`, and says whether it is.
template <auto... ops, class Op, class F>
bool select(Op op, const F& f) {
  return ((op == ops && (f.template operator()<ops>(), true)) || ...);
}

/// dispatch() of core/dtype.h for CUDA.
template <class... Ts, class F>
void dispatch_cuda(Types<Ts...> types, DType dtype, const char* op, F&& f) {
  dispatch(types, dtype, op, "CUDA", std::forward<F>(f));
}

/// Leaves `length` elements of an axis, from `begin` on.
inline void cut_axis(View& view, int axis, int64_t begin, int64_t length) {
  view.data = static_cast<char*>(view.data) + begin * view.stride[axis] * item_size(view.dtype);
  view.size[axis] = length;
}

/// Calls f for both halves of a call along an axis of call.out; Call has cut(axis, begin, length).
template <class Call, class F>
void for_each_half(const Call& call, int axis, const F& f) {
  const int64_t size = call.out.size[axis], half = size / 2;
  for (const bool second : {false, true}) {
    Call part = call;
    part.cut(axis, second ? half : 0, second ? size - half : half);
    f(part);
  }
}

/// Whether the elements of (N, C, D, H, W) along `axis` come in vectors of `width` that are aligned everywhere.
inline bool has_vectors(const View& view, int axis, int width) {
  const size_t bytes = static_cast<size_t>(width * item_size(view.dtype));
  bool aligned =
      view.stride[axis] == 1 && view.size[axis] % width == 0 && reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int other = 0; other < 5; ++other)
    aligned &= other == axis || view.size[other] == 1 || view.stride[other] % width == 0;
  return aligned;
}

/// Calls f<width>() for the first width of `most`, `most` / 2, ... that fits(width); says whether there is one.
template <int most, class Fits, class F>
bool with_widest(const Fits& fits, const F& f) {
  if (!fits(most)) {
    if constexpr (most > 1) return with_widest<most / 2>(fits, f);
    return false;
  }
  f.template operator()<most>();
  return true;
}

/// Calls f with an unsigned integer of `bytes` bytes, for what only moves elements.
template <class F>
void dispatch_word(int64_t bytes, const F& f) {
  if (bytes == 1) f.template operator()<uint8_t>();
  if (bytes == 2) f.template operator()<uint16_t>();
  if (bytes == 4) f.template operator()<uint32_t>();
  if (bytes == 8) f.template operator()<uint64_t>();
}

}  // namespace voxgrad::cuda
