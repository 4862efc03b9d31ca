// Wgrad of up to 16 channels per group: a warp-specialized implicit GEMM with mma.sync and split-K, whose CTA tile
// slides along the depth. The kernel is memory-bound and reads both tensors once. Half of the warps stage planes of x
// and y (producer.cuh). The other half multiply in TF32, which represents halves exactly:
//
//   A: two units x 8 voxels                                  a unit is one tap of 8 channels of x
//   B: 8 voxels of a line of y x 8 channels of y
//
// A warp keeps the sums of up to 14 units by 8 channels of y, or of up to 8 units by 16 channels, in registers. The
// warps divide the voxels of the tile among themselves, in groups of 8 voxels. If there are more units, the warps also
// divide the units. The sums of the warps of a CTA are added in shared memory in a fixed order, and reduce_ranges()
// adds the sums of the CTAs. Lines of y are padded with zeros to a multiple of 8 voxels. If x is infinite at a voxel
// that a tap combines with such a zero, the sum of the tap is NaN.
#pragma once

#include "cuda/conv/direct/small_channel/producer.cuh"
#include "cuda/conv/plan/instances.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// Upper bound of the units.
inline constexpr int kSmallChannelUnits = kSmallChannelWgradConsumers / 32 * small_channel_units(8);

/// The parameters of wgrad_small_channel.
struct SmallChannelWgradParams {
  SmallChannelInput x;
  SmallChannelInput y;
  float* partial;  // (ranges, groups, units, 8 channels of x, columns)
  SlidingTiles tiles;
  int units;
  int splits;                           // warps among which the units are divided
  int octs;                             // groups of 8 voxels in a plane of the tile
  Divisor line_octs;                    // groups of 8 voxels in a line of the tile
  int unit_plane[kSmallChannelUnits];   // plane that a unit reads, from the first plane of a step
  int unit_offset[kSmallChannelUnits];  // bytes from the beginning of this plane
};

static_assert(sizeof(SmallChannelWgradParams) <= kMaxParameterBytes);

template <class Arithmetic_, class Element_, ConvArithmetic kKind, int kN8_>
struct SmallChannelWgradTile {
  using Arithmetic = Arithmetic_;
  using Element = Element_;
  static constexpr ConvArithmetic kArithmetic = kKind;
  static constexpr int kN8 = kN8_, kColumns = 8 * kN8, kRows = 0, kBlocks = 0;
  static constexpr int kUnits = small_channel_units(kColumns), kWarps = kSmallChannelWgradConsumers / 32;
  static constexpr int kProducers = kSmallChannelWgradConsumers, kThreads = 2 * kSmallChannelWgradConsumers;
};

template <class Tile>
using SmallChannelSums = Accumulator[Tile::kUnits / 2][1][Tile::kN8];

/// Runs a consumer warp: computes the sums of the units of the warp over its voxels.
template <class Tile>
__device__ void consume_planes(const SmallChannelWgradParams& p, const SlidingTileCoord& place,
                               SmallChannelSums<Tile>& sum, uint32_t table, uint32_t x_ring, uint32_t y_ring,
                               const StageBarriers& of_x, const StageBarriers& of_y) {
  using Arithmetic = typename Tile::Arithmetic;
  constexpr int kN8 = Tile::kN8, kUnits = Tile::kUnits;
  const SmallChannelHalo &x = p.x.halo, &y = p.y.halo;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int first_unit = warp % p.splits * kUnits, first_oct = warp / p.splits, oct_step = Tile::kWarps / p.splits;
  const uint32_t my_x = x_ring + (g * x.pitch + t) * 4, my_y = y_ring + (g * y.pitch + t) * 4;

  PipelineState x_arrived{}, y_arrived{};
  int first = 0, waited = 0;
  for (int step = 0; step < place.depths; ++step) {
    for (; waited < step * x.step[0] + x.span[0]; ++waited) {
      wait_barrier(of_x.full(x_arrived.stage), x_arrived.round);
      x_arrived.next(x.stages);
    }
    wait_barrier(of_y.full(y_arrived.stage), y_arrived.round);
    const uint32_t y_plane = y_arrived.stage * y.plane() * 4;
    uint32_t at[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      at[u] = my_x + load_shared(table + (first * p.units + min(first_unit + u, p.units - 1)) * 4);
    for (int oct = first_oct; oct < p.octs; oct += oct_step) {
      int line = oct;
      const int along = p.line_octs.take_digit(line);
      const uint32_t x_at = warp_uniform((line * x.step[1] * x.line + along * 8) * 4);
      const uint32_t y_at = warp_uniform(y_plane + (line * y.line + along * 8) * 4) + my_y;
      uint32_t b[kN8][2];
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[n][i] = load_shared(y_at + (n * 8 * y.pitch + i * 4) * 4);
      uint32_t parts[kN8][2 * Arithmetic::kParts];
      Arithmetic::split_words(parts, b);
      uint32_t a[2][1][4];  // a pair of units is loaded while the previous pair is multiplied
      const auto load = [&](int pair) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[pair % 2][0][i] = load_shared(at[2 * pair + i % 2] + x_at + i / 2 * 16);
      };
      load(0);
#pragma unroll
      for (int pair = 0; pair < kUnits / 2; ++pair) {
        if (pair + 1 < kUnits / 2) load(pair + 1);
        Arithmetic::multiply(sum[pair], a[pair % 2], parts);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(of_y.free(y_arrived.stage));
    y_arrived.next(y.stages);
    for (int i = 0; i < x.step[0]; ++i) {
      if (lane == 0) arrive(of_x.free(first));
      if (++first == x.stages) first = 0;
    }
  }
}

/// Waits for all consumer warps of the CTA.
template <class Tile>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * Tile::kWarps) : "memory");
}

/// Adds the sums of the consumer warps in a fixed order, and stores the partial sums of the CTA.
template <class Tile>
__device__ void write_sums(const SmallChannelWgradParams& p, const SlidingTileCoord& place,
                           const SmallChannelSums<Tile>& sum, uint32_t shared) {
  constexpr int kUnits = Tile::kUnits, kColumns = Tile::kColumns, kOfUnit = 8 * kColumns;  // words
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
#pragma unroll
    for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        store_shared(shared + ((warp * kUnits + u) * kOfUnit + g * kColumns + n * 8 + 2 * t + j) * 4,
                     __float_as_uint(sum[u / 2][0][n][u % 2 * 2 + j]));
  sync_consumers<Tile>();
  float* const partial = p.partial + (place.range * p.tiles.groups + place.group) * p.units * kOfUnit;
  for (int i = thread; i < p.units * kOfUnit; i += kSmallChannelWgradConsumers) {
    const int unit = i / kOfUnit;
    float total = 0.0f;
    for (int w = unit / kUnits; w < Tile::kWarps; w += p.splits)
      total += __uint_as_float(load_shared(shared + ((w * kUnits + unit % kUnits) * kOfUnit + i % kOfUnit) * 4));
    partial[i] = total;
  }
}

/// Computes partial sums of the weight gradient. Launch: one CTA per CTA tile, group and sample in a 1-D grid
/// (SlidingTiles). Dynamic shared memory: the rings of x and y, and the tables of units and voxels; later the sums of
/// all warps.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    wgrad_small_channel(const __grid_constant__ SmallChannelWgradParams p) {
  wait_for_previous_kernels();
#if VOXGRAD_HAS_WGMMA
  using Element = typename Tile::Element;
  constexpr bool kRounds = Tile::Arithmetic::kRounds && sizeof(Element) == 4;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint64_t barrier[2 * StageBarriers::kCount];
  static_assert(1024 + sizeof(barrier) <= kSmallChannelStaticBytes);
  const SmallChannelHalo &x = p.x.halo, &y = p.y.halo;
  const uint32_t x_ring = warp_uniform(shared_address(dynamic_shared));
  const uint32_t y_ring = x_ring + x.stages * x.plane() * 4, table = y_ring + y.stages * y.plane() * 4;
  const uint32_t x_voxels = table + kMaxSmallChannelStages * p.units * 4, y_voxels = x_voxels + x.table_bytes();
  const StageBarriers of_x{warp_uniform(shared_address(barrier))}, of_y{of_x.shared + StageBarriers::kCount * 8};
  const SlidingTileCoord place = p.tiles.place(blockIdx.x);
  if (threadIdx.x == 0) {
    of_x.init(Tile::kProducers, kSmallChannelWgradConsumers);
    of_y.init(Tile::kProducers, kSmallChannelWgradConsumers);
  }
  fence_barrier_init();
  for (int i = static_cast<int>(threadIdx.x); i < (table - x_ring) / 4; i += Tile::kThreads)
    store_shared(x_ring + i * 4, 0);  // missing channels are zero
  for (int i = static_cast<int>(threadIdx.x); i < x.stages * p.units; i += Tile::kThreads) {
    const int unit = i % p.units, stage = (i / p.units + p.unit_plane[unit]) % x.stages;
    store_shared(table + i * 4, stage * x.plane() * 4 + p.unit_offset[unit]);
  }
  list_voxels(p.x, place.q, x_voxels, static_cast<int>(threadIdx.x), Tile::kThreads);
  list_voxels(p.y, place.q, y_voxels, static_cast<int>(threadIdx.x), Tile::kThreads);
  __syncthreads();
  if (warp_uniform(static_cast<int>(threadIdx.x) / 32) < Tile::kWarps) {
    SmallChannelSums<Tile> sum = {};
    consume_planes<Tile>(p, place, sum, table, x_ring, y_ring, of_x, of_y);
    sync_consumers<Tile>();  // the sums overwrite the planes
    write_sums<Tile>(p, place, sum, x_ring);
  } else {
    const int thread = static_cast<int>(threadIdx.x) - kSmallChannelWgradConsumers;
    SmallChannelProducer<Element, kRounds, Tile::kProducers, false> produce_x(p.x, of_x, place, x_voxels, x_ring);
    SmallChannelProducer<Element, kRounds, Tile::kProducers, false> produce_y(p.y, of_y, place, y_voxels, y_ring);
    for (int step = 0, planes = 0; step < place.depths; ++step) {
      produce_y.produce(thread);
      for (; planes < step * x.step[0] + x.span[0]; ++planes) produce_x.produce(thread);
    }
  }
#endif
}

template <class Tile>
void launch_wgrad_small_channel(const SmallChannelWgradParams& p, int64_t blocks, int shared_bytes,
                                cudaStream_t stream) {
  ++small_channel_instance<Tile, ConvPass::wgrad>.launches;
  launch_kernel("conv weight gradient", wgrad_small_channel<Tile>, static_cast<unsigned>(blocks), Tile::kThreads,
                shared_bytes, stream, p);
}

}  // namespace voxgrad::cuda
