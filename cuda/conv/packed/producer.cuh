// Producer warps and tile scheduler of packed/fprop_dgrad.cuh: one warp has TMA fill stages of weights, one stages of
// inputs (some k-blocks of the halo), and one thread schedules CTA tiles dynamically. Weights and inputs were packed
// before (pack.cu), so that a stage is a few copies. Producers run ahead as far as there are stages, into the tiles to
// come. What is full and what is empty goes by mbarriers (common/tma.cuh).
#pragma once

#include "cuda/conv/common/implicit_gemm.cuh"
#include "cuda/conv/common/tma.cuh"

namespace voxgrad::cuda {

/// What the scheduler publishes of a CTA tile to the other warps, in shared memory.
struct alignas(16) ScheduledTile {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t stages;  // of B, or kNone behind the last tile
  int consumer;     // the warpgroup that multiplies it
  int phase, column_tile;
  int q[3];
  int sample, group;
  // Of a plane of a tile that slides: whether it is the first; with it the planes of results from q[0] on are complete,
  // of which so many are none of this tile, and then so many are.
  int begins, skips, ends;
};

/// Stages of A, of B and of the scheduler that are full, and that are empty; the consumers' turn (ping-pong): tiles
/// whose last stage has come.
template <class Tile>
struct FpropDgradBarriers {
  static constexpr int kA = kMostInputStages, kB = Tile::kStages, kScheduled = 4,
                       kCount = 2 * (kA + kB + kScheduled) + 1;
  uint32_t first;
  __device__ uint32_t full_a(int i) const { return first + 8 * i; }
  __device__ uint32_t empty_a(int i) const { return full_a(kA + i); }
  __device__ uint32_t full_b(int i) const { return full_a(2 * kA + i); }
  __device__ uint32_t empty_b(int i) const { return full_a(2 * kA + kB + i); }
  __device__ uint32_t full_tile(int i) const { return full_a(2 * (kA + kB) + i); }
  __device__ uint32_t empty_tile(int i) const { return full_a(2 * (kA + kB) + kScheduled + i); }
  __device__ uint32_t turn() const { return full_a(kCount - 1); }

  __device__ void init() const {
    for (int i = 0; i < kA; ++i) init_barrier(full_a(i), 1);
    for (int i = 0; i < kB; ++i) init_barrier(full_b(i), 1);
    for (int i = 0; i < kA; ++i) init_barrier(empty_a(i), Tile::kWarps);
    for (int i = 0; i < kB; ++i) init_barrier(empty_b(i), Tile::kWarps);
    for (int i = 0; i < kScheduled; ++i) init_barrier(full_tile(i), 1);
    for (int i = 0; i < kScheduled; ++i) init_barrier(empty_tile(i), Tile::kScheduledWarps);
    init_barrier(turn(), Tile::kWarps);
  }
};

/// The CTA tiles of a persistent CTA, in the order in which it takes them. CTAs take the next that nobody has taken:
/// those that are under way at a time are neighbours, read the same inputs, and fill the sectors that they share.
template <class Tile>
class TileScheduler {
 public:
  TileCoord place;
  int number = -1;
  int first_class, last_class;  // of its inputs (fprop) or its results (dgrad)
  int stages;                   // of B
  const int input_stages;       // of A
  bool ours;                    // it is asked for
  int begins, skips, ends;      // as in ScheduledTile

  __device__ TileScheduler(const ImplicitGemmParams& p, FpropDgradBarriers<Tile> barriers, uint32_t queue)
      : input_stages((p.transposed ? 1 : p.classes) * p.class_stages), p_(p), barriers_(barriers), queue_(queue) {}

  /// Goes on to the next; false behind the last. Without a look at its place if another consumer is asked for than that
  /// which multiplies it. By whole warps.
  __device__ bool next(int consumer = kAny) {
    wait_barrier(barriers_.full_tile(at_.stage), at_.round);
    uint32_t word[4];
    load_shared(queue_ + at_.stage * static_cast<uint32_t>(sizeof(ScheduledTile)), word);
    stages = static_cast<int>(warp_uniform(word[0]));
    ours = consumer == kAny || consumer == static_cast<int>(warp_uniform(word[1]));
    if (ours) {
      place.phase = static_cast<int>(warp_uniform(word[2]));
      place.column_tile = static_cast<int>(warp_uniform(word[3]));
      load_shared(queue_ + at_.stage * static_cast<uint32_t>(sizeof(ScheduledTile)) + 16, word);
      for (int a = 0; a < 3; ++a) place.q[a] = static_cast<int>(warp_uniform(word[a]));
      place.sample = static_cast<int>(warp_uniform(word[3]));
      load_shared(queue_ + at_.stage * static_cast<uint32_t>(sizeof(ScheduledTile)) + 32, word);
      place.group = static_cast<int>(warp_uniform(word[0]));
      begins = static_cast<int>(warp_uniform(word[1]));
      skips = static_cast<int>(warp_uniform(word[2]));
      ends = static_cast<int>(warp_uniform(word[3]));
      first_class = place.phase;
      last_class = p_.transposed ? place.phase + Tile::kTilePhases : p_.classes;
    }
    if (is_leader()) arrive(barriers_.empty_tile(at_.stage));
    at_.next(FpropDgradBarriers<Tile>::kScheduled);
    ++number;
    return stages >= 0;
  }

 private:
  static constexpr int kAny = -1;
  const ImplicitGemmParams& p_;
  const FpropDgradBarriers<Tile> barriers_;
  const uint32_t queue_;  // shared address of the tiles that were published
  PipelineState at_;
};

__device__ inline ScheduledTile scheduled(const ImplicitGemmParams& p, const TileCoord& place, int consumer) {
  ScheduledTile tile{};
  tile.stages = static_cast<uint32_t>(p.weight_stages[place.phase]);
  tile.consumer = consumer;
  tile.phase = place.phase;
  tile.column_tile = place.column_tile;
  for (int a = 0; a < 3; ++a) tile.q[a] = place.q[a];
  tile.sample = static_cast<int>(place.sample);
  tile.group = place.group;
  return tile;
}

/// The dynamic tile scheduler: takes CTA tiles that have results, as far ahead as the queue goes; towards the end one,
/// so that other CTAs find as many. By one thread.
template <class Tile>
__device__ void schedule_tiles(const ImplicitGemmParams& p, FpropDgradBarriers<Tile> barriers, ScheduledTile* queue) {
  constexpr int kMost = FpropDgradBarriers<Tile>::kScheduled;
  int published = 0;
  for (unsigned number = 0; number < p.work_tiles; ++published) {
    const int ahead = p.work_tiles - number > 2 * kMost * gridDim.x ? kMost : 1;
    if (published >= ahead) wait_barrier(barriers.empty_tile((published - ahead) % kMost), (published - ahead) / kMost);
    ScheduledTile tile{ScheduledTile::kNone};
    while ((number = atomicAdd(p.next_tile, 1)) < p.work_tiles) {
      const TileCoord place = tile_coord(p, number);
      if (!has_results<Tile::kTilePhases>(p, place)) continue;
      tile = scheduled(p, place, published % Tile::kConsumers);
      break;
    }
    queue[published % kMost] = tile;
    arrive(barriers.full_tile(published % kMost));
  }
}

/// The same of sliding tiles, plane by plane of their inputs: of two tiles in turn, one for each consumer. Each plane
/// of results has a plane of inputs (plan_fprop_dgrad.cpp). By one thread.
template <class Tile>
__device__ void schedule_planes(const ImplicitGemmParams& p, FpropDgradBarriers<Tile> barriers, ScheduledTile* queue) {
  constexpr int kMost = FpropDgradBarriers<Tile>::kScheduled, kConsumers = Tile::kConsumers, kBefore = Tile::kSlide - 1;
  const AxisPhase& depth = p.axis[0].phase[0];
  const int last_whole = static_cast<int>(p.axis[0].in_size) - 1 - depth.low;  // plane of results
  ScheduledTile tile[kConsumers];                                              // its q[0] is a plane of results, too
  int first[kConsumers], last[kConsumers], left[kConsumers];                   // of those; planes of inputs to come
  for (int group = 0; group < kConsumers; ++group) left[group] = 0;
  unsigned number = blockIdx.x;  // of the next tile: each CTA has a first and a second without asking
  int published = 0;
  const auto publish = [&](const ScheduledTile& plane) {
    if (published >= kMost) wait_barrier(barriers.empty_tile((published - kMost) % kMost), (published - kMost) / kMost);
    queue[published % kMost] = plane;
    arrive(barriers.full_tile(published % kMost));
    ++published;
  };
  for (bool any = true; any;) {
    any = false;
#pragma unroll
    for (int group = 0; group < kConsumers; ++group) {
      while (left[group] == 0 && number < p.work_tiles) {
        const TileCoord place = tile_coord(p, number);
        number = number < gridDim.x ? number + gridDim.x : 2 * gridDim.x + atomicAdd(p.next_tile, 1);
        if (!has_results<Tile::kTilePhases>(p, place)) continue;
        tile[group] = scheduled(p, place, group);
        tile[group].begins = 1;
        tile[group].q[0] = max(place.q[0] - kBefore, -depth.low);
        first[group] = place.q[0];
        last[group] = min(p.range, depth.count - place.q[0]) + place.q[0] - 1;
        left[group] = min(last[group], last_whole) - tile[group].q[0] + 1;
      }
      if (left[group] == 0) continue;
      any = true;
      const int complete = --left[group] > 0 ? tile[group].q[0] : last[group];
      tile[group].skips = max(first[group] - tile[group].q[0], 0);
      tile[group].ends = max(complete - tile[group].q[0] - tile[group].skips + 1, 0);
      publish(tile[group]);
      tile[group].begins = 0;
      ++tile[group].q[0];
    }
  }
  publish(ScheduledTile{ScheduledTile::kNone});
}

/// Has the stages of B filled, in the order in which it is packed. By one warp.
template <class Tile>
__device__ void produce_weights(const ImplicitGemmParams& p, TileScheduler<Tile> work, uint32_t stages,
                                FpropDgradBarriers<Tile> barriers) {
  constexpr int kStageBytes = 4 * Tile::kStageTaps * Tile::kTapWords;
  for (PipelineState at; work.next(); __syncwarp()) {
    if (!is_leader()) continue;
    const TileCoord& place = work.place;
    const char* from = reinterpret_cast<const char*>(
        p.weights + ((int64_t{place.group} * p.column_tiles + place.column_tile) * p.class_begin[p.classes] +
                     p.class_begin[work.first_class]) *
                        p.class_stages * (Tile::kTapWords / 4));
    for (int c = work.first_class; c < work.last_class; c += Tile::kTilePhases)
      for (int stage = 0; stage < p.class_stages; ++stage)
        for (int tile_phase = 0; tile_phase < Tile::kTilePhases; ++tile_phase)
          for (int left = p.class_begin[c + tile_phase + 1] - p.class_begin[c + tile_phase]; left > 0;
               left -= Tile::kStageTaps) {
            if (at.round > 0) wait_barrier(barriers.empty_b(at.stage), at.round - 1);
            const int bytes = min(left, Tile::kStageTaps) * (4 * Tile::kTapWords);
            bulk_load(stages + at.stage * kStageBytes, from, bytes, barriers.full_b(at.stage));
            from += bytes;
            at.next(Tile::kStages);
          }
  }
}

/// Has the stages of A filled: of each k-block, part and half of its words the halo, residues along the width apart.
/// By one warp.
template <class Tile>
__device__ void produce_inputs(const ImplicitGemmParams& p, TileScheduler<Tile> work, uint32_t stages,
                               FpropDgradBarriers<Tile> barriers) {
  constexpr int kPlanes = 2 * Tile::Arithmetic::kParts;  // of a k-block
  const int planes = p.stage_k_blocks * kPlanes, residues = p.axis[2].fold;
  for (PipelineState at; work.next(); __syncwarp()) {
    if (!is_leader()) continue;
    const TileCoord& place = work.place;
    for (int c = work.first_class; c < work.last_class; c += Tile::kTilePhases) {
      int part[3], first[3];
      class_phases(p, c, part);
      for (int a = 0; a < 3; ++a) {
        const AxisPhase& at_part = p.axis[a].phase[part[a]];
        first[a] = (place.q[a] + at_part.low) * p.axis[a].in_step + at_part.residue;
      }
      int plane = (place.sample * p.groups + place.group) * p.k_blocks * kPlanes;
      for (int stage = 0; stage < p.class_stages; ++stage) {
        if (at.round > 0) wait_barrier(barriers.empty_a(at.stage), at.round - 1);
        expect_bytes(barriers.full_a(at.stage), p.halo_voxels * planes * kVoxelBytes);
        uint32_t to = stages + at.stage * (4 * Tile::input_stage_words(p));
        for (int i = 0; i < planes; ++i, ++plane, to += p.rows.positions * kVoxelBytes)
          for (int residue = 0; residue < residues; ++residue)
            tma_load(to + residue * p.residue_positions * kVoxelBytes, p.packed, first[2] * 2, first[1], first[0],
                     plane * residues + residue, barriers.full_a(at.stage));
        at.next(p.input_stages);
      }
    }
  }
}

}  // namespace voxgrad::cuda
