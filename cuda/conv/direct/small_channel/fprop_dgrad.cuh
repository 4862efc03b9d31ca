// Fprop and dgrad of up to 16 channels per group: a warp-specialized implicit GEMM with mma.sync whose CTA tile slides
// along the depth. The kernel is memory-bound. For every stride and alignment, it reads each input once and writes
// whole lines of the volume.
//
// A CTA tile consists of lines as wide as the volume. Producer warps stage planes of inputs (producer.cuh), eight
// consumer warps multiply in TF32, and one warp runs the epilogue (epilogue.cuh). TF32 represents halves exactly.
//
//   A: 16 results of a line x 8 words, which are two units   a unit is 4 channels of one input voxel
//   B: two units x 8 columns                                 a column is an output channel in one phase of the width
//
// A unit is an offset into the staged plane that is equal for all lanes. The weights of a group stay in shared memory,
// in the order in which lanes read them. Phases of strided results along depth and height are computed one after
// another from the same planes. Phases along the width are computed together: each phase has zero weights for the taps
// of the other phases, so that A is loaded once for all phases. Results are collected in shared memory as consecutive
// lines of a channel, as in global memory. TMA writes them in one copy per channel; ordinary stores write the few
// elements before the first and after the last multiple of 16 bytes.
//
// An infinite input times a zero weight is NaN. A result may therefore be NaN although only its neighbor along the
// width reads the infinity.
#pragma once

#include "cuda/conv/direct/small_channel/epilogue.cuh"

namespace voxgrad::cuda {

/// Adds all sets of accumulators to the first set and returns this set.
template <int kAccumulators, int kM16, int kN8>
__device__ const Accumulator (&add_accumulators(Accumulator (&sums)[kAccumulators][kM16][kN8]))[kM16][kN8] {
#pragma unroll
  for (int set = 1; set < kAccumulators; ++set)
#pragma unroll
    for (int i = 0; i < kM16 * kN8 * 4; ++i)
      sums[0][i / 4 / kN8][i / 4 % kN8][i % 4] += sums[set][i / 4 / kN8][i / 4 % kN8][i % 4];
  return sums[0];
}

/// The addresses that a lane of a consumer warp reads and writes.
template <class Tile>
struct SmallChannelLane {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Tile::Element;
  static constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kParts = Arithmetic::kParts, kSize = sizeof(Element);
  // Products with the same accumulator wait for each other. Small tiles therefore alternate between two accumulators.
  static constexpr int kAccumulators = kM16 * kN8 <= 2 ? 2 : 1;
  using Sums = Accumulator[kAccumulators][kM16][kN8];

  int t;                    // index of the lane among the 4 lanes of a row
  int swap;                 // 1 if the lane stores the second phase of two neighbors first, otherwise 0
  uint32_t weights;         // address of the lane's first weights
  uint32_t rows[2 * kM16];  // addresses of the inputs, for this lane's channel of a unit
  uint32_t at[2 * kM16];    // offsets of the results of a phase
  int height[2 * kM16];     // positions of the results of a phase along the height
  unsigned inside = 0;      // one bit per sum: the result lies in the tile and in the volume
  /// Offset in bytes of the channel and phase of a column. The upper bits hold the offset modulo 16 between channels.
  uint32_t column_at[kN8][2];
  float floor;

  __device__ SmallChannelLane(const SmallChannelParams& p, const SlidingTileCoord& place, uint32_t shared_weights,
                              uint32_t ring) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4;
    const int phases = p.phases.value();
    t = lane % 4;
    // The results of two phases are neighbors in memory. Half of the lanes store the second phase first, which avoids
    // bank conflicts.
    swap = phases % 2 == 0 && t % 2 == 1 ? 1 : 0;
    weights = shared_weights + lane * 8 * kParts;
    floor = p.relu ? 0.0f : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * kM16; ++i) {
      int h = (i / 2 * Tile::kWarps + warp) * 16 + i % 2 * 8 + g;
      const bool in_tile = h < p.tile_voxels;
      if (!in_tile) h = 0;
      const int w = p.tile_width.take_digit(h);
      rows[i] = ring + (t * p.in.halo.pitch + h * p.in.halo.step[1] * p.in.halo.line + w) * 4;
      at[i] = (h * p.axis[1].out_step * p.width + w * phases) * kSize;
      height[i] = place.q[1] + h;
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = column_of(n, j);
          const bool real = in_tile && column < p.out_channels * phases && w * phases + column % phases < p.width;
          inside |= static_cast<unsigned>(real) << bit(i, n, j);
        }
    }
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int channel = column_of(n, j) / phases, phase = column_of(n, j) % phases;
        const auto apart = static_cast<uint32_t>(channel * p.out_stride[1] * kSize) & 15;
        column_at[n][j] = (channel * p.result_pitch + phase) * kSize | apart << 28;
      }
  }
  __device__ int column_of(int n, int j) const { return n * 8 + 2 * t + (j ^ swap); }
  __device__ static constexpr int bit(int i, int n, int j) { return (i * kN8 + n) * 2 + j; }

  /// Adds the products of pairs `begin` to `end` - 1 of a staged plane. The weights of pair 0 begin `slabs` bytes after
  /// the first weights.
  __device__ void multiply(const SmallChannelParams& p, Sums& sums, int begin, int end, uint32_t plane,
                           uint32_t slabs) const {
    uint32_t a[2][kM16][4], b[2][kN8][2 * kParts];
    const auto load = [&](int set, int pair) {
      const uint32_t offset[2] = {plane + p.unit_offset[2 * pair], plane + p.unit_offset[2 * pair + 1]};
#pragma unroll
      for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[set][m][i] = load_shared(rows[2 * m + i % 2] + offset[i / 2]);
#pragma unroll
      for (int n = 0; n < kN8; ++n) load_shared(weights + (slabs + (pair * kN8 + n) * (256 * kParts)), b[set][n]);
    };
    int pair = begin;
    for (; pair + 1 < end; pair += 2) {
      load(0, pair);
      load(1, pair + 1);
      Arithmetic::multiply(sums[0], a[0], b[0]);
      Arithmetic::multiply(sums[kAccumulators - 1], a[1], b[1]);
    }
    if (pair < end) {
      load(0, pair);
      Arithmetic::multiply(sums[0], a[0], b[0]);
    }
  }

  /// Stores the results of one phase of the height in shared memory. The lines of channel 0 begin `shift` bytes after
  /// `lines`, the address of the stage.
  __device__ void store(const SmallChannelParams& p, Sums& sums, const AxisPhase& high, uint32_t lines, uint32_t shift,
                        const float* bias) const {
    const auto& sum = add_accumulators(sums);
    const uint32_t corner = lines + warp_uniform(high.first * p.width * kSize);
    float added[kN8][2];
    uint32_t columns[kN8][2];
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        added[n][j] = bias[column_of(n, j)];
        columns[n][j] = corner + (column_at[n][j] & 0xfffffff) + ((column_at[n][j] >> 28) + shift & 15);
      }
#pragma unroll
    for (int i = 0; i < 2 * kM16; ++i) {
      const unsigned really = height[i] < high.count ? inside : 0;
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float(&both)[4] = sum[i / 2][n];
          const float value = swap ? both[i % 2 * 2 + 1 - j] : both[i % 2 * 2 + j];
          if (really >> bit(i, n, j) & 1)
            store_shared_element(columns[n][j] + at[i], from_float<Element>(max_or_nan(value + added[n][j], floor)));
        }
    }
  }
};

/// Runs the consumer warps of a CTA.
template <class Tile>
__device__ void consume_planes(const SmallChannelParams& p, const SlidingTileCoord& place,
                               const SmallChannelLane<Tile>& lane, OutputPlanes<Tile> slices, const float* bias,
                               const StageBarriers& barriers, const EpilogueBarriers& of_results) {
  const SmallChannelHalo& halo = p.in.halo;
  const bool leader = threadIdx.x % 32 == 0;
  PipelineState arrived{};  // the next plane to wait for
  int first = 0, waited = 0;
  for (int step = 0; step < place.depths; ++step) {
    for (; waited < step * halo.step[0] + halo.span[0]; ++waited) {
      wait_barrier(barriers.full(arrived.stage), arrived.round);
      arrived.next(halo.stages);
    }
    for (int deep = 0; deep < p.axis[0].phases; ++deep) {
      const AxisPhase& part = p.axis[0].phase[deep];
      if (!slices.find(step, part)) continue;
      const uint32_t lines = slices.shared(), shift = slices.shift(0);
      for (int phase = 0; phase < p.axis[1].phases; ++phase) {
        typename SmallChannelLane<Tile>::Sums sums = {};
        const int begin = warp_uniform(p.pair_begin[phase]), end = warp_uniform(p.pair_begin[phase + 1]);
        for (int tap = 0; tap < part.taps; ++tap) {
          int stage = first + part.start + tap * part.step - halo.low[0];
          if (stage >= halo.stages) stage -= halo.stages;
          lane.multiply(p, sums, begin, end, warp_uniform(stage * halo.plane() * 4),
                        warp_uniform((part.tap_first + tap * part.tap_step) * p.pairs.value() * (Tile::kSlab * 4)));
        }
        if (phase == 0 && slices.state.round > 0)
          wait_barrier(of_results.free(slices.state.stage), slices.state.round - 1);
        lane.store(p, sums, p.axis[1].phase[phase], lines, shift, bias);
      }
      fence_async_proxy();
      __syncwarp();
      if (leader) arrive(of_results.full(slices.state.stage));
      slices.state.next(2);
    }
    __syncwarp();
    for (int i = 0; i < halo.step[0]; ++i) {
      if (leader) arrive(barriers.free(first));
      if (++first == halo.stages) first = 0;
    }
  }
}

/// Computes fprop or dgrad. Launch: one CTA per CTA tile, group and sample in a 1-D grid (SlidingTiles). Dynamic shared
/// memory: two stages of results, the weights, the table of voxels, and the ring of input planes.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fprop_dgrad_small_channel(const __grid_constant__ SmallChannelParams p) {
  wait_for_previous_kernels();
#if VOXGRAD_HAS_WGMMA
  using Element = typename Tile::Element;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barrier[StageBarriers::kCount + EpilogueBarriers::kCount];
  __shared__ float bias[Tile::kColumns];
  static_assert(1024 + sizeof(barrier) + sizeof(bias) <= kSmallChannelStaticBytes);
  const SmallChannelHalo& halo = p.in.halo;
  const uint32_t results = warp_uniform(shared_address(dynamic_shared));
  const uint32_t weights = results + 2 * Tile::result_elements(p) * static_cast<int>(sizeof(Element));
  const uint32_t table = weights + Tile::weight_words(p) * 4, ring = table + (halo.table_bytes() + 15) / 16 * 16;
  const StageBarriers barriers{warp_uniform(shared_address(barrier))};
  const EpilogueBarriers of_results{barriers.shared + StageBarriers::kCount * 8};
  const SlidingTileCoord place = p.tiles.place(blockIdx.x);
  if (threadIdx.x == 0) {
    barriers.init(Tile::kProducers, kSmallChannelConsumers);
    of_results.init();
  }
  fence_barrier_init();
  fill_weights<Tile>(p, place.group, weights);
  list_voxels(p.in, place.q, table, static_cast<int>(threadIdx.x), Tile::kThreads);
  for (int i = static_cast<int>(threadIdx.x); i < halo.stages * halo.plane(); i += Tile::kThreads)
    store_shared(ring + i * 4, 0);  // missing channels are zero
  for (int column = static_cast<int>(threadIdx.x); column < Tile::kColumns; column += Tile::kThreads) {
    const int channel = p.phases.divide(column);
    bias[column] = p.bias && channel < p.out_channels
                       ? to_float(static_cast<const Element*>(
                             p.bias)[(int64_t{place.group} * p.out_channels + channel) * p.bias_stride])
                       : 0.0f;
  }
  __syncthreads();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const OutputPlanes<Tile> slices(p, place, results);
  if (warp < Tile::kWarps) {
    if constexpr (Tile::kBlocks == 1) keep_registers<128>();
    const SmallChannelLane<Tile> lane(p, place, weights, ring);
    consume_planes<Tile>(p, place, lane, slices, bias, barriers, of_results);
    return;
  }
  if constexpr (Tile::kBlocks == 1) leave_registers<56>();
  if (warp == Tile::kThreads / 32 - 1) return small_channel_epilogue<Tile>(p, place, slices, of_results);
  SmallChannelProducer<Element, Tile::kRounds, Tile::kProducers, Tile::kBlocks == 1> producer(p.in, barriers, place,
                                                                                              table, ring);
  const int planes = (place.depths - 1) * halo.step[0] + halo.span[0];
  for (int i = 0; i < planes; ++i) producer.produce(static_cast<int>(threadIdx.x) - kSmallChannelConsumers);
#endif
}

template <class Tile>
void launch_fprop_dgrad_small_channel(const SmallChannelParams& p, int64_t blocks, int shared_bytes,
                                      cudaStream_t stream) {
  ++small_channel_instance<Tile, ConvPass::fprop>.launches;
  launch_kernel("conv", fprop_dgrad_small_channel<Tile>, static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes,
                stream, p);
}

}  // namespace voxgrad::cuda
