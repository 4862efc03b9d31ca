// The gather of gather_mma.cuh on wgmma (wgmma.cuh), which multiplies half as fast again, reads both operands from
// shared memory by itself, and so leaves the warps free to load what comes next.
//
//   A: tiles of 64 rows of voxels x 8 words of input channels,
//   B: 8 words of input channels x kColumns output channels for each tap.
//
// The input is packed (pack.cu): rounded, and 4 words of channels of a voxel together. Of that the halo is staged, in
// two planes of 16 bytes a voxel: core matrices. 8 neighbours are one wherever they begin, so that a tap is, again,
// nothing but an offset. The rows of a tile are eights of neighbours at equal distances (RowTiles): 64 positions of the
// halo on end, line after line, where the ends of lines belong to no result; or 8 lines of 8.
//
// The rows are the results of a box. Or they are slots: the same voxels of the input's lattice in each of two phases of
// a strided, transposed convolution, which read the same inputs and lie side by side in the result.
//
// Four warps multiply, and do nothing else; they have most of the registers. Four others feed them (gather_feed.cuh),
// as many steps of 8 words ahead as there are buffers. In the end all write the results (gather_results.cuh).
//
// What bounds it: a product reads 2 KiB of A and 256 bytes for each 8 columns of B, of which shared memory gives 128
// bytes a clock. From 64 columns on that hides behind the multiplication; 48 columns reach 86 %, 32: 67 %, 24: 55 %.
#pragma once

#include "cuda/conv/gather_results.cuh"
#include "cuda/conv/wgmma.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kN8_, int kSlots_>
struct GatherWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kN8 = kN8_, kSlots = kSlots_;
  static constexpr int kWarps = 4;                                // that multiply
  static constexpr int kStagers = kGatherStagers, kCopiers = 32;  // threads that feed them
  static constexpr int kColumns = 8 * kN8;
  static constexpr int kThreads = 32 * kWarps + kStagers + kCopiers;
  static constexpr bool kThree = Arithmetic::kParts > 1;
  static constexpr int kTiles = gather_row_tiles(kColumns, kThree, kSlots);  // of 64 rows
  static constexpr int kOfSlot = kTiles / kSlots;
  static constexpr int kSlab = kColumns * kChunk;  // words of one part of one tap of B
  static constexpr int kTapWords = kSlab * Arithmetic::kParts;
  static constexpr int kStepTaps = gather_step_taps(kColumns, kThree), kStages = kGatherStages;
  static constexpr int kRing = kStages * kStepTaps * kTapWords;  // words
  static constexpr int kBlocks = 2;                              // a multiprocessor: bounds registers
  static constexpr int kRegisters = 200, kFeederRegisters = 56;  // of 128 in the mean

  /// Of the halo, in its parts.
  VG_HOST_DEVICE static int buffer_words(const GatherMma& p) { return p.rows.positions * kChunk * Arithmetic::kParts; }
  static size_t shared_bytes(const GatherMma& p) {
    using Window = ResultWindow<GatherWgmmaTile>;
    const int staged = kRing + p.buffers * buffer_words(p) + 2 * p.rounds * kStagers;
    return sizeof(uint32_t) * std::max(staged, Window::kWindows * Window::kWords);
  }
};

/// The sums of a box, and how a stage of B is multiplied into them.
template <class Tile>
struct GatherProducts {
  using Arithmetic = typename Tile::Arithmetic;
  static constexpr int kTiles = Tile::kTiles, kN8 = Tile::kN8, kSlots = Tile::kSlots, kOfSlot = Tile::kOfSlot;
  // Tensor cores truncate what they add: three products, whose errors shall not be seen, go to a sum of their own for
  // the length of some stages (64 words at most).
  static constexpr bool kSeparate = Tile::kThree;
  static constexpr int kSeparateStages = 8 / Tile::kStepTaps;

  Accumulator sum[kTiles][kN8], stage_sum[kSeparate ? kTiles : 1][kN8];
  bool fresh[kSlots];  // the first product has still to come: of those that go to stage_sum, if that is used
  int stages = 0;      // in stage_sum

  __device__ GatherProducts() {
    for (int slot = 0; slot < kSlots; ++slot) fresh[slot] = true;
    if constexpr (kSeparate)
      for (int tile = 0; tile < kTiles; ++tile)
        for (int n = 0; n < kN8; ++n)
          for (int i = 0; i < 4; ++i) sum[tile][n][i] = 0;
  }

  /// Taps from `first` to `last`, whose slabs begin at b, of the step whose halo is at a. In the end products of this
  /// stage may be under way, but none of the stages before.
  __device__ void multiply_stage(const GatherMma& p, int number, int first, int last, uint64_t a, uint64_t b) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int from = kSlots == 1 ? first : max(first, p.class_begin[number + slot]);
      const int to = kSlots == 1 ? last : min(last, p.class_begin[number + slot + 1]);
#pragma unroll 1
      for (int tap = from; tap < to; ++tap) {
        const uint64_t slab = advance_slab(b, (tap - first) * (Tile::kTapWords / 4));
        const int offset = p.tap_offset[tap];
        begin_products();
#pragma unroll
        for (int tile = 0; tile < kOfSlot; ++tile)
          multiply(p, slot, slot * kOfSlot + tile, advance_slab(a, offset + p.rows.base[tile]), slab);
        fresh[slot] = false;
        commit_products();
        await_products<kPending>();
      }
    }
    if (kPending > 1 && last - first < kPending) await_products<1>();
  }
  /// Adds up what is in stage_sum, of enough stages or of the last.
  __device__ void end_stage(bool last) {
    if constexpr (kSeparate) {
      if (++stages < kSeparateStages && !last) return;
      await_products<0>();
      stages = 0;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        if (!fresh[slot])
#pragma unroll
          for (int tile = slot * kOfSlot; tile < (slot + 1) * kOfSlot; ++tile)
#pragma unroll
            for (int n = 0; n < kN8; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[tile][n][i] += stage_sum[tile][n][i];
        fresh[slot] = true;
      }
    }
  }

 private:
  // Taps under way beside the one that is queued: enough to multiply until the next is.
  static constexpr int kTapClocks = kOfSlot * kN8 * 4 * (kSeparate ? 3 : 1);
  static constexpr int kPending = std::clamp(256 / kTapClocks, 1, Tile::kStepTaps - 1);

  __device__ void multiply(const GatherMma& p, int slot, int tile, uint64_t a, uint64_t b) {
    using Element = typename Arithmetic::Element;
    if constexpr (kSeparate) {
      const uint64_t low_a = advance_slab(a, 2 * p.rows.positions), low_b = advance_slab(b, Tile::kSlab / 4);
      multiply_async<Element>(stage_sum[tile], low_a, b, !fresh[slot]);
      multiply_async<Element>(stage_sum[tile], a, low_b);
      multiply_async<Element>(stage_sum[tile], a, b);
    } else {
      multiply_async<Element>(sum[tile], a, b, !fresh[slot]);
    }
  }
};

/// Multiplies all steps and writes the results. By four warps.
template <class Tile>
__device__ void multiply_box(const GatherMma& p, const GatherPlace& place, uint32_t* shared, uint32_t full) {
  using Barriers = GatherBarriers<Tile>;
  constexpr int kStages = Tile::kStages, kStepTaps = Tile::kStepTaps;
  const GatherWork<Tile> work(p, place);
  const uint32_t ring = shared_address(shared), words = shared_address(shared + Tile::kRing);
  GatherProducts<Tile> products;
  int stage = 0, buffer = 0, number = work.first, chunk = 0, tap = p.class_begin[number];
  for (int step = 0; step < work.steps; ++step) {
    Barriers::full_a(buffer, true);
    publish_to_wgmma();
    const uint64_t a = slab_descriptor(words + buffer * (4 * Tile::buffer_words(p)), p.rows.positions * kVoxelBytes,
                                       p.rows.group * kVoxelBytes);
    const int last_tap = p.class_begin[number + Tile::kSlots];
    const int last_buffer = buffer == 0 ? p.buffers - 1 : buffer - 1;
    do {
      const int slot = stage % kStages;
      await_round(full + 8 * slot, stage / kStages);
      const int end = min(tap + kStepTaps, last_tap);
      products.multiply_stage(p, number, tap, end, a, slab_descriptor(ring + slot * (4 * kStepTaps * Tile::kTapWords)));
      const bool first_of_step = tap == p.class_begin[number];
      tap = end;
      // The products of the stage before this one are done.
      if (stage > 0 && stage + kStages - 1 < work.stages) Barriers::empty_b((stage - 1) % kStages, false);
      if (first_of_step && step > 0 && step - 1 + p.buffers < work.steps) Barriers::empty_a(last_buffer, false);
      ++stage;
      products.end_stage(stage == work.stages);
    } while (tap < last_tap);
    if (++chunk == p.chunks) chunk = 0, number += Tile::kSlots;
    tap = p.class_begin[number];
    if (++buffer == p.buffers) buffer = 0;
  }
  await_products<0>();
  Barriers::results();  // nobody reads what was staged any more
  write_sums<Tile>(p, place, shared, products.sum);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) gather_wgmma(const __grid_constant__ GatherMma p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t full_stages[Tile::kStages];
  uint32_t* const shared = reinterpret_cast<uint32_t*>(dynamic_shared);
  const uint32_t full = shared_address(full_stages);
  __shared__ GatherPlace place;
  if (threadIdx.x == 0) {
    place = gather_place(p);
    for (int i = 0; i < Tile::kStages; ++i) init_barrier(full + 8 * i);
  }
  publish_barriers();
  __syncthreads();
  if (!has_results<Tile::kSlots>(p, place)) return;
  uint32_t* const table = shared + Tile::kRing + p.buffers * Tile::buffer_words(p);
  GatherInputs<Tile>::fill_table(p, place, table, static_cast<int>(threadIdx.x), Tile::kThreads);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) - 32 * Tile::kWarps;
  if (thread < 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    multiply_box<Tile>(p, place, shared, full);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kFeederRegisters));
    if (thread >= Tile::kStagers) {
      copy_weights<Tile>(p, place, shared_address(shared), full);
    } else {
      copy_inputs<Tile>(p, place, shared + Tile::kRing, thread);
      GatherBarriers<Tile>::results();
      help_to_write<Tile>(p, place, shared, Tile::kWarps + thread / 32);
    }
  }
#endif
}

/// Queues the kernel for a problem whose packed weights have `columns` columns a tile.
template <class Arithmetic>
void launch_gather_wgmma(const GatherMma& problem, int columns, cudaStream_t stream);

template <class Arithmetic, int kN8>
void launch_gather_wgmma_tile(const GatherMma& p, cudaStream_t stream) {
  using One = GatherWgmmaTile<Arithmetic, kN8, 1>;
  using Two = GatherWgmmaTile<Arithmetic, kN8, 2>;
  if (p.slots == 1)
    launch_gather<One>(gather_wgmma<One>, p, stream);
  else
    launch_gather<Two>(gather_wgmma<Two>, p, stream);
}

}  // namespace voxgrad::cuda
