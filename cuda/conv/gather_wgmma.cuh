// The gather of gather_mma.cuh on wgmma (wgmma.cuh), which multiplies half as fast again and by itself, so that
// the warps are free to load what comes next.
//
//   A: kM16 times 64 rows of voxels x 8 words of input channels, from shared memory through registers,
//   B: 8 words of input channels x kColumns output channels for each tap, in shared memory.
//
// The rows are the results of a box. Or they are slots: the same voxels of the input's lattice in each of four phases
// of a strided, transposed convolution. All phases read the same inputs, so that the slots share one halo, and what
// lies side by side in the result is written by one block.
//
// Four warps multiply and write the results; they do nothing else, and have most of the registers. Four others feed
// them (gather_feed.cuh), one to three steps of 8 words ahead. Products are queued in batches of a few taps, since each
// queueing costs as much as a tap: while one is multiplied, the fragments of the next are loaded.
#pragma once

#include "cuda/conv/gather_feed.cuh"
#include "cuda/conv/wgmma.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kN8_, int kSlots_>
struct GatherWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kN8 = kN8_, kSlots = kSlots_;
  static constexpr int kWarps = 4, kStagers = 96, kCopiers = 32;  // warps that multiply; threads that feed them
  static constexpr int kThreads = 32 * kWarps + kStagers + kCopiers;
  static constexpr int kColumns = 8 * kN8;
  static constexpr int kM16 = gather_wgmma_rows(kColumns, Arithmetic::kParts > 1, kSlots) / 64;
  static constexpr int kOfSlot = kM16 / kSlots;    // times 64 rows of a slot
  static constexpr int kSlab = kColumns * kChunk;  // words of one part of one tap of B
  static constexpr int kTapWords = kSlab * Arithmetic::kParts;
  static constexpr int kBatch = Arithmetic::kParts == 1 ? 4 : 2;  // times 64 rows whose fragments are loaded together
  static constexpr int kStepTaps = gather_step_taps(kColumns, Arithmetic::kParts > 1, kSlots), kStages = 4;
  static constexpr int kRing = kStages * kStepTaps * kTapWords;                  // words
  static constexpr int kBlocks = 2;                                              // a multiprocessor: bounds registers
  static constexpr int kFeederRegisters = Arithmetic::kElements == 1 ? 48 : 64;  // those of the others: what is left

  static size_t shared_bytes(const GatherMma& p) {
    return sizeof(uint32_t) * (kRing + p.buffers * kChunk * p.pitch + 2 * p.rounds * kStagers);
  }
};

/// A of one tap and 64 rows, in the arithmetic's parts.
template <class Arithmetic>
struct GatherFragment {
  uint32_t part[Arithmetic::kParts][4];

  __device__ void load(uint32_t row0, uint32_t row1, uint32_t offset, uint32_t upper) {
    const uint32_t word[4] = {load_shared(row0 + offset), load_shared(row1 + offset),
                              load_shared(row0 + (offset + upper)), load_shared(row1 + (offset + upper))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      part[0][i] = word[i];
      if constexpr (Arithmetic::kParts > 1) Arithmetic::split(word[i], part[0][i], part[1][i]);
    }
  }
  /// Queues c += this * B; c = unless `adds`.
  template <int kN8>
  __device__ void multiply(Accumulator (&c)[kN8], uint64_t b, bool adds) const {
    using Element = typename Arithmetic::Element;
    constexpr uint64_t kPart = kN8 * 8 * kChunk / 4;  // 16 bytes from one part of B to the next
    if constexpr (Arithmetic::kParts == 1) {
      multiply_async<Element>(c, part[0], b, adds);
    } else {
      multiply_async<Element>(c, part[1], b, adds);
      multiply_async<Element>(c, part[0], b + kPart);
      multiply_async<Element>(c, part[0], b);
    }
  }
};

/// The sums of a box, and how a stage of B is multiplied into them.
template <class Tile>
struct GatherProducts {
  using Arithmetic = typename Tile::Arithmetic;
  static constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kSlots = Tile::kSlots, kOfSlot = Tile::kOfSlot;
  static constexpr int kBatch = Tile::kBatch;
  // Tensor cores truncate what they add: three products, whose errors shall not be seen, go to a sum of their own for
  // the length of a stage (64 words at most).
  static constexpr bool kSeparate = Arithmetic::kParts > 1;

  Accumulator sum[kM16][kN8] = {}, stage_sum[kSeparate ? kM16 : 1][kN8];
  GatherFragment<Arithmetic> a[2][kBatch];  // a batch is multiplied, the next is loaded
  uint32_t rows[2 * kOfSlot], upper;        // of A: shared addresses of this lane's rows and words of channels

  __device__ GatherProducts(const GatherMma& p, const uint32_t* words) : upper(4 * p.pitch * 4) {
#pragma unroll
    for (int i = 0; i < 2 * kOfSlot; ++i) {
      int m = row_of_box<Tile>(i);
      const bool inside = m < p.box_voxels;
      const int w = p.box[2].take(m), h = p.box[1].take(m);
      rows[i] =
          shared_address(words + threadIdx.x % 4 * p.pitch + (inside ? (m * p.extent[1].value + h) * p.line + w : 0));
    }
  }

  __device__ void load(int which, int fragment, int block, uint32_t offset) {
    a[which][fragment].load(rows[2 * block], rows[2 * block + 1], offset, upper);
  }
  __device__ void multiply(int which, int fragment, int m, uint64_t slab, bool first) {
    if constexpr (kSeparate)
      a[which][fragment].multiply(stage_sum[m], slab, !first);
    else
      a[which][fragment].multiply(sum[m], slab, true);
  }

  /// All rows take `taps` taps, no more than a batch's; `offsets` are those of the taps.
  template <int kUsed>
  __device__ void multiply_batch(const int* offsets, uint32_t buffer, uint64_t slabs, int first, int taps) {
    const auto load_rows = [&](int m) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (j < taps) load(m % 2, j, m, offsets[first + j] + buffer);
    };
    load_rows(0);
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      begin_products();
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (j < taps) multiply(m % 2, j, m, slabs + (first + j) * (Tile::kTapWords / 4), first + j == 0);
      commit_products();
      await_products<1>();
      if (m + 1 < kUsed) load_rows(m + 1);
    }
  }
  template <int kUsed>
  __device__ void multiply_stage(const int* offsets, uint32_t buffer, uint64_t slabs, int taps) {
    int first = 0;
    for (; first + kBatch <= taps; first += kBatch) multiply_batch<kUsed>(offsets, buffer, slabs, first, kBatch);
    // The rest by batches of known length, so that no branch comes between products.
    for (; first < taps; ++first) multiply_batch<kUsed>(offsets, buffer, slabs, first, 1);
  }

  /// The taps from begin[s] to begin[s + 1] are those of slot s. ptxas wants the start of products said on each way to
  /// them, else it says so itself, in a line for each.
  __device__ void multiply_slots(const int* offsets, uint32_t buffer, uint64_t slabs, int taps,
                                 const int (&begin)[kSlots + 1]) {
    constexpr int kTaps = kBatch / kOfSlot;  // of a batch
    const auto load_taps = [&](int which, int first) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        if (first + j < taps)
#pragma unroll
          for (int b = 0; b < kOfSlot; ++b) load(which, j * kOfSlot + b, b, offsets[first + j] + buffer);
    };
    load_taps(0, 0);
    for (int pair = 0; pair < taps; pair += 2 * kTaps)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int first = pair + which * kTaps;
        begin_products();
#pragma unroll
        for (int j = 0; j < kTaps; ++j)
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot)
            if (first + j < taps && first + j >= begin[slot] && first + j < begin[slot + 1]) {
              begin_products();
#pragma unroll
              for (int b = 0; b < kOfSlot; ++b)
                multiply(which, j * kOfSlot + b, slot * kOfSlot + b, slabs + (first + j) * (Tile::kTapWords / 4),
                         first + j == max(begin[slot], 0));
            }
        begin_products();
        commit_products();
        await_products<1>();
        load_taps(1 - which, first + kTaps);
      }
  }

  /// Adds the sums of the stage to those of the box, for slots that had taps.
  __device__ void end_stage(int taps, const int (&begin)[kSlots + 1]) {
    if constexpr (kSeparate) {
      await_products<0>();
#pragma unroll
      for (int m = 0; m < kM16; ++m)
        if (begin[m / kOfSlot] < taps && begin[m / kOfSlot + 1] > 0)
#pragma unroll
          for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n][i] += stage_sum[m][n][i];
    }
  }
};

/// Multiplies all steps and writes the results. By four warps.
template <class Tile>
__device__ void multiply_box(const GatherMma& p, const GatherPlace& place, uint32_t ring, uint32_t full,
                             const uint32_t* words) {
  using Barriers = GatherBarriers<Tile>;
  constexpr int kSlots = Tile::kSlots, kM16 = Tile::kM16, kStages = Tile::kStages;
  const GatherWork<Tile> work(p, place);
  GatherProducts<Tile> products(p, words);
  int stage = 0, step = 0, of_a = 0;  // of_a: the buffer
  for (int number = work.first; number < work.last; number += kSlots)
    for (int chunk = 0; chunk < p.chunks; ++chunk, ++step) {
      Barriers::full_a(of_a, true);
      const uint32_t buffer = of_a * kChunk * p.pitch * 4;
      const int last_tap = p.class_begin[number + kSlots];
      for (int tap = p.class_begin[number]; tap < last_tap; tap += Tile::kStepTaps, ++stage) {
        const int slot = stage % kStages;
        await_round(full + 8 * slot, stage / kStages);
        const uint64_t slabs = slab_descriptor(ring + slot * (4 * Tile::kStepTaps * Tile::kTapWords));
        const int taps = min(Tile::kStepTaps, last_tap - tap);
        int begin[kSlots + 1];
#pragma unroll
        for (int slot = 0; slot <= kSlots; ++slot) begin[slot] = p.class_begin[number + slot] - tap;
        if constexpr (kSlots > 1)
          products.multiply_slots(p.tap_offset + tap, buffer, slabs, taps, begin);
        else if (kM16 > 4 && p.box_voxels <= 32 * kM16)
          products.template multiply_stage<kM16 / 2>(p.tap_offset + tap, buffer, slabs, taps);
        else
          products.template multiply_stage<kM16>(p.tap_offset + tap, buffer, slabs, taps);
        products.end_stage(taps, begin);
        // The products of the stage before this one are done.
        if (stage > 0 && stage + kStages - 1 < work.stages) Barriers::empty_b((stage - 1) % kStages, false);
      }
      if (step + p.buffers < work.steps) Barriers::empty_a(of_a, false);
      if (++of_a == p.buffers) of_a = 0;
    }
  await_products<0>();
  write_results<Tile>(p, place, place.phase, products.sum);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) gather_wgmma(const __grid_constant__ GatherMma p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t full_stages[Tile::kStages];
  uint32_t* const words = reinterpret_cast<uint32_t*>(dynamic_shared) + Tile::kRing;
  const uint32_t ring = shared_address(dynamic_shared), full = shared_address(full_stages);
  const GatherPlace place = gather_place(p);
  if (!has_results<Tile::kSlots>(p, place)) return;
  if (threadIdx.x == 0)
    for (int i = 0; i < Tile::kStages; ++i) init_barrier(full + 8 * i);
  publish_barriers();
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) - 32 * Tile::kWarps;
  if (thread < 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(256 - Tile::kFeederRegisters));
    multiply_box<Tile>(p, place, ring, full, words);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kFeederRegisters));
    if (thread >= Tile::kStagers)
      copy_weights<Tile>(p, place, ring, full);
    else if constexpr (Tile::Arithmetic::kElements == 1)
      copy_inputs<Tile>(p, place, words, thread);
    else
      pair_inputs<Tile>(p, place, words, thread);
  }
#endif
}

/// Queues the kernel for a problem whose packed weights have `columns` columns a tile.
template <class Arithmetic>
void launch_gather_wgmma(const GatherMma& problem, int columns, cudaStream_t stream);

template <class Arithmetic, int kN8>
void launch_gather_wgmma_tile(const GatherMma& p, cudaStream_t stream) {
  if constexpr (kN8 <= 8) {
    using Slots = GatherWgmmaTile<Arithmetic, kN8, 4>;
    if (p.slots > 1) return launch_gather<Slots>(gather_wgmma<Slots>, p, stream);
  }
  using Tile = GatherWgmmaTile<Arithmetic, kN8, 1>;
  launch_gather<Tile>(gather_wgmma<Tile>, p, stream);
}

}  // namespace voxgrad::cuda
