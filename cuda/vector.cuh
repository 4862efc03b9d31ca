// 16 bytes at a time: the vectors in which kernels read and write contiguous elements of any alignment.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"

namespace voxgrad::cuda {

template <class T, int width>
struct alignas(sizeof(T) * width) Vector {
  T v[width];
};

/// A type that the GPU loads in one instruction.
template <size_t bytes>
using Word = std::conditional_t<
    bytes == 16, uint4,
    std::conditional_t<bytes == 8, uint2,
                       std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>>>;

/// Elements of the widest of the types in 16 bytes.
template <class... Ts>
inline constexpr int kVectorWidth = 16 / static_cast<int>(std::max({sizeof(Ts)...}));

#ifdef __CUDACC__
/// Left to itself, the compiler loads an array's elements one by one.
template <class T, int width>
__device__ Vector<T, width> load_vector(const T* data) {
  using Loaded = Word<sizeof(T) * width>;
  return std::bit_cast<Vector<T, width>>(*reinterpret_cast<const Loaded*>(data));
}

/// A vector on its way, a word until it is used: a choice between halves would wait for each load by itself.
template <class T, int width>
struct Loading {
  Word<sizeof(T) * width> word;

  Loading() = default;
  __device__ explicit Loading(const Vector<T, width>& vector) : word(std::bit_cast<decltype(word)>(vector)) {}
  /// What is at `data`, or `neutral` elements if that is not `inside`.
  __device__ Loading(const T* data, bool inside, T neutral) {
    Vector<T, width> none;
#pragma unroll
    for (T& x : none.v) x = neutral;
    *this = Loading(none);
    if (inside) word = *reinterpret_cast<const decltype(word)*>(data);
  }
  __device__ Vector<T, width> get() const { return std::bit_cast<Vector<T, width>>(word); }
};

template <class T, int width>
__device__ void store_vector(T* data, const Vector<T, width>& vector) {
  *reinterpret_cast<Word<sizeof(T) * width>*>(data) = std::bit_cast<Word<sizeof(T) * width>>(vector);
}

/// `width` neighbours, 16 bytes of them at a time.
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
/// Rounded to T.
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

/// Contiguous elements: a few before the first aligned vector, vectors, and a few behind the last.
template <class T>
struct Span {
  static constexpr int kWidth = kVectorWidth<T>;
  int64_t count, head, vectors;

  __device__ Span(const T* data, int64_t elements) : count(elements) {
    const auto place = static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % kWidth);
    head = min(static_cast<int64_t>((kWidth - place) % kWidth), count);
    vectors = (count - head) / kWidth;
  }
  /// Elements that are in no vector, and where the i-th of them is.
  __device__ int64_t scalars() const { return count - vectors * kWidth; }
  __device__ int64_t scalar(int64_t i) const { return i < head ? i : i + vectors * kWidth; }
};

/// Calls taker.take(x) for the elements of `data` in [0, count) that fall to `thread` of `threads`, in a fixed order,
/// and taker.close() behind each vector. `kUnroll` vectors are on their way at a time; where there are none left,
/// elements are `neutral`.
template <int kUnroll, class T, class Taker>
__device__ void read_span(const T* data, int64_t count, T neutral, int thread, int threads, Taker& taker) {
  constexpr int width = Span<T>::kWidth;
  const Span<T> span(data, count);
  for (int64_t v = thread; v < span.vectors; v += kUnroll * threads) {
    Loading<T, width> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t place = v + u * threads;
      loaded[u] = {data + span.head + place * width, place < span.vectors, neutral};
    }
#pragma unroll
    for (const auto& vector : loaded) {
#pragma unroll
      for (const T& x : vector.get().v) taker.take(x);
      taker.close();
    }
  }
  for (int64_t i = thread; i < span.scalars(); i += threads) taker.take(data[span.scalar(i)]);
  taker.close();
}
#endif

}  // namespace voxgrad::cuda
