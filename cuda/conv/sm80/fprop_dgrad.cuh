// Fprop and dgrad with mma.sync, for every geometry that axis_phases.h can describe: a multistage implicit GEMM with
// one CTA tile per CTA.
//
//   A: 256 results (a tile of three axes, in one sample and one phase) x 8 words of input channels (a k-block)
//   B: a k-block x kColumns output channels, for each tap
//
// Other implicit GEMMs read the input again for each tap. Here, a CTA stages the halo of its tile, which holds the
// inputs of all taps for a k-block, only once. A tap is then an offset into the halo that is equal for all threads.
// Words of channels are stored 8 banks apart, so that a warp reads 8 neighboring voxels of 4 words without bank
// conflicts. While one halo is multiplied, the next halo passes through registers, where elements are rounded and
// halves are packed in pairs. The weights, packed in the order in which CTAs and lanes read them
// (pack_weights_kernel()), are copied to a ring of three stages. Residues of strided inputs and phases of strided
// results are separate problems (axis_phases.h), so that no product is computed unnecessarily.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/concepts.h"
#include "cuda/conv/plan/instances.h"
#include "cuda/conv/sm80/fprop_dgrad_producers.cuh"
#include "cuda/conv/sm80/params.cuh"

namespace voxgrad::cuda {

/// Returns the row of the tile that belongs to row `i` of the 2 * kM16 rows of a thread.
template <class Tile>
__device__ int row_of_tile(int thread, int i) {
  const int warp = thread / 32, lane = thread % 32;
  return i / 2 * (16 * Tile::kWarps) + warp * 16 + i % 2 * 8 + lane / 4;
}

/// Stores an element if `really`. The assembly keeps nvcc from reordering the stores, which would need registers for
/// addresses and values.
template <class Element>
__device__ void store_in_order(Element* at, Element value, bool really) {
  if constexpr (sizeof(Element) == 4)
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(at), "f"(value),
                 "r"(static_cast<unsigned>(really))
                 : "memory");
  else
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u16 [%0], %1;}" ::"l"(at), "h"(value.bits),
                 "r"(static_cast<unsigned>(really))
                 : "memory");
}

/// Adds the bias, applies ReLU and stores the results of a CTA tile. In dgrad, class `number` is the phase of the
/// results.
template <class Tile>
__device__ void store_results(const MmaSyncParams& p, const TileCoord& place, int number,
                              const Accumulator (&sum)[Tile::kM16][Tile::kN8]) {
  using Element = typename Tile::Arithmetic::Element;
  int thread = static_cast<int>(threadIdx.x), group = place.group;
  int64_t sample = place.sample;
  // Keeps nvcc from computing offsets before the mainloop, which would spill them.
  asm volatile("" : "+r"(thread), "+r"(group), "+l"(sample));
  const int lane = thread % 32;
  const int64_t channel = int64_t{group} * p.out_channels + place.column_tile * Tile::kColumns + lane % 4 * 2;
  const int columns = p.out_channels - place.column_tile * Tile::kColumns - lane % 4 * 2;
  const float floor = p.epilogue.floor;
  int phase[3] = {};
  if (p.transposed) class_phases(p, number, phase);
  Element* rows[2 * Tile::kM16];
  unsigned inside = 0;  // one bit per row
#pragma unroll
  for (int i = 0; i < 2 * Tile::kM16; ++i) {
    int m = row_of_tile<Tile>(thread, i);
    bool valid = m < p.tile_voxels;
    int64_t offset = sample * p.out_stride[0] + channel * p.out_stride[1];
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& at = p.axis[a].phase[phase[a]];
      const int q = place.q[a] + (a > 0 ? p.tile[a].take_digit(m) : m);
      valid &= q < at.count;
      offset += (at.first + int64_t{q} * p.axis[a].out_step) * p.out_stride[a + 2];
    }
    rows[i] = static_cast<Element*>(p.out) + offset;
    inside |= static_cast<unsigned>(valid) << i;
  }
#pragma unroll
  for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (n * 8 + j >= columns) continue;
      const int64_t step = (n * 8 + j) * p.out_stride[1];
      const float shift = p.epilogue.bias_of<Element>(channel + n * 8 + j);
#pragma unroll
      for (int i = 0; i < 2 * Tile::kM16; ++i) {
        const float value = sum[i / 2][n][i % 2 * 2 + j] + shift;
        store_in_order(rows[i] + step, Element(value < floor ? floor : value), inside >> i & 1);  // keeps NaN
      }
    }
}

/// Multiplies the staged operands. Between the products, the mainloop stages the next k-block of the halo.
template <class Tile>
struct MmaSyncMainloop {
  using Arithmetic = typename Tile::Arithmetic;
  static constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kParts = Arithmetic::kParts, kStageTaps = Tile::kStageTaps;
  static constexpr int kVoxelTaps = 4;  // taps that are multiplied between the load and the store of a voxel
  // Taps between the load of fragments and their products. Three products per tap are long enough to hide the loads.
  static constexpr int kAhead = kParts == 1 ? 1 : 0;
  struct Fragments {
    uint32_t a[kAhead + 1][kM16][4];
    uint32_t b[kAhead + 1][kN8][2 * kParts];
  };

  const MmaSyncParams& p;
  const MmaSyncShared<Tile>& shared;
  HaloProducer<Tile>& halo;
  WeightProducer<Tile>& weights;
  const uint32_t* columns;  // this lane's words of the first stage of B
  uint32_t rows[2 * kM16];  // shared addresses of word t in this lane's rows of A
  Accumulator sum[kM16][kN8] = {};
  int a_stage = 0;
  int round = 0;   // next round of voxels to stage
  int rounds = 0;  // rounds of voxels of the next k-block

  __device__ MmaSyncMainloop(const MmaSyncParams& params, const MmaSyncShared<Tile>& memory, HaloProducer<Tile>& a,
                             WeightProducer<Tile>& b)
      : p(params), shared(memory), halo(a), weights(b) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    columns = shared.weights + lane * 2 * kParts;
#pragma unroll
    for (int i = 0; i < 2 * kM16; ++i) {
      int m = row_of_tile<Tile>(thread, i);
      const bool inside = m < p.tile_voxels;
      const int w = p.tile[2].take_digit(m), h = p.tile[1].take_digit(m);
      rows[i] = shared_address(shared.inputs + lane % 4 * p.pitch +
                               (inside ? (m * p.extent[1].value() + h) * p.line + w : 0));
    }
  }

  /// Adds the products of all taps of a class with the staged k-block. If `more`, stages the next k-block.
  __device__ void multiply(int number, bool more) {
    if (more) halo.next();
    rounds = more ? p.rounds : 0;
    round = 0;
    const int last = p.class_begin[number + 1];
    for (int tap = p.class_begin[number]; tap < last; tap += kStageTaps) {
      cp_async_wait<1>();
      __syncthreads();
      weights.fetch();
      if (last - tap >= kStageTaps)
        multiply_taps<true>(tap, kStageTaps);
      else
        multiply_taps<false>(tap, last - tap);
    }
    halo.stage(round, rounds, 1 - a_stage);  // the voxels that the products above did not hide
  }
  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kM16; ++m)
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
  }

 private:
  /// Loads the fragments of tap `tap` + j.
  __device__ void load_fragments(Fragments& fragments, int tap, int j) const {
    const uint32_t upper = 4 * p.pitch * 4;  // bytes from word t of a k-block to word t + 4
    const uint32_t* b = columns + weights.stage * Tile::kStageWords + j * Tile::kSlab;
    const uint32_t offset = p.tap_offset[tap + j] + a_stage * shared.stage_words * 4;
    constexpr int kSets = kAhead + 1;
#pragma unroll
    for (int n = 0; n < kN8; ++n, b += 64 * kParts) {
      if constexpr (kParts == 1)
        *reinterpret_cast<uint2*>(fragments.b[j % kSets][n]) = *reinterpret_cast<const uint2*>(b);
      else
        *reinterpret_cast<uint4*>(fragments.b[j % kSets][n]) = *reinterpret_cast<const uint4*>(b);
    }
#pragma unroll
    for (int m = 0; m < kM16; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        fragments.a[j % kSets][m][i] = load_shared(rows[2 * m + i] + offset);
        fragments.a[j % kSets][m][i + 2] = load_shared(rows[2 * m + i] + (offset + upper));
      }
  }
  /// Multiplies the taps of a stage of B: kStageTaps taps if kFull, otherwise `count` taps.
  template <bool kFull>
  __device__ void multiply_taps(int tap, int count) {
    typename HaloProducer<Tile>::Voxel voxel;
    Fragments fragments;
    if (kAhead > 0) load_fragments(fragments, tap, 0);
    const auto multiply_tap = [&](int j) {
      if (j % kVoxelTaps == 0 && round < rounds) halo.load(voxel, round);
      if (j + kAhead < kStageTaps && (kFull || j + kAhead < count)) load_fragments(fragments, tap, j + kAhead);
      Arithmetic::multiply(sum, fragments.a[j % (kAhead + 1)], fragments.b[j % (kAhead + 1)]);
      if ((j % kVoxelTaps == kVoxelTaps - 1 || j + 1 == (kFull ? kStageTaps : count)) && round < rounds)
        halo.store(voxel, round++, 1 - a_stage);
    };
    if constexpr (kAhead > 0) {
#pragma unroll
      for (int j = 0; j < kStageTaps; ++j) {
        if (!kFull && j >= count) break;
        multiply_tap(j);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < count; ++j) multiply_tap(j);
    }
  }
};

/// The parts of fprop_dgrad_mma_sync().
template <class Tile>
concept FpropDgradMmaSyncTile =
    KernelTile<Tile> && StageProducer<HaloProducer<Tile>> && KBlockMainloop<MmaSyncMainloop<Tile>>;

/// Computes fprop or dgrad. Launch: one CTA per CTA tile in a 1-D grid; MmaSyncParams::digit decodes the number of a
/// tile. Dynamic shared memory: MmaSyncShared.
template <FpropDgradMmaSyncTile Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fprop_dgrad_mma_sync(const __grid_constant__ MmaSyncParams p) {
  wait_for_previous_kernels();
  extern __shared__ uint4 dynamic_shared[];
  const MmaSyncShared<Tile> shared(p, dynamic_shared);
  TileCoord place = tile_coord(p, blockIdx.x);
  if (!p.merged && !has_results(p, place)) return;
  const MmaSyncSteps steps(p, place);
  HaloProducer<Tile> halo(p, place, shared);
  WeightProducer<Tile> weights(p, place, steps, shared.weights);
  weights.fetch();
  weights.fetch();
  halo.stage(0, p.rounds, 0);
  for (int k_block = 1; p.merged && k_block < p.k_blocks; ++k_block) {
    halo.next_k_block();
    halo.stage(0, p.rounds, k_block);
  }

  MmaSyncMainloop<Tile> mainloop(p, shared, halo, weights);
  for (; place.column_tile < steps.last_column_tile; ++place.column_tile)
    for (int number = steps.first_class, k_block = 0; number < steps.last_class;) {
      if (p.merged) mainloop.a_stage = k_block;
      const bool last_k_block = k_block + 1 == p.k_blocks;
      const bool more = !p.merged && !(last_k_block && number + 1 == steps.last_class);
      mainloop.multiply(number, more);
      if (!p.merged) mainloop.a_stage = 1 - mainloop.a_stage;
      if (p.merged ? last_k_block : !more) {
        store_results<Tile>(p, place, number, mainloop.sum);
        mainloop.clear();
      }
      k_block = last_k_block ? 0 : k_block + 1;
      number += last_k_block;
    }
}

}  // namespace voxgrad::cuda
