// The register tile under the CPU convolutions: c = a * b, where b's columns fill vectors and a's elements are
// broadcast.
//
// A convolution is a matrix product whose left factor repeats the input once for each tap. Eigen's gemm reaches the
// processor's rate only on that repeated matrix, copied out and then packed once more. Here the product is a sum over
// segments (a tap, or a row of voxels) that point into the input tile as it is: nothing is repeated, and taps that
// fall outside the input are simply not in the list.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace voxgrad::cpu {

/// Where a segment starts: offsets of its first elements in a and in b.
struct TileSegment {
  int64_t a = 0;
  int64_t b = 0;
};

/// c(m, n) = sum over segments and over k in [0, depth) of a[segment.a + k * a_step + m] * b[segment.b + k * b_step +
/// n]. c has as many columns as the tile, row after row.
template <class T>
struct TileProduct {
  const T* a = nullptr;
  int64_t a_step = 0;
  const T* b = nullptr;
  int64_t b_step = 0;
  std::span<const TileSegment> segments;
  int64_t depth = 0;
  T* c = nullptr;
  bool adds = false;
};

inline constexpr int kTileAlignment = 64;
inline constexpr int kMaxTileRows = 12;
/// No tile is wider than this many bytes.
inline constexpr int kMaxTileWidth = 3 * kTileAlignment;

/// The tiles of one width: products[m - 1] computes m rows.
template <class T>
struct TileFamily {
  int columns = 0;
  int max_rows = 0;
  void (*products[kMaxTileRows])(const TileProduct<T>&) = {};
};

/// A run of columns (channels) and the tiles that compute it; the run may end before the tile does.
template <class T>
struct ColumnBlock {
  int64_t first = 0;
  int64_t count = 0;
  const TileFamily<T>* family = nullptr;
};

/// Blocks that cover `channels` columns with little padding. f32 and f64.
template <class T>
std::vector<ColumnBlock<T>> column_blocks(int64_t channels);

/// The columns of these blocks, padding included.
template <class T>
int64_t padded_columns(const std::vector<ColumnBlock<T>>& blocks) {
  int64_t columns = 0;
  for (const ColumnBlock<T>& block : blocks) columns += block.family->columns;
  return columns;
}

}  // namespace voxgrad::cpu
