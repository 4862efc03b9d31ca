// Fprop and dgrad on wgmma of inputs and weights that were packed before: a persistent, warp-specialised ping-pong
// implicit GEMM with a dynamic tile scheduler.
//
//   A: m64 tiles of voxels x 8 words of input channels (a k-block),
//   B: a k-block x kColumns output channels for each tap.
//
// The input is packed (pack.cu): rounded, and 4 words of channels of a voxel together. Of that the halo of the CTA tile
// is staged, in two planes of 16 bytes a voxel: core matrices. 8 neighbours are one wherever they begin, so that a tap
// is, as in mma_sync/fprop_dgrad.cuh, nothing but an offset. The rows of an m64 tile are eights of neighbours at equal
// distances (RowTiles): 64 consecutive positions of the halo, line after line, where the ends of lines belong to no
// result; or 8 lines of 8.
//
// The rows are the results of the tile; or (dgrad, kTilePhases) the same voxels of the input's lattice in each of two
// phases, which read the same inputs and lie side by side in the result.
//
// Or, of few columns, the tile slides along depth (kSlide): a CTA walks the planes of its tile one after the other; a
// plane of inputs is multiplied by the taps of all depths at once, which are columns of one product, and so is read
// once for three of them. Its sums belong to three neighbouring planes of results; with each plane of inputs the last
// of them is complete and is written (SlidingSums).
//
// There is one CTA on each SM. Two consumer warpgroups take turns: while one multiplies a tile, the other runs the
// epilogue of the tile before (epilogue.cuh). They have most of the registers. Three producer warps (producer.cuh) go
// on to the next tile while this one is multiplied: the tensor cores wait for neither beginning nor end of a tile.
//
// What bounds it: a product reads 2 KiB of A and 256 bytes for each 8 columns of B, of which shared memory gives 128
// bytes a clock. From 64 columns on that hides behind the multiplication; 48 columns reach 86 %, 32: 67 %, 24: 55 %.
#pragma once

#include "cuda/conv/common/wgmma.cuh"
#include "cuda/conv/packed/epilogue.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kColumns_, int kTilePhases_, int kSlide_>
struct WgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kColumns = kColumns_, kTilePhases = kTilePhases_, kSlide = kSlide_;
  static constexpr int kProductColumns = kColumns * kSlide, kN8 = kProductColumns / 8;
  static constexpr int kWarps = 4, kConsumers = kConsumerWarpgroups;  // warps of one
  static constexpr int kProducers = 128;                              // threads, of which three warps work
  static constexpr int kScheduledWarps = kWarps * kConsumers + 2;     // that read what is scheduled
  static constexpr int kThreads = 32 * kWarps * kConsumers + kProducers;
  static constexpr bool kThree = Arithmetic::kParts > 1;
  static constexpr int kTiles = m64_tiles(kProductColumns, kThree, kTilePhases, kSlide);  // of 64 rows
  static constexpr int kPhaseTiles = kTiles / kTilePhases;
  static constexpr int kSlab = kProductColumns * kKWords;  // words of high or low of one tap of B
  static constexpr int kTapWords = kSlab * Arithmetic::kParts;
  static constexpr int kStageTaps = weight_stage_taps(kProductColumns, kThree, kSlide);
  static constexpr int kStages = weight_stages(kProductColumns, kThree, kSlide);
  static constexpr int kRing = kStages * kStageTaps * kTapWords;   // words
  static constexpr int kRegisters = 232, kProducerRegisters = 40;  // of 168 in the mean
  static_assert(kRegisters * kConsumers * kWarps * 32 + kProducerRegisters * kProducers <= launch_registers(kThreads));

  /// Of the halo, high and low.
  VG_HOST_DEVICE static int input_stage_words(const ImplicitGemmParams& p) {
    return p.stage_k_blocks * p.rows.positions * kKWords * Arithmetic::kParts;
  }
  /// Where in shared memory the epilogue's buffers are; where it is listed which results these are.
  VG_HOST_DEVICE static int epilogue_at(const ImplicitGemmParams& p) {
    return kRing + p.input_stages * input_stage_words(p);
  }
  VG_HOST_DEVICE static int rows_at(const ImplicitGemmParams& p) {
    return epilogue_at(p) + kConsumers * EpilogueBuffer<WgmmaTile>::kWords;
  }
  static size_t shared_bytes(const ImplicitGemmParams& p) {
    return sizeof(uint32_t) * rows_at(p) + kPhaseTiles * 64 * sizeof(EpilogueRow);
  }
};

/// The accumulators of a CTA tile, and how a stage of B is multiplied into them.
template <class Tile>
struct FpropDgradMainloop {
  using Arithmetic = typename Tile::Arithmetic;
  static constexpr int kTiles = Tile::kTiles, kN8 = Tile::kN8, kTilePhases = Tile::kTilePhases,
                       kPhaseTiles = Tile::kPhaseTiles;
  // Tensor cores truncate what they add: three products, whose errors shall not be seen, go to a sum of their own for
  // the length of some stages (64 words at most).
  static constexpr bool kSeparate = Tile::kThree;
  static constexpr int kSeparateStages = 8 / Tile::kStageTaps;

  Accumulator sum[kTiles][kN8], stage_sum[kSeparate ? kTiles : 1][kN8];
  bool fresh[kTilePhases];  // the first product has still to come: of those that go to stage_sum, if that is used
  int stages = 0;           // in stage_sum

  __device__ FpropDgradMainloop() {
    for (int tile_phase = 0; tile_phase < kTilePhases; ++tile_phase) fresh[tile_phase] = true;
    if constexpr (kSeparate)
      for (int tile = 0; tile < kTiles; ++tile)
        for (int n = 0; n < kN8; ++n)
          for (int i = 0; i < 4; ++i) sum[tile][n][i] = 0;
  }

  /// `count` taps from `tap` on, of a phase of the tile, whose slabs begin at b, of the k-blocks whose halo is at a. In
  /// the end products of this stage may be under way, but none of the stages before.
  __device__ void multiply(const ImplicitGemmParams& p, int tile_phase, int tap, int count, uint64_t a, uint64_t b) {
    multiply_taps<Tile::kStageTaps>(p, tile_phase, tap, count, a, b);
    warpgroup_wait<1>();
  }
  /// Adds up what is in stage_sum, of enough stages or of the last.
  __device__ void end_stage(bool last) {
    if constexpr (kSeparate) {
      if (++stages < kSeparateStages && !last) return;
      warpgroup_wait<0>();
      stages = 0;
#pragma unroll
      for (int tile_phase = 0; tile_phase < kTilePhases; ++tile_phase) {
        if (!fresh[tile_phase])
#pragma unroll
          for (int tile = tile_phase * kPhaseTiles; tile < (tile_phase + 1) * kPhaseTiles; ++tile)
#pragma unroll
            for (int n = 0; n < kN8; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[tile][n][i] += stage_sum[tile][n][i];
        fresh[tile_phase] = true;
      }
    }
  }

 private:
  static constexpr int kTap = Tile::kTapWords / 4;  // of B, in 16 bytes

  /// `count` taps from `tap` on, at most kMost, in pieces of powers of two: without loops, so that what a tap wants
  /// beside its products is done while those of others run. Most stages are one piece.
  template <int kMost>
  __device__ void multiply_taps(const ImplicitGemmParams& p, int tile_phase, int tap, int count, uint64_t a,
                                uint64_t b) {
    if (count >= kMost) {
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const uint64_t at = advance_slab(a, p.tap_offset[tap + i]);
#pragma unroll
        for (int tile = 0; tile < kPhaseTiles; ++tile)
          multiply(tile_phase, tile_phase * kPhaseTiles + tile, p, advance_slab(at, p.rows.base[tile]),
                   advance_slab(b, i * kTap));
        fresh[tile_phase] = false;
      }
      warpgroup_commit();
      tap += kMost;
      count -= kMost;
      b = advance_slab(b, kMost * kTap);
    }
    if constexpr (kMost > 1)
      if (count > 0) multiply_taps<kMost / 2>(p, tile_phase, tap, count, a, b);
  }
  __device__ void multiply(int tile_phase, int tile, const ImplicitGemmParams& p, uint64_t a, uint64_t b) {
    using Element = typename Arithmetic::Element;
    if constexpr (kSeparate) {
      const uint64_t low_a = advance_slab(a, 2 * p.rows.positions), low_b = advance_slab(b, Tile::kSlab / 4);
      multiply_async<Element>(stage_sum[tile], low_a, b, !fresh[tile_phase]);
      multiply_async<Element>(stage_sum[tile], a, low_b);
      multiply_async<Element>(stage_sum[tile], a, b);
    } else {
      multiply_async<Element>(sum[tile], a, b, !fresh[tile_phase]);
    }
  }
};

/// Of a sliding tile: the sums of planes of results that are not complete, the next first. Not in the accumulators:
/// those that a product finds there must come from products, or the assembler lets each wait for the one before.
template <class Tile>
struct SlidingSums {
  static constexpr int kN8 = Tile::kColumns / 8;
  static constexpr int kPlanes = Tile::kSlide > 1 ? Tile::kSlide - 1 : 1;  // unused where nothing slides

  Accumulator sum[kPlanes][Tile::kTiles][kN8];

  /// From `products`, the sums of a plane of inputs, to those of the plane of results that they complete, in the last
  /// columns. If `begins`, nothing came before.
  __device__ void add_to(Accumulator (&products)[Tile::kTiles][Tile::kN8], bool begins) {
    each([&](int tile, int n, int i) {
      float before = begins ? 0.0f : sum[0][tile][n][i];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const float later = begins || plane + 1 == kPlanes ? 0.0f : sum[plane + 1][tile][n][i];
        const float both = products[tile][(kPlanes - plane) * kN8 + n][i] + before;
        if (plane == 0)
          products[tile][kPlanes * kN8 + n][i] = both;
        else
          sum[plane - 1][tile][n][i] = both;
        before = later;
      }
      sum[kPlanes - 1][tile][n][i] = products[tile][n][i];
    });
  }
  /// The same where there are no more inputs.
  __device__ void move_on(Accumulator (&products)[Tile::kTiles][Tile::kN8]) {
    each([&](int tile, int n, int i) {
      products[tile][kPlanes * kN8 + n][i] = sum[0][tile][n][i];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        sum[plane][tile][n][i] = plane + 1 < kPlanes ? sum[plane + 1][tile][n][i] : 0.0f;
    });
  }

 private:
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(tile, n, i);
  }
};

/// Where a consumer is in the pipelines.
struct OperandStages {
  PipelineState a, b;
};

/// The mainloop: multiplies all stages of a CTA tile. By four warps.
template <class Tile>
__device__ void consume_tile(const ImplicitGemmParams& p, const TileScheduler<Tile>& work, uint32_t shared,
                             OperandStages at, FpropDgradBarriers<Tile> barriers, FpropDgradMainloop<Tile>& products) {
  constexpr int kStages = Tile::kStages, kStageTaps = Tile::kStageTaps;
  const uint32_t words = shared + 4 * Tile::kRing;
  const bool leads = is_leader();
  int stage = 0, number = work.first_class, of_class = 0, last_a = 0, last_b = 0;
  for (int input_stage = 0; input_stage < work.input_stages; ++input_stage) {
    wait_barrier(barriers.full_a(at.a.stage), at.a.round);
    const uint64_t a = slab_descriptor(words + at.a.stage * (4 * Tile::input_stage_words(p)),
                                       p.rows.positions * kVoxelBytes, p.rows.group * kVoxelBytes);
    bool first_stage = true;
#pragma unroll
    for (int tile_phase = 0; tile_phase < Tile::kTilePhases; ++tile_phase) {
      int tap = p.class_begin[number + tile_phase];
      for (int left = p.class_begin[number + tile_phase + 1] - tap; left > 0; left -= kStageTaps, tap += kStageTaps) {
        wait_barrier(barriers.full_b(at.b.stage), at.b.round);
        const bool last = ++stage == work.stages;
        if (last && leads) arrive(barriers.turn());
        products.multiply(p, tile_phase, tap, min(left, kStageTaps), a,
                          slab_descriptor(shared + at.b.stage * (4 * kStageTaps * Tile::kTapWords)));
        // The products of the stage before this one are done.
        if (leads && stage > 1) arrive(barriers.empty_b(last_b));
        if (leads && input_stage > 0 && first_stage) arrive(barriers.empty_a(last_a));
        first_stage = false;
        last_b = at.b.stage;
        at.b.next(kStages);
        products.end_stage(last);
      }
    }
    last_a = at.a.stage;
    at.a.next(p.input_stages);
    if (++of_class == p.class_stages) of_class = 0, number += Tile::kTilePhases;
  }
  warpgroup_wait<0>();
  if (leads) {
    arrive(barriers.empty_b(last_b));
    arrive(barriers.empty_a(last_a));
  }
}

/// Multiplies every second tile of the CTA and runs its epilogue. By the four warps of consumer `consumer`.
template <class Tile>
__device__ void consume_tiles(const ImplicitGemmParams& p, TileScheduler<Tile> work, uint32_t* shared, int consumer,
                              FpropDgradBarriers<Tile> barriers) {
  uint32_t* const buffer = shared + Tile::epilogue_at(p) + consumer * EpilogueBuffer<Tile>::kWords;
  const EpilogueRow* const rows = reinterpret_cast<const EpilogueRow*>(shared + Tile::rows_at(p));
  SlidingSums<Tile> carry;
  for (OperandStages at; work.next(consumer);) {
    if (work.ours) {
      if (work.number > 0) wait_barrier(barriers.turn(), work.number - 1);
      FpropDgradMainloop<Tile> products;
      consume_tile<Tile>(p, work, shared_address(shared), at, barriers, products);
      if constexpr (Tile::kSlide > 1) {
        carry.add_to(products.sum, work.begins != 0);
        while (work.ends > 0) {
          if (--work.skips < 0) {
            run_epilogue<Tile>(p, work.place, buffer, rows, consumer, products.sum);
            if (--work.ends == 0) break;
          }
          carry.move_on(products.sum);
          ++work.place.q[0];
        }
      } else {
        run_epilogue<Tile>(p, work.place, buffer, rows, consumer, products.sum);
      }
    }
    at.a.skip(work.input_stages, p.input_stage_count);
    at.b.skip<Tile::kStages>(work.stages);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) fprop_dgrad_wgmma(const __grid_constant__ ImplicitGemmParams p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t barrier[FpropDgradBarriers<Tile>::kCount];
  __shared__ ScheduledTile queue[FpropDgradBarriers<Tile>::kScheduled];
  uint32_t* const shared = reinterpret_cast<uint32_t*>(dynamic_shared);
  const FpropDgradBarriers<Tile> barriers{warp_uniform(shared_address(barrier))};
  const TileScheduler<Tile> scheduler(p, barriers, warp_uniform(shared_address(queue)));
  if (threadIdx.x == 0) barriers.init();
  fence_barrier_init();
  list_rows<Tile>(p, reinterpret_cast<EpilogueRow*>(shared + Tile::rows_at(p)));
  __syncthreads();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32), producer = warp - Tile::kWarps * Tile::kConsumers;
  const int consumer = warp / Tile::kWarps;
  if (consumer < Tile::kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    consume_tiles<Tile>(p, scheduler, shared, consumer, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    if (producer == 0)
      produce_inputs<Tile>(p, scheduler, shared_address(shared + Tile::kRing), barriers);
    else if (producer == 1)
      produce_weights<Tile>(p, scheduler, shared_address(shared), barriers);
    else if (producer == 2 && is_leader()) {
      if constexpr (Tile::kSlide > 1)
        schedule_planes<Tile>(p, barriers, queue);
      else
        schedule_tiles<Tile>(p, barriers, queue);
    }
  }
#endif
}

template <class Tile>
void launch_wgmma_tile(ImplicitGemmParams p, cudaStream_t stream) {
  int all = 0;  // classes, of inputs
  for (int c = 0; c < p.classes; c += p.tile_phases) {
    for (int tile_phase = c; tile_phase < c + p.tile_phases; ++tile_phase)
      p.weight_stages[c] += (p.class_begin[tile_phase + 1] - p.class_begin[tile_phase] + Tile::kStageTaps - 1) /
                            Tile::kStageTaps * p.class_stages;
    all += p.weight_stages[c];
  }
  if (!p.transposed) p.weight_stages[0] = all;
  launch_implicit_gemm<Tile>(fprop_dgrad_wgmma<Tile>, p, stream);
}

template <class Arithmetic, int kColumns>
void launch_wgmma_width(const ImplicitGemmParams& p, cudaStream_t stream) {
  if constexpr (may_slide(kColumns, Arithmetic::kParts > 1))
    if (p.slide > 1) return launch_wgmma_tile<WgmmaTile<Arithmetic, kColumns, 1, kSlidingTaps>>(p, stream);
  if (p.tile_phases == 1)
    launch_wgmma_tile<WgmmaTile<Arithmetic, kColumns, 1, 1>>(p, stream);
  else
    launch_wgmma_tile<WgmmaTile<Arithmetic, kColumns, 2, 1>>(p, stream);
}

}  // namespace voxgrad::cuda
