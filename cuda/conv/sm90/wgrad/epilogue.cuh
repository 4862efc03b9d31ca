// The epilogue of wgrad_kernel: it stores partial sums, or it adds the sums of one or two splits and stores the
// weights.
#pragma once

#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/common/wgrad_splits.h"
#include "cuda/conv/sm90/wgrad/scheduler.cuh"

namespace voxgrad::cuda::implicit_wgrad {

/// Stores the partial sums. Rows of the sums are (tap, input channel), and columns are output channels. 8 lanes store
/// neighboring input channels.
template <class Tile>
__device__ void store_partial(const Params& p, const WorkUnit& unit, int warpgroup, const typename Tile::Sums& sum) {
  const TapSet& set = p.set[unit.set];
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = unit.column * Tile::kN + lane % 4 * 2, of_y = unit.group * p.out_channels + column;
  const int64_t out_stride = int64_t{p.taps} * p.in_channels, first = unit.split * p.split_stride + of_y * out_stride;
#pragma unroll
  for (int s = 0; s < Tile::kMTiles; ++s) {
    if (s >= set.m_tiles[warpgroup]) break;
    const MTile& m_tile = set.m_tile[warpgroup][s];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4, tap = m_tile.tap[row / Tile::kChunk];
      const int channel = (unit.channel_tile * p.chunks + m_tile.chunk) * Tile::kChunk + row % Tile::kChunk;
      const bool exists = tap != MTile::kNone && channel < p.in_channels;
      const int64_t to = first + tap * p.in_channels + channel;
#pragma unroll
      for (int n = 0; n < Tile::kN8 * Tile::kSlide; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int in_block = n % Tile::kN8 * 8 + i, plane = Tile::kSlide - 1 - n / Tile::kN8;
          const int64_t at = to + in_block * out_stride + plane * p.plane_taps * p.in_channels;
          if (exists && column + in_block < p.out_channels) p.partial[at] = sum[s][n][half * 2 + i];
        }
    }
  }
}

/// The taps of a work unit, sorted by chunk of input channels and then by index of the tap.
template <class Tile>
struct TapList {
  static constexpr int kSlots = 2 * Tile::kMTiles * Tile::kTapsOfSlot, kMax = kSlots * Tile::kSlide;
  struct Tap {
    int shared;      ///< offset in SharedSums of the first input channel of the first column
    int channel;     ///< first input channel of the chunk, counted within the group
    int64_t offset;  ///< elements from the first tap of a weight to this tap
  };
  Tap tap[kMax];
  int count;
};

/// Threads that meet at the first barrier of SharedSums: the consumers, and the warp that lists the taps.
template <class Tile>
inline constexpr int kThreadsOfSums = 128 * Tile::kConsumers + 32;

/// Fills in `list`, and arrives at the first barrier of SharedSums. A whole warp must call this function.
template <class Tile>
__device__ void list_taps(const Params& p, const WorkUnit& unit, TapList<Tile>& list) {
  using List = TapList<Tile>;
  const TapSet& set = p.set[unit.set];
  constexpr uint32_t kNone = UINT32_MAX;  // the slot has no tap
  const auto key = [&](int i) {
    if (i >= List::kMax) return kNone;
    const int slot = i % List::kSlots, tile = slot / Tile::kTapsOfSlot, of_group = tile % Tile::kMTiles;
    const MTile& m_tile = set.m_tile[tile / Tile::kMTiles][of_group];
    const int tap = m_tile.tap[slot % Tile::kTapsOfSlot], plane = Tile::kSlide - 1 - i / List::kSlots;
    if (of_group >= set.m_tiles[tile / Tile::kMTiles] || tap == MTile::kNone) return kNone;
    return static_cast<uint32_t>(m_tile.chunk) << 16 | static_cast<uint32_t>(tap + plane * p.plane_taps);
  };
  static_assert(List::kMax <= 64);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own[] = {key(lane), key(lane + 32)};
  int at[2] = {}, count = 0;  // positions of the two taps of this lane, number of all taps
  for (int i = 0; i < List::kMax; ++i) {
    const uint32_t other = __shfl_sync(UINT32_MAX, own[i / 32], i % 32);
    for (int part = 0; part < 2; ++part) at[part] += other < own[part];
    count += other != kNone;
  }
  for (int part = 0; part < 2; ++part) {
    if (own[part] == kNone) continue;
    const int i = part * 32 + lane;
    list.tap[at[part]] = {
        i % List::kSlots * Tile::kShape.slot_pitch() + i / List::kSlots * Tile::kN * Tile::kShape.pitch(),
        (unit.channel_tile * p.chunks + static_cast<int>(own[part] >> 16)) * Tile::kChunk,
        p.weight.tap_offset(static_cast<int>(own[part] & 0xffff))};
  }
  if (threadIdx.x % 32 == 0) list.count = count;
  asm volatile("bar.arrive 1, %0;" ::"n"(kThreadsOfSums<Tile>) : "memory");
}

/// The sums of a work unit in shared memory, by column and (tap, input channel). If there are two splits, their CTAs
/// form a cluster, and each CTA adds and stores half of the columns.
template <class Tile>
class SharedSums {
 public:
  /// `sums` is the shared memory of the stages, which the sums overwrite.
  __device__ SharedSums(const Params& p, const WorkUnit& unit, float* sums) : p_(p), unit_(unit), sums_(sums) {}

  /// Adds the sums of the cluster and stores the weights. All consumers must call this function.
  __device__ void reduce(int warpgroup, const typename Tile::Sums& sum, const TapList<Tile>& taps) const {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreadsOfSums<Tile>) : "memory");  // nothing reads the stages any more
    write(warpgroup, sum);
    if (p_.cluster.value() == 1) {
      asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
      add<1>(taps);
    } else {
      cluster_sync();
      add<2>(taps);
      cluster_sync_relaxed();  // until then, the other CTA reads the sums of this CTA
    }
  }

 private:
  static constexpr int kPitch = Tile::kShape.pitch(), kSlotPitch = Tile::kShape.slot_pitch();
  static constexpr int kThreads = 128 * Tile::kConsumers;

  // These are ordinary stores. With inline assembly, ptxas would serialize the wgmma products.
  __device__ void write(int warpgroup, const typename Tile::Sums& sum) const {
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int s = 0; s < Tile::kMTiles; ++s) {
      if (s >= p_.set[unit_.set].m_tiles[warpgroup]) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + half * 8 + lane / 4;
        const int slot = (warpgroup * Tile::kMTiles + s) * Tile::kTapsOfSlot + row / Tile::kChunk;
        float* const to = sums_ + slot * kSlotPitch + row % Tile::kChunk + lane % 4 * 2 * kPitch;
#pragma unroll
        for (int n = 0; n < Tile::kN8 * Tile::kSlide; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) to[(n * 8 + i) * kPitch] = sum[s][n][half * 2 + i];
      }
    }
  }

  /// Adds and stores the columns of this CTA. Neighboring threads handle neighboring taps or, if these are closer in
  /// memory, neighboring channels.
  template <int kCtas>
  __device__ void add(const TapList<Tile>& taps) const {
    const int thread = static_cast<int>(threadIdx.x);
    int tap = p_.weight.by_taps ? thread % taps.count : thread / Tile::kChunk;
    int in_chunk = p_.weight.by_taps ? thread / taps.count : thread % Tile::kChunk;
    const int tap_step = p_.weight.by_taps ? kThreads % taps.count : kThreads / Tile::kChunk;
    const int in_chunk_step = p_.weight.by_taps ? kThreads / taps.count : 0;
    while (tap < taps.count && in_chunk < Tile::kChunk) {
      add_columns<kCtas>(taps.tap[tap], in_chunk);
      tap += tap_step, in_chunk += in_chunk_step;
      if (p_.weight.by_taps && tap >= taps.count) tap -= taps.count, ++in_chunk;
    }
  }
  template <int kCtas>
  __device__ void add_columns(typename TapList<Tile>::Tap tap, int in_chunk) const {
    constexpr int kColumns = Tile::kN / kCtas, kAtOnce = 8;
    using T = typename Tile::Element;
    const int rank = unit_.split % kCtas, channel = tap.channel + in_chunk;
    if (channel >= p_.in_channels) return;
    const float* const own = sums_ + rank * kColumns * kPitch + tap.shared + in_chunk;
    const float* const other = kCtas > 1 ? in_cta(1 - rank, own) : own;
    const int first = unit_.column * Tile::kN + rank * kColumns, of_y = unit_.group * p_.out_channels + first;
    const bool scaled = std::is_same_v<T, Float16> && p_.x_maxima;
    const uint32_t x_maximum = scaled ? p_.x_maxima[unit_.group * p_.in_channels + channel] : 0;
    int64_t at = of_y * p_.weight.out_stride + channel * p_.weight.in_stride + tap.offset;
#pragma unroll 1
    for (int begin = 0; begin < kColumns; begin += kAtOnce) {
      float sum[kAtOnce];
      uint32_t y_maximum[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sum[i] = own[(begin + i) * kPitch];
        const bool exists = first + begin + i < p_.out_channels;
        // Values that are not used must not be loaded, because cluster_sync_relaxed() does not wait for their loads.
        if (kCtas > 1 && exists) sum[i] += other[(begin + i) * kPitch];
        y_maximum[i] = scaled && exists ? p_.y_maxima[of_y + begin + i] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, at += p_.weight.out_stride) {
        if (first + begin + i >= p_.out_channels) return;
        if (scaled)
          static_cast<float*>(p_.weight.data)[at] = unscaled(sum[i], x_maximum, y_maximum[i]);
        else
          static_cast<T*>(p_.weight.data)[at] = T(sum[i]);
      }
    }
  }

  const Params& p_;
  const WorkUnit& unit_;
  float* const sums_;
};

}  // namespace voxgrad::cuda::implicit_wgrad
