// Epilogue of packed/fprop_dgrad.cuh. From registers, where 8 neighbours of a column lie in 8 lanes; or, where two
// phases lie side by side in memory, by way of buffers in shared memory, so that 32 neighbouring threads write what
// lies side by side in the result. Rows of it seldom begin at a multiple of 32 bytes, and each sector that is written
// in part is written again.
#pragma once

#include "cuda/conv/packed/producer.cuh"

namespace voxgrad::cuda {

/// How results of an m64 tile in two phases wait in shared memory: some columns of each, all rows of a column together.
template <class Tile>
struct EpilogueBuffer {
  static constexpr int kN8 = epilogue_buffer_columns(Tile::kColumns) / 8;  // times 8 columns at a time
  static constexpr int kPhasePitch = kEpiloguePhasePitch, kPitch = 2 * kEpiloguePhasePitch + 4;  // words
  static constexpr int kWords = epilogue_buffer_words(Tile::kColumns, Tile::kTilePhases);
};

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

/// Three numbers in fields of 10 bits: places in a tile, below 512, or limits to them, 511 more (Epilogue::limit),
/// whose uppermost bits compare.
struct PackedTriple {
  static_assert(64 * RowTiles::kMost < 512, "a place in a tile, and one more");
  static constexpr uint32_t kOnes = 1 | 1 << 10 | 1 << 20, kMost = 511, kGuards = 512 * kOnes;
  uint32_t bits = 0;
  __device__ void put(int axis, int value) { bits |= static_cast<uint32_t>(value) << 10 * axis; }
};

/// Where the result of a row is, the same in all tiles: bytes from the tile's corner; its place in the tile, or none.
struct alignas(8) EpilogueRow {
  uint32_t offset;
  PackedTriple place;
};

/// Lists the rows of one phase. By all threads.
template <class Tile>
__device__ void list_rows(const ImplicitGemmParams& p, EpilogueRow* rows) {
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kPhaseTiles * 64; i += Tile::kThreads) {
    const int tile = i / 64, row = i % 64;
    int index = p.rows.base[tile] + row / 8 * p.rows.group + row % 8, offset = 0;
    bool exists = index < p.rows.end[tile];
    PackedTriple place;
    for (int a = 2; a >= 0; --a) {
      const int in_tile = a == 2 ? p.line_positions.take(index) : a == 1 ? p.extent[1].take(index) : index;
      exists &= in_tile < p.tile[a].value;
      place.put(a, in_tile);
      offset += in_tile * p.axis[a].out_step * static_cast<int>(p.out_stride[a + 2]);
    }
    if (!exists) place.bits = PackedTriple::kMost * PackedTriple::kOnes;
    rows[i] = {static_cast<uint32_t>(offset) * static_cast<uint32_t>(sizeof(typename Tile::Arithmetic::Element)),
               place};
  }
}

/// Where the results of a tile are, for a lane of the warps that write them: out = sum + bias, behind the ReLU if there
/// is one, of the classes from place.phase on.
template <class Tile>
struct Epilogue {
  using Element = typename Tile::Arithmetic::Element;

  const ImplicitGemmParams& p;
  int warp, lane, columns;
  int64_t channel;     // the first
  char* corner;        // of the tile, there
  uint32_t first = 0;  // of the lane's phase: bytes from the corner
  PackedTriple limit;  // how far the tile goes: less the place of a row, its guards stand if the row is inside

  __device__ Epilogue(const ImplicitGemmParams& problem, const TileCoord& place)
      : p(problem),
        warp(warp_uniform(static_cast<int>(threadIdx.x) / 32 % Tile::kWarps)),
        lane(static_cast<int>(threadIdx.x) % 32),
        columns(p.out_channels - place.column_tile * Tile::kColumns),
        channel(int64_t{place.group} * p.out_channels + place.column_tile * Tile::kColumns) {
    int phase[3] = {}, from = 0;
    if (p.transposed) class_phases(p, place.phase + lane % Tile::kTilePhases, phase);
    int64_t at = place.sample * p.out_stride[0] + channel * p.out_stride[1];
    for (int a = 0; a < 3; ++a) {
      const AxisPhase& part = p.axis[a].phase[phase[a]];
      at += int64_t{place.q[a]} * p.axis[a].out_step * p.out_stride[a + 2];
      from += part.first * static_cast<int>(p.out_stride[a + 2]);
      limit.put(a, max(min(p.tile[a].value, part.count - place.q[a]), 0) + PackedTriple::kMost);
    }
    corner = static_cast<char*>(p.out) + at * static_cast<int>(sizeof(Element));
    first = static_cast<uint32_t>(from) * static_cast<uint32_t>(sizeof(Element));
    // Not to be computed anew for each buffer.
    asm volatile("" : "+l"(corner), "+r"(first), "+r"(limit.bits), "+r"(columns));
  }

  __device__ bool has(const EpilogueRow& row) const {
    return ((limit.bits - row.place.bits) & PackedTriple::kGuards) == PackedTriple::kGuards;
  }
  __device__ float bias(int column) const {
    return p.bias && column < columns
               ? static_cast<float>(static_cast<const Element*>(p.bias)[(channel + column) * p.bias_stride])
               : 0.0f;
  }
  /// Bytes from a column to the next.
  __device__ int64_t step() const { return p.out_stride[1] * static_cast<int>(sizeof(Element)); }
  __device__ Element result(float sum) const { return Element(max_or_nan(sum, p.relu ? 0.0f : -INFINITY)); }

  /// One phase: 8 rows of 4 columns at a time. `rows`: list_rows().
  __device__ void write(const EpilogueRow* rows, const Accumulator (&sum)[Tile::kTiles][Tile::kN8]) const {
    constexpr int kN8 = Tile::kColumns / 8, kFirst = Tile::kN8 - kN8, kRows = 2 * Tile::kTiles;
    const int pair = lane % 4 * 2;
    char* at[kRows];
    bool valid[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const EpilogueRow row = rows[i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4];
      valid[i] = has(row);
      at[i] = corner + (first + row.offset) + pair * step();
    }
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = n * 8 + pair + j;
        const float shift = bias(column);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          store_if(valid[i] && column < columns, at[i] + (n * 8 + j) * step(),
                   result(sum[i / 2][kFirst + n][i % 2 * 2 + j] + shift));
      }
  }

  /// Two phases, of an m64 tile whose rows are listed at `rows`: a buffer with the columns from 8 * n on. It is free
  /// when sync() was called.
  template <class Sync>
  __device__ void write(uint32_t buffer, const EpilogueRow* rows, int n, Sync sync) const {
    using Buffer = EpilogueBuffer<Tile>;
    constexpr int kTilePhases = Tile::kTilePhases, kReads = 2 * kTilePhases;  // of 32 rows
    constexpr int kColumns = Buffer::kN8 * 8 / Tile::kWarps;                  // of a warp
    buffer += 4 * (warp * Buffer::kPitch + lane % kTilePhases * Buffer::kPhasePitch + lane / kTilePhases);
    float x[kColumns][kReads];
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < kReads; ++i)
        x[column][i] = __uint_as_float(
            load_shared(buffer + 4 * (column * Tile::kWarps * Buffer::kPitch + i * (32 / kTilePhases))));
    uint32_t to[kReads];
    bool valid[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const EpilogueRow row = rows[(i * 32 + lane) / kTilePhases];
      to[i] = first + row.offset;
      valid[i] = has(row);
    }
    const float of_lane = bias(n * 8 + lane);
    float shift[kColumns];
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
      shift[column] = __shfl_sync(0xffffffff, of_lane, column * Tile::kWarps + warp);
    sync();
    char* base = corner + (n * 8 + warp) * step();
    constexpr int kMany = kColumns % 4 == 0 ? 4 : kColumns % 3 == 0 ? 3 : 2;  // columns whose addresses are held
#pragma unroll
    for (int many = 0; many < kColumns; many += kMany) {
      char* at[kMany][kReads];  // in registers of their own: a store holds its address for long
#pragma unroll
      for (int j = 0; j < kMany; ++j, base += Tile::kWarps * step()) {
        asm volatile("" : "+l"(base));  // one sum, not the sum of its parts anew for each address
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          at[j][i] = base + to[i];
          asm volatile("" : "+l"(at[j][i]));
        }
      }
#pragma unroll
      for (int j = 0; j < kMany; ++j) {
        const int column = many + j;
        if (n * 8 + column * Tile::kWarps + warp >= columns) break;
#pragma unroll
        for (int i = 0; i < kReads; ++i) store_if(valid[i], at[j][i], result(x[column][i] + shift[column]));
      }
    }
  }
};

/// Fills a buffer with columns from 8 * n on of an m64 tile's sums, in all phases.
template <class Tile>
__device__ void stage_sums(uint32_t* words, const Accumulator (&sum)[Tile::kTiles][Tile::kN8], int tile, int n) {
  using Buffer = EpilogueBuffer<Tile>;
  const int warp = static_cast<int>(threadIdx.x) / 32 % Tile::kWarps, lane = static_cast<int>(threadIdx.x) % 32;
  words += lane % 4 * 2 * Buffer::kPitch + warp * 16 + lane / 4;
#pragma unroll
  for (int tile_phase = 0; tile_phase < Tile::kTilePhases; ++tile_phase)
#pragma unroll
    for (int i = 0; i < Buffer::kN8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[(i * 8 + j % 2) * Buffer::kPitch + tile_phase * Buffer::kPhasePitch + j / 2 * 8] =
            __float_as_uint(sum[tile_phase * Tile::kPhaseTiles + tile][n + i][j]);
}

/// By consumer `consumer`. `buffer`: shared memory of its own, for two phases; `rows`: list_rows(). Of a sliding tile,
/// the plane of results that is complete.
template <class Tile>
__device__ void run_epilogue(const ImplicitGemmParams& p, const TileCoord& place, uint32_t* buffer,
                             const EpilogueRow* rows, int consumer, const Accumulator (&sum)[Tile::kTiles][Tile::kN8]) {
  const Epilogue<Tile> epilogue(p, place);
  if constexpr (Tile::kTilePhases == 1) {
    epilogue.write(rows, sum);
  } else {
    using Buffer = EpilogueBuffer<Tile>;
    constexpr int kBuffers = Tile::kN8 / Buffer::kN8;
    const auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(32 * Tile::kWarps) : "memory"); };
#pragma unroll 1
    for (int i = 0; i < p.rows.tiles * kBuffers; ++i) {
      const int tile = i / kBuffers, n = i % kBuffers * Buffer::kN8;
      if (n * 8 >= epilogue.columns) continue;
#pragma unroll
      for (int j = 0; j < Tile::kPhaseTiles * kBuffers; ++j)
        if (i == j) stage_sums<Tile>(buffer, sum, j / kBuffers, j % kBuffers * Buffer::kN8);
      sync();
      epilogue.write(shared_address(buffer), rows + tile * 64, n, sync);
    }
  }
}

}  // namespace voxgrad::cuda
