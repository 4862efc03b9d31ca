// Eigen as this folder uses it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <tuple>

// Threads come from parallel_for alone: Eigen's own would choose its blocks, and so the order of its sums, by their
// number.
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif

// GCC 12 takes the deliberately undefined operands of its own AVX-512 intrinsics for mistakes (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace voxgrad::cpu {

// A result must be a function of its element alone, but Eigen computes the ends of an array, and what precedes an
// aligned address, with other instructions. So elements pass through whole, aligned blocks.
inline constexpr int kBlock = 64;
template <class T>
using Block = Eigen::Array<T, kBlock, 1>;

/// exp(x). Eigen's own ends at about the smallest normal number, so that exp(-inf) is not 0; below that the square of
/// the root goes on to 0.
template <class T>
Block<T> exp_block(const Block<T>& x) {
  constexpr T kLow = sizeof(T) == 8 ? T(-708) : T(-87);
  if (!(x < kLow).any()) return x.exp();
  return (x < kLow).select((x * T(0.5)).exp().square(), x.exp());
}

/// Calls y block = f(x blocks...) over `count` elements; what a last, partial block holds beyond its end is unused.
template <class T, class F, class... In>
void map_blocks(F f, int64_t count, T* y, const In*... x) {
  std::array<Block<T>, sizeof...(In)> blocks;
  blocks.fill(Block<T>::Zero());
  for (int64_t i = 0; i < count; i += kBlock) {
    const size_t bytes = static_cast<size_t>(std::min<int64_t>(kBlock, count - i)) * sizeof(T);
    size_t k = 0;
    (std::memcpy(blocks[k++].data(), x + i, bytes), ...);
    const Block<T> result = std::apply(f, blocks);
    std::memcpy(y + i, result.data(), bytes);
  }
}

}  // namespace voxgrad::cpu
