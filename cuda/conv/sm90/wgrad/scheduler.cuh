// The CTA tile and the work units of wgrad_kernel.
#pragma once

#include "cuda/conv/sm90/wgmma.cuh"
#include "cuda/conv/sm90/wgrad/params.h"

namespace voxgrad::cuda::implicit_wgrad {

/// A CTA tile. A row of x has kChunk input channels and a row of y has kN output channels, 32 or 64 each. A warpgroup
/// has kMTiles m64 tiles. A sliding tile has kSlide planes of y; the first plane belongs to the last tap along the
/// depth. kPromotes: the sums over 64 voxels are added in float, because the accumulators of tensor cores truncate.
template <class Arithmetic_, int kChunk_, int kN_, int kMTiles_, int kSlide_>
struct CtaTile {
  using Arithmetic = Arithmetic_;
  static constexpr bool kPromotes = Arithmetic::kParts > 1;
  using Element = std::conditional_t<kPromotes, Float16, typename Arithmetic::Element>;  // three products of scaled f16
  static constexpr int kChunk = kChunk_, kN = kN_, kMTiles = kMTiles_, kSlide = kSlide_, kN8 = kN / 8;
  using Sums = Accumulator[kMTiles][kN8 * kSlide];
  static constexpr int kTapsOfSlot = 64 / kChunk;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisters = 232, kProducerRegisters = 40;
  static constexpr WgradTile kShape{kChunk, kN, kMTiles, kSlide};
};

/// The taps, channels and voxels that a CTA computes at a time.
struct WorkUnit {
  int set;           // index of the set of taps
  int column;        // index of the tile along the output channels
  int channel_tile;  // index of the tile along the input channels
  int group;
  int split;
  int first_tile;  // first tile of y
  int last_tile;   // tile of y after the last tile of the unit

  __device__ WorkUnit(const Params& p, int number) {
    const int rank = p.cluster.take_digit(number);
    set = p.sets.take_digit(number);
    column = p.columns.take_digit(number);
    channel_tile = p.channel_tiles.take_digit(number);
    group = p.groups.take_digit(number);
    split = number * p.cluster.value() + rank;
    first_tile = split * p.tiles_of_split;
    last_tile = min(first_tile + p.tiles_of_split, p.all_tiles);
  }
};

}  // namespace voxgrad::cuda::implicit_wgrad
