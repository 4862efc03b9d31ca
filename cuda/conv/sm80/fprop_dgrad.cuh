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
// halves are packed in pairs. The weights, packed in the order in which CTAs and lanes read them (pack.cu), are copied
// to a ring of three stages. Residues of strided inputs and phases of strided results are separate problems
// (axis_phases.h), so that no product is computed unnecessarily.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/plan/instances.h"
#include "cuda/conv/sm80/params.cuh"

namespace voxgrad::cuda {

/// A CTA tile. Each warp computes kM16 blocks of 16 rows by kN8 blocks of 8 columns.
template <class Arithmetic_, int kN8_>
struct MmaSyncTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kM16 = 4, kN8 = kN8_, kThreads = kMmaSyncThreads, kWarps = kThreads / 32;
  static constexpr int kRows = 16 * kM16 * kWarps, kColumns = 8 * kN8;
  static constexpr int kSlab = kColumns * kMmaSyncKWords * Arithmetic::kParts;  // words of one tap of B
  static constexpr int kStageTaps = mma_sync_stage_taps(kSlab), kStages = kMmaSyncWeightStages;
  static constexpr int kAccumulators = 4 * kM16 * kN8;
  static constexpr int kBlocks = kAccumulators * Arithmetic::kParts > 64 ? 2 : 3;  // CTAs per SM; limits the registers
  static constexpr int kRing = kStages * kStageTaps * kSlab;                       // words
  static_assert(kRows == kMmaSyncRows);

  static size_t shared_bytes(const MmaSyncParams& p) {
    return sizeof(uint32_t) * (kRing + p.input_stages * kMmaSyncKWords * p.pitch + 2 * p.rounds * kThreads);
  }
};

/// The offset of a voxel outside of the input. Its elements are zero.
inline constexpr uint32_t kOutside = UINT32_MAX;

/// Computes the lowest input position that a CTA tile reads along each axis for one class. The position may lie outside
/// of the input.
__device__ inline void halo_first(const MmaSyncParams& p, const TileCoord& place, int number, int (&first)[3]) {
  int part[3];
  class_phases(p, number, part);
  for (int a = 0; a < 3; ++a) {
    const AxisPhase& at = p.axis[a].phase[part[a]];
    first[a] = (place.q[a] + at.low) * p.axis[a].fold * p.axis[a].in_step + at.residue;
  }
}
/// Returns the offset of the position that halo_first() computes, in elements from the first element of the sample.
__device__ inline int64_t halo_corner(const MmaSyncParams& p, const TileCoord& place, int number) {
  int first[3];
  halo_first(p, place, number, first);
  int64_t corner = 0;
  for (int a = 0; a < 3; ++a) corner += first[a] * p.in_stride[a + 2];
  return corner;
}
/// Fills the table `offsets` with the offset of each voxel of the halo: bytes from halo_corner(), or kOutside.
template <class Element>
__device__ void locate_halo(const MmaSyncParams& p, const TileCoord& place, int number, uint32_t* offsets, int thread,
                            int threads) {
  int first[3];
  halo_first(p, place, number, first);
  for (int v = thread; v < p.rounds * threads; v += threads) {
    int index = v, offset = 0;
    bool inside = v < p.halo_voxels;
    for (int a = 2; a >= 0; --a) {
      const int step = p.extent[a].take_digit(index) * p.axis[a].in_step;
      inside &= static_cast<unsigned>(first[a] + step) < static_cast<unsigned>(p.axis[a].in_size);
      offset += step * static_cast<int>(p.in_stride[a + 2]);
    }
    offsets[v] = inside ? static_cast<uint32_t>(offset) * sizeof(Element) : kOutside;
  }
}

/// The channels of one voxel in one k-block, held in registers between the load and the store to shared memory.
template <class Arithmetic>
struct StagedVoxel {
  using Element = typename Arithmetic::Element;
  static constexpr int kChannels = kMmaSyncKWords * Arithmetic::kElements;
  Element value[kChannels];

  /// Loads the first `channels` elements, which are `stride` bytes apart, and sets the others to zero.
  __device__ void load(const char* at, int64_t stride, int channels) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c, at += stride) value[c] = load_element(at, c < channels);
  }
  /// Loads an element if `inside`, otherwise returns zero. The assembly keeps nvcc from reordering the loads, which
  /// would need registers for several addresses.
  __device__ static Element load_element(const char* at, bool inside) {
    if constexpr (sizeof(Element) == 4) {
      float x;
      asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
                   : "=f"(x)
                   : "l"(at), "r"(static_cast<unsigned>(inside)));
      return x;
    } else {
      uint16_t x;
      asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u16 %0, 0; @p ld.global.nc.u16 %0, [%1];}"
                   : "=h"(x)
                   : "l"(at), "r"(static_cast<unsigned>(inside)));
      Element element;
      element.bits = x;
      return element;
    }
  }
  /// Stores the elements as words, `pitch` bytes apart.
  __device__ void store(uint32_t shared, uint32_t pitch) const {
#pragma unroll
    for (int w = 0; w < kMmaSyncKWords; ++w, shared += pitch) {
      Element x[Arithmetic::kElements];
#pragma unroll
      for (int e = 0; e < Arithmetic::kElements; ++e) x[e] = value[w * Arithmetic::kElements + e];
      store_shared(shared, Arithmetic::word(x));
    }
  }
};

/// Fills the table `targets` with the offset in bytes at which each voxel of the halo is stored in a stage. Threads
/// also store voxels beyond the halo; these go to a word of padding.
template <int kThreads>
__device__ void place_words(const MmaSyncParams& p, int* targets, int thread) {
  const int fold = p.axis[2].fold;
  for (int v = thread; v < p.rounds * kThreads; v += kThreads) {
    int lines = v;
    // Residues are stored separately, so that neighboring results read neighboring words.
    const int w = p.extent[2].take_digit(lines);
    const int target = lines * p.line + w % fold * (p.extent[2].value() / fold) + w / fold;
    targets[v] = (v < p.halo_voxels ? target : p.pitch - 1) * static_cast<int>(sizeof(uint32_t));
  }
}

/// Returns the row of the tile that belongs to row `i` of the 2 * kM16 rows of this lane.
template <class Tile>
__device__ int row_of_tile(int i) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
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
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t channel = int64_t{place.group} * p.out_channels + place.column_tile * Tile::kColumns + lane % 4 * 2;
  const int columns = p.out_channels - place.column_tile * Tile::kColumns - lane % 4 * 2;
  const float floor = p.relu ? 0.0f : -INFINITY;
  int phase[3] = {};
  if (p.transposed) class_phases(p, number, phase);
  Element* rows[2 * Tile::kM16];
  unsigned inside = 0;  // one bit per row
#pragma unroll
  for (int i = 0; i < 2 * Tile::kM16; ++i) {
    int m = row_of_tile<Tile>(i);
    bool valid = m < p.tile_voxels;
    int64_t offset = place.sample * p.out_stride[0] + channel * p.out_stride[1];
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
      const float shift =
          p.bias ? static_cast<float>(static_cast<const Element*>(p.bias)[(channel + n * 8 + j) * p.bias_stride])
                 : 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * Tile::kM16; ++i) {
        const float value = sum[i / 2][n][i % 2 * 2 + j] + shift;
        store_in_order(rows[i] + step, Element(value < floor ? floor : value), inside >> i & 1);  // keeps NaN
      }
    }
}

/// Computes fprop or dgrad. Launch: one CTA per CTA tile in a 1-D grid; MmaSyncParams::digit decodes the number of a
/// tile. Dynamic shared memory: the ring of weights, the stages of inputs, and the tables `offsets` and `targets`.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fprop_dgrad_mma_sync(const __grid_constant__ MmaSyncParams p) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kParts = Arithmetic::kParts, kThreads = Tile::kThreads;
  constexpr int kStageWords = Tile::kStageTaps * Tile::kSlab, kStageTaps = Tile::kStageTaps;
  constexpr int kVoxelTaps = 4;  // taps that are multiplied between the load and the store of a voxel
  // Taps between the load of fragments and their products. Three products per tap are long enough to hide the loads.
  constexpr int kAhead = kParts == 1 ? 1 : 0;
  extern __shared__ uint4 dynamic_shared[];
  uint32_t* const b_ring = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint32_t* const a_words = b_ring + Tile::kRing;
  const int a_stage_words = kMmaSyncKWords * p.pitch;
  uint32_t* const offsets = a_words + p.input_stages * a_stage_words;
  int* const targets = reinterpret_cast<int*>(offsets + p.rounds * kThreads);

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, t = lane % 4;
  TileCoord place = tile_coord(p, blockIdx.x);
  if (!p.merged && !has_results(p, place)) return;
  const int last_class = p.transposed && !p.merged ? place.phase + 1 : p.classes;

  // ---- Producer of operand A: the halos of the inputs
  const char* const in =
      reinterpret_cast<const char*>(static_cast<const Element*>(p.in) + place.sample * p.in_stride[0] +
                                    place.group * int64_t{p.in_channels} * p.in_stride[1]);
  const int64_t channel_bytes = p.in_stride[1] * static_cast<int64_t>(sizeof(Element));
  struct {
    int number;      // class
    int k_block;     // k-block of channels
    int64_t corner;  // halo_corner() of the class
  } stage{place.phase, 0, 0};
  const auto locate = [&] {
    locate_halo<Element>(p, place, stage.number, offsets, thread, kThreads);
    stage.corner = halo_corner(p, place, stage.number);
  };
  locate();
  place_words<kThreads>(p, targets, thread);
  const auto next_stage = [&] {
    if (++stage.k_block < p.k_blocks) return;
    stage.k_block = 0;
    ++stage.number;
    locate();
  };
  const auto load_voxel = [&](StagedVoxel<Arithmetic>& voxel, int round) {
    const int first = stage.k_block * StagedVoxel<Arithmetic>::kChannels;
    const uint32_t offset = offsets[thread + round * kThreads];
    voxel.load(in + stage.corner * static_cast<int64_t>(sizeof(Element)) + first * channel_bytes + offset,
               channel_bytes, offset == kOutside ? 0 : p.in_channels - first);
  };
  const auto store_voxel = [&](const StagedVoxel<Arithmetic>& voxel, int round, int stage_b) {
    voxel.store(shared_address(a_words + stage_b * a_stage_words) + targets[thread + round * kThreads], p.pitch * 4);
  };
  // Stages voxels while no products run. Several voxels at a time hide the latency of the loads.
  const auto stage_voxels = [&](int round, int rounds, int stage_b) {
    constexpr int kMany = Arithmetic::kElements == 1 && kN8 != 4 ? 3 : 2;
    for (; round < rounds; round += kMany) {
      StagedVoxel<Arithmetic> voxel[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) load_voxel(voxel[i], min(round + i, rounds - 1));
#pragma unroll
      for (int i = 0; i < kMany; ++i) store_voxel(voxel[i], min(round + i, rounds - 1), stage_b);
    }
  };

  // ---- Producer of operand B: the packed weights
  const uint4* weights = p.weights + thread +
                         ((int64_t{place.group} * p.column_tiles + place.column_tile) * p.class_begin[p.classes] +
                          p.class_begin[place.phase]) *
                             p.k_blocks * (Tile::kSlab / 4);
  const int last_tile = p.merged ? p.column_tiles : place.column_tile + 1;
  int next_tile = place.column_tile, next_class = place.phase, next_k_block = 0, next_tap = 0, next_stage_b = 0;
  const auto fetch_weights = [&] {
    if (next_tile < last_tile) {
      constexpr int kUnits = kStageWords / 4;
      uint4* const to = reinterpret_cast<uint4*>(b_ring + next_stage_b * kStageWords) + thread;
      const int left = p.class_begin[next_class + 1] - p.class_begin[next_class] - next_tap;
      if (left >= kStageTaps) {
#pragma unroll
        for (int i = 0; i < kUnits; i += kThreads)
          if (kUnits % kThreads == 0 || i + thread < kUnits) cp_async(to + i, weights + i);
        weights += kUnits;
      } else {
        for (int i = 0; i + thread < left * (Tile::kSlab / 4); i += kThreads) cp_async(to + i, weights + i);
        weights += left * (Tile::kSlab / 4);
      }
      next_tap += kStageTaps;
      if (left <= kStageTaps) {
        next_tap = 0;
        if (++next_k_block == p.k_blocks) {
          next_k_block = 0;
          if (++next_class == last_class) next_class = place.phase, ++next_tile;
        }
      }
      if (++next_stage_b == Tile::kStages) next_stage_b = 0;
    }
    cp_async_commit();
  };
  fetch_weights();
  fetch_weights();
  stage_voxels(0, p.rounds, 0);
  if (p.merged)
    for (stage.k_block = 1; stage.k_block < p.k_blocks; ++stage.k_block) stage_voxels(0, p.rounds, stage.k_block);

  // ---- Mainloop
  const uint32_t upper = 4 * p.pitch * 4;  // bytes from word t of a k-block to word t + 4
  uint32_t rows[2 * kM16];                 // shared addresses of word t in this lane's rows of A
#pragma unroll
  for (int i = 0; i < 2 * kM16; ++i) {
    int m = row_of_tile<Tile>(i);
    const bool inside = m < p.tile_voxels;
    const int w = p.tile[2].take_digit(m), h = p.tile[1].take_digit(m);
    rows[i] = shared_address(a_words + t * p.pitch + (inside ? (m * p.extent[1].value() + h) * p.line + w : 0));
  }
  const uint32_t* const columns = b_ring + lane * 2 * kParts;

  Accumulator sum[kM16][kN8] = {};
  int stage_b = 0, a_now = 0;
  for (; place.column_tile < last_tile; ++place.column_tile)
    for (int step = 0; step < (last_class - place.phase) * p.k_blocks; ++step) {
      const int number = place.phase + step / p.k_blocks, k_block = step % p.k_blocks;
      if (p.merged) a_now = k_block;
      const bool more = !p.merged && (k_block + 1 < p.k_blocks || number + 1 < last_class);
      if (more) next_stage();
      const int rounds = more ? p.rounds : 0;
      int round = 0;
      const int a_offset = a_now * a_stage_words * 4;
      const auto multiply_taps = [&]<bool kFull>(int tap, int count) {
        StagedVoxel<Arithmetic> voxel;
        uint32_t a_fragment[kAhead + 1][kM16][4], b_fragment[kAhead + 1][kN8][2 * kParts];
        const auto load_fragments = [&](int j) {
          const uint32_t* b = columns + stage_b * kStageWords + j * Tile::kSlab;
          const uint32_t offset = p.tap_offset[tap + j] + a_offset;
#pragma unroll
          for (int n = 0; n < kN8; ++n, b += 64 * kParts) {
            if constexpr (kParts == 1)
              *reinterpret_cast<uint2*>(b_fragment[j % (kAhead + 1)][n]) = *reinterpret_cast<const uint2*>(b);
            else
              *reinterpret_cast<uint4*>(b_fragment[j % (kAhead + 1)][n]) = *reinterpret_cast<const uint4*>(b);
          }
#pragma unroll
          for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              a_fragment[j % (kAhead + 1)][m][i] = load_shared(rows[2 * m + i] + offset);
              a_fragment[j % (kAhead + 1)][m][i + 2] = load_shared(rows[2 * m + i] + (offset + upper));
            }
        };
        if (kAhead > 0) load_fragments(0);
        const auto multiply_tap = [&](int j) {
          if (j % kVoxelTaps == 0 && round < rounds) load_voxel(voxel, round);
          if (j + kAhead < kStageTaps && (kFull || j + kAhead < count)) load_fragments(j + kAhead);
          Arithmetic::multiply(sum, a_fragment[j % (kAhead + 1)], b_fragment[j % (kAhead + 1)]);
          if ((j % kVoxelTaps == kVoxelTaps - 1 || j + 1 == (kFull ? kStageTaps : count)) && round < rounds)
            store_voxel(voxel, round++, 1 - a_now);
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
      };
      const int last = p.class_begin[number + 1];
      for (int tap = p.class_begin[number]; tap < last; tap += kStageTaps) {
        cp_async_wait<1>();
        __syncthreads();
        fetch_weights();
        if (last - tap >= kStageTaps)
          multiply_taps.template operator()<true>(tap, kStageTaps);
        else
          multiply_taps.template operator()<false>(tap, last - tap);
        if (++stage_b == Tile::kStages) stage_b = 0;
      }
      stage_voxels(round, rounds, 1 - a_now);  // the voxels that the products above did not hide
      if (!p.merged) a_now = 1 - a_now;
      if (p.merged ? k_block + 1 == p.k_blocks : !more) {
        store_results<Tile>(p, place, number, sum);
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
          for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
      }
    }
}

}  // namespace voxgrad::cuda
