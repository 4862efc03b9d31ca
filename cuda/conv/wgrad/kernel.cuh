// Persistent, warp-specialised weight gradient (wgrad) of channels-last halves, on TMA and wgmma:
//
//   D[tap, input channel][output channel] = sum over voxels of x[voxel * stride + tap][input channel] * y[voxel][output
//   channel]
//
// y is the output's gradient. K are the voxels of a tile of y, whose boxes in shared memory hold a voxel a row: both
// operands are M- or N-major as they lie, and a tap is, again, a shift of where x begins. An m64 tile is one tap of 64
// input channels or two taps of 32, as far apart as they are. A CTA takes a set of taps by 64 (or 32) output channels
// and a part of the voxels (split-K); one producer warp loads both operands, two consumer warpgroups share the m64
// tiles. Partial sums are float32 and added up by a second kernel in a fixed order.
//
// Voxels of a tile beyond y's end are zeros of y, multiplied by what x holds there: an infinity or NaN of x can reach
// taps that no voxel reads it with.
#pragma once

#include "cuda/conv/fprop_dgrad/pipeline.cuh"
#include "cuda/conv/wgrad/params.h"

namespace voxgrad::cuda::implicit_wgrad {

/// kChunk input channels are a row of x, kN output channels one of y: 32 or 64. kSlots m64 tiles a warpgroup.
template <class Element_, int kChunk_, int kN_, int kSlots_>
struct CtaTile {
  using Element = Element_;
  static constexpr int kChunk = kChunk_, kN = kN_, kSlots = kSlots_, kN8 = kN / 8;
  static constexpr int kTapsOfSlot = 64 / kChunk;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisters = 232, kProducerRegisters = 40;
};

/// Taps, channels and voxels of a CTA at a time.
struct WorkUnit {
  int set, column, channel_tile, group, split, first_tile, last_tile;

  __device__ WorkUnit(const Params& p, int number) {
    set = p.sets.take(number);
    column = p.columns.take(number);
    channel_tile = p.channel_tiles.take(number);
    group = p.groups.take(number);
    split = number;
    first_tile = split * p.tiles_of_split;
    last_tile = min(first_tile + p.tiles_of_split, p.all_tiles);
  }
};

template <class Tile>
__device__ void produce(const Params& p, uint32_t stages, Pipeline pipeline) {
  for (int number = static_cast<int>(blockIdx.x); number < p.units; number += static_cast<int>(gridDim.x)) {
    const WorkUnit unit(p, number);
    const TapSet& set = p.set[unit.set];
    const int y_channel = unit.group * p.out_channels + unit.column * Tile::kN;
    const int x_channel = unit.group * p.in_channels + unit.channel_tile * p.chunks * Tile::kChunk;
    const uint32_t bytes = set.boxes * p.box_rows * (2 * Tile::kChunk) + p.y_rows * (2 * Tile::kN);
    for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
      int left = tile, at[3];
      for (int a = 2; a >= 0; --a) at[a] = p.tiles[2 - a].take(left) * p.tile[a + 1];
      const int sample = left * p.tile[0];
      pipeline.acquire();
      pipeline.commit(bytes);
      const uint32_t to = stages + pipeline.stage() * p.stage_bytes;
      for (int i = 0; i < set.boxes; ++i) {
        const Box& box = p.box[set.first_box + i];
        tma_load(to + i * p.box_bytes, p.x, x_channel + box.chunk * Tile::kChunk, at[2] * p.in_step[2] + box.offset[2],
                 at[1] * p.in_step[1] + box.offset[1], at[0] * p.in_step[0] + box.offset[0], sample,
                 pipeline.barrier());
      }
      tma_load(to + p.boxes_bytes, p.y, y_channel, at[2], at[1], at[0], sample, pipeline.barrier());
      pipeline.next();
    }
  }
}

/// What wgmma is told of an operand whose rows, of one voxel, hold `columns` (32 or 64) values of M or N.
__device__ inline uint64_t voxel_rows(uint32_t shared, int columns, int voxels_apart, int blocks_apart) {
  const uint64_t code = columns == 64 ? 1 : 2;
  return (shared & 0x3ffff) >> 4 | static_cast<uint64_t>(blocks_apart & 0x3fff) << 16 |
         static_cast<uint64_t>(voxels_apart >> 4) << 32 | code << 62;
}

template <class Tile>
struct Mainloop {
  static constexpr int kSlots = Tile::kSlots;
  const Params& p;
  const uint32_t stages;
  Pipeline pipeline;
  const bool first_warp = warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4) == 0;

  __device__ Mainloop(const Params& params, uint32_t at, const Pipeline& ring)
      : p(params), stages(at), pipeline(ring) {}

  /// Multiplies all tiles of a unit.
  __device__ void multiply(const WorkUnit& unit, int warpgroup, Accumulator (&sum)[kSlots][Tile::kN8]) {
    const TapSet& set = p.set[unit.set];
    uint64_t slot[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const Slot& of = set.slot[warpgroup][s];
      slot[s] = advance_slab(voxel_rows(stages, Tile::kChunk, p.x_pitch, warp_uniform(static_cast<int>(of.apart))),
                             warp_uniform(of.start));
    }
    const bool releases = first_warp && is_leader();
    int last = -1;
    bool fresh = true;
    for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
      pipeline.wait();
      const int stage = pipeline.stage() * p.stage_bytes;
      uint64_t b = voxel_rows(stages + stage + p.boxes_bytes, Tile::kN, 8 * 2 * Tile::kN, 0);
      int step = 0;
      do {
        const int at = stage / 16 + p.step_at[step];
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < kSlots; ++s)
          multiply_async<typename Tile::Element, true>(sum[s], advance_slab(slot[s], at), b, !fresh);
        fresh = false;
        b = advance_slab(b, 16 * 2 * Tile::kN / 16);
        if (step > 0) continue;
        warpgroup_commit();
        warpgroup_wait<1>();  // those of the tile before: its stage is filled anew while this one is multiplied
        if (releases && last >= 0) pipeline.release(last);
      } while (++step < p.steps);
      warpgroup_commit();
      last = pipeline.stage();
      pipeline.next();
    }
    warpgroup_wait<0>();
    if (releases && last >= 0) pipeline.release(last);
  }
};

/// Columns are output channels, rows (tap, input channel): 8 lanes store 32 bytes of input channels.
template <class Tile>
__device__ void store_partial(const Params& p, const WorkUnit& unit, int warpgroup,
                              const Accumulator (&sum)[Tile::kSlots][Tile::kN8]) {
  const TapSet& set = p.set[unit.set];
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = unit.column * Tile::kN + lane % 4 * 2;
  float* const out = p.partial + unit.split * p.split_stride +
                     (int64_t{unit.group} * p.out_channels + column) * p.taps * p.in_channels;
  const int of_column = p.taps * p.in_channels;
#pragma unroll
  for (int s = 0; s < Tile::kSlots; ++s) {
    if (s >= set.slots[warpgroup]) break;
    const Slot& slot = set.slot[warpgroup][s];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4, tap = slot.tap[row / Tile::kChunk];
      const int channel = (unit.channel_tile * p.chunks + slot.chunk) * Tile::kChunk + row % Tile::kChunk;
      const bool exists = tap != Slot::kNone && channel < p.in_channels;
      float* to = out + tap * p.in_channels + channel;
#pragma unroll
      for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (exists && column + n * 8 + i < p.out_channels)
            to[static_cast<int64_t>(n * 8 + i) * of_column] = sum[s][n][half * 2 + i];
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) wgrad_kernel(const __grid_constant__ Params p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barriers[2 * kMaxStages];
  const uint32_t stages = (warp_uniform(shared_address(dynamic_shared)) + 1023) & ~1023u;
  const Pipeline pipeline(warp_uniform(shared_address(barriers)), p.stages);
  if (threadIdx.x == 0) pipeline.init(Tile::kConsumers);
  fence_barrier_init();
  __syncthreads();
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup < Tile::kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    Mainloop<Tile> mainloop(p, stages, pipeline);
    for (int number = static_cast<int>(blockIdx.x); number < p.units; number += static_cast<int>(gridDim.x)) {
      const WorkUnit unit(p, number);
      Accumulator sum[Tile::kSlots][Tile::kN8];
      mainloop.multiply(unit, warpgroup, sum);
      store_partial<Tile>(p, unit, warpgroup, sum);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    if (warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4) == 0 && is_leader()) produce<Tile>(p, stages, pipeline);
  }
#endif
}

}  // namespace voxgrad::cuda::implicit_wgrad
