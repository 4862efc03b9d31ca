// Elementwise kernels over views of one shape: out[i] = f(in[i]...).
//
// The host sorts and merges the axes (cuda/nest.cuh) and selects one of three kernels:
// - map_contiguous: all views are one contiguous row, which is read and written in vectors of up to 16 bytes.
// - map_rows: the output has contiguous rows of at least 32 elements. An input row is contiguous or a single broadcast
//   element, such as a bias over a volume. Rows may begin at any address.
// - map_strided: any strides, one element at a time.
// map_rows and map_strided address elements with 32-bit indices; the host splits views of 2^31 elements or more.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "core/view.h"
#include "cuda/detail/launch.h"
#include "cuda/nest.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {

/// The addresses of an output and its N inputs.
template <size_t N>
struct Pointers {
  void* out;
  const void* in[N > 0 ? N : 1];
};

/// Computes one element of contiguous views.
template <class Out, class... In, class F, size_t... k>
__device__ void map_one(const F& f, const Pointers<sizeof...(In)>& p, int64_t i, std::index_sequence<k...>) {
  static_cast<Out*>(p.out)[i] = static_cast<Out>(f(static_cast<const In*>(p.in[k])[i]...));
}

/// Computes one vector of contiguous views, starting at element i.
template <class Out, class... In, class F, size_t... k>
__device__ void map_vector(const F& f, const Pointers<sizeof...(In)>& p, int64_t i, std::index_sequence<k...>) {
  constexpr int width = kVectorWidth<Out, In...>;
  const auto apply_to = [&f](const Vector<In, width>&... x) {
    Vector<Out, width> y;
#pragma unroll
    for (int j = 0; j < width; ++j) y.v[j] = static_cast<Out>(f(x.v[j]...));
    return y;
  };
  store_vector(static_cast<Out*>(p.out) + i, apply_to(load_vector<In, width>(static_cast<const In*>(p.in[k]) + i)...));
}

/// Maps `count` contiguous elements: elements [head, head + vectors * width) as vectors, the others one by one.
/// Launch: one thread per vector in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class F, class Out, class... In>
__global__ void __launch_bounds__(kBlock)
    map_contiguous(F f, Pointers<sizeof...(In)> p, int64_t count, int64_t head, int64_t vectors) {
  wait_for_previous_kernels();
  constexpr int width = kVectorWidth<Out, In...>;
  constexpr std::index_sequence_for<In...> inputs;
  const int64_t step = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += step) map_vector<Out, In...>(f, p, head + i * width, inputs);
  const int64_t vector_elements = vectors * width;
#pragma unroll 1
  for (int64_t i = thread_index(); i < count - vector_elements; i += step)
    map_one<Out, In...>(f, p, i < head ? i : i + vector_elements, inputs);
}

/// Computes one element of views of any strides. offset[0] is its offset in the output, offset[k + 1] in input k.
template <class F, class Out, class... In, size_t... k>
__device__ void map_at(const F& f, const Pointers<sizeof...(In)>& p, const int64_t (&offset)[sizeof...(In) + 1],
                       std::index_sequence<k...>) {
  static_cast<Out*>(p.out)[offset[0]] = static_cast<Out>(f(static_cast<const In*>(p.in[k])[offset[k + 1]]...));
}

/// Maps `count` elements of views of any strides. Launch: one thread per element in a 1-D grid-stride loop, kBlock
/// threads per CTA. No shared memory.
template <class F, class Out, class... In>
__global__ void __launch_bounds__(kBlock)
    map_strided(F f, Pointers<sizeof...(In)> p, uint32_t count, Offsets<sizeof...(In) + 1> offsets) {
  wait_for_previous_kernels();
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < count; i += gridDim.x * kBlock) {
    int64_t offset[sizeof...(In) + 1];
    offsets.at(i, offset);
    map_at<F, Out, In...>(f, p, offset, std::index_sequence_for<In...>());
  }
}

/// The rows that map_rows processes, for N views of one dtype.
template <size_t N>
struct Rows {
  uint32_t length;      ///< elements of a row
  bool one_element[N];  ///< the row of the view is one broadcast element
  Divisor slots;        ///< maximum number of vectors that a row touches
  Offsets<N> starts;    ///< offsets of the first elements of the rows

  Rows(const Nest<N>& nest, int width)
      : length(static_cast<uint32_t>(nest.size[0])),
        slots((nest.size[0] + width - 2) / width + 1),
        starts(nest.without(0)) {
    for (size_t k = 0; k < N; ++k) one_element[k] = nest.stride[0][k] == 0;
  }
  /// Returns whether map_rows supports the views of a nest.
  static bool supports(const Nest<N>& nest) {
    constexpr int64_t kMinLength = 32;
    return nest.size[0] >= kMinLength && nest.stride[0][0] == 1 &&
           std::all_of(nest.stride[0], nest.stride[0] + N, [](int64_t s) { return s == 0 || s == 1; });
  }
};

/// Loads elements [first, first + width) of a row. Elements outside of the row are zero. `whole` states that all
/// elements are inside the row; aligned elements are then loaded as one vector. If `one_element`, all elements are
/// *row.
template <int width, class T>
__device__ PackedVector<T, width> load_slot(const T* row, bool one_element, int first, bool whole, uint32_t length) {
  if (!one_element && whole && reinterpret_cast<uintptr_t>(row + first) % sizeof(Vector<T, width>) == 0)
    return {row + first, true, T()};
  if (one_element) return {nullptr, false, *row};
  Vector<T, width> x{};
#pragma unroll
  for (int j = 0; j < width; ++j)
    if (static_cast<uint32_t>(first + j) < length) x.v[j] = row[first + j];
  return PackedVector<T, width>(x);
}

/// Maps rows of an output and N inputs of dtype T. A thread computes one slot: an aligned vector of the output, or the
/// part of such a vector that is inside the row. Launch: one thread per slot, `count` in all, in a 1-D grid-stride
/// loop, kBlock threads per CTA. No shared memory.
template <class F, class T, size_t N>
__global__ void __launch_bounds__(kBlock)
    map_rows(F f, Pointers<N> p, uint32_t count, const __grid_constant__ Rows<N + 1> rows) {
  wait_for_previous_kernels();
  constexpr int width = kVectorWidth<T>;
  for (uint32_t i = blockIdx.x * kBlock + threadIdx.x; i < count; i += gridDim.x * kBlock) {
    uint32_t row = i;
    const uint32_t slot = rows.slots.take_digit(row);
    int64_t start[N + 1];
    rows.starts.at(row, start);
    T* out = static_cast<T*>(p.out) + start[0];
    const auto lead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(T) % width);
    const auto first = static_cast<int>(slot * width - lead);
    if (first >= static_cast<int>(rows.length)) continue;
    const bool whole = first >= 0 && static_cast<uint32_t>(first) + width <= rows.length;
    Vector<T, width> result;
    [&]<size_t... k>(std::index_sequence<k...>) {
      const PackedVector<T, width> loaded[N + 1] = {load_slot<width>(
          static_cast<const T*>(p.in[k]) + start[k + 1], rows.one_element[k + 1], first, whole, rows.length)...};
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

/// True if map_rows is compiled for a map. This is the case for floating-point arithmetic of two operands of one dtype,
/// and for copies and fills, which move unsigned words.
template <class Out, class... In>
inline constexpr bool kHasRows = false;
template <class T>
inline constexpr bool kHasRows<T, T, T> = std::is_floating_point_v<compute_t<T>>;
template <class T>
inline constexpr bool kHasRows<T, T> = std::is_unsigned_v<T>;
template <class T>
inline constexpr bool kHasRows<T> = std::is_unsigned_v<T>;

/// The kernels of a map of N views, and the sizes that launch_map() needs.
template <size_t N>
struct MapKernels {
  const void* contiguous;
  const void* rows;  ///< null if map_rows is not compiled for this map
  const void* strided;
  int64_t width;                ///< elements of a vector of map_contiguous and map_rows
  std::array<int64_t, N> item;  ///< bytes of an element of each view
};

/// Launches the kernel that suits the views. The first view is the output; `f` points to the kernels' first parameter.
/// The function is compiled only once for each N, not for every operator and dtype.
template <size_t N>
void launch_map(const char* op, const MapKernels<N>& kernels, const void* f, const std::array<View, N>& views);

/// Computes out[i] = f(in[i]...), converted to Out. Out and In are the C++ types of the views' dtypes.
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

/// Calls f with the unsigned integer type of `bytes` bytes, for kernels that only move elements.
template <class F>
void dispatch_word(int64_t bytes, const F& f) {
  if (bytes == 1) f.template operator()<uint8_t>();
  if (bytes == 2) f.template operator()<uint16_t>();
  if (bytes == 4) f.template operator()<uint32_t>();
  if (bytes == 8) f.template operator()<uint64_t>();
}

}  // namespace voxgrad::cuda
