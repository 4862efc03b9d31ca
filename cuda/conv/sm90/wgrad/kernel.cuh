// Persistent, warp-specialized weight gradient (wgrad) of channels-last tensors with TMA and wgmma. Halves are
// multiplied directly. float32 is converted to scaled halves (operand.h) and computed as one product, or as three
// products for Float32Precision::highest:
//
//   D[tap, input channel][output channel] =
//       sum over voxels of x[voxel * stride + tap][input channel] * y[voxel][output channel]
//
// y is the gradient of the output. K runs over the voxels of a tile of y. The boxes in shared memory have one row per
// voxel, so that A is M-major and B is N-major without a transposition. A tap is a shift of the start address of x. An
// m64 tile is one tap of 64 input channels, or two taps of 32 input channels, whose distance is part of the descriptor.
// With few output channels, a tile slides along the depth: three consecutive planes of y, which correspond to three
// taps along the depth, are blocks of columns of one product. A CTA computes a set of taps by 64 (or 32) output
// channels for a part of the voxels (split-K). One producer warp loads both operands, and two consumer warpgroups share
// the m64 tiles. Partial sums are float32, and a second kernel adds them in a fixed order.
//
// If a tile extends beyond the end of y, the missing voxels of y are zeros, which are multiplied by elements of x. An
// infinity or NaN in x can therefore reach the gradient of a tap that does not read it.
#pragma once

#include "cuda/conv/sm90/fprop_dgrad/pipeline.cuh"
#include "cuda/conv/sm90/wgrad/params.h"

namespace voxgrad::cuda::implicit_wgrad {

/// A CTA tile. A row of x has kChunk input channels and a row of y has kN output channels, 32 or 64 each. A warpgroup
/// has kMTiles m64 tiles. A sliding tile has kSlide planes of y; the first plane belongs to the last tap along the
/// depth. kPromotes: the sums over 64 voxels are added in float, because the accumulators of tensor cores truncate.
template <class Element_, int kChunk_, int kN_, int kMTiles_, int kSlide_, bool kPromotes_>
struct CtaTile {
  using Element = Element_;
  static constexpr int kChunk = kChunk_, kN = kN_, kMTiles = kMTiles_, kSlide = kSlide_, kN8 = kN / 8;
  using Sums = Accumulator[kMTiles][kN8 * kSlide];
  static constexpr int kTapsOfSlot = 64 / kChunk;
  static constexpr bool kPromotes = kPromotes_;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisters = 232, kProducerRegisters = 40;
};

/// The taps, channels and voxels that a CTA computes at a time.
struct WorkUnit {
  int set;           // index of the set of taps
  int column;        // index of the tile along the output channels
  int channel_tile;  // index of the tile along the input channels
  int group;
  int split;
  int first_tile;  // first tile of y
  int last_tile;   // tile of y after the last tile of the unit

  __device__ WorkUnit(const Params& p, int number) {
    set = p.sets.take_digit(number);
    column = p.columns.take_digit(number);
    channel_tile = p.channel_tiles.take_digit(number);
    group = p.groups.take_digit(number);
    split = number;
    first_tile = split * p.tiles_of_split;
    last_tile = min(first_tile + p.tiles_of_split, p.all_tiles);
  }
};

/// Loads the boxes of x and y. One thread runs this function.
template <class Tile>
__device__ void produce(const Params& p, uint32_t stages, Pipeline pipeline) {
  for (int number = static_cast<int>(blockIdx.x); number < p.units; number += static_cast<int>(gridDim.x)) {
    const WorkUnit unit(p, number);
    const TapSet& set = p.set[unit.set];
    const int y_channel = unit.group * p.y_pitch_channels + unit.column * Tile::kN;
    const int x_channel = unit.group * p.x_pitch_channels + unit.channel_tile * p.chunks * Tile::kChunk;
    const uint32_t bytes = set.boxes * p.box_rows * (2 * Tile::kChunk) + p.y_rows * (2 * Tile::kN);
    for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
      int left = tile, at[3];
      for (int a = 2; a >= 0; --a) at[a] = p.tiles[2 - a].take_digit(left) * p.tile[a + 1];
      const int sample = p.tiles[3].take_digit(left) * p.tile[0];
      const int x_sample = sample + p.parts[left].x * p.samples, y_sample = sample + p.parts[left].y * p.samples;
      pipeline.acquire();
      pipeline.commit(bytes);
      const uint32_t to = stages + pipeline.stage() * p.stage_bytes;
      for (int i = 0; i < set.boxes; ++i) {
        const Box& box = p.box[set.first_box + i];
        tma_load(to + i * p.box_bytes, p.x, x_channel + box.chunk * Tile::kChunk, at[2] * p.in_step[2] + box.offset[2],
                 at[1] * p.in_step[1] + box.offset[1], at[0] * p.in_step[0] + box.offset[0], x_sample,
                 pipeline.barrier());
      }
      tma_load(to + p.boxes_bytes, p.y, y_channel, at[2], at[1], at[0] + p.y_first, y_sample, pipeline.barrier());
      pipeline.next();
    }
  }
}

/// Returns the wgmma descriptor of an operand with one row per voxel. A row contains `columns` (32 or 64) elements
/// along M or N. `voxels_apart` is the distance in bytes between the two groups of 8 voxels. `blocks_apart` is the
/// distance between blocks of `columns` elements, in units of 16 bytes.
__device__ inline uint64_t voxel_rows(uint32_t shared, int columns, int voxels_apart, int blocks_apart) {
  const uint64_t code = columns == 64 ? 1 : 2;
  return (shared & 0x3ffff) >> 4 | static_cast<uint64_t>(blocks_apart & 0x3fff) << 16 |
         static_cast<uint64_t>(voxels_apart >> 4) << 32 | code << 62;
}

/// Multiplies the tiles of a work unit.
template <class Tile>
struct Mainloop {
  static constexpr int kMTiles = Tile::kMTiles;
  const Params& p;
  const uint32_t stages;
  Pipeline pipeline;
  const bool first_warp = warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4) == 0;

  __device__ Mainloop(const Params& params, uint32_t at, const Pipeline& ring)
      : p(params), stages(at), pipeline(ring) {}

  /// Computes the sums of a unit over all its tiles.
  __device__ void multiply(const WorkUnit& unit, int warpgroup, typename Tile::Sums& sum) {
    uint64_t m_tile[kMTiles];
    find_m_tiles(p.set[unit.set], warpgroup, m_tile);
    if (p.set[unit.set].m_tiles[warpgroup] < kMTiles)
      multiply_m_tiles<kMTiles - 1>(unit, m_tile, sum);
    else
      multiply_m_tiles<kMTiles>(unit, m_tile, sum);
  }

 private:
  template <int kUsed>
  __device__ void multiply_m_tiles(const WorkUnit& unit, const uint64_t (&m_tile)[kMTiles], typename Tile::Sums& sum) {
    if constexpr (Tile::kPromotes)
      multiply_promoted<kUsed>(unit, m_tile, sum);
    else
      multiply_plain<kUsed>(unit, m_tile, sum);
  }
  __device__ void find_m_tiles(const TapSet& set, int warpgroup, uint64_t (&m_tile)[kMTiles]) const {
#pragma unroll
    for (int s = 0; s < kMTiles; ++s) {
      const MTile& of = set.m_tile[warpgroup][s];
      m_tile[s] = advance_slab(voxel_rows(stages, Tile::kChunk, p.x_pitch, warp_uniform(static_cast<int>(of.apart))),
                               warp_uniform(of.start));
    }
  }
  /// Returns the descriptor of y in a stage.
  __device__ uint64_t operand_b(int stage) const {
    return voxel_rows(stages + stage + p.boxes_bytes, Tile::kN, 8 * 2 * Tile::kN, p.y_plane / 16);
  }
  static constexpr int kStepB = 16 * 2 * Tile::kN / 16;  // from one step of 16 voxels to the next, in units of 16 bytes

  /// Computes products over 64 voxels for one m64 tile after another. While the products of a tile run, the products of
  /// the previous tile are added to the sums.
  template <int kUsed>
  __device__ void multiply_promoted(const WorkUnit& unit, const uint64_t (&m_tile)[kMTiles], typename Tile::Sums& sum) {
    const bool releases = first_warp && is_leader();
    static_assert(Tile::kSlide == 1);
    Accumulator product[2][Tile::kN8];
#pragma unroll
    for (auto& of_tile : sum)
#pragma unroll
      for (Accumulator& x : of_tile)
#pragma unroll
        for (float& value : x) value = 0;
    for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
      pipeline.wait();
      const int stage = pipeline.stage() * p.stage_bytes;
      uint64_t b = operand_b(stage);
      for (int step = 0; step < p.steps; step += 4, b = advance_slab(b, 4 * kStepB)) {
#pragma unroll
        for (int s = 0; s < kUsed; ++s) {
          warpgroup_arrive();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply_async<typename Tile::Element, true>(product[s % 2],
                                                         advance_slab(m_tile[s], stage / 16 + p.step_at[step + k]),
                                                         advance_slab(b, k * kStepB), k > 0);
          warpgroup_commit();
          warpgroup_wait<1>();
          if (s > 0) add(sum[s - 1], product[(s + 1) % 2]);
        }
        warpgroup_wait<0>();
        add(sum[kUsed - 1], product[(kUsed - 1) % 2]);
      }
      if (releases) pipeline.release(pipeline.stage());
      pipeline.next();
    }
  }
  __device__ static void add(Accumulator (&sum)[Tile::kN8], const Accumulator (&product)[Tile::kN8]) {
#pragma unroll
    for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] += product[n][i];
  }

  template <int kUsed>
  __device__ void multiply_plain(const WorkUnit& unit, const uint64_t (&m_tile)[kMTiles], typename Tile::Sums& sum) {
    const bool releases = first_warp && is_leader();
    int last = -1;  // stage of the previous products, which read the stage until the next products begin
    const auto release_last = [&] {
      if (releases && last >= 0) pipeline.release(last);
      last = -1;
    };
    bool fresh = true;
    for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
      pipeline.wait();
      const int stage = pipeline.stage() * p.stage_bytes;
      uint64_t b = operand_b(stage);
      int step = 0;
      do {
        const int at = stage / 16 + p.step_at[step];
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < kUsed; ++s)
          multiply_async<typename Tile::Element, true>(sum[s], advance_slab(m_tile[s], at), b, !fresh);
        warpgroup_commit();
        warpgroup_wait<1>();  // until the products of the previous step are done
        fresh = false;
        b = advance_slab(b, kStepB);
        release_last();
      } while (++step < p.steps);
      last = pipeline.stage();
      pipeline.next();
    }
    warpgroup_wait<0>();
    release_last();
  }
};

/// Stores the partial sums, or the results if p.result is not null. Rows of the sums are (tap, input channel), and
/// columns are output channels. 8 lanes store neighboring input channels.
template <class Tile>
__device__ void store_sums(const Params& p, const WorkUnit& unit, int warpgroup, const typename Tile::Sums& sum) {
  using T = typename Tile::Element;
  const TapSet& set = p.set[unit.set];
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = unit.column * Tile::kN + lane % 4 * 2, of_y = unit.group * p.out_channels + column;
  const int64_t first = unit.split * p.split_stride + of_y * p.out_stride;
#pragma unroll
  for (int s = 0; s < Tile::kMTiles; ++s) {
    if (s >= set.m_tiles[warpgroup]) break;
    const MTile& m_tile = set.m_tile[warpgroup][s];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4, tap = m_tile.tap[row / Tile::kChunk];
      const int channel = (unit.channel_tile * p.chunks + m_tile.chunk) * Tile::kChunk + row % Tile::kChunk;
      const bool exists = tap != MTile::kNone && channel < p.in_channels;
      const int64_t to = first + tap * p.in_channels + channel;
#pragma unroll
      for (int n = 0; n < Tile::kN8 * Tile::kSlide; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = sum[s][n][half * 2 + i];
          const int in_block = n % Tile::kN8 * 8 + i, plane = Tile::kSlide - 1 - n / Tile::kN8;
          const int64_t at = to + in_block * p.out_stride + plane * p.plane_taps * p.in_channels;
          if (!exists || column + in_block >= p.out_channels) continue;
          if (p.result)
            static_cast<T*>(p.result)[at] = T(value);
          else
            p.partial[at] = value;
        }
    }
  }
}

/// Computes the weight gradient or its partial sums. Launch: a 1-D grid of persistent CTAs, at most one per SM. Dynamic
/// shared memory: the ring of stages.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) wgrad_kernel(const __grid_constant__ Params p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barriers[2 * WgradPlan::kMaxStages];
  const uint32_t stages = (warp_uniform(shared_address(dynamic_shared)) + 1023) & ~1023u;
  const Pipeline pipeline(warp_uniform(shared_address(barriers)), p.stages);
  if (threadIdx.x == 0) {
    prefetch_tensor(p.x);
    prefetch_tensor(p.y);
    pipeline.init(Tile::kConsumers);
  }
  fence_barrier_init();
  __syncthreads();
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup < Tile::kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    Mainloop<Tile> mainloop(p, stages, pipeline);
    for (int number = static_cast<int>(blockIdx.x); number < p.units; number += static_cast<int>(gridDim.x)) {
      const WorkUnit unit(p, number);
      typename Tile::Sums sum;
      mainloop.multiply(unit, warpgroup, sum);
      store_sums<Tile>(p, unit, warpgroup, sum);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    if (warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4) == 0 && is_leader()) produce<Tile>(p, stages, pipeline);
  }
#endif
}

}  // namespace voxgrad::cuda::implicit_wgrad
