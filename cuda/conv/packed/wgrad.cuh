// The weight gradient of weight_mma.cuh on wgmma (wgmma.cuh), with both operands from shared memory,
//
//   A: 64 rows x 8 words of voxels; rows are channels of y,
//   B: 8 words of voxels x kColumns columns; columns are (tap along height, set of taps along the width, channel of x).
//
// wgmma takes floats K-major only, and K is voxels along the width, which is how contiguous tensors lie in memory. Core
// matrices are 8 channels x 4 words. They may begin at any multiple of 16 bytes, so that taps along depth and height,
// which move by whole lines, are offsets; but taps along the width move by words. So x stands in shared memory once for
// each of the block's, its sets; or y does in A, so much later each, where it has few channels: versions, for taps that
// read the same residue of x. Halves may lie across, as they are packed: core matrices are 8 voxels x 8 channels.
//
//   floats in shared memory: plane, quad of 4 words, line, set, 8 channels, channel, word;
//   halves of x: plane, line, 8 channels, voxel, channel; of y: plane, 8 channels, line, voxel, channel.
//
// Lines of x lie on end, and so do taps along height: a product takes as many columns on end as its width, whatever tap
// they belong to. If these dilate, lines of one residue lie on end.
//
// A block slides along depth through pillars, boxes of the lattice, plane by plane: of x, planes that have not been
// there yet are staged, of y one. Two groups of four warps multiply; they share a plane's products, or, where there are
// few, its steps. Other warps feed them (weight_stage.cuh, weight_lines.cuh): eleven and a thread, or one by the copy
// engine.
//
// Where y ends within a box it is zero, and x may be anything: what is not finite there reaches taps that do not read
// it.
//
// Voxels are summed in ranges of pillars, every n-th of them, which follow from shapes (and of floats from whether x
// has to be copied first); weight_sum() adds these up in order. For float32 accuracy three products, one after the
// other for a plane, start from zero and are added in float32, as tensor cores truncate what they add.
#pragma once

#include "cuda/conv/packed/wgrad_producer_f32.cuh"

namespace voxgrad::cuda {

template <class Arithmetic_, int kColumns_, int kHeights_>
struct WeightWgmmaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kWgmma = true;
  static constexpr int kColumns = kColumns_, kN8 = kColumns / 8, kHeights = kHeights_;
  static constexpr bool kThree = Arithmetic::kParts > 1;
  static constexpr int kSteps = 4;  // that are queued together, at most
  static constexpr bool kLate = may_be_late(arithmetic_kind<Arithmetic>());
  static constexpr bool kHalves = Arithmetic::kElements == 2;
  // Threads that multiply; that feed them, of which one copies all, of halves.
  static constexpr int kMultipliers = 256, kFeeders = kHalves ? 128 : kWeightCopiers + kWeightFinishers + 32;
  static constexpr int kThreads = kMultipliers + kFeeders;
  static constexpr int kRegisters = kHalves  ? 184
                                    : kThree ? 176
                                             : 160,
                       kFeederRegisters = kHalves  ? 72
                                          : kThree ? 40
                                                   : 48;
  static_assert(kFeeders % 128 == 0);
  static_assert(kRegisters * kMultipliers + kFeederRegisters * kFeeders <= launch_registers(kThreads));
};

/// The products of a group of four warps, and what they are of.
template <class Tile>
struct WeightProducts {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeights = Tile::kHeights, kN8 = Tile::kN8;
  using Sums = Accumulator[kHeights][kN8];

  const WeightWgmma& p;
  const WeightPlace& place;
  int group, first, first_step, last_step;  // first product of the group; steps
  int first_tap, first_part;                // along depth, of the first product; its part of that tap's products

  __device__ WeightProducts(const WeightWgmma& problem, const WeightPlace& at, int of_group)
      : p(problem), place(at), group(of_group) {
    first = p.by_steps ? 0 : group * kHeights;
    first_tap = first / p.plane_products;
    first_part = first - first_tap * p.plane_products;
    first_step = p.by_steps ? group * p.steps / 2 : 0;
    last_step = p.by_steps ? first_step + p.steps / 2 : p.steps;
  }
  /// Whether there is a product i; others are multiplied for nothing.
  __device__ bool exists(int i) const { return first + i < p.depth.taps * p.plane_products; }

  /// sum += the products of a plane of y, or = if not `adds` (and not three products); tail: x's slot that its first
  /// tap reads. If kLate, calls begun() when the products before are done, and these may be under way in the end.
  template <class Begun>
  __device__ void multiply(Sums& sum, bool adds, int tail, uint32_t x, uint32_t y, Begun begun) const {
    const int octet = Tile::kHalves ? p.of_x.octet : 128;
    uint32_t from[kHeights];  // 16 bytes
    int tap = first_tap, part = first_part;
    asm volatile("" : "+r"(tap), "+r"(part));  // not to be kept in registers for all products from plane to plane
#pragma unroll
    for (int i = 0; i < kHeights; ++i) {
      const bool real = exists(i);
      int slot = tail + (real ? tap * p.depth.tap_step : 0);
      if (slot >= p.of_x.slots) slot -= p.of_x.slots;
      from[i] = (x + slot * p.of_x.slot_bytes + (real ? part : 0) * (kN8 * octet)) >> 4;
      if (++part == p.plane_products) part = 0, ++tap;
    }
    const uint64_t x_slab = slab_descriptor(0, p.of_x.pitch, octet);
    const uint64_t y_slab = slab_descriptor(y, p.of_y.pitch, Tile::kHalves ? p.of_y.octet : 128);
    if constexpr (Tile::kThree) {
#pragma unroll
      for (int i = 0; i < kHeights; ++i)
        multiply_parts(sum[i], advance_slab(x_slab, static_cast<int>(from[i])), y_slab);
    } else {
      int step = first_step;
      do {
        multiply_steps<Tile::kSteps>(
            step,
            [&](uint64_t of_x, uint64_t of_y) {
#pragma unroll
              for (int i = 0; i < kHeights; ++i)
                multiply_async<Element, Tile::kHalves>(sum[i], of_y, advance_slab(of_x, static_cast<int>(from[i])),
                                                       adds);
              adds = true;
            },
            x_slab, y_slab);
        await_products<1>();
        if constexpr (Tile::kLate) begun();
      } while (step < last_step);
      if constexpr (!Tile::kLate) await_products<0>();
    }
  }

  /// Queues the products of the next kMost steps or, if fewer are left, of the largest power of two of them: without a
  /// loop, so that what a step wants beside its products is done while those of others run.
  template <int kMost, class Multiply>
  __device__ void multiply_steps(int& step, Multiply multiply, uint64_t x, uint64_t y) const {
    if (last_step - step >= kMost) {
      begin_products();
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        multiply(advance_slab(x, p.x_step_at[step + i]), advance_slab(y, p.y_step_at[step + i]));
      commit_products();
      step += kMost;
    } else if constexpr (kMost > 1) {
      multiply_steps<kMost / 2>(step, multiply, x, y);
    }
  }

  /// sum += one product in three, of high and low parts. Tensor cores truncate what they add, so that these start from
  /// zero, and are added in float32. The other group of warps multiplies meanwhile.
  __device__ void multiply_parts(Accumulator (&sum)[kN8], uint64_t x, uint64_t y) const {
    const int x_low = p.of_x.part_bytes >> 4, y_low = p.of_y.part_bytes >> 4;
    Accumulator part[kN8];
    bool adds = false;
    int step = first_step;
    do {
      multiply_steps<Tile::kSteps>(
          step,
          [&](uint64_t b, uint64_t a) {
            multiply_async<Element>(part, advance_slab(a, y_low), b, adds);
            multiply_async<Element>(part, a, advance_slab(b, x_low));
            multiply_async<Element>(part, a, b);
            adds = true;
          },
          x, y);
      await_products<1>();
    } while (step < last_step);
    await_products<0>();
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] += part[n][i];
  }

  __device__ void write(const Sums& sum) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int64_t range = p.by_steps ? int64_t{place.range} * 2 + group : place.range;
    const int columns = p.x_octets * 8;
    const int64_t of_width_tap = int64_t{p.kernel[0]} * p.kernel[1] * columns;
    float* out[2];       // this lane's rows; null: not there
    int version_tap[2];  // along the width, from a set's first on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int octet = thread / 32 % 4 * 2 + half, version = octet / p.row_octets;
      const int row = place.first_row + (octet - version * p.row_octets) * 8 + lane / 4;
      const bool real = version < p.versions && row < p.y_channels;
      version_tap[half] = version * p.tap_step;
      out[half] = real ? p.partial +
                             ((range * p.groups + place.group) * p.y_channels + row) * p.kernel[2] * of_width_tap +
                             version_tap[half] * of_width_tap + place.first_column + lane % 4 * 2
                       : nullptr;
    }
    const int height_taps = min(p.height.taps, p.kernel[1] - place.height_tap);
    const int first_octet = place.first_column / 8, line = p.sets * p.column_octets;
    int tap = first_tap, part = first_part;
#pragma unroll
    for (int i = 0; i < kHeights; ++i) {
      const int depth = place.depth_tap + tap;
      const bool real = exists(i) && depth < p.kernel[0];
      int height = part * kN8 / line, octet = part * kN8 - height * line, set = octet / p.column_octets;
      octet -= set * p.column_octets;
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        if (real && height < height_taps && first_octet + octet < p.x_octets) {
          const int width = place.tap[set];
          const int64_t at =
              width * of_width_tap + (int64_t{depth} * p.kernel[1] + place.height_tap + height) * columns + octet * 8;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (out[half] && width + version_tap[half] < p.kernel[2])
              *reinterpret_cast<float2*>(out[half] + at) = make_float2(sum[i][n][2 * half], sum[i][n][2 * half + 1]);
        }
        if (++octet == p.column_octets) octet = 0, ++set;
        if (set == p.sets) set = 0, ++height;
      }
      if (++part == p.plane_products) part = 0, ++tap;
    }
  }
};

/// Multiplies all planes of the block's pillars and writes the sums.
template <class Tile>
__device__ void multiply_planes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared,
                                WeightBarriers barriers, int group) {
  using Products = WeightProducts<Tile>;
  const Products products(p, place, group);
  typename Products::Sums sum;
  const uint32_t y_slots = shared + p.of_x.slots * p.of_x.slot_bytes;
  const bool speaks = is_leader();
  Ring head, of_y;  // planes that have come
  int tail = 0;     // x's slot that the next plane's first tap reads
  int held = 0;     // slots before it that nobody reads any more, but that are not given back, nor is y's last
  const auto give_back = [&] {
    if (held == 0) return;
    if (speaks) {
      arrive(barriers.empty_y((of_y.slot > 0 ? of_y.slot : p.of_y.slots) - 1));
      for (; held > 0; --held) arrive(barriers.empty_x(tail - held + (tail < held ? p.of_x.slots : 0)));
    }
    held = 0;
  };
  if constexpr (Tile::kThree)
    for (int i = 0; i < Tile::kHeights; ++i)
      for (int n = 0; n < Tile::kN8; ++n)
        for (int j = 0; j < 4; ++j) sum[i][n][j] = 0;
  bool adds = false;
  int index = of_warp(place.range);
  do {
    const int planes = WeightPillar::at<typename Tile::Arithmetic>(p, index).planes;
    int plane = 0;
    do {
      for (int row = p.depth.first_new_row(plane == 0); row < p.depth.span; ++row) {
        await_round(barriers.full_x(head.slot), head.round);
        head.next(p.of_x.slots);
      }
      await_round(barriers.full_y(of_y.slot), of_y.round);
      const uint32_t y_plane = y_slots + of_y.slot * p.of_y.slot_bytes;
      products.multiply(sum, adds, tail, shared, y_plane, give_back);
      adds = true;
      const bool last = plane + 1 == planes;  // the next reads none of these
      held = last ? p.depth.span : p.depth.advance;
      of_y.next(p.of_y.slots);
      tail += held;
      if (tail >= p.of_x.slots) tail -= p.of_x.slots;
      if (!Tile::kLate || last || !p.late) {
        if (Tile::kLate) await_products<0>();
        give_back();
      }
    } while (++plane < planes);
  } while ((index += p.ranges) < p.pillars);
  await_products<0>();  // done long since, which the compiler does not know
  products.write(sum);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) weight_wgmma(const __grid_constant__ WeightWgmma p) {
#if VOXGRAD_HAS_WGMMA
  extern __shared__ __align__(1024) uint4 dynamic_shared[];
  __shared__ uint64_t barrier[WeightBarriers::kCount];
  const WeightBarriers barriers{shared_address(barrier)};
  const uint32_t shared = shared_address(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < WeightBarriers::kCount) barriers.init<Tile>(thread);
  __shared__ WeightPlace shared_place;
  if (thread == 0) shared_place = WeightPlace(p);
  publish_barriers();
  __syncthreads();
  const int warp = of_warp(thread / 32);  // so that what follows is known to be the same in all lanes
  if (warp < Tile::kMultipliers / 32) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    multiply_planes<Tile>(p, shared_place, of_warp(shared), {of_warp(barriers.first)}, warp / 4);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kFeederRegisters));
    const int feeder = warp - Tile::kMultipliers / 32;
    if constexpr (Tile::kHalves) {
      if (feeder == 0 && is_leader()) copy_boxes<Tile>(p, shared_place, shared, barriers);
    } else {
      const uint32_t raw = of_warp(shared) + p.raw_at;
      const WeightBarriers all{of_warp(barriers.first)};
      const int of_role = thread - Tile::kMultipliers;
      if (feeder < kWeightCopiers / 32)
        copy_planes<Tile>(p, shared_place, raw, all, of_role);
      else if (feeder < (kWeightCopiers + kWeightFinishers) / 32)
        finish_planes<Tile>(p, shared_place, of_warp(shared), raw, all, of_role - kWeightCopiers);
      else if (is_leader())
        copy_lattice<Tile>(p, shared_place, shared, barriers);
    }
  }
#endif
}

/// Queues a kernel that packs p.samples of y, whose versions are so many voxels apart.
template <class Arithmetic>
void pack_lattice(const WeightWgmma& p, const View& y, char* packed, cudaStream_t stream);
/// Queues the kernel.
template <class Arithmetic>
void launch_weight_wgmma(const WeightWgmma& p, int columns, int heights, int64_t blocks, int shared_bytes,
                         cudaStream_t stream);

template <class Tile>
void launch_wgmma_tile(const WeightWgmma& p, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  ++conv_instance<Tile, true, Tile::kColumns>.launches;
  launch_with_shared(weight_wgmma<Tile>, static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream, p);
}

/// The tile of so many products.
template <class Arithmetic, int kColumns, int kHeights = 1>
void launch_wgmma_heights(const WeightWgmma& p, int heights, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  if (heights == kHeights)
    return launch_wgmma_tile<WeightWgmmaTile<Arithmetic, kColumns, kHeights>>(p, blocks, shared_bytes, stream);
  if constexpr (kHeights < most_heights(arithmetic_kind<Arithmetic>(), kColumns))
    launch_wgmma_heights<Arithmetic, kColumns, kHeights + 1>(p, heights, blocks, shared_bytes, stream);
}

}  // namespace voxgrad::cuda
