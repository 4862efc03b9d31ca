// The weight gradient of convolutions on tensor cores by wgmma (sm_90a): the sum of weight_mma.cuh with its
// operands exchanged,
//
//   A: 64 rows x 8 words of voxels; 8 rows are one tap of 8 channels of x, so that 64 are a stack of 8 columns of 8,
//   B: 8 words of voxels x 8 * kN8 channels of y.
//
// wgmma takes K-major operands from shared memory, at multiples of 16 bytes. y is the same for all taps, and so are its
// slabs; taps shift x by single words, and so A is gathered from the halo of x into registers, 4 words a lane, as the
// other kernel gathers its B. Of the four slots of registers for A one is being filled, one is being rounded and two
// belong to products under way. Tiles are as many stacks high as their columns need: there is a body for each height.
//
// y's box: word k of channel c at k / 4 * quad_words(rows) + c * 4 + k % 4. Four words of a channel are 16 bytes on
// end, one copy where y's rows allow it, and four words more let a warp that stores 8 quads of a channel meet all
// banks. Copies are not rounded: x is rounded in registers, y in place by the thread that copied it. For float32
// accuracy x is split in registers instead, and y into two boxes, of high and of low parts.
#pragma once

#include "cuda/conv/weight_stage.cuh"
#include "cuda/conv/wgmma.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kN8_>
struct WeightWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kN8 = kN8_, kRows = 8 * kN8, kThreads = 128;
  static constexpr int kMostStacks = most_stacks(arithmetic_kind<Arithmetic>(), kRows);
  static constexpr int kQuadBytes = quad_words(kRows) * 4;
  /// Of y's box in one part, and in all of the arithmetic's.
  __device__ static int part_bytes(const WeightMma& p) { return p.box_words / 4 * kQuadBytes; }
  __device__ static int y_bytes(const WeightMma& p) { return Arithmetic::kParts * part_bytes(p); }
};

/// The compiler knows nothing of products under way: what follows shall read `c` after the await before. And zeros that
/// it knew would be written where ptxas does not want them, so that it would let no two products overlap.
template <int kN8>
__device__ void settle(Accumulator (&c)[kN8]) {
#pragma unroll
  for (int n = 0; n < kN8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
}

/// Nearest TF32 value once the hardware has truncated; what is not finite stays as it is.
template <class Arithmetic>
__device__ void round_fragment(uint32_t (&a)[4]) {
  if constexpr (Arithmetic::kRounds) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (fabsf(__uint_as_float(a[i])) < INFINITY) a[i] += 0x1000u;
  }
}

/// The order in which the products of some steps use the slots of A: cycles of four, then of three, so that it repeats
/// itself with at least two products between the uses of a slot.
template <int kStacks>
struct FragmentSlots {
  static constexpr int kSteps = kStacks == 1 ? 4 : kStacks == 2 || kStacks == 5 ? 2 : 1;
  static constexpr int kProducts = kStacks * kSteps, kInFours = kProducts % 3 * 4;
  static_assert(kProducts >= 3 && kInFours <= kProducts && kBoxWords / 2 / 8 % kSteps == 0);
  static constexpr int slot(int product) { return product < kInFours ? product % 4 : (product - kInFours) % 3; }
};

/// sum += a staged box; `columns`: this lane's bytes in x's halo, two columns of 8 for each stack.
template <class Tile, int kStacks>
__device__ void multiply_box(const WeightMma& p, Accumulator (&sum)[kStacks][Tile::kN8],
                             const uint32_t (&columns)[kStacks][2], uint32_t x, uint32_t y) {
  using Slots = FragmentSlots<kStacks>;
  uint32_t a[4][4];
  const auto load = [&](uint32_t(&to)[4], int stack, uint32_t at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = load_shared(columns[stack][i % 2] + at + i / 2 * 16);
  };
  uint64_t slab = slab_descriptor(y, Tile::kQuadBytes, 128);
  uint32_t at = x + p.step_offset[0];
  load(a[0], 0, at);
  for (int step = 0; step < p.steps; step += Slots::kSteps) {
#pragma unroll
    for (int i = 0; i < Slots::kProducts; ++i) {
      constexpr int kLast = Slots::kProducts - 1;
      const int stack = i % kStacks, slot = Slots::slot(i);
      if (stack == kStacks - 1) at = x + p.step_offset[(step + i / kStacks + 1) % (kBoxWords / 8)];
      await_products<1>();
      load(a[Slots::slot(i == kLast ? 0 : i + 1)], stack == kStacks - 1 ? 0 : stack + 1, at);
      round_fragment<typename Tile::Arithmetic>(a[slot]);
      begin_products();
      multiply_async<typename Tile::Arithmetic::Element>(sum[stack], a[slot], slab);
      commit_products();
      if (stack == kStacks - 1) slab += 2 * Tile::kQuadBytes >> 4;
    }
  }
  await_products<0>();
}

/// The same in three products of high and low parts. Tensor cores truncate what they add to an accumulator, so that a
/// stack's products of eight steps start from zero and are added in float32.
template <class Tile, int kStacks>
__device__ void multiply_box_parts(const WeightMma& p, Accumulator (&sum)[kStacks][Tile::kN8],
                                   const uint32_t (&columns)[kStacks][2], uint32_t x, uint32_t y) {
  constexpr int kSteps = 8;
  const uint64_t low_slab = Tile::part_bytes(p) >> 4;
  uint32_t word[2][4], high[2][4], low[2][4];
  Accumulator part[Tile::kN8] = {};
  settle(part);
#pragma unroll 1
  for (int first = 0; first < p.steps; first += kSteps) {
#pragma unroll
    for (int m = 0; m < kStacks; ++m) {
      const auto load = [&](uint32_t(&to)[4], int step) {
        const uint32_t at = x + p.step_offset[(first + step) % (kBoxWords / 8)];
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = load_shared(columns[m][i % 2] + at + i / 2 * 16);
      };
      uint64_t slab = slab_descriptor(y + first * 2 * Tile::kQuadBytes, Tile::kQuadBytes, 128);
      load(word[0], 0);
#pragma unroll 2
      for (int step = 0; step < kSteps; ++step, slab += 2 * Tile::kQuadBytes >> 4) {
        const int turn = step % 2;
        load(word[1 - turn], step + 1);
        await_products<1>();
#pragma unroll
        for (int i = 0; i < 4; ++i) Tf32x3::split(word[turn][i], high[turn][i], low[turn][i]);
        begin_products();
        multiply_async<float>(part, low[turn], slab, step > 0);
        multiply_async<float>(part, high[turn], slab + low_slab);
        multiply_async<float>(part, high[turn], slab);
        commit_products();
      }
      await_products<0>();
      settle(part);
#pragma unroll
      for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] += part[n][i];
    }
  }
}

template <class Tile, int kStacks>
__device__ void write_sums(const WeightMma& p, const WeightPlace& place, const Accumulator (&sum)[kStacks][Tile::kN8]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int64_t row_step = int64_t{p.columns} * 8;
  float* const out = p.partial +
                     ((place.range * p.groups + place.group) * p.out_channels + place.first_row + 2 * t) * row_step +
                     (p.of_class[place.number].column_begin + place.first_column) * 8 + g;
#pragma unroll
  for (int m = 0; m < kStacks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (m * 4 + warp) * 2 + half;
      if (column >= place.columns) continue;
#pragma unroll
      for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (n * 8 + 2 * t + j < place.rows) out[(n * 8 + j) * row_step + column * 8] = sum[m][n][2 * half + j];
    }
}

/// The block's tile, in so many stacks.
template <class Tile, int kStacks>
__device__ void sum_boxes(const WeightMma& p, const WeightPlace& place, uint32_t shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const BoxStage<Tile> stage(p, place, shared);
  const WeightClass& c = p.of_class[place.number];
  uint32_t columns[kStacks][2];
#pragma unroll
  for (int m = 0; m < kStacks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int column = (m * 4 + warp) * 2 + half;
      column = place.first_column + (column < place.columns ? column : 0);
      const int block = column / c.taps, tap = column - block * c.taps;
      columns[m][half] =
          (((block - place.first_block) * 8 + lane / 4) * p.pitch + lane % 4) * 4 + p.tap_offset[c.tap_begin + tap];
    }
  Accumulator sum[kStacks][Tile::kN8] = {};
#pragma unroll
  for (int m = 0; m < kStacks; ++m) settle(sum[m]);
  const auto finish = [&](uint32_t buffer) {
    await_copies<0>();
    stage.finish_y(p, buffer);
    publish_to_wgmma();
  };
  const uint32_t buffers[2] = {shared + p.table_bytes,
                               shared + p.table_bytes + (p.buffers == 2 ? p.buffer_words * 4 : 0)};
  const int64_t first = place.range * p.range;
  const int count = static_cast<int>(min(p.range, p.boxes - first)), ahead = p.buffers - 1;  // boxes
  BoxCursor cursor(p, first);
  for (int box = -ahead, turn = ahead; box < count; ++box, turn ^= 1) {
    const uint32_t buffer = turn ? buffers[1] : buffers[0], other = turn ? buffers[0] : buffers[1];
    if (ahead && box >= 0) finish(buffer);
    __syncthreads();
    if (box + ahead < count) {
      stage.box(p, cursor, other);
      commit_copies();
      cursor.next(p);
    }
    if (!ahead) {
      finish(buffer);
      __syncthreads();
    }
    if (box < 0) continue;
    if constexpr (Tile::Arithmetic::kParts == 1)
      multiply_box<Tile>(p, sum, columns, buffer + Tile::y_bytes(p), buffer);
    else
      multiply_box_parts<Tile>(p, sum, columns, buffer + Tile::y_bytes(p), buffer);
  }
#pragma unroll
  for (int m = 0; m < kStacks; ++m) settle(sum[m]);
  write_sums<Tile>(p, place, sum);
}

/// The least of the compiled heights that holds the tile.
template <class Tile, int kIndex = 0>
__device__ void sum_in_stacks(const WeightMma& p, const WeightPlace& place, uint32_t shared) {
  constexpr int kStacks = kWgmmaStacks[kIndex];
  if constexpr (kStacks >= Tile::kMostStacks) {
    sum_boxes<Tile, kStacks>(p, place, shared);
  } else {
    if (place.columns <= 8 * kStacks)
      sum_boxes<Tile, kStacks>(p, place, shared);
    else
      sum_in_stacks<Tile, kIndex + 1>(p, place, shared);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) weight_wgmma(const __grid_constant__ WeightMma p) {
#if !defined(__CUDA_ARCH__) || VOXGRAD_HAS_WGMMA
  extern __shared__ uint4 dynamic_shared[];
  sum_in_stacks<Tile>(p, WeightPlace(p, Tile::kRows), shared_address(dynamic_shared));
#endif
}

/// Queues the kernel; rows: of a tile, 8 to 64.
template <class Arithmetic>
void launch_weight_wgmma(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream);

template <class Tile>
void launch_wgmma_tile(const WeightMma& p, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  ++conv_instance<Tile, true, Tile::kRows>.launches;
  check_cuda(cudaFuncSetAttribute(weight_wgmma<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "conv weight gradient: shared memory");
  weight_wgmma<Tile><<<static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream>>>(p);
}

}  // namespace voxgrad::cuda
