// The warps that feed those of gather_wgmma.cuh: one copies weights to a ring of stages, one the inputs of a step, some
// chunks of 8 words of channels of the halo, to a ring of buffers, and one takes the boxes. Weights and inputs were
// packed before (pack.cu), so that nothing is left to do but to tell the copy engine where they are. They run ahead as
// far as the rings go, into the boxes to come. What is full and what is empty goes by the barriers of bulk_copy.cuh.
#pragma once

#include "cuda/conv/bulk_copy.cuh"
#include "cuda/conv/gather_block.cuh"

namespace voxgrad::cuda {

/// What the warps of a block are told of a box that they take, in shared memory.
struct alignas(16) GatherBox {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t stages;  // of B, or kNone behind the last box
  int phase, group, column_tile;
  int q[3];
  int sample;
};

/// Buffers of A, stages of B and numbers of boxes that are full, and that are empty; boxes whose last stage has come.
template <class Tile>
struct GatherBarriers {
  static constexpr int kA = kGatherBuffers, kB = Tile::kStages, kBoxes = 4, kCount = 2 * (kA + kB + kBoxes) + 1;
  uint32_t first;
  __device__ uint32_t full_a(int i) const { return first + 8 * i; }
  __device__ uint32_t empty_a(int i) const { return full_a(kA + i); }
  __device__ uint32_t full_b(int i) const { return full_a(2 * kA + i); }
  __device__ uint32_t empty_b(int i) const { return full_a(2 * kA + kB + i); }
  __device__ uint32_t full_box(int i) const { return full_a(2 * (kA + kB) + i); }
  __device__ uint32_t empty_box(int i) const { return full_a(2 * (kA + kB) + kBoxes + i); }
  __device__ uint32_t turn() const { return full_a(kCount - 1); }

  __device__ void init() const {
    for (int i = 0; i < kA; ++i) init_barrier(full_a(i), 1);
    for (int i = 0; i < kB; ++i) init_barrier(full_b(i), 1);
    for (int i = 0; i < kA; ++i) init_barrier(empty_a(i), Tile::kWarps);
    for (int i = 0; i < kB; ++i) init_barrier(empty_b(i), Tile::kWarps);
    for (int i = 0; i < kBoxes; ++i) init_barrier(full_box(i), 1);
    for (int i = 0; i < kBoxes; ++i) init_barrier(empty_box(i), Tile::kTold);
    init_barrier(turn(), Tile::kWarps);
  }
};

/// The boxes of a block, in the order in which it takes them. Blocks take the next that nobody has taken: those that
/// are under way at a time are neighbours, read the same inputs, and fill the sectors that they share.
template <class Tile>
class GatherBoxes {
 public:
  GatherPlace place;
  int number = -1;
  int first_class, last_class;  // of its inputs (forward) or its results
  int stages;                   // of B
  const int steps;              // of A

  __device__ GatherBoxes(const GatherMma& p, GatherBarriers<Tile> barriers, uint32_t queue)
      : steps((p.transposed ? 1 : p.classes) * p.class_steps), p_(p), barriers_(barriers), queue_(queue) {}

  /// Goes on to the next; false behind the last. Without a look at its place if the box is another's. By whole warps.
  __device__ bool next(bool ours = true) {
    await_round(barriers_.full_box(at_.slot), at_.round);
    uint32_t word[4];
    load_shared(queue_ + at_.slot * static_cast<uint32_t>(sizeof(GatherBox)), word);
    stages = static_cast<int>(of_warp(word[0]));
    if (ours) {
      place.phase = static_cast<int>(of_warp(word[1]));
      place.group = static_cast<int>(of_warp(word[2]));
      place.column_tile = static_cast<int>(of_warp(word[3]));
      load_shared(queue_ + at_.slot * static_cast<uint32_t>(sizeof(GatherBox)) + 16, word);
      for (int a = 0; a < 3; ++a) place.q[a] = static_cast<int>(of_warp(word[a]));
      place.sample = static_cast<int>(of_warp(word[3]));
      first_class = place.phase;
      last_class = p_.transposed ? place.phase + Tile::kSlots : p_.classes;
    }
    if (is_leader()) arrive(barriers_.empty_box(at_.slot));
    at_.next(GatherBarriers<Tile>::kBoxes);
    ++number;
    return stages >= 0;
  }

 private:
  const GatherMma& p_;
  const GatherBarriers<Tile> barriers_;
  const uint32_t queue_;  // shared address of the boxes that were told
  Ring at_;
};

/// Takes boxes that have results, and tells the other warps of the block: as far ahead as the queue goes; towards the
/// end one box, so that other blocks find as many. By one thread.
template <class Tile>
__device__ void take_boxes(const GatherMma& p, GatherBarriers<Tile> barriers, GatherBox* queue) {
  constexpr int kMost = GatherBarriers<Tile>::kBoxes;
  int told = 0;
  for (unsigned number = 0; number < p.boxes; ++told) {
    const int ahead = p.boxes - number > 2 * kMost * gridDim.x ? kMost : 1;
    if (told >= ahead) await_round(barriers.empty_box((told - ahead) % kMost), (told - ahead) / kMost);
    GatherBox box{GatherBox::kNone};
    while ((number = atomicAdd(p.next_box, 1)) < p.boxes) {
      const GatherPlace place = gather_place(p, number);
      if (!has_results<Tile::kSlots>(p, place)) continue;
      box = {static_cast<uint32_t>(p.stages[place.phase]),
             place.phase,
             place.group,
             place.column_tile,
             {place.q[0], place.q[1], place.q[2]},
             static_cast<int>(place.sample)};
      break;
    }
    queue[told % kMost] = box;
    arrive(barriers.full_box(told % kMost));
  }
}

/// Copies B to the ring, stage by stage, in the order in which it is packed. By one warp.
template <class Tile>
__device__ void copy_weights(const GatherMma& p, GatherBoxes<Tile> box, uint32_t ring, GatherBarriers<Tile> barriers) {
  constexpr int kStageBytes = 4 * Tile::kStepTaps * Tile::kTapWords;
  for (Ring at; box.next(); __syncwarp()) {
    if (!is_leader()) continue;
    const GatherPlace& place = box.place;
    const char* from = reinterpret_cast<const char*>(
        p.weights + ((int64_t{place.group} * p.column_tiles + place.column_tile) * p.class_begin[p.classes] +
                     p.class_begin[box.first_class]) *
                        p.class_steps * (Tile::kTapWords / 4));
    for (int c = box.first_class; c < box.last_class; c += Tile::kSlots)
      for (int step = 0; step < p.class_steps; ++step)
        for (int slot = 0; slot < Tile::kSlots; ++slot)
          for (int left = p.class_begin[c + slot + 1] - p.class_begin[c + slot]; left > 0; left -= Tile::kStepTaps) {
            if (at.round > 0) await_round(barriers.empty_b(at.slot), at.round - 1);
            const int bytes = min(left, Tile::kStepTaps) * (4 * Tile::kTapWords);
            copy_bulk(ring + at.slot * kStageBytes, from, bytes, barriers.full_b(at.slot));
            from += bytes;
            at.next(Tile::kStages);
          }
  }
}

/// Copies A to the ring: of each chunk of a step, part and half of its words the halo, residues along the width apart.
/// By one warp.
template <class Tile>
__device__ void copy_inputs(const GatherMma& p, GatherBoxes<Tile> box, uint32_t ring, GatherBarriers<Tile> barriers) {
  constexpr int kPlanes = 2 * Tile::Arithmetic::kParts;  // of a chunk
  const int planes = p.depth * kPlanes, residues = p.axis[2].fold;
  const int splits[3] = {p.axis[0].in_step, p.axis[1].in_step, residues};
  for (Ring at; box.next(); __syncwarp()) {
    if (!is_leader()) continue;
    const GatherPlace& place = box.place;
    for (int c = box.first_class; c < box.last_class; c += Tile::kSlots) {
      int part[3], first[3];
      class_parts(p, c, part);
      for (int a = 0; a < 3; ++a) first[a] = place.q[a] + p.axis[a].part[part[a]].low;
      int plane = (place.sample * p.groups + place.group) * p.chunks * kPlanes;
      for (int step = 0; step < p.class_steps; ++step) {
        if (at.round > 0) await_round(barriers.empty_a(at.slot), at.round - 1);
        expect_bytes(barriers.full_a(at.slot), p.halo_voxels * planes * kVoxelBytes);
        uint32_t to = ring + at.slot * (4 * Tile::buffer_words(p));
        for (int i = 0; i < planes; ++i, ++plane, to += p.rows.positions * kVoxelBytes) {
          int split = plane;
          for (int a = 0; a < 2; ++a) split = split * splits[a] + p.axis[a].part[part[a]].residue;
          split *= residues;
          for (int residue = 0; residue < residues; ++residue)
            copy_box(to + residue * p.residue_positions * kVoxelBytes, p.packed, first[2] * 2, first[1], first[0],
                     split + residue, barriers.full_a(at.slot));
        }
        at.next(p.buffers);
      }
    }
  }
}

}  // namespace voxgrad::cuda
