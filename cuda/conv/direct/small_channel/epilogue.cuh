// The parameters, the weights in shared memory and the epilogue of the kernel of fprop_dgrad.cuh.
#pragma once

#include "cuda/conv/direct/small_channel/producer.cuh"
#include "cuda/conv/plan/instances.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// A unit of K: 4 channels of one input voxel.
struct SmallChannelUnit {
  int height;   // tap along the height
  int along;    // position along the width that result 0 of a line reads
  int channel;  // first of the 4 channels; negative if the unit only completes a pair
};

/// The parameters of fprop_dgrad_small_channel.
struct SmallChannelParams {
  SmallChannelInput in;
  const void* weight;
  // Strides of the weights, in elements.
  int64_t weight_group;
  int64_t weight_in;
  int64_t weight_out;
  int64_t weight_tap[3];
  const void* bias;  // or null
  int64_t bias_stride;
  bool relu;
  void* out;
  int64_t out_stride[3];  // strides of samples, channels and depth, in elements
  int out_channels;       // per group
  int width;              // width of the results
  int height;             // height of the results
  SlidingTiles tiles;
  AxisPhases axis[3];
  Divisor tile_width;
  int tile_voxels;  // results of one phase in a plane of the tile
  int kernel_depth;
  int result_pitch;                                 // elements from one channel to the next in shared memory
  Divisor pairs;                                    // pairs of units in a plane
  Divisor phases;                                   // phases of the results along the width
  Divisor tap_distance;                             // positions along the width from one tap of a phase to the next
  int pair_begin[kMaxAxisPhases + 1];               // first pair of each phase of the height
  int8_t part_of[kMaxAxisPhases];                   // index in axis[2].phase of each phase of the width
  uint32_t unit_offset[2 * kMaxSmallChannelPairs];  // bytes from the beginning of a plane
  SmallChannelUnit unit[2 * kMaxSmallChannelPairs];
};

static_assert(sizeof(SmallChannelParams) <= kMaxParameterBytes);
static_assert(kMaxAxisPhases - 1 <= INT8_MAX);  // part_of

/// A CTA tile. Each consumer warp computes kM16 blocks of 16 rows by kN8 blocks of 8 columns.
template <class Arithmetic_, class Element_, ConvArithmetic kKind, int kM16_, int kN8_, int kBlocks_>
struct SmallChannelTile {
  using Arithmetic = Arithmetic_;
  using Element = Element_;
  static constexpr ConvArithmetic kArithmetic = kKind;
  static constexpr int kM16 = kM16_, kN8 = kN8_, kWarps = kSmallChannelConsumers / 32;
  static constexpr int kRows = 16 * kM16 * kWarps, kColumns = 8 * kN8;
  static constexpr bool kRounds = Arithmetic::kRounds && sizeof(Element) == 4;
  static constexpr int kBlocks = kBlocks_;  // maximum CTAs per SM
  static constexpr int kProducers = small_channel_producers(kBlocks),
                       kThreads = kSmallChannelConsumers + kProducers + kSmallChannelEpilogue;
  static constexpr int kSlab = 64 * kN8 * Arithmetic::kParts;  // words of B per pair

  __host__ __device__ static int weight_words(const SmallChannelParams& p) {
    return p.kernel_depth * p.pairs.value() * kSlab;
  }
  __host__ __device__ static int result_elements(const SmallChannelParams& p) {
    return p.out_channels * p.result_pitch;
  }
};

__device__ inline void store_shared_element(uint32_t address, float x) { store_shared(address, __float_as_uint(x)); }
template <class Half>
__device__ void store_shared_element(uint32_t address, Half x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x.bits) : "memory");
}

/// Barriers of the two stages of results. Consumers arrive at full(), and the epilogue warp arrives at free().
struct EpilogueBarriers {
  static constexpr int kCount = 4;
  uint32_t shared;
  __device__ uint32_t full(int stage) const { return shared + stage * 8; }
  __device__ uint32_t free(int stage) const { return shared + (2 + stage) * 8; }
  __device__ void init() const {
    for (int stage = 0; stage < 2; ++stage) {
      init_barrier(full(stage), kSmallChannelConsumers / 32);
      init_barrier(free(stage), 1);
    }
  }
};

/// Copies the weights of a group to shared memory, in the order (tap along depth, pair, 8 columns, lane, unit). Each
/// thread copies one column of all taps and pairs, with kBatch loads at a time.
template <class Tile>
__device__ void fill_weights(const SmallChannelParams& p, int group, uint32_t shared) {
  using Element = typename Tile::Element;
  constexpr int kParts = Tile::Arithmetic::kParts, kSlabs = Tile::kThreads / (64 * Tile::kN8), kBatch = 4;
  static_assert(Tile::kThreads % (64 * Tile::kN8) == 0);
  const int thread = static_cast<int>(threadIdx.x), u = thread % 2, lane = thread / 2 % 32;
  int column = thread / 64 % Tile::kN8 * 8 + lane / 4;
  const AxisPhase part = p.axis[2].phase[p.part_of[p.phases.take_digit(column)]];
  const Element* const weight = static_cast<const Element*>(p.weight) + group * p.weight_group + column * p.weight_out;
  const bool is_real = column < p.out_channels;
  const int slabs = p.kernel_depth * p.pairs.value();
  for (int first = thread / (64 * Tile::kN8); first < slabs; first += kBatch * kSlabs) {
    float x[kBatch][1];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int depth = min(first + i * kSlabs, slabs - 1);
      const SmallChannelUnit& unit = p.unit[p.pairs.take_digit(depth) * 2 + u];
      const int channel = unit.channel + lane % 4,
                taps = part.step < 0 ? part.start - unit.along : unit.along - part.start;
      const int tap = p.tap_distance.divide(max(taps, 0));
      const bool exists = unit.channel >= 0 && channel < p.in.channels && is_real && taps >= 0 && tap < part.taps &&
                          tap * p.tap_distance.value() == taps;
      x[i][0] = exists
                    ? to_float(weight[depth * p.weight_tap[0] + unit.height * p.weight_tap[1] +
                                      (part.tap_first + tap * part.tap_step) * p.weight_tap[2] + channel * p.weight_in])
                    : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slab = first + i * kSlabs;
      if (slab >= slabs) break;
      uint32_t word[kParts];
      Tile::Arithmetic::split(x[i], word);
      const int at = (slab * Tile::kN8 + thread / 64 % Tile::kN8) * 32 + lane;
#pragma unroll
      for (int k = 0; k < kParts; ++k) store_shared(shared + ((at * kParts + k) * 2 + u) * 4, word[k]);
    }
  }
}

/// Copies `count` consecutive results of one channel from shared to global memory.
template <class Element>
__device__ void write_lines(Element* to, uint32_t from, int count) {
  constexpr int kVector = 16 / sizeof(Element);
  const auto store = [&](int i) {
    if constexpr (sizeof(Element) == 4) {
      to[i] = __uint_as_float(load_shared(from + i * 4));
    } else {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from + i * 2));
      to[i].bits = bits;
    }
  };
  const int ahead = static_cast<int>(-reinterpret_cast<uintptr_t>(to) / sizeof(Element) % kVector);
  const int head = min(ahead, count), body = (count - head) / kVector * kVector;
  if (body > 0) bulk_store(to + head, from + head * static_cast<int>(sizeof(Element)), body * sizeof(Element));
  for (int i = 0; i < head; ++i) store(i);
  for (int i = head + body; i < count; ++i) store(i);
}

/// Iterates over the planes of results of a CTA tile, in the order in which the consumers compute them.
template <class Tile>
struct OutputPlanes {
  using Element = typename Tile::Element;
  const SmallChannelParams& p;
  const SlidingTileCoord& place;
  uint32_t stages;  // address of the first stage of results
  Element* first;   // first result of the tile in channel 0 and depth 0
  PipelineState state{};
  Element* at = nullptr;  // first result of the tile in channel 0 of the current plane

  __device__ OutputPlanes(const SmallChannelParams& problem, const SlidingTileCoord& block, uint32_t shared)
      : p(problem), place(block), stages(shared) {
    first = static_cast<Element*>(p.out) + place.sample * p.out_stride[0] +
            int64_t{place.group} * p.out_channels * p.out_stride[1] +
            int64_t{place.q[1]} * p.axis[1].out_step * p.width;
  }
  /// Selects the plane of a step in one phase of the depth. Returns false if the plane does not exist.
  __device__ bool find(int step, const AxisPhase& part) {
    const int depth = place.q[0] + step;
    at = first + (part.first + int64_t{depth} * p.axis[0].out_step) * p.out_stride[2];
    return depth < part.count;
  }
  /// Returns the offset of a channel in memory from a multiple of 16 bytes. The channel has the same offset in shared
  /// memory.
  __device__ uint32_t shift(int channel) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at + channel * p.out_stride[1])) & 15;
  }
  /// Returns the address of the current stage.
  __device__ uint32_t shared() const {
    return stages + state.stage * Tile::result_elements(p) * static_cast<int>(sizeof(Element));
  }
};

/// Runs the epilogue warp of a CTA. Each lane copies the lines of one channel.
template <class Tile>
__device__ void small_channel_epilogue(const SmallChannelParams& p, const SlidingTileCoord& place,
                                       OutputPlanes<Tile> slices, const EpilogueBarriers& of_results) {
  const int channel = static_cast<int>(threadIdx.x) % 32;
  const int first_line = place.q[1] * p.axis[1].out_step;
  const int elements = min(p.tiles.tile[1] * p.axis[1].out_step, p.height - first_line) * p.width;
  for (int step = 0; step < place.depths; ++step)
    for (int deep = 0; deep < p.axis[0].phases; ++deep) {
      if (!slices.find(step, p.axis[0].phase[deep])) continue;
      wait_barrier(of_results.full(slices.state.stage), slices.state.round);
      if (channel < p.out_channels)
        write_lines(slices.at + channel * p.out_stride[1],
                    slices.shared() + channel * p.result_pitch * static_cast<int>(sizeof(typename Tile::Element)) +
                        slices.shift(channel),
                    elements);
      bulk_store_commit();
      bulk_store_wait<0>();
      __syncwarp();
      if (channel == 0) arrive(of_results.free(slices.state.stage));
      slices.state.next(2);
    }
}

}  // namespace voxgrad::cuda
