// Compiler vector types and small transpositions in registers for the CPU convolutions.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace voxgrad::cpu {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64, kVectorRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32, kVectorRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16, kVectorRegisters = 32;
#else
inline constexpr int kVectorBytes = 16, kVectorRegisters = 16;
#endif

/// Bytes of half a vector, but at least 16, because some processors have no smaller vectors.
inline constexpr int kHalfVectorBytes = kVectorBytes >= 32 ? kVectorBytes / 2 : kVectorBytes;
/// Elements per half vector. The number of columns of a register tile is a multiple of this number.
template <class T>
inline constexpr int kColumnUnit = kHalfVectorBytes / static_cast<int>(sizeof(T));

/// Calls f(std::integral_constant<int, i>()) for i from 0 to count - 1. The compiler keeps arrays of vectors in
/// registers because the indices are constants.
template <int count, class F>
[[gnu::always_inline]] inline void unrolled(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, count>{});
}

template <class T, int bytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(bytes)));
};

template <class T, int bytes>
[[gnu::always_inline]] inline typename VectorOf<T, bytes>::Type load(const T* from) {
  typename VectorOf<T, bytes>::Type vector;
  std::memcpy(&vector, from, bytes);
  return vector;
}

/// Transposes a square: loads n vectors of n elements from the addresses `from(0)`, `from(1)`, ..., and stores element
/// j of all vectors at the address `to(j)`.
template <class T, int n, class From, class To>
[[gnu::always_inline]] inline void transpose(const From& from, const To& to) {
  using Vector = typename VectorOf<T, n* static_cast<int>(sizeof(T))>::Type;
  Vector rows[n];
  unrolled<n>([&](auto i) { std::memcpy(&rows[i], from(i), sizeof(Vector)); });
  for (int stage = 1; stage < n; stage *= 2) {  // log2(n) stages that interleave the two halves of the rows
    Vector next[n];
    [&]<int... k>(std::integer_sequence<int, k...>) __attribute__((always_inline)) {
      unrolled<n / 2>([&](auto i) __attribute__((always_inline)) {
        next[2 * i] = __builtin_shufflevector(rows[i], rows[i + n / 2], (k % 2 * n + k / 2)...);
        next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + n / 2], (k % 2 * n + k / 2 + n / 2)...);
      });
    }
    (std::make_integer_sequence<int, n>{});
    unrolled<n>([&](auto i) { rows[i] = next[i]; });
  }
  unrolled<n>([&](auto j) { std::memcpy(to(j), &rows[j], sizeof(Vector)); });
}

/// Computes to[i] = from[2 * i + first] for i in [0, n), where `first` is 0 or 1. Reads 2 n elements.
template <class T, int n, int first>
[[gnu::always_inline]] inline void every_second(const T* from, T* to) {
  typename VectorOf<T, n*static_cast<int>(sizeof(T))>::Type low, high, result;
  std::memcpy(&low, from, sizeof low);
  std::memcpy(&high, from + n, sizeof high);
  [&]<int... k>(std::integer_sequence<int, k...>) __attribute__((always_inline)) {
    result = __builtin_shufflevector(low, high, (2 * k + first)...);
  }
  (std::make_integer_sequence<int, n>{});
  std::memcpy(to, &result, sizeof result);
}

}  // namespace voxgrad::cpu
