// Warp-specialized weight gradient (wgrad) of channels-last tensors with TMA and wgmma. Halves are multiplied directly.
// float32 is converted to scaled halves (operand.h) and computed as one product, or as three products for
// Float32Precision::highest:
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
// the m64 tiles. Either the sums of at most two splits are added in shared memory, and the kernel stores the weight
// gradient; the CTAs of two splits form a cluster for this purpose (epilogue.cuh). Or persistent CTAs store partial
// sums in float32, and a second kernel adds the sums of all splits in a fixed order.
//
// If a tile extends beyond the end of y, the missing voxels of y are zeros, which are multiplied by elements of x. An
// infinity or NaN in x can therefore reach the gradient of a tap that does not read it.
#pragma once

#include "cuda/conv/sm90/fprop_dgrad/pipeline.cuh"
#include "cuda/conv/sm90/wgrad/epilogue.cuh"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_wgrad {

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

/// The parts of wgrad_kernel().
template <class Tile>
concept WgradKernelTile =
    WarpSpecializedTile<Tile> && ScheduledUnit<WorkUnit, Params> && KBlockMainloop<Mainloop<Tile>>;

/// Computes the weight gradient or its partial sums. Launch: a 1-D grid of persistent CTAs, at most one per SM; if
/// p.weight.data is not null, one CTA per work unit, in clusters of p.cluster. Dynamic shared memory: the ring of
/// stages, or SharedSums, which overwrites the ring.
template <WgradKernelTile Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) wgrad_kernel(const __grid_constant__ Params p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barriers[2 * kMaxWgradStages];
  __shared__ TapList<Tile> taps;
  static_assert(1024 + sizeof(barriers) + sizeof(taps) <= kWgradStaticBytes);
  const uint32_t at = warp_uniform(shared_address(dynamic_shared)), stages = (at + 1023) & ~1023u;
  const Pipeline pipeline(warp_uniform(shared_address(barriers)), p.stages);
  if (threadIdx.x == 0) {
    prefetch_tensor(p.x);
    prefetch_tensor(p.y);
    pipeline.init(Tile::kConsumers);
  }
  fence_barrier_init();
  __syncthreads();
  wait_for_previous_kernels();
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup < Tile::kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    Mainloop<Tile> mainloop(p, stages, pipeline);
    float* const sums = reinterpret_cast<float*>(dynamic_shared + (stages - at) / sizeof(uint4));
    for (int number = static_cast<int>(blockIdx.x); number < p.units; number += static_cast<int>(gridDim.x)) {
      const WorkUnit unit(p, number);
      typename Tile::Sums sum;
      mainloop.multiply(unit, warpgroup, sum);
      if (p.weight.data)
        SharedSums<Tile>(p, unit, sums).reduce(warpgroup, sum, taps);
      else
        store_partial<Tile>(p, unit, warpgroup, sum);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4);
    if (warp == 0 && is_leader()) produce<Tile>(p, stages, pipeline);
    if (warp == 1 && p.weight.data) list_taps(p, WorkUnit(p, static_cast<int>(blockIdx.x)), taps);
  }
#endif
}

}  // namespace voxgrad::cuda::implicit_wgrad
