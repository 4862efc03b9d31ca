// Wgrad on wgmma of y (and halves of x) that were packed before: a warp-specialised implicit GEMM over voxels with
// split-K, both operands from shared memory,
//
//   A: 64 rows x 8 words of voxels (a k-block); rows are channels of y,
//   B: a k-block x kColumns columns; columns are (tap along height, tap along the width, channel of x).
//
// wgmma takes floats K-major only, and K is voxels along the width, which is how contiguous tensors lie in memory. Core
// matrices are 8 channels x 4 words. They may begin at any multiple of 16 bytes, so that taps along depth and height,
// which move by whole lines, are offsets; but taps along the width move by words. So x stands in shared memory once for
// each of the CTA's, shifted by it (x shifts); or y does in A, shifted the other way, where it has few channels (y
// shifts), for taps that read the same residue of x. Halves are M- and N-major, as they are packed: core matrices are 8
// voxels x 8 channels, and no shift is needed for x.
//
//   floats in shared memory: plane, quad of 4 words, line, x shift, 8 channels, channel, word;
//   halves of x: plane, line, 8 channels, voxel, channel; of y: plane, 8 channels, line, voxel, channel.
//
// Lines of x are consecutive, and so are taps along height: a product takes as many consecutive columns as its width,
// whatever tap they belong to. If these dilate, lines of one residue are consecutive.
//
// A CTA slides along depth through tiles of the lattice, plane by plane: of x, planes that have not been there yet are
// staged, of y one. Two consumer warpgroups share a plane's products, or, where there are few, its k-blocks. Producer
// warps (wgrad_producer.cuh, wgrad_producer_f32.cuh) fill the stages: eleven and a thread, or one by TMA.
//
// Where y ends within a tile it is zero, and x may be anything: what is not finite there reaches taps that do not read
// it.
//
// Split-K: ranges of sliding tiles, every n-th of them, which follow from shapes (and of floats from whether x has to
// be copied first); reduce_ranges() adds these up in order. For float32 accuracy three products, one after the other
// for a plane, start from zero and are added in float32, as tensor cores truncate what they add.
#pragma once

#include "cuda/conv/packed/wgrad_producer_f32.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kColumns_, int kProducts_>
struct WgradWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kColumns = kColumns_, kN8 = kColumns / 8, kProducts = kProducts_;
  static constexpr bool kThree = Arithmetic::kParts > 1;
  static constexpr int kKBlocks = 4;  // that are queued together, at most
  static constexpr bool kLate = may_be_late(arithmetic_kind<Arithmetic>());
  static constexpr bool kHalves = Arithmetic::kElements == 2;
  // Threads of consumers; of producers, of which one copies all, of halves.
  static constexpr int kConsumers = 256, kProducers = kHalves ? 128 : kCopyThreads + kSplitThreads + 32;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kRegisters = kHalves  ? 184
                                    : kThree ? 176
                                             : 160,
                       kProducerRegisters = kHalves  ? 72
                                            : kThree ? 40
                                                     : 48;
  static_assert(kProducers % 128 == 0);
  static_assert(kRegisters * kConsumers + kProducerRegisters * kProducers <= launch_registers(kThreads));
};

/// The accumulators of a consumer warpgroup, and how a plane is multiplied into them.
template <class Tile>
struct WgradMainloop {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  static constexpr int kProducts = Tile::kProducts, kN8 = Tile::kN8;
  using Sums = Accumulator[kProducts][kN8];

  const PackedWgradParams& p;
  const WgradCoord& place;
  int consumer, first, first_k_block, last_k_block;  // first product of the consumer; k-blocks
  int first_tap, first_part;  // along depth, of the first product; its part of that tap's products

  __device__ WgradMainloop(const PackedWgradParams& problem, const WgradCoord& at, int of_consumer)
      : p(problem), place(at), consumer(of_consumer) {
    first = p.by_k_blocks ? 0 : consumer * kProducts;
    first_tap = first / p.plane_products;
    first_part = first - first_tap * p.plane_products;
    first_k_block = p.by_k_blocks ? consumer * p.k_blocks / 2 : 0;
    last_k_block = p.by_k_blocks ? first_k_block + p.k_blocks / 2 : p.k_blocks;
  }
  /// Whether there is a product i; others are multiplied for nothing.
  __device__ bool exists(int i) const { return first + i < p.depth.taps * p.plane_products; }

  /// sum += the products of a plane of y, or = if not `adds` (and not three products); tail: x's stage that its first
  /// tap reads. If kLate, calls begun() when the products before are done, and these may be under way in the end.
  template <class Begun>
  __device__ void multiply(Sums& sum, bool adds, int tail, uint32_t x, uint32_t y, Begun begun) const {
    const int octet = Tile::kHalves ? p.of_x.octet : 128;
    uint32_t from[kProducts];  // 16 bytes
    int tap = first_tap, part = first_part;
    asm volatile("" : "+r"(tap), "+r"(part));  // not to be kept in registers for all products from plane to plane
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const bool real = exists(i);
      int stage = tail + (real ? tap * p.depth.tap_step : 0);
      if (stage >= p.of_x.stages) stage -= p.of_x.stages;
      from[i] = (x + stage * p.of_x.stage_bytes + (real ? part : 0) * (kN8 * octet)) >> 4;
      if (++part == p.plane_products) part = 0, ++tap;
    }
    const uint64_t x_slab = slab_descriptor(0, p.of_x.pitch, octet);
    const uint64_t y_slab = slab_descriptor(y, p.of_y.pitch, Tile::kHalves ? p.of_y.octet : 128);
    if constexpr (Tile::kThree) {
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        multiply_parts(sum[i], advance_slab(x_slab, static_cast<int>(from[i])), y_slab);
    } else {
      int k_block = first_k_block;
      do {
        multiply_k_blocks<Tile::kKBlocks>(
            k_block,
            [&](uint64_t of_x, uint64_t of_y) {
#pragma unroll
              for (int i = 0; i < kProducts; ++i)
                multiply_async<Element, Tile::kHalves>(sum[i], of_y, advance_slab(of_x, static_cast<int>(from[i])),
                                                       adds);
              adds = true;
            },
            x_slab, y_slab);
        warpgroup_wait<1>();
        if constexpr (Tile::kLate) begun();
      } while (k_block < last_k_block);
      if constexpr (!Tile::kLate) warpgroup_wait<0>();
    }
  }

  /// Queues the products of the next kMost k-blocks or, if fewer are left, of the largest power of two of them: without
  /// a loop, so that what a k-block wants beside its products is done while those of others run.
  template <int kMost, class Multiply>
  __device__ void multiply_k_blocks(int& k_block, Multiply multiply, uint64_t x, uint64_t y) const {
    if (last_k_block - k_block >= kMost) {
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        multiply(advance_slab(x, p.x_k_block_at[k_block + i]), advance_slab(y, p.y_k_block_at[k_block + i]));
      warpgroup_commit();
      k_block += kMost;
    } else if constexpr (kMost > 1) {
      multiply_k_blocks<kMost / 2>(k_block, multiply, x, y);
    }
  }

  /// sum += one product in three, of high and low parts. Tensor cores truncate what they add, so that these start from
  /// zero, and are added in float32. The other consumer multiplies meanwhile.
  __device__ void multiply_parts(Accumulator (&sum)[kN8], uint64_t x, uint64_t y) const {
    const int x_low = p.of_x.part_bytes >> 4, y_low = p.of_y.part_bytes >> 4;
    Accumulator part[kN8];
    bool adds = false;
    int k_block = first_k_block;
    do {
      multiply_k_blocks<Tile::kKBlocks>(
          k_block,
          [&](uint64_t b, uint64_t a) {
            multiply_async<Element>(part, advance_slab(a, y_low), b, adds);
            multiply_async<Element>(part, a, advance_slab(b, x_low));
            multiply_async<Element>(part, a, b);
            adds = true;
          },
          x, y);
      warpgroup_wait<1>();
    } while (k_block < last_k_block);
    warpgroup_wait<0>();
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] += part[n][i];
  }

  __device__ void write(const Sums& sum) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int64_t range = p.by_k_blocks ? int64_t{place.range} * 2 + consumer : place.range;
    const int columns = p.x_octets * 8;
    const int64_t of_width_tap = int64_t{p.kernel[0]} * p.kernel[1] * columns;
    float* out[2];       // this lane's rows; null: not there
    int y_shift_tap[2];  // along the width, from an x shift's first on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int octet = thread / 32 % 4 * 2 + half, y_shift = octet / p.row_octets;
      const int row = place.first_row + (octet - y_shift * p.row_octets) * 8 + lane / 4;
      const bool real = y_shift < p.y_shifts && row < p.y_channels;
      y_shift_tap[half] = y_shift * p.tap_step;
      out[half] = real ? p.partial +
                             ((range * p.groups + place.group) * p.y_channels + row) * p.kernel[2] * of_width_tap +
                             y_shift_tap[half] * of_width_tap + place.first_column + lane % 4 * 2
                       : nullptr;
    }
    const int height_taps = min(p.height.taps, p.kernel[1] - place.height_tap);
    const int first_octet = place.first_column / 8, line = p.x_shifts * p.column_octets;
    int tap = first_tap, part = first_part;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int depth = place.depth_tap + tap;
      const bool real = exists(i) && depth < p.kernel[0];
      int height = part * kN8 / line, octet = part * kN8 - height * line, x_shift = octet / p.column_octets;
      octet -= x_shift * p.column_octets;
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        if (real && height < height_taps && first_octet + octet < p.x_octets) {
          const int width = place.tap[x_shift];
          const int64_t at =
              width * of_width_tap + (int64_t{depth} * p.kernel[1] + place.height_tap + height) * columns + octet * 8;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (out[half] && width + y_shift_tap[half] < p.kernel[2])
              *reinterpret_cast<float2*>(out[half] + at) = make_float2(sum[i][n][2 * half], sum[i][n][2 * half + 1]);
        }
        if (++octet == p.column_octets) octet = 0, ++x_shift;
        if (x_shift == p.x_shifts) x_shift = 0, ++height;
      }
      if (++part == p.plane_products) part = 0, ++tap;
    }
  }
};

/// Multiplies all planes of the CTA's sliding tiles and writes the sums.
template <class Tile>
__device__ void consume_planes(const PackedWgradParams& p, const WgradCoord& place, uint32_t shared,
                               WgradBarriers barriers, int consumer) {
  using Products = WgradMainloop<Tile>;
  const Products products(p, place, consumer);
  typename Products::Sums sum;
  const uint32_t y_stages = shared + p.of_x.stages * p.of_x.stage_bytes;
  const bool speaks = is_leader();
  PipelineState head, of_y;  // planes that have come
  int tail = 0;              // x's stage that the next plane's first tap reads
  int held = 0;  // stages before it that nobody reads any more, but that are not given back, nor is y's last
  const auto give_back = [&] {
    if (held == 0) return;
    if (speaks) {
      arrive(barriers.empty_y((of_y.stage > 0 ? of_y.stage : p.of_y.stages) - 1));
      for (; held > 0; --held) arrive(barriers.empty_x(tail - held + (tail < held ? p.of_x.stages : 0)));
    }
    held = 0;
  };
  if constexpr (Tile::kThree)
    for (int i = 0; i < Tile::kProducts; ++i)
      for (int n = 0; n < Tile::kN8; ++n)
        for (int j = 0; j < 4; ++j) sum[i][n][j] = 0;
  bool adds = false;
  int index = warp_uniform(place.range);
  do {
    const int planes = SlidingTile::at<typename Tile::Arithmetic>(p, index).planes;
    int plane = 0;
    do {
      for (int row = p.depth.first_new_row(plane == 0); row < p.depth.span; ++row) {
        wait_barrier(barriers.full_x(head.stage), head.round);
        head.next(p.of_x.stages);
      }
      wait_barrier(barriers.full_y(of_y.stage), of_y.round);
      const uint32_t y_plane = y_stages + of_y.stage * p.of_y.stage_bytes;
      products.multiply(sum, adds, tail, shared, y_plane, give_back);
      adds = true;
      const bool last = plane + 1 == planes;  // the next reads none of these
      held = last ? p.depth.span : p.depth.advance;
      of_y.next(p.of_y.stages);
      tail += held;
      if (tail >= p.of_x.stages) tail -= p.of_x.stages;
      if (!Tile::kLate || last || !p.late) {
        if (Tile::kLate) warpgroup_wait<0>();
        give_back();
      }
    } while (++plane < planes);
  } while ((index += p.ranges) < p.sliding_tiles);
  warpgroup_wait<0>();  // done long since, which the compiler does not know
  products.write(sum);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) wgrad_wgmma(const __grid_constant__ PackedWgradParams p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t barrier[WgradBarriers::kCount];
  const WgradBarriers barriers{shared_address(barrier)};
  const uint32_t shared = shared_address(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < WgradBarriers::kCount) barriers.init<Tile>(thread);
  __shared__ WgradCoord shared_place;
  if (thread == 0) shared_place = WgradCoord(p);
  fence_barrier_init();
  __syncthreads();
  const int warp = warp_uniform(thread / 32);  // so that what follows is known to be the same in all lanes
  if (warp < Tile::kConsumers / 32) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    consume_planes<Tile>(p, shared_place, warp_uniform(shared), {warp_uniform(barriers.first)}, warp / 4);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    const int producer = warp - Tile::kConsumers / 32;
    if constexpr (Tile::kHalves) {
      if (producer == 0 && is_leader()) produce_planes<Tile>(p, shared_place, shared, barriers);
    } else {
      const uint32_t raw = warp_uniform(shared) + p.raw_at;
      const WgradBarriers all{warp_uniform(barriers.first)};
      const int of_role = thread - Tile::kConsumers;
      if (producer < kCopyThreads / 32)
        copy_planes<Tile>(p, shared_place, raw, all, of_role);
      else if (producer < (kCopyThreads + kSplitThreads) / 32)
        split_planes<Tile>(p, shared_place, warp_uniform(shared), raw, all, of_role - kCopyThreads);
      else if (is_leader())
        copy_all_y<Tile>(p, shared_place, shared, barriers);
    }
  }
#endif
}

/// Queues a kernel that packs p.samples of y, whose y shifts are so many voxels apart.
template <class Arithmetic>
void pack_y(const PackedWgradParams& p, const View& y, char* packed, cudaStream_t stream);
/// Queues the kernel.
template <class Arithmetic>
void launch_wgrad_wgmma(const PackedWgradParams& p, int columns, int products, int64_t blocks, int shared_bytes,
                        cudaStream_t stream);

template <class Tile>
void launch_wgmma_tile(const PackedWgradParams& p, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  ++conv_instance<Tile, ConvPass::wgrad, Tile::kColumns>.launches;
  launch_with_shared(wgrad_wgmma<Tile>, static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream, p);
}

/// The tile of so many products.
template <class Arithmetic, int kColumns, int kProducts = 1>
void launch_wgrad_products(const PackedWgradParams& p, int products, int64_t blocks, int shared_bytes,
                           cudaStream_t stream) {
  if (products == kProducts)
    return launch_wgmma_tile<WgradWgmmaTile<Arithmetic, kColumns, kProducts>>(p, blocks, shared_bytes, stream);
  if constexpr (kProducts < most_products(arithmetic_kind<Arithmetic>(), kColumns))
    launch_wgrad_products<Arithmetic, kColumns, kProducts + 1>(p, products, blocks, shared_bytes, stream);
}

}  // namespace voxgrad::cuda
