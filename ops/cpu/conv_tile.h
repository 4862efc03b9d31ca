// The register tile of the CPU convolutions. It computes c = a * b: each element of `a` is multiplied by vectors of
// elements of `b`, and the sums stay in registers.
//
// A convolution is a matrix product whose left operand contains the input once per tap. Eigen's matrix product would
// require a copy of this operand in memory and would then pack the copy. The register tile instead sums over segments
// (a tap, or a row of voxels) that point into the packed input tile. The packed input tile holds each input once, and
// the list of segments omits the taps outside the input.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace voxgrad::cpu {

/// The start of a segment in both operands.
struct TileSegment {
  int64_t a = 0;  // offset of the first element of the segment in operand a
  int64_t b = 0;  // offset of the first element of the segment in operand b
};

/// c(m, n) = sum over segments and over k in [0, depth) of a[segment.a + k * a_step + m] * b[segment.b + k * b_step +
/// n]. c(m, n) is at c[m * c_step + n] and has the columns of the tile.
template <class T>
struct TileProduct {
  const T* a = nullptr;
  int64_t a_step = 0;
  const T* b = nullptr;
  int64_t b_step = 0;
  std::span<const TileSegment> segments;
  int64_t depth = 0;
  T* c = nullptr;
  int64_t c_step = 0;
  bool adds = false;  ///< adds to c instead of setting c
};

inline constexpr int kTileAlignment = 64;
inline constexpr int kMaxTileRows = 24;
/// Largest width of a tile in bytes.
inline constexpr int kMaxTileWidth = 3 * kTileAlignment;

/// The register tiles that have the same number of columns.
template <class T>
struct TileFamily {
  int columns = 0;
  int max_rows = 0;
  void (*products[kMaxTileRows])(const TileProduct<T>&) = {};  // products[m - 1] computes m rows
};

/// Consecutive columns, which are channels or voxels, and the register tiles that compute them.
template <class T>
struct ColumnBlock {
  int64_t first = 0;
  int64_t count = 0;  // at most the columns of the tiles
  const TileFamily<T>* family = nullptr;
};

/// Divides `channels` columns into blocks with little padding. Compiled for f32 and f64.
template <class T>
std::vector<ColumnBlock<T>> column_blocks(int64_t channels);

/// Returns the number of columns of the blocks, including padding.
template <class T>
int64_t padded_columns(const std::vector<ColumnBlock<T>>& blocks) {
  int64_t columns = 0;
  for (const ColumnBlock<T>& block : blocks) columns += block.family->columns;
  return columns;
}

}  // namespace voxgrad::cpu
