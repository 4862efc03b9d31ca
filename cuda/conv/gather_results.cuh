// How gather_wgmma.cuh writes its results: by way of windows in shared memory, so that 32 neighbouring threads write
// what lies side by side in the result. Rows of it seldom begin at a multiple of 32 bytes, and each sector that is
// written in part is written again; where phases lie side by side, two of them are written together. The warps that
// staged the inputs have nothing to do by then, and help.
#pragma once

#include "cuda/conv/gather_feed.cuh"

namespace voxgrad::cuda {

/// How results of 64 rows wait in shared memory: some columns of each slot, all rows of a column together.
template <class Tile>
struct ResultWindow {
  static constexpr int kN8 = Tile::kN8 % 4 == 0 ? 4 : Tile::kN8 == 6 ? 3 : Tile::kN8;  // times 8 columns at a time
  // Words. Pitches without bank conflicts: for 4 pairs of columns times 8 rows, and for 16 rows in two slots.
  static constexpr int kSlotPitch = 80, kPitch = Tile::kSlots == 1 ? 68 : Tile::kSlots * kSlotPitch + 4;
  static constexpr int kWords = kN8 * 8 * kPitch, kWindows = 2;  // one is filled while the other is read
};

/// Where in the result row `row` of `tile` of a phase lies, in elements from the block's corner; or -1.
__device__ inline int result_offset(const GatherMma& p, const GatherPlace& place, const int (&phase)[3], int tile,
                                    int row) {
  int index = p.rows.base[tile] + row / 8 * p.rows.group + row % 8;
  bool valid = index < p.rows.end[tile];
  int offset = 0;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    const AxisPart& at = p.axis[a].part[phase[a]];
    const int of_box = a == 2 ? p.line_positions.take(index) : a == 1 ? p.extent[1].take(index) : index;
    valid &= of_box < p.box[a].value && place.q[a] + of_box < at.count;
    offset += (at.first + of_box * p.axis[a].out_step) * static_cast<int>(p.out_stride[a + 2]);
  }
  return valid ? offset : -1;
}

/// NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Writes windows of a box: out = sum + bias, of the classes from place.phase on. By all warps of
/// GatherBarriers::results, which meet when a window is filled. The next is filled while this one is written.
template <class Tile>
struct ResultWriter {
  using Element = typename Tile::Arithmetic::Element;
  using Window = ResultWindow<Tile>;
  static constexpr int kSlots = Tile::kSlots, kReads = 2 * kSlots;  // of 32 rows
  static constexpr int kWriters = GatherBarriers<Tile>::kOfA / 32;

  const GatherMma& p;
  const GatherPlace& place;
  int warp, lane;
  Element* corner;
  int phase[3] = {};   // of the slot that this lane reads
  int offset[kReads];  // of this tile, where this lane writes; or -1

  __device__ ResultWriter(const GatherMma& problem, const GatherPlace& at, int of_warp)
      : p(problem),
        place(at),
        warp(of_warp),
        lane(static_cast<int>(threadIdx.x) % 32),
        corner(static_cast<Element*>(p.out) + place.sample * p.out_stride[0] + first_channel() * p.out_stride[1]) {
    if (p.transposed) class_parts(p, place.phase + lane % kSlots, phase);
    for (int a = 0; a < 3; ++a) corner += int64_t{place.q[a]} * p.axis[a].out_step * p.out_stride[a + 2];
  }

  /// False behind the last.
  __device__ bool begin_tile(int tile) {
    if (p.rows.end[tile] == 0) return false;
#pragma unroll
    for (int i = 0; i < kReads; ++i) offset[i] = result_offset(p, place, phase, tile, (i * 32 + lane) / kSlots);
    return true;
  }
  __device__ int64_t first_channel() const {
    return int64_t{place.group} * p.out_channels + place.column_tile * Tile::kColumns;
  }
  __device__ int columns() const { return min(Tile::kColumns, p.out_channels - place.column_tile * Tile::kColumns); }
  __device__ void write(const uint32_t* words, int n) const {
    const float floor = p.relu ? 0.0f : -INFINITY;
    const int first = n * 8 + warp, last = min((n + Window::kN8) * 8, columns());
    const int64_t stride = p.out_stride[1], step = kWriters * stride;
    Element* out[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) out[i] = corner + first * stride + offset[i];
    const uint32_t* from = words + warp * Window::kPitch + lane % kSlots * Window::kSlotPitch + lane / kSlots;
#pragma unroll 2
    for (int c = first; c < last; c += kWriters, from += kWriters * Window::kPitch) {
      float shift = 0;
      if (p.bias)
        shift = static_cast<float>(static_cast<const Element*>(p.bias)[(first_channel() + c) * p.bias_stride]);
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        if (offset[i] >= 0) *out[i] = Element(max_or_nan(__uint_as_float(from[i * (32 / kSlots)]) + shift, floor));
        out[i] += step;
      }
    }
  }
};

/// Fills a window with columns from 8 * n on of a tile's sums, in all slots.
template <class Tile>
__device__ void put_sums(uint32_t* words, const Accumulator (&sum)[Tile::kTiles][Tile::kN8], int tile, int n) {
  using Window = ResultWindow<Tile>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  words += lane % 4 * 2 * Window::kPitch + warp * 16 + lane / 4;
#pragma unroll
  for (int slot = 0; slot < Tile::kSlots; ++slot)
#pragma unroll
    for (int i = 0; i < Window::kN8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[(i * 8 + j % 2) * Window::kPitch + slot * Window::kSlotPitch + j / 2 * 8] =
            __float_as_uint(sum[slot * Tile::kOfSlot + tile][n + i][j]);
}

/// Of the warps that multiply. `windows`: shared memory that nobody reads any more.
template <class Tile>
__device__ void write_sums(const GatherMma& p, const GatherPlace& place, uint32_t* windows,
                           const Accumulator (&sum)[Tile::kTiles][Tile::kN8]) {
  using Window = ResultWindow<Tile>;
  ResultWriter<Tile> writer(p, place, static_cast<int>(threadIdx.x) / 32);
  int turn = 0;
#pragma unroll
  for (int tile = 0; tile < Tile::kOfSlot; ++tile) {
    if (!writer.begin_tile(tile)) break;
#pragma unroll
    for (int n = 0; n < Tile::kN8; n += Window::kN8) {
      if (n * 8 >= writer.columns()) break;
      uint32_t* const words = windows + turn * Window::kWords;
      turn = 1 - turn;
      put_sums<Tile>(words, sum, tile, n);
      GatherBarriers<Tile>::results();
      writer.write(words, n);
    }
  }
}

/// Of the others, of which the first is number Tile::kWarps.
template <class Tile>
__device__ void help_to_write(const GatherMma& p, const GatherPlace& place, uint32_t* windows, int warp) {
  using Window = ResultWindow<Tile>;
  ResultWriter<Tile> writer(p, place, warp);
  int turn = 0;
#pragma unroll 1
  for (int tile = 0; tile < Tile::kOfSlot && writer.begin_tile(tile); ++tile)
#pragma unroll 1
    for (int n = 0; n * 8 < writer.columns(); n += Window::kN8) {
      GatherBarriers<Tile>::results();
      writer.write(windows + turn * Window::kWords, n);
      turn = 1 - turn;
    }
}

}  // namespace voxgrad::cuda
