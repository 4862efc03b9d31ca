// Persistent, warp-specialized implicit GEMM with TMA and wgmma, for the forward convolution (fprop) and its data
// gradient (dgrad, which is also the transposed convolution) of channels-last tensors:
//
//   D[voxel][output channel] =
//       sum over taps and input channels of A[voxel + tap][input channel] * B[tap][input channel][output channel]
//
// The channels of a voxel are contiguous. A TMA box of some channels of the voxels of a CTA tile, with or without their
// halo, is therefore a swizzled K-major operand in shared memory, with one row per voxel. The zero fill of TMA provides
// the padding, and the element strides of TMA separate the residues of a strided convolution. A tap is a shift of the
// operand's start address by some rows. Weights are loaded in the same way. They are a K-major operand if the input
// channels are contiguous in memory, or an N-major operand if the output channels are contiguous.
//
// In dgrad with strides, each stride phase is a separate GEMM with its own taps. One producer warp loads boxes of
// inputs, and another producer warp loads weights. Two consumer warpgroups compute the GEMMs in turn (ping-pong), so
// that the epilogue of one GEMM overlaps the products of the next. Cooperative warpgroups share every CTA tile instead.
//
// L2 limits GEMMs with few taps per box. Two CTAs may therefore form a cluster that loads the weights once for both
// (multicast). The CTAs then issue the copies of weights in turn.
#pragma once

#include "core/detail/divide.h"
#include "cuda/conv/sm90/fprop_dgrad/epilogue.cuh"
#include "cuda/conv/sm90/fprop_dgrad/pipeline.cuh"
#include "cuda/conv/sm90/fprop_dgrad/scheduler.cuh"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_gemm {

/// A CTA tile of kTiles m64 tiles of voxels (if cooperative, for each warpgroup) and kN output channels. A sliding tile
/// has kSlide blocks of kN columns. kNMajor: N is the contiguous axis of B. kThree: floats in three products, which
/// requires cooperative warpgroups and a K-major B.
template <class Arithmetic_, int kN_, int kTiles_, int kSlide_, int kRowBytes_, bool kNMajor_>
struct CtaTile {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kN = kN_, kTiles = kTiles_, kN8 = kN / 8, kSlide = kSlide_;
  static constexpr bool kSlides = kSlide > 1;
  using Sums = Accumulator[kTiles][kN8 * kSlide];
  static constexpr int kRowBytes = kRowBytes_;  // bytes of a row of A: some channels of a voxel
  static constexpr bool kNMajor = kNMajor_, kThree = Arithmetic::kParts > 1;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisters = 232, kProducerRegisters = 40;
  static constexpr int kNBlock = kNMajor && kN > 64 ? 64 : kN;  // columns of a TMA box of weights

  static constexpr int kExactTaps = 256 / kRowBytes;  // kThree: taps with a total K of 64

  static constexpr int kWeightBytes = kSlide * kN * kRowBytes;  // bytes of the weights of one tap
};

/// Loads the boxes of inputs. One thread runs this function.
template <class Tile>
__device__ void produce_inputs(const Params& p, uint32_t stages, Pipeline pipeline) {
  for_each_gemm<Tile::kSlide>(p, [&](const WorkUnit& unit, const Phase& phase, bool first) {
    if (p.resident && !first) return;
    for (KBlocks k(p, unit); k.left > 0; k.next()) {
      if (Tile::kThree && p.resident && k.chunk == p.resident_chunks) break;
      const Load& box = k.box(p);
      const auto from = ChunkOperands::of<Tile::kThree>(p, k.chunk);
      int at[3];
      for (int a = 0; a < 3; ++a) at[a] = unit.at[a + 1] * p.in_step[a] + box.offset[a];
      pipeline.acquire();
      pipeline.commit(p.box_rows * Tile::kRowBytes);
      tma_load(stages + pipeline.stage() * p.input_bytes, p.input,
               unit.group * p.in_channels + from.chunk * p.chunk_channels, at[2], at[1], at[0],
               unit.at[0] + (from.low_input ? p.samples : 0), pipeline.barrier());
      pipeline.next();
    }
  });
}

/// Returns the offset in bytes, from the first stage of weights, of a tap's weights for the current chunk.
template <class Tile>
__device__ int stage_of_weights(const Params& p, const WorkUnit& unit, const KBlocks& k, int tap,
                                const Pipeline& pipeline) {
  return (p.kept_taps > 0 ? (unit.column * p.chunks + k.chunk) * p.kept_taps + tap : pipeline.stage() * p.stage_taps) *
         Tile::kWeightBytes;
}

/// Loads the weights, several taps per stage. One thread runs this function.
template <class Tile>
__device__ void produce_weights(const Params& p, uint32_t stages, Pipeline pipeline) {
  constexpr int tap_bytes = Tile::kWeightBytes;
  int turn = 0;
  const auto load = [&](const WorkUnit& unit, const Phase& phase, bool) {
    const int n = unit.group * p.n_group + unit.column * Tile::kN;
    for (KBlocks block(p, unit); block.left > 0; block.next()) {
      const Load& box = block.box(p);
      const auto from = ChunkOperands::of<Tile::kThree>(p, block.chunk);
      const int k = unit.group * p.k_group + from.chunk * p.chunk_channels;
      for (int begin = 0; begin < box.taps; begin += p.stage_taps) {
        const int taps = min(box.taps - begin, p.stage_taps);
        pipeline.acquire();
        pipeline.commit(taps * tap_bytes);
        uint32_t to = stages + stage_of_weights<Tile>(p, unit, block, box.first_tap + begin, pipeline);
        for (int i = 0; i < taps; ++i, ++turn) {
          int tap = p.tap[box.first_tap + begin + i].weight + (from.low_weight ? p.taps : 0);
          for (int block = 0; block < Tile::kSlide; ++block, tap += p.slide_step)
            for (int j = 0; j < Tile::kN; j += Tile::kNBlock) {
              const int x = Tile::kNMajor ? n + j : k, y = Tile::kNMajor ? k : n;
              if (p.cluster == 1)
                tma_load(to, p.weight, x, y, tap, pipeline.barrier());
              else if ((turn ^ static_cast<int>(blockIdx.x)) % 2 == 0)
                tma_multicast(to, p.weight, x, y, tap, pipeline.barrier(), 3);
              to += Tile::kNBlock * Tile::kRowBytes;
            }
        }
        pipeline.next();
      }
    }
  };
  if (p.kept_taps == 0) return for_each_gemm<Tile::kSlide>(p, load);
  WorkUnit unit(p, 0);
  for (; unit.column < p.unit_columns; ++unit.column)
    for (int phase = 0; phase < p.phases; ++phase) {
      unit.select_boxes(p, p.phase_of[phase]);
      load(unit, p.phase_of[phase], false);
    }
}

/// Returns the wgmma descriptor of an operand whose rows have `swizzle` bytes. `groups_apart` is the distance in bytes
/// from one group of 8 rows to the next. `blocks_apart` is the distance between blocks of columns of an N-major
/// operand.
__device__ inline uint64_t swizzled_operand(uint32_t shared, int swizzle, int groups_apart, int blocks_apart) {
  const uint64_t code = swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
  return (shared & 0x3ffff) >> 4 | static_cast<uint64_t>(blocks_apart >> 4) << 16 |
         static_cast<uint64_t>(groups_apart >> 4) << 32 | code << 62;
}

/// Multiplies the k-blocks of one GEMM.
template <class Tile>
struct Mainloop {
  static constexpr int kTiles = Tile::kTiles;
  const Params& p;
  const uint32_t input_stages;
  const uint32_t weight_stages;
  Pipeline inputs;
  Pipeline weights;
  int base[kTiles];  // first rows of the warpgroup's m64 tiles, in units of 16 bytes
  int held = 0;      // stages of the resident boxes of the current unit
  // Barriers of ping-pong. `turn` completes a round when all warps of the other warpgroup have issued the last products
  // of a GEMM, and `others_turn` when those of this warpgroup have.
  const uint32_t turn;
  const uint32_t others_turn;
  int gemm = 0;
  const bool first_warp = warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4) == 0;

  __device__ Mainloop(const Params& params, uint32_t input_at, uint32_t weight_at, const Pipeline& input,
                      const Pipeline& weight, uint32_t turns, int warpgroup)
      : p(params),
        input_stages(input_at),
        weight_stages(weight_at),
        inputs(input),
        weights(weight),
        turn(turns + 8 * warpgroup),
        others_turn(turns + 8 * (1 - warpgroup)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      base[i] =
          warp_uniform(max(p.base[p.cooperative ? i * Tile::kConsumers + warpgroup : i], 0) * Tile::kRowBytes / 16);
  }

  /// Releases the resident boxes of the previous unit. The boxes of the next unit then remain for all GEMMs of this
  /// unit.
  __device__ void next_resident() {
    for (; held > 0; --held) {
      if (leads()) inputs.release(inputs.stage());
      inputs.next();
    }
    held = p.resident_chunks;
  }

  /// Skips a GEMM that the other warpgroup computes.
  __device__ void skip(const WorkUnit& unit, const Phase& phase) {
    int boxes = p.chunks * unit.loads,
        stages = unit.loads == phase.loads ? p.chunks * phase.weight_stages : boxes * phase.box_stages;
    if (p.splits > 1) {
      boxes = stages = 0;
      for (KBlocks k(p, unit); k.left > 0; k.next(), ++boxes) stages += divide_up(k.box(p).taps, p.stage_taps);
    }
    ++gemm;
    if (p.kept_taps == 0) weights.skip(stages);
    if (!p.resident) inputs.skip(boxes);
  }

  /// Computes the sums of a GEMM; a sliding tile adds to `sum`. Returns false, with undefined sums, if the GEMM has no
  /// k-block.
  __device__ bool multiply(const WorkUnit& unit, const Phase& phase, typename Tile::Sums& sum) {
    if constexpr (Tile::kThree) return multiply_exactly(unit, phase, sum);
    const bool leader = is_leader(), releases = first_warp && leader;
    bool fresh = !Tile::kSlides;
    if (p.kept_taps > 0) weights.restart(unit.column * p.kept_stages + phase.first_stage);
    // The products of the previous tap read these stages until the products of the next tap have begun.
    int last_weights = -1, last_inputs = -1;
    const auto release_last = [&] {
      if (releases && last_weights >= 0) weights.release(last_weights, p.cluster);
      if (releases && last_inputs >= 0) inputs.release(last_inputs);
      last_weights = last_inputs = -1;
    };
    Pipeline input = inputs;
    // A wait on a barrier identifies a round only by its parity. This wait for the other warpgroup ensures that the
    // stages of this GEMM cannot be two rounds behind (docs/conv-kernels.md).
    if (gemm > 0 && !p.cooperative) wait_barrier(turn, (gemm - 1) / 2);
    ++gemm;
    KBlocks k(p, unit);
    for (; k.left > 0; k.next()) {
      const Load& box = k.box(p);
      input.wait();
      const uint64_t a = swizzled_operand(input_stages + input.stage() * p.input_bytes, Tile::kRowBytes,
                                          p.group_pitch * Tile::kRowBytes, 0);
      for (int begin = 0; begin < box.taps; begin += p.stage_taps) {
        const int taps = min(box.taps - begin, p.stage_taps);
        weights.wait();
        const uint32_t b = weight_stages + stage_of_weights<Tile>(p, unit, k, box.first_tap + begin, weights);
        int i = 0;
        do {
          const int shift = p.tap[box.first_tap + begin + i].shift * Tile::kRowBytes / 16;
          multiply_tap(sum, advance_slab(a, shift), operand_b(b + i * Tile::kWeightBytes), fresh);
          warpgroup_commit();
          warpgroup_wait<1>();  // until the products of the previous tap are done
          fresh = false;
          release_last();
        } while (++i < taps);
        if (p.kept_taps == 0) last_weights = weights.stage();
        weights.next();
      }
      if (!p.resident) last_inputs = input.stage();
      input.next();
    }
    if (leader && !p.cooperative) arrive(others_turn);  // this warp has issued the last products
    warpgroup_wait<0>();
    release_last();
    if (!p.resident) inputs = input;
    return !fresh;
  }

  /// Computes the sums of a GEMM by three TF32 products, with the accuracy of float32. Tensor cores truncate when they
  /// add, so this function adds sums over 64 elements of K in float32. The other warpgroup multiplies in the meantime.
  __device__ bool multiply_exactly(const WorkUnit& unit, const Phase& phase, typename Tile::Sums& sum) {
    const bool releases = leads();
    Pipeline input = inputs;
    if (p.kept_taps > 0) weights.restart(unit.column * p.kept_stages + phase.first_stage);
    each(sum, [](float& x, int, int, int) { x = 0; });
    for (KBlocks k(p, unit); k.left > 0; k.next()) {
      const Load& box = k.box(p);
      if (p.resident && k.chunk == p.resident_chunks)
        (input = inputs).skip(p.product_chunks.value());  // reads the high parts again
      input.wait();
      const uint64_t a = swizzled_operand(input_stages + input.stage() * p.input_bytes, Tile::kRowBytes,
                                          p.group_pitch * Tile::kRowBytes, 0);
      for (int begin = 0; begin < box.taps; begin += p.stage_taps) {
        const int taps = min(box.taps - begin, p.stage_taps);
        weights.wait();
        const uint32_t b = weight_stages + stage_of_weights<Tile>(p, unit, k, box.first_tap + begin, weights);
        for (int i = 0; i < taps;) {
          typename Tile::Sums products;
          const int end = min(i + Tile::kExactTaps, taps);
          bool fresh = true;
          do {
            const int shift = p.tap[box.first_tap + begin + i].shift * Tile::kRowBytes / 16;
            multiply_tap(products, advance_slab(a, shift), operand_b(b + i * Tile::kWeightBytes), fresh);
            fresh = false;
          } while (++i < end);
          warpgroup_commit();
          warpgroup_wait<0>();
          each(products, [&](float& x, int t, int n, int j) {
            asm volatile("" : "+f"(x));  // keeps nvcc from reading x before the wait
            sum[t][n][j] += x;
          });
        }
        if (releases && p.kept_taps == 0) weights.release(weights.stage(), p.cluster);
        weights.next();
      }
      if (releases && !p.resident) inputs.release(input.stage());
      input.next();
    }
    if (!p.resident) inputs = input;
    return true;
  }

  /// Moves a sliding tile by one plane of results. The sums of the next plane become the first ones, and the sums of a
  /// new plane start at 0. After the last plane of inputs (`ends`), all sums start at 0.
  __device__ static void slide(typename Tile::Sums& sum, bool ends) {
    each(sum, [&](float& x, int t, int n, int j) {
      constexpr int kLater = (Tile::kSlide - 1) * Tile::kN8;
      x = n >= kLater || ends ? 0 : sum[t][n < kLater ? n + Tile::kN8 : n][j];
    });
  }

 private:
  template <class F>
  __device__ static void each(typename Tile::Sums& sum, const F& f) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < Tile::kN8 * Tile::kSlide; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(sum[t][n][i], t, n, i);
  }
  __device__ bool leads() const { return first_warp && is_leader(); }
  /// Returns the descriptor of a tap's weights. A row contains the K of one output channel or, if N-major, the output
  /// channels of one k.
  __device__ uint64_t operand_b(uint32_t at) const {
    if constexpr (Tile::kNMajor)
      return swizzled_operand(at, 2 * Tile::kNBlock, 16 * Tile::kNBlock, Tile::kNBlock * Tile::kRowBytes);
    else
      return swizzled_operand(at, Tile::kRowBytes, 8 * Tile::kRowBytes, 0);
  }
  /// Issues the products of a tap. All loops are unrolled, because the accumulators of wgmma must stay in fixed
  /// registers.
  __device__ void multiply_tap(typename Tile::Sums& sum, uint64_t a, uint64_t b, bool fresh) const {
    constexpr int kStepA = 2, kStepB = Tile::kNMajor ? 2 * Tile::kNBlock : 2;  // 32 bytes of K, in units of 16 bytes
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Tile::kRowBytes / 32; ++k)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        multiply_async<typename Tile::Element, false, Tile::kNMajor>(sum[t], advance_slab(a, base[t] + k * kStepA),
                                                                     advance_slab(b, k * kStepB), k > 0 || !fresh);
  }
};

/// The parts of fprop_dgrad_kernel().
template <class Tile>
concept FpropDgradKernelTile =
    WarpSpecializedTile<Tile> && ScheduledUnit<WorkUnit, Params> && KBlockMainloop<Mainloop<Tile>>;

/// Computes fprop or dgrad. Launch: a 1-D grid of persistent CTAs, at most one per SM, in clusters of p.cluster.
/// Dynamic shared memory: the rings of inputs and weights.
template <FpropDgradKernelTile Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) fprop_dgrad_kernel(const __grid_constant__ Params p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barriers[2 * (kMaxFpropDgradStages + kMaxFpropDgradWeightStages) + 2];
  __shared__ ResultRows<Tile> rows;
  constexpr bool kHalves = sizeof(typename Tile::Element) == 2;
  __shared__ alignas(128) uint8_t staged[kHalves ? 4 * Tile::kConsumers : 1][kStagedBytes];
  static_assert(1024 + sizeof(barriers) + sizeof(rows) + sizeof(staged) <= fprop_dgrad_static_bytes(kHalves));
  const uint32_t input_stages = (warp_uniform(shared_address(dynamic_shared)) + 1023) & ~1023u;
  const uint32_t weight_stages = input_stages + p.input_stages * p.input_bytes;
  const uint32_t barrier = warp_uniform(shared_address(barriers));
  const Pipeline inputs(barrier, p.input_stages);
  const Pipeline weights(barrier + kMaxFpropDgradStages * Pipeline::kBarrierBytes, p.weight_stages);
  const uint32_t turns = barrier + (kMaxFpropDgradStages + kMaxFpropDgradWeightStages) * Pipeline::kBarrierBytes;
  if (threadIdx.x == 0) {
    prefetch_tensor(p.input);
    prefetch_tensor(p.weight);
    inputs.init(p.resident || p.cooperative ? Tile::kConsumers : 1);
    weights.init((p.cooperative ? Tile::kConsumers : 1) * p.cluster);
    for (int i = 0; i < Tile::kConsumers; ++i) init_barrier(turns + 8 * i, 4);  // the warps of the other warpgroup
  }
  fence_barrier_init();
  rows.list(p);
  p.cluster > 1 ? cluster_sync() : __syncthreads();
  wait_for_previous_kernels();
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup < Tile::kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    Mainloop<Tile> mainloop(p, input_stages, weight_stages, inputs, weights, turns, warpgroup);
    const uint32_t of_warp = warp_uniform(shared_address(staged[kHalves ? threadIdx.x / 32 : 0]));
    typename Tile::Sums kept_sum;
    if constexpr (Tile::kSlides) mainloop.slide(kept_sum, true);
    for_each_gemm<Tile::kSlide>(p, [&](const WorkUnit& unit, const Phase& phase, bool first) {
      if (p.resident && first) mainloop.next_resident();
      if (!p.cooperative && mainloop.gemm % Tile::kConsumers != warpgroup) return mainloop.skip(unit, phase);
      if constexpr (Tile::kSlides) {
        mainloop.multiply(unit, phase, kept_sum);
        WorkUnit complete = unit;
        complete.at[1] -= Tile::kSlide - 1;
        if (unit.plane >= Tile::kSlide - 1 && complete.has_results(phase))
          store_results<Tile>(p, complete, phase, rows, warpgroup, of_warp, kept_sum, false);
        mainloop.slide(kept_sum, unit.plane == unit.planes - 1);
      } else {
        typename Tile::Sums sum;
        const bool empty = !mainloop.multiply(unit, phase, sum);
        store_results<Tile>(p, unit, phase, rows, warpgroup, of_warp, sum, empty);
      }
    });
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32 % 4);
    if (warp == 0 && is_leader()) produce_inputs<Tile>(p, input_stages, inputs);
    if (warp == 1 && is_leader()) produce_weights<Tile>(p, weight_stages, weights);
  }
  if (p.cluster > 1)
    cluster_sync();  // the other CTA still copies to the memory of this CTA and arrives at its barriers
#endif
}

}  // namespace voxgrad::cuda::implicit_gemm
