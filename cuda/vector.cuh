// Vectors of up to 16 bytes, in which kernels load and store contiguous elements.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/view.h"

namespace voxgrad::cuda {

/// Number of elements of a 16-byte vector. With several types, the widest type determines the number.
template <class... Ts>
inline constexpr int kVectorWidth = 16 / static_cast<int>(std::max({sizeof(Ts)...}));

/// `width` contiguous elements, aligned to their total size.
template <class T, int width>
struct alignas(sizeof(T) * width) Vector {
  T v[width];
};

/// A type of `bytes` bytes that the GPU loads and stores with one instruction.
template <size_t bytes>
using Word = std::conditional_t<
    bytes == 16, uint4,
    std::conditional_t<bytes == 8, uint2,
                       std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>>>;

/// Loads an aligned vector with one instruction. The compiler would load the elements of an array one by one.
template <class T, int width>
__device__ Vector<T, width> load_vector(const T* data) {
  using Loaded = Word<sizeof(T) * width>;
  return std::bit_cast<Vector<T, width>>(*reinterpret_cast<const Loaded*>(data));
}

/// Stores an aligned vector with one instruction.
template <class T, int width>
__device__ void store_vector(T* data, const Vector<T, width>& vector) {
  *reinterpret_cast<Word<sizeof(T) * width>*>(data) = std::bit_cast<Word<sizeof(T) * width>>(vector);
}

/// A vector that is loaded as one machine word, or filled with a neutral element. The choice between the two is made
/// for the whole word, so that a kernel can have several loads in flight. A choice for each element would make the
/// kernel wait for each load separately.
template <class T, int width>
struct PackedVector {
  Word<sizeof(T) * width> word;

  PackedVector() = default;
  __device__ explicit PackedVector(const Vector<T, width>& vector) : word(std::bit_cast<decltype(word)>(vector)) {}
  /// Loads the vector at `data` if `inside`, otherwise sets all elements to `neutral`.
  __device__ PackedVector(const T* data, bool inside, T neutral) {
    Vector<T, width> filled;
#pragma unroll
    for (T& x : filled.v) x = neutral;
    *this = PackedVector(filled);
    if (inside) word = *reinterpret_cast<const decltype(word)*>(data);
  }
  __device__ Vector<T, width> get() const { return std::bit_cast<Vector<T, width>>(word); }
};

/// Returns the address of the element of a view at `position`, an index along each of the first axes.
template <class T, class... Index>
__device__ T* element(const View& view, Index... position) {
  int64_t offset = 0;
  int axis = 0;
  ((offset += static_cast<int64_t>(position) * view.stride[axis++]), ...);
  return static_cast<T*>(view.data) + offset;
}

/// Loads `width` contiguous elements, at most 16 bytes per instruction. `from` must be aligned to 16 bytes, or to the
/// size of all elements if that is smaller.
template <int width, class T>
__device__ void load_values(const T* from, T (&to)[width]) {
  constexpr int part = std::min(width, kVectorWidth<T>);
#pragma unroll
  for (int k = 0; k < width; k += part) {
    const auto loaded = load_vector<T, part>(from + k);
#pragma unroll
    for (int j = 0; j < part; ++j) to[k + j] = loaded.v[j];
  }
}

/// Rounds `width` elements to T and stores them, at most 16 bytes per instruction. `to` must be aligned to 16 bytes, or
/// to the size of all elements if that is smaller.
template <int width, class T, class C>
__device__ void store_values(T* to, const C (&from)[width]) {
  constexpr int part = std::min(width, kVectorWidth<T>);
#pragma unroll
  for (int k = 0; k < width; k += part) {
    Vector<T, part> stored;
#pragma unroll
    for (int j = 0; j < part; ++j) stored.v[j] = convert<T>(from[k + j]);
    store_vector(to + k, stored);
  }
}

/// The division of `count` contiguous elements of any alignment into aligned vectors and the scalars before and after
/// the vectors.
template <class T>
struct Span {
  static constexpr int kWidth = kVectorWidth<T>;
  int64_t count;
  int64_t head;     ///< scalars before the first vector
  int64_t vectors;  ///< number of vectors

  __device__ Span(const T* data, int64_t elements) : count(elements) {
    const auto misalignment = static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % kWidth);
    head = min(static_cast<int64_t>((kWidth - misalignment) % kWidth), count);
    vectors = (count - head) / kWidth;
  }
  /// Returns the number of scalars, before and after the vectors.
  __device__ int64_t scalars() const { return count - vectors * kWidth; }
  /// Returns the index of scalar `i` among all elements.
  __device__ int64_t scalar(int64_t i) const { return i < head ? i : i + vectors * kWidth; }
};

/// Passes this thread's share of the `count` elements at `data` to the consumer, in a fixed order. `threads` threads
/// share the elements; `thread` is the index of this thread. Calls consumer.accumulate(element) for every element, and
/// consumer.flush() after every vector, so that a consumer can limit the number of elements that are summed in a narrow
/// type. A thread loads kUnroll vectors at a time, all of which are in flight together. Vectors that lie beyond the
/// data consist of `neutral` elements.
template <int kUnroll, class T, class Consumer>
__device__ void read_span(const T* data, int64_t count, T neutral, int thread, int threads, Consumer& consumer) {
  constexpr int width = Span<T>::kWidth;
  const Span<T> span(data, count);
  for (int64_t v = thread; v < span.vectors; v += kUnroll * threads) {
    PackedVector<T, width> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t index = v + u * threads;
      loaded[u] = {data + span.head + index * width, index < span.vectors, neutral};
    }
#pragma unroll
    for (const auto& vector : loaded) {
#pragma unroll
      for (const T& x : vector.get().v) consumer.accumulate(x);
      consumer.flush();
    }
  }
  for (int64_t i = thread; i < span.scalars(); i += threads) consumer.accumulate(data[span.scalar(i)]);
  consumer.flush();
}

/// Returns whether the elements along `axis` form vectors of `width` that are aligned at every position of the other
/// axes.
inline bool has_vectors(const View& view, int axis, int width) {
  const size_t bytes = static_cast<size_t>(width * item_size(view.dtype));
  bool aligned =
      view.stride[axis] == 1 && view.size[axis] % width == 0 && reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int other = 0; other < view.rank; ++other)
    aligned &= other == axis || view.size[other] == 1 || view.stride[other] % width == 0;
  return aligned;
}

/// Calls f<width>() with the largest width of `max_width`, `max_width` / 2, ..., 1 for which fits(width) is true.
/// Returns false if there is no such width.
template <int max_width, class Fits, class F>
bool with_widest(const Fits& fits, const F& f) {
  if (!fits(max_width)) {
    if constexpr (max_width > 1) return with_widest<max_width / 2>(fits, f);
    return false;
  }
  f.template operator()<max_width>();
  return true;
}

}  // namespace voxgrad::cuda
