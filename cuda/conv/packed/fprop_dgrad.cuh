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
// Or, of few channels, a box slides along depth ("slide"): a plane of inputs is multiplied by the taps of all depths at
// once, which are columns of one product, and so is read once for three of them. Its sums belong to three neighbouring
// planes of results; with each plane of inputs the last of them is complete and is written (GatherCarry).
//
// A block takes one box after another, and there is one block on each multiprocessor. Two groups of four warps
// multiply, in turn: while one multiplies a box, the other writes the results of the box before (gather_results.cuh).
// They have most of the registers. Three other warps feed them (gather_feed.cuh), and go on to the next box while this
// one is multiplied: the tensor cores need not wait for the beginning of a box nor for its end.
//
// What bounds it: a product reads 2 KiB of A and 256 bytes for each 8 columns of B, of which shared memory gives 128
// bytes a clock. From 64 columns on that hides behind the multiplication; 48 columns reach 86 %, 32: 67 %, 24: 55 %.
#pragma once

#include "cuda/conv/packed/epilogue.cuh"
#include "cuda/conv/common/wgmma.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kColumns_, int kSlots_, int kSlide_>
struct GatherWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kColumns = kColumns_, kSlots = kSlots_, kSlide = kSlide_;
  static constexpr int kProductColumns = kColumns * kSlide, kN8 = kProductColumns / 8;
  static constexpr int kWarps = 4, kGroups = kGatherGroups;  // that multiply
  static constexpr int kFeeders = 128;                       // threads that feed them: three warps do
  static constexpr int kTold = kWarps * kGroups + 2;         // warps that are told of boxes
  static constexpr int kThreads = 32 * kWarps * kGroups + kFeeders;
  static constexpr bool kThree = Arithmetic::kParts > 1;
  static constexpr int kTiles = gather_row_tiles(kProductColumns, kThree, kSlots, kSlide);  // of 64 rows
  static constexpr int kOfSlot = kTiles / kSlots;
  static constexpr int kSlab = kProductColumns * kChunk;  // words of one part of one tap of B
  static constexpr int kTapWords = kSlab * Arithmetic::kParts;
  static constexpr int kStepTaps = gather_step_taps(kProductColumns, kThree, kSlide);
  static constexpr int kStages = gather_stages(kProductColumns, kThree, kSlide);
  static constexpr int kRing = kStages * kStepTaps * kTapWords;  // words
  static constexpr int kRegisters = 232, kFeederRegisters = 40;  // of 168 in the mean
  static_assert(kRegisters * kGroups * kWarps * 32 + kFeederRegisters * kFeeders <= launch_registers(kThreads));

  /// Of the halo, in its parts.
  VG_HOST_DEVICE static int buffer_words(const GatherMma& p) {
    return p.depth * p.rows.positions * kChunk * Arithmetic::kParts;
  }
  /// Where in shared memory the windows for results are; where it is listed which these are.
  VG_HOST_DEVICE static int windows_at(const GatherMma& p) { return kRing + p.buffers * buffer_words(p); }
  VG_HOST_DEVICE static int rows_at(const GatherMma& p) {
    return windows_at(p) + kGroups * ResultWindow<GatherWgmmaTile>::kWords;
  }
  static size_t shared_bytes(const GatherMma& p) {
    return sizeof(uint32_t) * rows_at(p) + kOfSlot * 64 * sizeof(ResultRow);
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

  /// `count` taps from `tap` on, of a slot, whose slabs begin at b, of the step whose halo is at a. In the end products
  /// of this stage may be under way, but none of the stages before.
  __device__ void multiply_stage(const GatherMma& p, int slot, int tap, int count, uint64_t a, uint64_t b) {
    multiply_taps<Tile::kStepTaps>(p, slot, tap, count, a, b);
    await_products<1>();
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
  static constexpr int kTap = Tile::kTapWords / 4;  // of B, in 16 bytes

  /// `count` taps from `tap` on, at most kMost, in pieces of powers of two: without loops, so that what a tap wants
  /// beside its products is done while those of others run. Most stages are one piece.
  template <int kMost>
  __device__ void multiply_taps(const GatherMma& p, int slot, int tap, int count, uint64_t a, uint64_t b) {
    if (count >= kMost) {
      begin_products();
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const uint64_t at = advance_slab(a, p.tap_offset[tap + i]);
#pragma unroll
        for (int tile = 0; tile < kOfSlot; ++tile)
          multiply(slot, slot * kOfSlot + tile, p, advance_slab(at, p.rows.base[tile]), advance_slab(b, i * kTap));
        fresh[slot] = false;
      }
      commit_products();
      tap += kMost;
      count -= kMost;
      b = advance_slab(b, kMost * kTap);
    }
    if constexpr (kMost > 1)
      if (count > 0) multiply_taps<kMost / 2>(p, slot, tap, count, a, b);
  }
  __device__ void multiply(int slot, int tile, const GatherMma& p, uint64_t a, uint64_t b) {
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

/// Of a box that slides: the sums of planes of results that are not complete, the next first. Not in the accumulators:
/// those that a product finds there must come from products, or the assembler lets each wait for the one before.
template <class Tile>
struct GatherCarry {
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

/// Where the warps that multiply are in the rings.
struct GatherRings {
  Ring a, b;
};

/// Multiplies all steps of a box. By four warps.
template <class Tile>
__device__ void multiply_box(const GatherMma& p, const GatherBoxes<Tile>& box, uint32_t shared, GatherRings rings,
                             GatherBarriers<Tile> barriers, GatherProducts<Tile>& products) {
  constexpr int kStages = Tile::kStages, kStepTaps = Tile::kStepTaps;
  const uint32_t words = shared + 4 * Tile::kRing;
  const bool leads = is_leader();
  int stage = 0, number = box.first_class, of_class = 0, last_buffer = 0, last_slot = 0;
  for (int step = 0; step < box.steps; ++step) {
    await_round(barriers.full_a(rings.a.slot), rings.a.round);
    const uint64_t a = slab_descriptor(words + rings.a.slot * (4 * Tile::buffer_words(p)),
                                       p.rows.positions * kVoxelBytes, p.rows.group * kVoxelBytes);
    bool first_stage = true;
#pragma unroll
    for (int slot = 0; slot < Tile::kSlots; ++slot) {
      int tap = p.class_begin[number + slot];
      for (int left = p.class_begin[number + slot + 1] - tap; left > 0; left -= kStepTaps, tap += kStepTaps) {
        await_round(barriers.full_b(rings.b.slot), rings.b.round);
        const bool last = ++stage == box.stages;
        if (last && leads) arrive(barriers.turn());
        products.multiply_stage(p, slot, tap, min(left, kStepTaps), a,
                                slab_descriptor(shared + rings.b.slot * (4 * kStepTaps * Tile::kTapWords)));
        // The products of the stage before this one are done.
        if (leads && stage > 1) arrive(barriers.empty_b(last_slot));
        if (leads && step > 0 && first_stage) arrive(barriers.empty_a(last_buffer));
        first_stage = false;
        last_slot = rings.b.slot;
        rings.b.next(kStages);
        products.end_stage(last);
      }
    }
    last_buffer = rings.a.slot;
    rings.a.next(p.buffers);
    if (++of_class == p.class_steps) of_class = 0, number += Tile::kSlots;
  }
  await_products<0>();
  if (leads) {
    arrive(barriers.empty_b(last_slot));
    arrive(barriers.empty_a(last_buffer));
  }
}

/// Multiplies every second box of the block, and writes its results. By the four warps of group `group`.
template <class Tile>
__device__ void multiply_boxes(const GatherMma& p, GatherBoxes<Tile> box, uint32_t* shared, int group,
                               GatherBarriers<Tile> barriers) {
  uint32_t* const window = shared + Tile::windows_at(p) + group * ResultWindow<Tile>::kWords;
  const ResultRow* const rows = reinterpret_cast<const ResultRow*>(shared + Tile::rows_at(p));
  GatherCarry<Tile> carry;
  for (GatherRings rings; box.next(group);) {
    if (box.ours) {
      if (box.number > 0) await_round(barriers.turn(), box.number - 1);
      GatherProducts<Tile> products;
      multiply_box<Tile>(p, box, shared_address(shared), rings, barriers, products);
      if constexpr (Tile::kSlide > 1) {
        carry.add_to(products.sum, box.begins != 0);
        while (box.ends > 0) {
          if (--box.skips < 0) {
            write_sums<Tile>(p, box.place, window, rows, group, products.sum);
            if (--box.ends == 0) break;
          }
          carry.move_on(products.sum);
          ++box.place.q[0];
        }
      } else {
        write_sums<Tile>(p, box.place, window, rows, group, products.sum);
      }
    }
    rings.a.skip(box.steps, p.buffer_count);
    rings.b.skip<Tile::kStages>(box.stages);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) gather_wgmma(const __grid_constant__ GatherMma p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t barrier[GatherBarriers<Tile>::kCount];
  __shared__ GatherBox queue[GatherBarriers<Tile>::kBoxes];
  uint32_t* const shared = reinterpret_cast<uint32_t*>(dynamic_shared);
  const GatherBarriers<Tile> barriers{of_warp(shared_address(barrier))};
  const GatherBoxes<Tile> boxes(p, barriers, of_warp(shared_address(queue)));
  if (threadIdx.x == 0) barriers.init();
  publish_barriers();
  list_rows<Tile>(p, reinterpret_cast<ResultRow*>(shared + Tile::rows_at(p)));
  __syncthreads();
  const int warp = of_warp(static_cast<int>(threadIdx.x) / 32), feeder = warp - Tile::kWarps * Tile::kGroups;
  const int group = warp / Tile::kWarps;
  if (group < Tile::kGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    multiply_boxes<Tile>(p, boxes, shared, group, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kFeederRegisters));
    if (feeder == 0)
      copy_inputs<Tile>(p, boxes, shared_address(shared + Tile::kRing), barriers);
    else if (feeder == 1)
      copy_weights<Tile>(p, boxes, shared_address(shared), barriers);
    else if (feeder == 2 && is_leader()) {
      if constexpr (Tile::kSlide > 1)
        take_planes<Tile>(p, barriers, queue);
      else
        take_boxes<Tile>(p, barriers, queue);
    }
  }
#endif
}

template <class Tile>
void launch_gather_wgmma_slots(GatherMma p, cudaStream_t stream) {
  int all = 0;  // classes, of inputs
  for (int c = 0; c < p.classes; c += p.slots) {
    for (int slot = c; slot < c + p.slots; ++slot)
      p.stages[c] +=
          (p.class_begin[slot + 1] - p.class_begin[slot] + Tile::kStepTaps - 1) / Tile::kStepTaps * p.class_steps;
    all += p.stages[c];
  }
  if (!p.transposed) p.stages[0] = all;
  launch_gather<Tile>(gather_wgmma<Tile>, p, stream);
}

template <class Arithmetic, int kColumns>
void launch_gather_wgmma_tile(const GatherMma& p, cudaStream_t stream) {
  if constexpr (may_slide(kColumns, Arithmetic::kParts > 1))
    if (p.slide > 1)
      return launch_gather_wgmma_slots<GatherWgmmaTile<Arithmetic, kColumns, 1, kGatherSlide>>(p, stream);
  if (p.slots == 1)
    launch_gather_wgmma_slots<GatherWgmmaTile<Arithmetic, kColumns, 1, 1>>(p, stream);
  else
    launch_gather_wgmma_slots<GatherWgmmaTile<Arithmetic, kColumns, 2, 1>>(p, stream);
}

}  // namespace voxgrad::cuda
