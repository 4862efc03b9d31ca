// The producer warps of the kernels for few channels (fprop_dgrad.cuh, wgrad.cuh). They load planes of inputs into
// shared memory, some stages ahead of the consumers. Tensors may have any layout and alignment, and their elements are
// rounded and padded with zeros. The elements therefore pass through registers, 8 channels of several voxels at a time,
// so that enough loads are in flight. Halves are converted to floats, which TF32 represents exactly.
#pragma once

#include <cuda_fp16.h>

#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/plan/small_channel.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BFloat16 x) { return x; }
__device__ inline float to_float(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }

/// Change the number of registers per thread: producers release registers, and consumers acquire them. All 4 warps of a
/// warpgroup must call the function.
template <int kRegisters>
__device__ void keep_registers() {
#if VOXGRAD_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ void leave_registers() {
#if VOXGRAD_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Loads an element if `really`, otherwise returns 0. The assembly keeps nvcc from moving each load to the store that
/// needs its value, because fewer loads would then run at a time.
__device__ inline float load_in_order(const char* at, bool really) {
  float x = 0.0f;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.f32 %0, [%1];}"
               : "+f"(x)
               : "l"(at), "r"(static_cast<unsigned>(really)));
  return x;
}
__device__ inline uint16_t load_half_in_order(const char* at, bool really) {
  uint16_t x = 0;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u16 %0, [%1];}"
               : "+h"(x)
               : "l"(at), "r"(static_cast<unsigned>(really)));
  return x;
}
template <class Element>
__device__ Element load_in_order(const char* at, bool really) {
  if constexpr (sizeof(Element) == 4) {
    return load_in_order(at, really);
  } else {
    Element element;
    element.bits = load_half_in_order(at, really);
    return element;
  }
}

template <class Element>
__device__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, Float16>) {
    Float16 half;
    half.bits = __half_as_ushort(__float2half_rn(x));
    return half;
  } else {
    return Element(x);
  }
}

/// A tensor (N, C, D, H, W), and the halo that a CTA tile reads.
struct SmallChannelInput {
  const char* data;
  int64_t stride[5];       // bytes
  uint32_t channel_bytes;  // stride of channels; 32-bit offsets reach all channels of a group (plan/small_channel.cpp)
  int size[3];             // voxels outside of this size are zero
  int channels;            // per group
  SmallChannelHalo halo;
};

inline SmallChannelInput describe_input(const View& view, int channels, const SmallChannelHalo& halo) {
  SmallChannelInput in{};
  in.data = view.as<char>();
  in.channels = channels;
  in.halo = halo;
  for (int a = 0; a < 5; ++a) in.stride[a] = view.stride[a] * static_cast<int64_t>(item_size(view.dtype));
  in.channel_bytes = static_cast<uint32_t>(in.stride[1]);
  for (int a = 0; a < 3; ++a) in.size[a] = static_cast<int>(view.size[a + 2]);
  return in;
}

/// The offset of a voxel outside of the volume. Its value is zero.
inline constexpr uint32_t kZero = UINT32_MAX;
/// Fills the table of the voxels of a plane. Its first part contains the offset of each voxel in the input, in bytes
/// from the beginning of the plane, or kZero. With a stride along the width, its second part contains the offset of
/// each voxel in the stage, in bytes; otherwise, voxels are stored one after another. `q` is the first result of the
/// CTA tile.
__device__ inline void list_voxels(const SmallChannelInput& in, const int (&q)[3], uint32_t table, int thread,
                                   int threads) {
  const SmallChannelHalo& halo = in.halo;
  const int height = q[1] * halo.step[1] + halo.low[1], width = q[2] * halo.step[2] + halo.low[2];
  for (int v = thread; v < halo.voxels(); v += threads) {
    const int line = v / halo.positions, position = v % halo.positions, h = height + line, w = width + position;
    const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(in.size[1]) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(in.size[2]);
    store_shared(table + v * 4, inside ? static_cast<uint32_t>(h * in.stride[3] + w * in.stride[4]) : kZero);
    if (halo.step[2] > 1) store_shared(table + (halo.voxels() + v) * 4, halo.offset(line, position) * 4);
  }
}

/// Stages a plane of all channels of a group, or zeros. kRounds: rounds the elements to TF32.
template <class Element, bool kRounds, int kProducers>
__device__ void stage_plane(const SmallChannelInput& in, const char* plane, bool zeros, uint32_t table, uint32_t stage,
                            int thread) {
  constexpr int kChannels = 8, kAtOnce = 3;  // channels of a piece; pieces that a thread loads at a time
  const int voxels = in.halo.voxels(), pitch = in.halo.pitch * 4, pieces = in.halo.pieces(in.channels);
  const auto copy = [&]<bool kAll>(int piece) {
    Element value[kAtOnce][kChannels];
    uint32_t to[kAtOnce];
    int left[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int number = piece + i * kProducers;
      if (number >= pieces) break;
      const int octet = number >= voxels ? 1 : 0, voxel = number - octet * voxels;
      const uint32_t from = load_shared(table + voxel * 4);
      to[i] = stage + octet * kChannels * pitch +
              (in.halo.step[2] > 1 ? load_shared(table + (voxels + voxel) * 4) : voxel * 4);
      left[i] = kAll ? kChannels : in.channels - octet * kChannels;
      const bool inside = from != kZero && !zeros;
      uint32_t at = inside ? from + octet * kChannels * in.channel_bytes : 0;
#pragma unroll
      for (int c = 0; c < kChannels; ++c, at += in.channel_bytes)
        value[i][c] = load_in_order<Element>(plane + at, inside && (kAll || c < left[i]));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece + i * kProducers >= pieces) break;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float x = to_float(value[i][c]);
        if (kAll || c < left[i])
          store_shared(to[i] + c * pitch, kRounds ? round_for_tensor_cores(x) : __float_as_uint(x));
      }
    }
  };
  for (int piece = thread; piece < pieces; piece += kAtOnce * kProducers)
    if (in.channels % kChannels == 0)
      copy.template operator()<true>(piece);
    else
      copy.template operator()<false>(piece);
}

/// Barriers of the stages of input planes. Producers arrive at full(), and consumers arrive at free().
struct StageBarriers {
  static constexpr int kCount = 2 * kMaxSmallChannelStages;
  uint32_t shared;
  __device__ uint32_t full(int stage) const { return shared + stage * 8; }
  __device__ uint32_t free(int stage) const { return shared + (kMaxSmallChannelStages + stage) * 8; }
  __device__ void init(int producers, int consumers) const {
    for (int stage = 0; stage < kMaxSmallChannelStages; ++stage) {
      init_barrier(full(stage), producers / 32);
      init_barrier(free(stage), consumers / 32);
    }
  }
};

/// The position of a CTA tile.
struct SlidingTileCoord {
  int q[3];  // first result along each axis
  int group;
  int depths;  // results along the depth
  int64_t sample;
  int64_t range;  // index of the tile among the tiles of its group
};
/// The division of the results into CTA tiles.
struct SlidingTiles {
  int tile[3];   // results of a tile along each axis
  int tiles[3];  // tiles along each axis
  int count;     // results along the depth
  int groups;
  __device__ SlidingTileCoord place(unsigned block) const {
    SlidingTileCoord place;
    place.q[2] = static_cast<int>(take_digit(block, tiles[2]));
    place.q[1] = static_cast<int>(take_digit(block, tiles[1]));
    place.q[0] = static_cast<int>(take_digit(block, tiles[0]));
    place.group = static_cast<int>(take_digit(block, groups));
    place.sample = block;
    place.range = ((place.sample * tiles[0] + place.q[0]) * tiles[1] + place.q[1]) * tiles[2] + place.q[2];
    for (int a = 0; a < 3; ++a) place.q[a] *= tile[a];
    place.depths = min(tile[0], count - place.q[0]);
    return place;
  }
};

/// Runs the producer warps of a CTA, which load one plane of inputs after another. kPrefetches: also prefetches later
/// planes into L2.
template <class Element, bool kRounds, int kProducers, bool kPrefetches>
struct SmallChannelProducer {
  static constexpr int kPrefetched = 3;  // planes ahead
  const SmallChannelInput& in;
  const StageBarriers& barriers;
  uint32_t table;        // address of the table of list_voxels()
  uint32_t ring;         // address of the first stage
  int depth;             // position of the next plane
  int height;            // position of the first line of a plane
  const char* channels;  // first channel of the group
  int turn = 0;          // rotation of the threads from plane to plane
  PipelineState stage{};

  __device__ SmallChannelProducer(const SmallChannelInput& input, const StageBarriers& ring_barriers,
                                  const SlidingTileCoord& place, uint32_t voxels, uint32_t planes)
      : in(input), barriers(ring_barriers), table(voxels), ring(planes) {
    depth = place.q[0] * in.halo.step[0] + in.halo.low[0];
    height = place.q[1] * in.halo.step[1] + in.halo.low[1];
    channels = in.data + place.sample * in.stride[0] + int64_t{place.group} * in.channels * in.stride[1];
  }
  /// Prefetches the lines of a channel of a later plane into L2.
  __device__ void prefetch_channel(int channel) const {
    const int later = depth + kPrefetched, first = max(height, 0);
    const int last = min(height + in.halo.lines, in.size[1]);
    if (static_cast<unsigned>(later) >= static_cast<unsigned>(in.size[0]) || first >= last || in.size[2] == 0) return;
    if (in.stride[3] > 2 * in.size[2] * int64_t{sizeof(Element)}) return;  // most bytes would lie between lines
    const char* const from = channels + later * in.stride[2] + channel * in.stride[1] + first * in.stride[3];
    prefetch_bulk(from,
                  static_cast<uint32_t>((last - first - 1) * in.stride[3] + in.size[2] * int64_t{sizeof(Element)}));
  }
  /// Loads the next plane. The loads start with the warp after the last warp of the previous plane, so that all warps
  /// load the same amount.
  __device__ void produce(int thread) {
    const bool inside = static_cast<unsigned>(depth) < static_cast<unsigned>(in.size[0]);
    if (kPrefetches && thread < in.channels) prefetch_channel(thread);
    if (stage.round > 0) wait_barrier(barriers.free(stage.stage), stage.round - 1);
    stage_plane<Element, kRounds, kProducers>(in, channels + (inside ? depth : 0) * in.stride[2], !inside, table,
                                              ring + stage.stage * in.halo.plane() * 4, (thread + turn) % kProducers);
    turn = (turn + kProducers - (in.halo.pieces(in.channels) + 31) / 32 * 32 % kProducers) % kProducers;
    __syncwarp();
    if (thread % 32 == 0) arrive(barriers.full(stage.stage));
    stage.next(in.halo.stages);
    ++depth;
  }
};

}  // namespace voxgrad::cuda
