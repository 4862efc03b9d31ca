// The CTA tile of fprop and dgrad by mma.sync, its shared memory, and the producers that fill it.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/concepts.h"
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
  static constexpr int kStageWords = kStageTaps * kSlab, kRing = kStages * kStageWords;
  static_assert(kRows == kMmaSyncRows);
};

/// The dynamic shared memory of a CTA, whose parts have sizes that depend on the plan.
template <class Tile>
struct MmaSyncShared {
  uint32_t* weights;  // ring of kStages stages
  uint32_t* inputs;   // MmaSyncParams::input_stages stages
  uint32_t* offsets;  // offset in the input of each voxel of the halo (locate_halo())
  int* targets;       // offset in a stage of each voxel of the halo (place_words())
  int stage_words;    // words of a stage of inputs

  __device__ MmaSyncShared(const MmaSyncParams& p, uint4* memory)
      : weights(reinterpret_cast<uint32_t*>(memory)),
        inputs(weights + Tile::kRing),
        offsets(inputs + p.input_stages * input_stage_words(p)),
        targets(reinterpret_cast<int*>(offsets + p.rounds * Tile::kThreads)),
        stage_words(input_stage_words(p)) {}
  __device__ uint32_t* input_stage(int stage) const { return inputs + stage * stage_words; }
  VG_HOST_DEVICE static int input_stage_words(const MmaSyncParams& p) { return kMmaSyncKWords * p.pitch; }
  static size_t bytes(const MmaSyncParams& p) {
    return sizeof(uint32_t) * (Tile::kRing + p.input_stages * input_stage_words(p) + 2 * p.rounds * Tile::kThreads);
  }
};

/// The column tiles and classes that a CTA computes one after another.
struct MmaSyncSteps {
  int first_class;
  int last_class;        // exclusive
  int last_column_tile;  // exclusive

  __device__ MmaSyncSteps(const MmaSyncParams& p, const TileCoord& place)
      : first_class(place.phase),
        last_class(p.transposed && !p.merged ? place.phase + 1 : p.classes),
        last_column_tile(p.merged ? p.column_tiles : place.column_tile + 1) {}
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
    for (int c = 0; c < kChannels; ++c, at += stride) value[c] = load_element<Element>(at, c < channels);
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

/// Stages operand A: copies the halo of the CTA tile to shared memory, one k-block of channels of one class at a time.
template <class Tile>
struct HaloProducer {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Voxel = StagedVoxel<Arithmetic>;
  static constexpr int kThreads = Tile::kThreads;

  const MmaSyncParams& p;
  const TileCoord& place;
  const MmaSyncShared<Tile>& shared;
  const int thread = static_cast<int>(threadIdx.x);
  int number;                  // class
  int k_block = 0;             // k-block of channels
  const char* from = nullptr;  // first channel of the k-block at halo_corner() of the class

  __device__ HaloProducer(const MmaSyncParams& params, const TileCoord& at, const MmaSyncShared<Tile>& memory)
      : p(params), place(at), shared(memory), number(place.phase) {
    locate();
    place_words<kThreads>(p, shared.targets, thread);
  }
  /// Continues with the next k-block of the class.
  __device__ void next_k_block() {
    ++k_block;
    from += Voxel::kChannels * channel_bytes();
  }
  /// Continues with the next k-block, which may belong to the next class.
  __device__ void next() {
    if (k_block + 1 < p.k_blocks) return next_k_block();
    k_block = 0;
    ++number;
    locate();
  }
  /// Loads the voxel of this thread in a round.
  __device__ void load(Voxel& voxel, int round) const {
    const uint32_t offset = shared.offsets[thread + round * kThreads];
    voxel.load(from + offset, channel_bytes(), offset == kOutside ? 0 : p.in_channels - k_block * Voxel::kChannels);
  }
  __device__ void store(const Voxel& voxel, int round, int stage) const {
    voxel.store(shared_address(shared.input_stage(stage)) + shared.targets[thread + round * kThreads], p.pitch * 4);
  }
  /// Stages the voxels of several rounds while no products run. Several voxels at a time hide the latency of the loads.
  __device__ void stage(int round, int rounds, int stage) const {
    constexpr int kMany = Arithmetic::kElements == 1 && Tile::kN8 != 4 ? 3 : 2;
    for (; round < rounds; round += kMany) {
      Voxel voxel[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) load(voxel[i], min(round + i, rounds - 1));
#pragma unroll
      for (int i = 0; i < kMany; ++i) store(voxel[i], min(round + i, rounds - 1), stage);
    }
  }

 private:
  __device__ int64_t channel_bytes() const { return p.in_stride[1] * static_cast<int64_t>(sizeof(Element)); }
  __device__ void locate() {
    locate_halo<Element>(p, place, number, shared.offsets, thread, kThreads);
    const int64_t offset = place.sample * p.in_stride[0] + place.group * int64_t{p.in_channels} * p.in_stride[1] +
                           halo_corner(p, place, number);
    from = static_cast<const char*>(p.in) + offset * static_cast<int64_t>(sizeof(Element));
  }
};

/// Copies operand B, the packed weights, to its ring of stages in the order in which the mainloop reads them: column
/// tiles, classes, k-blocks, taps.
template <class Tile>
struct WeightProducer {
  static constexpr int kThreads = Tile::kThreads, kStageTaps = Tile::kStageTaps;

  const MmaSyncParams& p;
  const int thread = static_cast<int>(threadIdx.x);
  const uint4* from;
  uint32_t* const ring;
  const MmaSyncSteps steps;
  int column_tile;
  int number;  // class
  int k_block = 0;
  int tap = 0;
  int stage = 0;  // next stage to fill; after fetch(), the stage that the mainloop reads

  __device__ WeightProducer(const MmaSyncParams& params, const TileCoord& place, const MmaSyncSteps& all,
                            uint32_t* weights)
      : p(params),
        from(p.weights + thread +
             ((int64_t{place.group} * p.column_tiles + place.column_tile) * p.class_begin[p.classes] +
              p.class_begin[place.phase]) *
                 p.k_blocks * (Tile::kSlab / 4)),
        ring(weights),
        steps(all),
        column_tile(place.column_tile),
        number(place.phase) {}

  /// Copies the weights of up to kStageTaps taps to the next stage.
  __device__ void fetch() {
    if (column_tile < steps.last_column_tile) {
      constexpr int kUnits = Tile::kStageWords / 4;
      uint4* const to = reinterpret_cast<uint4*>(ring + stage * Tile::kStageWords) + thread;
      const int left = p.class_begin[number + 1] - p.class_begin[number] - tap;
      if (left >= kStageTaps) {
#pragma unroll
        for (int i = 0; i < kUnits; i += kThreads)
          if (kUnits % kThreads == 0 || i + thread < kUnits) cp_async(to + i, from + i);
        from += kUnits;
      } else {
        for (int i = 0; i + thread < left * (Tile::kSlab / 4); i += kThreads) cp_async(to + i, from + i);
        from += left * (Tile::kSlab / 4);
      }
      tap += kStageTaps;
      if (left <= kStageTaps) {
        tap = 0;
        if (++k_block == p.k_blocks) {
          k_block = 0;
          if (++number == steps.last_class) number = steps.first_class, ++column_tile;
        }
      }
    }
    cp_async_commit();
    if (++stage == Tile::kStages) stage = 0;
  }
};

}  // namespace voxgrad::cuda
