// Eigen's arrays for the CPU kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <tuple>

// Only parallel_for starts threads. With Eigen's threads, the blocks of a product and the order of its sums would
// depend on the number of threads.
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif

// GCC 12 warns about undefined operands in its own AVX-512 intrinsics (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace voxgrad::cpu {

/// Elements per block. Eigen uses other instructions for the unaligned beginning and the end of an array than for the
/// rest, and these instructions may round differently. Kernels therefore compute whole aligned blocks, so that a result
/// depends only on its operands.
inline constexpr int kBlock = 64;
template <class T>
using Block = Eigen::Array<T, kBlock, 1>;

/// Computes exp(x). Eigen's exp is never smaller than about the smallest normal number, exp(kLow), not even for -inf.
/// For x below kLow, this function computes exp(x / 2)^2, which reaches 0.
template <class T>
Block<T> exp_block(const Block<T>& x) {
  constexpr T kLow = sizeof(T) == 8 ? T(-708) : T(-87);
  if (!(x < kLow).any()) return x.exp();
  return (x < kLow).select((x * T(0.5)).exp().square(), x.exp());
}

/// Computes y = f(x...) for `count` elements, block by block. The unused elements of a partial last block are ignored.
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
