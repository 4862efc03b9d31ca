// How gather_wgmma.cuh writes its results: by way of windows in shared memory, so that 32 neighbouring threads write
// what lies side by side in the result. Rows of it seldom begin at a multiple of 32 bytes, and each sector that is
// written in part is written again; where phases lie side by side, two of them are written together.
#pragma once

#include "cuda/conv/gather_feed.cuh"

namespace voxgrad::cuda {

/// How results of 64 rows wait in shared memory: some columns of each slot, all rows of a column together.
template <class Tile>
struct ResultWindow {
  static constexpr int kN8 = gather_window_columns(Tile::kColumns) / 8;  // times 8 columns at a time
  static constexpr int kSlotPitch = kGatherSlotPitch, kPitch = gather_window_pitch(Tile::kSlots);  // words
  static constexpr int kWords = kN8 * 8 * kPitch;
};

/// NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Without a branch.
template <class T>
__device__ void store_if(bool really, char* to, T value) {
  if constexpr (sizeof(T) == 4)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
                 "r"(__float_as_uint(static_cast<float>(value))), "r"(static_cast<int>(really))
                 : "memory");
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b16 [%0], %1;}" ::"l"(to), "h"(value.bits),
                 "r"(static_cast<int>(really))
                 : "memory");
}

/// Writes windows of a box: out = sum + bias, behind the ReLU if there is one, of the classes from place.phase on. By
/// Tile::kWarps warps.
template <class Tile>
struct ResultWriter {
  using Element = typename Tile::Arithmetic::Element;
  using Window = ResultWindow<Tile>;
  static constexpr int kSlots = Tile::kSlots, kReads = 2 * kSlots;  // of 32 rows

  const GatherMma& p;
  int warp, lane, columns;
  int64_t channel;          // the first
  char* corner;             // of the box, there
  int first = 0, limit[3];  // of the slot that this lane reads: elements from the corner; how far the box goes
  char* out[kReads];        // of this tile and the first column, where this lane writes
  bool valid[kReads];       // it does
  float bias = 0;           // of this window's column number `lane`

  __device__ ResultWriter(const GatherMma& problem, const GatherPlace& place)
      : p(problem),
        warp(of_warp(static_cast<int>(threadIdx.x) / 32 % Tile::kWarps)),
        lane(static_cast<int>(threadIdx.x) % 32),
        columns(p.out_channels - place.column_tile * Tile::kColumns),
        channel(int64_t{place.group} * p.out_channels + place.column_tile * Tile::kColumns) {
    int phase[3] = {};
    if (p.transposed) class_parts(p, place.phase + lane % kSlots, phase);
    int64_t at = place.sample * p.out_stride[0] + channel * p.out_stride[1];
    for (int a = 0; a < 3; ++a) {
      const AxisPart& part = p.axis[a].part[phase[a]];
      at += int64_t{place.q[a]} * p.axis[a].out_step * p.out_stride[a + 2];
      first += part.first * static_cast<int>(p.out_stride[a + 2]);
      limit[a] = min(p.box[a].value, part.count - place.q[a]);
    }
    corner = static_cast<char*>(p.out) + at * static_cast<int>(sizeof(Element));
  }

  /// False behind the last.
  __device__ bool begin_tile(int tile) {
    if (p.rows.end[tile] == 0) return false;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int row = (i * 32 + lane) / kSlots;
      int index = p.rows.base[tile] + row / 8 * p.rows.group + row % 8, to = first;
      valid[i] = index < p.rows.end[tile];
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        const int of_box = a == 2 ? p.line_positions.take(index) : a == 1 ? p.extent[1].take(index) : index;
        valid[i] &= of_box < limit[a];
        to += of_box * p.axis[a].out_step * static_cast<int>(p.out_stride[a + 2]);
      }
      out[i] = corner + int64_t{to} * static_cast<int>(sizeof(Element));
    }
    return true;
  }
  /// Of columns from 8 * n on.
  __device__ void begin_window(int n) {
    const int c = n * 8 + lane;
    if (p.bias && c < columns)
      bias = static_cast<float>(static_cast<const Element*>(p.bias)[(channel + c) * p.bias_stride]);
  }
  /// Many columns at a time: loads and stores of one wait together.
  __device__ void write(uint32_t window, int n) const {
    constexpr int kColumns = Window::kN8 * 8 / Tile::kWarps;  // of a warp
    constexpr int kMany = kColumns % 4 == 0 ? 4 : 2;
    const float floor = p.relu ? 0.0f : -INFINITY;
    const int64_t step = p.out_stride[1] * static_cast<int>(sizeof(Element));
    window += 4 * (warp * Window::kPitch + lane % kSlots * Window::kSlotPitch + lane / kSlots);
    int64_t column = (n * 8 + warp) * step;
#pragma unroll
    for (int first_column = 0; first_column < kColumns; first_column += kMany) {
      float x[kMany][kReads], shift[kMany];
#pragma unroll
      for (int j = 0; j < kMany; ++j) {
        shift[j] = __shfl_sync(0xffffffff, bias, (first_column + j) * Tile::kWarps + warp);
#pragma unroll
        for (int i = 0; i < kReads; ++i)
          x[j][i] = __uint_as_float(
              load_shared(window + 4 * ((first_column + j) * Tile::kWarps * Window::kPitch + i * (32 / kSlots))));
      }
#pragma unroll
      for (int j = 0; j < kMany; ++j, column += Tile::kWarps * step) {
        const bool exists = n * 8 + (first_column + j) * Tile::kWarps + warp < columns;
#pragma unroll
        for (int i = 0; i < kReads; ++i)
          store_if(exists && valid[i], out[i] + column, Element(max_or_nan(x[j][i] + shift[j], floor)));
      }
    }
  }
};

/// Fills a window with columns from 8 * n on of a tile's sums, in all slots.
template <class Tile>
__device__ void put_sums(uint32_t* words, const Accumulator (&sum)[Tile::kTiles][Tile::kN8], int tile, int n) {
  using Window = ResultWindow<Tile>;
  const int warp = static_cast<int>(threadIdx.x) / 32 % Tile::kWarps, lane = static_cast<int>(threadIdx.x) % 32;
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

/// Of group `group` of the warps that multiply. `window`: shared memory of the group's own.
template <class Tile>
__device__ void write_sums(const GatherMma& p, const GatherPlace& place, uint32_t* window, int group,
                           const Accumulator (&sum)[Tile::kTiles][Tile::kN8]) {
  using Window = ResultWindow<Tile>;
  const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * Tile::kWarps) : "memory"); };
  ResultWriter<Tile> writer(p, place);
#pragma unroll
  for (int tile = 0; tile < Tile::kOfSlot; ++tile) {
    if (!writer.begin_tile(tile)) break;
#pragma unroll
    for (int n = 0; n < Tile::kN8; n += Window::kN8) {
      if (n * 8 >= writer.columns) break;
      writer.begin_window(n);
      put_sums<Tile>(window, sum, tile, n);
      meet();
      writer.write(shared_address(window), n);
      meet();
    }
  }
}

}  // namespace voxgrad::cuda
