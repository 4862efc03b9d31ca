// The warps that feed those of gather_wgmma.cuh: one copies weights to a ring of stages, one the inputs of a step, some
// chunks of 8 words of channels of the halo, to a ring of buffers, and one takes the boxes. Weights and inputs were
// packed before (pack.cu), so that nothing is left to do but to tell the copy engine where they are. They run ahead as
// far as the rings go, into the boxes to come. What is full and what is empty goes by the barriers of bulk_copy.cuh.
#pragma once

#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/common/implicit_gemm.cuh"

namespace voxgrad::cuda {

/// What the warps of a block are told of a box that they take, in shared memory.
struct alignas(16) GatherBox {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t stages;  // of B, or kNone behind the last box
  int warps;        // the group of them that multiplies it
  int phase, column_tile;
  int q[3];
  int sample, group;
  // Of a plane of a box that slides: whether it is the first; with it the planes of results from q[0] on are complete,
  // of which so many are none of this box, and then so many are.
  int begins, skips, ends;
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
  bool ours;                    // it is asked for
  int begins, skips, ends;      // as in GatherBox

  __device__ GatherBoxes(const GatherMma& p, GatherBarriers<Tile> barriers, uint32_t queue)
      : steps((p.transposed ? 1 : p.classes) * p.class_steps), p_(p), barriers_(barriers), queue_(queue) {}

  /// Goes on to the next; false behind the last. Without a look at its place if another group of warps is asked for
  /// than that which multiplies it. By whole warps.
  __device__ bool next(int warps = kAnyWarps) {
    await_round(barriers_.full_box(at_.slot), at_.round);
    uint32_t word[4];
    load_shared(queue_ + at_.slot * static_cast<uint32_t>(sizeof(GatherBox)), word);
    stages = static_cast<int>(of_warp(word[0]));
    ours = warps == kAnyWarps || warps == static_cast<int>(of_warp(word[1]));
    if (ours) {
      place.phase = static_cast<int>(of_warp(word[2]));
      place.column_tile = static_cast<int>(of_warp(word[3]));
      load_shared(queue_ + at_.slot * static_cast<uint32_t>(sizeof(GatherBox)) + 16, word);
      for (int a = 0; a < 3; ++a) place.q[a] = static_cast<int>(of_warp(word[a]));
      place.sample = static_cast<int>(of_warp(word[3]));
      load_shared(queue_ + at_.slot * static_cast<uint32_t>(sizeof(GatherBox)) + 32, word);
      place.group = static_cast<int>(of_warp(word[0]));
      begins = static_cast<int>(of_warp(word[1]));
      skips = static_cast<int>(of_warp(word[2]));
      ends = static_cast<int>(of_warp(word[3]));
      first_class = place.phase;
      last_class = p_.transposed ? place.phase + Tile::kSlots : p_.classes;
    }
    if (is_leader()) arrive(barriers_.empty_box(at_.slot));
    at_.next(GatherBarriers<Tile>::kBoxes);
    ++number;
    return stages >= 0;
  }

 private:
  static constexpr int kAnyWarps = -1;
  const GatherMma& p_;
  const GatherBarriers<Tile> barriers_;
  const uint32_t queue_;  // shared address of the boxes that were told
  Ring at_;
};

__device__ inline GatherBox to_tell(const GatherMma& p, const GatherPlace& place, int warps) {
  GatherBox box{};
  box.stages = static_cast<uint32_t>(p.stages[place.phase]);
  box.warps = warps;
  box.phase = place.phase;
  box.column_tile = place.column_tile;
  for (int a = 0; a < 3; ++a) box.q[a] = place.q[a];
  box.sample = static_cast<int>(place.sample);
  box.group = place.group;
  return box;
}

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
      box = to_tell(p, place, told % Tile::kGroups);
      break;
    }
    queue[told % kMost] = box;
    arrive(barriers.full_box(told % kMost));
  }
}

/// The same of boxes that slide along depth, plane by plane of their inputs: of two boxes in turn, one for each group
/// of warps. Each plane of results has a plane of inputs (plan_gather_wgmma.cpp). By one thread.
template <class Tile>
__device__ void take_planes(const GatherMma& p, GatherBarriers<Tile> barriers, GatherBox* queue) {
  constexpr int kMost = GatherBarriers<Tile>::kBoxes, kGroups = Tile::kGroups, kBefore = Tile::kSlide - 1;
  const AxisPart& depth = p.axis[0].part[0];
  const int last_whole = static_cast<int>(p.axis[0].in_size) - 1 - depth.low;  // plane of results
  GatherBox box[kGroups];                                                      // its q[0] is a plane of results, too
  int first[kGroups], last[kGroups], left[kGroups];                            // of those; planes of inputs to come
  for (int group = 0; group < kGroups; ++group) left[group] = 0;
  unsigned number = blockIdx.x;  // of the next box: each block has a first and a second without asking
  int told = 0;
  const auto tell = [&](const GatherBox& plane) {
    if (told >= kMost) await_round(barriers.empty_box((told - kMost) % kMost), (told - kMost) / kMost);
    queue[told % kMost] = plane;
    arrive(barriers.full_box(told % kMost));
    ++told;
  };
  for (bool any = true; any;) {
    any = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      while (left[group] == 0 && number < p.boxes) {
        const GatherPlace place = gather_place(p, number);
        number = number < gridDim.x ? number + gridDim.x : 2 * gridDim.x + atomicAdd(p.next_box, 1);
        if (!has_results<Tile::kSlots>(p, place)) continue;
        box[group] = to_tell(p, place, group);
        box[group].begins = 1;
        box[group].q[0] = max(place.q[0] - kBefore, -depth.low);
        first[group] = place.q[0];
        last[group] = min(p.range, depth.count - place.q[0]) + place.q[0] - 1;
        left[group] = min(last[group], last_whole) - box[group].q[0] + 1;
      }
      if (left[group] == 0) continue;
      any = true;
      const int complete = --left[group] > 0 ? box[group].q[0] : last[group];
      box[group].skips = max(first[group] - box[group].q[0], 0);
      box[group].ends = max(complete - box[group].q[0] - box[group].skips + 1, 0);
      tell(box[group]);
      box[group].begins = 0;
      ++box[group].q[0];
    }
  }
  tell(GatherBox{GatherBox::kNone});
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
  for (Ring at; box.next(); __syncwarp()) {
    if (!is_leader()) continue;
    const GatherPlace& place = box.place;
    for (int c = box.first_class; c < box.last_class; c += Tile::kSlots) {
      int part[3], first[3];
      class_parts(p, c, part);
      for (int a = 0; a < 3; ++a) {
        const AxisPart& at_part = p.axis[a].part[part[a]];
        first[a] = (place.q[a] + at_part.low) * p.axis[a].in_step + at_part.residue;
      }
      int plane = (place.sample * p.groups + place.group) * p.chunks * kPlanes;
      for (int step = 0; step < p.class_steps; ++step) {
        if (at.round > 0) await_round(barriers.empty_a(at.slot), at.round - 1);
        expect_bytes(barriers.full_a(at.slot), p.halo_voxels * planes * kVoxelBytes);
        uint32_t to = ring + at.slot * (4 * Tile::buffer_words(p));
        for (int i = 0; i < planes; ++i, ++plane, to += p.rows.positions * kVoxelBytes)
          for (int residue = 0; residue < residues; ++residue)
            copy_box(to + residue * p.residue_positions * kVoxelBytes, p.packed, first[2] * 2, first[1], first[0],
                     plane * residues + residue, barriers.full_a(at.slot));
        at.next(p.buffers);
      }
    }
  }
}

}  // namespace voxgrad::cuda
