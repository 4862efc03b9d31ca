// The producers of packed/wgrad.cuh that bring planes of x of floats to shared memory, whose lines may begin anywhere.
// Five warps copy them as they lie, by cp.async of 16 bytes: raw lines, from a multiple of 16 bytes on. Six split
// planes that have come: for each x shift, into quads of words of a channel, whose voxels may be x_step words from each
// other, rounded (or split into high and low), and zero where a tap reads beside x.
#pragma once

#include "cuda/conv/packed/wgrad_producer.cuh"

namespace voxgrad::cuda {

/// Where a CTA's x shifts stand in a raw line, which holds all of their words, and those between them.
struct XShifts {
  int count, first;          // that exist; position of a line's first word, from that of the tile on
  int offset[kMostXShifts];  // words, of an x shift's first one
  int later[kMostXShifts];   // voxels after the x shift before: 1, 2, or 4 if it shares no word with it, or many

  __device__ XShifts(const PackedWgradParams& p, const WgradCoord& place) : count(0), first(INT_MAX) {
#pragma unroll
    for (int x_shift = 0; x_shift < kMostXShifts; ++x_shift)
      if (place.tap[x_shift] < p.kernel[2]) ++count, first = min(first, place.tap[x_shift] * p.dilation);
    count = warp_uniform(count);
    first = warp_uniform(first);
#pragma unroll
    for (int x_shift = 0; x_shift < kMostXShifts; ++x_shift) {
      offset[x_shift] = warp_uniform(x_shift < count ? place.tap[x_shift] * p.dilation - first : 0);
      const int words = x_shift > 0 ? offset[x_shift] - offset[x_shift - 1] : 0;
      later[x_shift] = words == p.x_step ? 1 : words == 2 * p.x_step ? 2 : 4;
    }
  }
};

/// A line of x in a sliding tile, at depth 0, and its first word, `first` behind the tile's.
struct RawLine {
  const char* from;
  int at, word;  // positions along height and width

  __device__ RawLine(const PackedWgradParams& p, const WgradCoord& place, const SlidingTile& sliding_tile, int first,
                     int channel, int line)
      : at(sliding_tile.height * p.height.in_stride - p.height.padding + place.height_tap * p.height.dilation +
           line * p.line_at),
        word(sliding_tile.width * p.x_step - p.padding + first) {
    from = p.x + sliding_tile.sample * p.x_stride[0] +
           (int64_t{place.group} * p.x_channels + place.first_column + channel) * p.x_stride[1] + at * p.x_stride[3] +
           int64_t{word} * 4;
  }
};

/// What a thread copies of x, of floats: the same 16 bytes of every `copied`th channel, of every `copy_shares`th line.
/// If any of them are of the line; they begin at a multiple of 16 bytes, so that the others can be read, whatever they
/// are.
struct RawLineCopies {
  const PackedWgradParams& p;
  const WgradCoord& place;
  int first;                  // of XShifts
  int chunk, channel, share;  // the first ones
  const char* from;           // the first line's chunk, at depth 0, if that began at a multiple of 16 bytes
  int at;                     // that line
  unsigned last_byte;         // of that chunk, in the line
  int there;                  // channels of x from the first on

  __device__ RawLineCopies(const PackedWgradParams& problem, const WgradCoord& at_place, int thread)
      : p(problem), place(at_place), first(XShifts(p, place).first) {
    chunk = thread % p.chunks;
    share = thread / p.chunks / p.copied;
    channel = thread / p.chunks - share * p.copied;
    there = p.x_channels - place.first_column - channel;
  }
  __device__ void begin(const SlidingTile& sliding_tile) {
    const RawLine line(p, place, sliding_tile, first, channel, share);
    from = line.from + chunk * 16;
    at = line.at;
    last_byte = (line.word + chunk * 4 + 3) * 4;
  }
  __device__ void plane(int depth, uint32_t raw) const {
    const bool in_volume = static_cast<unsigned>(depth) < static_cast<unsigned>(p.x_size[0]);
    const char* residue_from = from + depth * p.x_stride[2];
    raw += (share * p.raw_line_to + channel * p.raw_pitch) + chunk * 16;
    for (int residue = 0; residue < p.residues; ++residue) {
      const char* channel_from = residue_from;
      uint32_t to = raw;
      const int lines = p.lines - (residue >= p.full_residues), first_line = at + residue * p.residue_at;
      for (int i = 0; i < p.column_octets * 8; i += p.copied) {
        if (i + channel < p.column_octets * 8)
          copy_lines(channel_from, to, first_line, lines, in_volume && i < there ? p.x_size[1] : 0);
        channel_from += p.copy_channel_at;
        to += p.copied * p.raw_pitch;
      }
      residue_from += p.raw_residue_at;
      raw += p.lines * p.raw_line_to;
    }
  }

 private:
  __device__ void copy_lines(const char* from, uint32_t to, int at, int lines, int height) const {
    lines = (lines - share + p.copy_shares - 1) / p.copy_shares;
    copy_many<4>(from, to, at, lines, height);
    copy_many<1>(from, to, at, lines, height);
  }
  /// So many at a time, with addresses in registers of their own: a copy holds its address for long.
  template <int kMany>
  __device__ void copy_many(const char*& from, uint32_t& to, int& at, int& lines, int height) const {
    const unsigned end = (p.x_size[2] + 3) * 4;
#pragma unroll 1
    for (; lines >= kMany; lines -= kMany) {
      const char* each[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i, from += p.copy_line_at) {
        asm volatile("" : "+l"(from));
        each[i] = from;
      }
#pragma unroll
      for (int i = 0; i < kMany; ++i, to += p.copy_line_to, at += p.copy_line_step) {
        const auto begins = static_cast<unsigned>(reinterpret_cast<uintptr_t>(each[i]) & 15);
        const bool exists = last_byte - begins < end && static_cast<unsigned>(at) < static_cast<unsigned>(height);
        cp_async(to, each[i] - begins, exists);
      }
    }
  }
};

/// Copies all planes of x, of floats. By warps 0 to kCopyThreads / 32.
template <class Tile>
__device__ void copy_planes(const PackedWgradParams& p, const WgradCoord& place, uint32_t raw, WgradBarriers barriers,
                            int thread) {
  RawLineCopies copies(p, place, thread);
  PipelineState stage;
  for_each_plane<Tile>(
      p, place, [&](const SlidingTile& sliding_tile) { copies.begin(sliding_tile); },
      [&](const PipelineState&, int depth) {
        if (stage.round > 0) wait_barrier(barriers.empty_raw(stage.stage), stage.round - 1);
        if (copies.share < p.copy_shares) copies.plane(depth, raw + stage.stage * p.raw_bytes);
        arrive_with_copies(barriers.full_raw(stage.stage));
        stage.next(p.raw_stages);
      },
      [](const PipelineState&, const SlidingTile&, int) {});
}

/// How a thread splits planes of x, of floats: a quad of every `split_channels`th channel, of every `shares`th line.
template <class Tile>
struct LineSplitter {
  const PackedWgradParams& p;
  const WgradCoord& place;
  const XShifts x_shifts;
  int quad, channel, share;  // the first ones
  uint32_t address;          // its last bits, of the first line at depth 0: how far from a multiple of 16 bytes
  unsigned real;             // bit x_shift * 4 + i: word i is one of x's line; elsewhere x is zero

  __device__ LineSplitter(const PackedWgradParams& problem, const WgradCoord& at_place, int thread)
      : p(problem), place(at_place), x_shifts(problem, at_place) {
    // Neighbours are quads, then as many channels as fill 128 bytes, then lines, whose words lie in different banks.
    const int quads = 2 * p.pairs, neighbours = max(1, 8 / quads), row = thread / quads;
    quad = thread - row * quads;
    share = row / neighbours % p.shares;
    channel = row / neighbours / p.shares * neighbours + row % neighbours;
  }
  __device__ bool works() const { return channel < p.split_channels; }
  __device__ void begin(const SlidingTile& sliding_tile) {
    const RawLine line(p, place, sliding_tile, x_shifts.first, channel, share);
    address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(line.from));
    real = 0;
#pragma unroll
    for (int x_shift = 0; x_shift < kMostXShifts; ++x_shift)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = line.word + x_shifts.offset[x_shift] + (quad * 4 + i) * p.x_step;
        if (static_cast<unsigned>(word) < static_cast<unsigned>(p.x_size[2])) real |= 1u << (x_shift * 4 + i);
      }
  }
  __device__ void plane(int depth, uint32_t raw, uint32_t stage) const {
    if (p.x_step == 1)
      split_plane<1>(depth, raw, stage);
    else if (p.x_step == 2)
      split_plane<2>(depth, raw, stage);
    else
      split_plane<0>(depth, raw, stage);
  }

 private:
  /// kStep: x_step, if not 0.
  template <int kStep>
  __device__ void split_plane(int depth, uint32_t raw, uint32_t stage) const {
    const int later = x_shifts.later[1];
    const bool even = x_shifts.count < 3 || x_shifts.later[2] == later;
    if (x_shifts.count == 1) return split_lines<kStep, 4>(depth, raw, stage);
    if constexpr (kStep > 0)  // others seldom share words
      if (even && later == 1)
        return x_shifts.count == 2 ? split_lines<kStep, 4, 1>(depth, raw, stage)
                                   : split_lines<kStep, 4, 1, 1>(depth, raw, stage);
    if constexpr (kStep == 1)
      if (even && later == 2)
        return x_shifts.count == 2 ? split_lines<kStep, 4, 2>(depth, raw, stage)
                                   : split_lines<kStep, 4, 2, 2>(depth, raw, stage);
    if constexpr (kStep == 2)
      if (!even && later == 1) return split_lines<kStep, 4, 1, 4>(depth, raw, stage);
    x_shifts.count == 2 ? split_lines<0, 4, 4>(depth, raw, stage) : split_lines<0, 4, 4, 4>(depth, raw, stage);
  }
  /// kLater: of each x shift, as in XShifts.
  template <int kStep, int... kLater>
  __device__ void split_lines(int depth, uint32_t raw, uint32_t stage) const {
    raw += channel * p.raw_pitch + quad * p.x_step * 16;
    stage += quad * p.of_x.pitch + channel * 16;
    const uint32_t plane_at = address + depth * static_cast<uint32_t>(p.x_stride[2]);
    for (int residue = 0; residue < p.residues; ++residue) {
      const int lines = p.lines - (residue >= p.full_residues);
      uint32_t at = plane_at + residue * static_cast<uint32_t>(p.raw_residue_at);
      for (int line = share; line < lines; line += p.shares) {
        uint32_t from = raw + (residue * p.lines + line) * p.raw_line_to;
        uint32_t to = stage + residue * p.residue_to + line * p.line_to, channel_at = at;
        for (int i = channel; i < p.column_octets * 8; i += p.split_channels) {
          split_quads<kStep, kLater...>(from + channel_at % 16, to);
          from += p.split_channels * p.raw_pitch;
          to += p.split_channels * 16;
          channel_at += p.split_channels * static_cast<uint32_t>(p.x_stride[1]);
        }
        at += p.shares * static_cast<uint32_t>(p.raw_line_at);
      }
    }
  }

  /// Words of a raw line to quads at `to` and further on.
  template <int kStep, int... kLater>
  __device__ void split_quads(uint32_t from, uint32_t to) const {
    constexpr int kXShifts = sizeof...(kLater), kNew[] = {kLater...};  // words that the x shift before does not have
    unsigned exists = real;
    asm volatile("" : "+r"(exists));  // not to be kept as a register for each bit
    uint32_t word[kXShifts][4], high[4], low[4];
    const auto load = [&](int x_shift) {
      const uint32_t first = from + x_shifts.offset[x_shift] * 4;
#pragma unroll
      for (int i = 4 - kNew[x_shift]; i < 4; ++i) {
        word[x_shift][i] = 0;
        if (exists & 1u << (x_shift * 4 + i))
          word[x_shift][i] = load_shared(first + i * (kStep > 0 ? kStep : p.x_step) * 4);
      }
    };
    if constexpr (!Tile::kThree)  // for which there are registers
#pragma unroll
      for (int x_shift = 0; x_shift < kXShifts; ++x_shift) load(x_shift);
#pragma unroll
    for (int x_shift = 0; x_shift < kXShifts; ++x_shift) {
      if constexpr (Tile::kThree) load(x_shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 4 - kNew[x_shift])
          high[i] = high[i + kNew[x_shift]], low[i] = low[i + kNew[x_shift]];
        else if constexpr (Tile::kThree)
          Tf32x3::split(word[x_shift][i], high[i], low[i]);
        else  // the nearest, once the hardware has truncated
          high[i] = fabsf(__uint_as_float(word[x_shift][i])) < INFINITY ? word[x_shift][i] + 0x1000u : word[x_shift][i];
      }
      const uint32_t at = to + x_shift * p.column_octets * 128;
      store_shared(at, high);
      if constexpr (Tile::kThree) store_shared(at + p.of_x.part_bytes, low);
    }
  }
};

/// Splits all planes of x, of floats. By warps 0 to kSplitThreads / 32.
template <class Tile>
__device__ void split_planes(const PackedWgradParams& p, const WgradCoord& place, uint32_t shared, uint32_t raw,
                             WgradBarriers barriers, int thread) {
  LineSplitter<Tile> quads(p, place, thread);
  PipelineState from;
  for_each_plane<Tile>(
      p, place, [&](const SlidingTile& sliding_tile) { quads.begin(sliding_tile); },
      [&](const PipelineState& ring, int depth) {
        wait_barrier(barriers.full_raw(from.stage), from.round);
        if (ring.round > 0) wait_barrier(barriers.empty_x(ring.stage), ring.round - 1);
        if (quads.works()) quads.plane(depth, raw + from.stage * p.raw_bytes, shared + ring.stage * p.of_x.stage_bytes);
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) {
          arrive(barriers.full_x(ring.stage));
          arrive(barriers.empty_raw(from.stage));
        }
        from.next(p.raw_stages);
      },
      [](const PipelineState&, const SlidingTile&, int) {});
}

}  // namespace voxgrad::cuda
