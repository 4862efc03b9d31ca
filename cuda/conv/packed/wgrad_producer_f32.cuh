// How the warps that feed those of weight_wgmma.cuh bring planes of x of floats to shared memory, whose lines may begin
// anywhere. Five warps copy them as they lie, by 16 bytes in the background: raw lines, from a multiple of 16 bytes on.
// Six take planes that have come apart: for each set, quads of words of a channel, whose voxels may be x_step words
// from each other, rounded (or split), and zero where a tap reads beside x.
#pragma once

#include "cuda/conv/packed/wgrad_producer.cuh"

namespace voxgrad::cuda {

/// Where a block's sets stand in a raw line, which holds all of their words, and those between them, on end.
struct WeightSets {
  int count, first;       // that exist; position of a line's first word, from that of the box on
  int offset[kMostSets];  // words, of a set's first one
  int later[kMostSets];   // voxels after the set before: 1, 2, or 4 if it shares no word with it, or many

  __device__ WeightSets(const WeightWgmma& p, const WeightPlace& place) : count(0), first(INT_MAX) {
#pragma unroll
    for (int set = 0; set < kMostSets; ++set)
      if (place.tap[set] < p.kernel[2]) ++count, first = min(first, place.tap[set] * p.dilation);
    count = of_warp(count);
    first = of_warp(first);
#pragma unroll
    for (int set = 0; set < kMostSets; ++set) {
      offset[set] = of_warp(set < count ? place.tap[set] * p.dilation - first : 0);
      const int words = set > 0 ? offset[set] - offset[set - 1] : 0;
      later[set] = words == p.x_step ? 1 : words == 2 * p.x_step ? 2 : 4;
    }
  }
};

/// A line of x in a pillar, at depth 0, and its first word, `first` behind the box's.
struct WeightLine {
  const char* from;
  int at, word;  // positions along height and width

  __device__ WeightLine(const WeightWgmma& p, const WeightPlace& place, const WeightPillar& pillar, int first,
                        int channel, int line)
      : at(pillar.height * p.height.in_stride - p.height.padding + place.height_tap * p.height.dilation +
           line * p.line_at),
        word(pillar.width * p.x_step - p.padding + first) {
    from = p.x + pillar.sample * p.x_stride[0] +
           (int64_t{place.group} * p.x_channels + place.first_column + channel) * p.x_stride[1] + at * p.x_stride[3] +
           int64_t{word} * 4;
  }
};

/// What a thread copies of x, of floats: the same 16 bytes of every `copied`th channel, of every `copy_shares`th line.
/// If any of them are of the line; they begin at a multiple of 16 bytes, so that the others can be read, whatever they
/// are.
struct WeightCopies {
  const WeightWgmma& p;
  const WeightPlace& place;
  int first;                  // of WeightSets
  int chunk, channel, share;  // the first ones
  const char* from;           // the first line's chunk, at depth 0, if that began at a multiple of 16 bytes
  int at;                     // that line
  unsigned last_byte;         // of that chunk, in the line
  int there;                  // channels of x from the first on

  __device__ WeightCopies(const WeightWgmma& problem, const WeightPlace& at_place, int thread)
      : p(problem), place(at_place), first(WeightSets(p, place).first) {
    chunk = thread % p.chunks;
    share = thread / p.chunks / p.copied;
    channel = thread / p.chunks - share * p.copied;
    there = p.x_channels - place.first_column - channel;
  }
  __device__ void begin(const WeightPillar& pillar) {
    const WeightLine line(p, place, pillar, first, channel, share);
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
        copy_async(to, each[i] - begins, exists);
      }
    }
  }
};

/// Copies all planes of x, of floats. By warps 0 to kWeightCopiers / 32.
template <class Tile>
__device__ void copy_planes(const WeightWgmma& p, const WeightPlace& place, uint32_t raw, WeightBarriers barriers,
                            int thread) {
  WeightCopies copies(p, place, thread);
  Ring slot;
  for_each_plane<Tile>(
      p, place, [&](const WeightPillar& pillar) { copies.begin(pillar); },
      [&](const Ring&, int depth) {
        if (slot.round > 0) await_round(barriers.empty_raw(slot.slot), slot.round - 1);
        if (copies.share < p.copy_shares) copies.plane(depth, raw + slot.slot * p.raw_bytes);
        arrive_with_copies(barriers.full_raw(slot.slot));
        slot.next(p.raw_slots);
      },
      [](const Ring&, const WeightPillar&, int) {});
}

/// How a thread takes planes of x apart, of floats: a quad of every `finished`th channel, of every `shares`th line.
template <class Tile>
struct WeightQuads {
  const WeightWgmma& p;
  const WeightPlace& place;
  const WeightSets sets;
  int quad, channel, share;  // the first ones
  uint32_t address;          // its last bits, of the first line at depth 0: how far from a multiple of 16 bytes
  unsigned real;             // bit set * 4 + i: word i is one of x's line; elsewhere x is zero

  __device__ WeightQuads(const WeightWgmma& problem, const WeightPlace& at_place, int thread)
      : p(problem), place(at_place), sets(problem, at_place) {
    // Neighbours are quads, then as many channels as fill 128 bytes, then lines, whose words lie in different banks.
    const int quads = 2 * p.pairs, neighbours = max(1, 8 / quads), row = thread / quads;
    quad = thread - row * quads;
    share = row / neighbours % p.shares;
    channel = row / neighbours / p.shares * neighbours + row % neighbours;
  }
  __device__ bool works() const { return channel < p.finished; }
  __device__ void begin(const WeightPillar& pillar) {
    const WeightLine line(p, place, pillar, sets.first, channel, share);
    address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(line.from));
    real = 0;
#pragma unroll
    for (int set = 0; set < kMostSets; ++set)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = line.word + sets.offset[set] + (quad * 4 + i) * p.x_step;
        if (static_cast<unsigned>(word) < static_cast<unsigned>(p.x_size[2])) real |= 1u << (set * 4 + i);
      }
  }
  __device__ void plane(int depth, uint32_t raw, uint32_t slot) const {
    if (p.x_step == 1)
      take_plane<1>(depth, raw, slot);
    else if (p.x_step == 2)
      take_plane<2>(depth, raw, slot);
    else
      take_plane<0>(depth, raw, slot);
  }

 private:
  /// kStep: x_step, if not 0.
  template <int kStep>
  __device__ void take_plane(int depth, uint32_t raw, uint32_t slot) const {
    const int later = sets.later[1];
    const bool even = sets.count < 3 || sets.later[2] == later;
    if (sets.count == 1) return take_lines<kStep, 4>(depth, raw, slot);
    if constexpr (kStep > 0)  // others seldom share words
      if (even && later == 1)
        return sets.count == 2 ? take_lines<kStep, 4, 1>(depth, raw, slot)
                               : take_lines<kStep, 4, 1, 1>(depth, raw, slot);
    if constexpr (kStep == 1)
      if (even && later == 2)
        return sets.count == 2 ? take_lines<kStep, 4, 2>(depth, raw, slot)
                               : take_lines<kStep, 4, 2, 2>(depth, raw, slot);
    if constexpr (kStep == 2)
      if (!even && later == 1) return take_lines<kStep, 4, 1, 4>(depth, raw, slot);
    sets.count == 2 ? take_lines<0, 4, 4>(depth, raw, slot) : take_lines<0, 4, 4, 4>(depth, raw, slot);
  }
  /// kLater: of each set, as in WeightSets.
  template <int kStep, int... kLater>
  __device__ void take_lines(int depth, uint32_t raw, uint32_t slot) const {
    raw += channel * p.raw_pitch + quad * p.x_step * 16;
    slot += quad * p.of_x.pitch + channel * 16;
    const uint32_t plane_at = address + depth * static_cast<uint32_t>(p.x_stride[2]);
    for (int residue = 0; residue < p.residues; ++residue) {
      const int lines = p.lines - (residue >= p.full_residues);
      uint32_t at = plane_at + residue * static_cast<uint32_t>(p.raw_residue_at);
      for (int line = share; line < lines; line += p.shares) {
        uint32_t from = raw + (residue * p.lines + line) * p.raw_line_to;
        uint32_t to = slot + residue * p.residue_to + line * p.line_to, channel_at = at;
        for (int i = channel; i < p.column_octets * 8; i += p.finished) {
          take_apart<kStep, kLater...>(from + channel_at % 16, to);
          from += p.finished * p.raw_pitch;
          to += p.finished * 16;
          channel_at += p.finished * static_cast<uint32_t>(p.x_stride[1]);
        }
        at += p.shares * static_cast<uint32_t>(p.raw_line_at);
      }
    }
  }

  /// Words of a raw line to quads at `to` and further on.
  template <int kStep, int... kLater>
  __device__ void take_apart(uint32_t from, uint32_t to) const {
    constexpr int kSets = sizeof...(kLater), kNew[] = {kLater...};  // words that the set before does not have
    unsigned exists = real;
    asm volatile("" : "+r"(exists));  // not to be kept as a register for each bit
    uint32_t word[kSets][4], high[4], low[4];
    const auto load = [&](int set) {
      const uint32_t first = from + sets.offset[set] * 4;
#pragma unroll
      for (int i = 4 - kNew[set]; i < 4; ++i) {
        word[set][i] = 0;
        if (exists & 1u << (set * 4 + i)) word[set][i] = load_shared(first + i * (kStep > 0 ? kStep : p.x_step) * 4);
      }
    };
    if constexpr (!Tile::kThree)  // for which there are registers
#pragma unroll
      for (int set = 0; set < kSets; ++set) load(set);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if constexpr (Tile::kThree) load(set);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 4 - kNew[set])
          high[i] = high[i + kNew[set]], low[i] = low[i + kNew[set]];
        else if constexpr (Tile::kThree)
          Tf32x3::split(word[set][i], high[i], low[i]);
        else  // the nearest, once the hardware has truncated
          high[i] = fabsf(__uint_as_float(word[set][i])) < INFINITY ? word[set][i] + 0x1000u : word[set][i];
      }
      const uint32_t at = to + set * p.column_octets * 128;
      store_shared(at, high);
      if constexpr (Tile::kThree) store_shared(at + p.of_x.part_bytes, low);
    }
  }
};

/// Takes all planes of x apart, of floats. By warps 0 to kWeightFinishers / 32.
template <class Tile>
__device__ void finish_planes(const WeightWgmma& p, const WeightPlace& place, uint32_t shared, uint32_t raw,
                              WeightBarriers barriers, int thread) {
  WeightQuads<Tile> quads(p, place, thread);
  Ring from;
  for_each_plane<Tile>(
      p, place, [&](const WeightPillar& pillar) { quads.begin(pillar); },
      [&](const Ring& ring, int depth) {
        await_round(barriers.full_raw(from.slot), from.round);
        if (ring.round > 0) await_round(barriers.empty_x(ring.slot), ring.round - 1);
        if (quads.works()) quads.plane(depth, raw + from.slot * p.raw_bytes, shared + ring.slot * p.of_x.slot_bytes);
        publish_to_engines();
        __syncwarp();
        if (thread % 32 == 0) {
          arrive(barriers.full_x(ring.slot));
          arrive(barriers.empty_raw(from.slot));
        }
        from.next(p.raw_slots);
      },
      [](const Ring&, const WeightPillar&, int) {});
}

}  // namespace voxgrad::cuda
