// The warps that feed those of gather_wgmma.cuh: one copies weights to a ring of stages, six copy the inputs of a step,
// some chunks of 8 words of channels of the halo, to a ring of buffers, and one takes the boxes. Weights and inputs
// were packed before (pack.cu), so that nothing is left to do but to copy. They run ahead as far as the rings go, into
// the boxes to come. What is full and what is empty goes by the barriers of bulk_copy.cuh.
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
    for (int i = 0; i < kA; ++i) init_barrier(full_a(i), Tile::kStagers);
    for (int i = 0; i < kB; ++i) init_barrier(full_b(i), 1);
    for (int i = 0; i < kA; ++i) init_barrier(empty_a(i), Tile::kWarps);
    for (int i = 0; i < kB; ++i) init_barrier(empty_b(i), Tile::kWarps);
    for (int i = 0; i < kBoxes; ++i) init_barrier(full_box(i), 1);
    for (int i = 0; i < kBoxes; ++i) init_barrier(empty_box(i), Tile::kThreads / 32 - 1);
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
    if (threadIdx.x % 32 != 0) continue;
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

/// Copies A in the background. By threads 0 to kStagers, of which each takes every kStagers-th voxel of the halo.
template <class Tile>
struct GatherInputs {
  static constexpr int kStagers = Tile::kStagers, kPlanes = 2 * Tile::Arithmetic::kParts;  // of a step

  const GatherMma& p;
  int thread;
  uint32_t words;   // shared address of the first buffer
  uint32_t* table;  // of this thread's voxels: bytes from the halo's corner, or kOutside; bytes from the staged corner

  __device__ void copy_all(GatherBoxes<Tile> box, GatherBarriers<Tile> barriers) const {
    find_targets();
    for (Ring at; box.next();) {
      const GatherPlace& place = box.place;
      for (int c = box.first_class; c < box.last_class; c += Tile::kSlots) {
        locate_halo<2>(p, place, c, table, kVoxelBytes, thread, kStagers);
        const char* from = static_cast<const char*>(p.in) + halo_corner(p, place, c) * kVoxelBytes +
                           (place.sample * p.groups + place.group) * p.chunks * (kPlanes * p.plane_bytes);
        for (int step = 0; step < p.class_steps; ++step) {
          if (at.round > 0) await_round(barriers.empty_a(at.slot), at.round - 1);
          uint32_t to = words + at.slot * (4 * Tile::buffer_words(p));
          for (int i = 0; i < p.depth; ++i, from += kPlanes * p.plane_bytes, to += 4 * Tile::chunk_words(p))
            copy_chunk(from, to);
          arrive_with_copies(barriers.full_a(at.slot));
          at.next(p.buffers);
        }
      }
    }
  }

 private:
  /// Residues lie apart in the buffer: what neighbours read lies side by side.
  __device__ void find_targets() const {
    const int fold = p.axis[2].fold, line = p.extent[2].value / fold;
    for (int v = thread; v < p.halo_voxels; v += kStagers) {
      int lines = v;
      const int w = p.extent[2].take(lines);
      table[2 * v + 1] = ((w % fold * (p.halo_voxels / p.extent[2].value) + lines) * line + w / fold) * kVoxelBytes;
    }
  }
  __device__ void copy_chunk(const char* from, uint32_t to) const {
    const uint32_t pitch = p.rows.positions * kVoxelBytes;
    constexpr int kMany = 4;  // whose entries are loaded together
    for (int first = thread; first < p.halo_voxels; first += kMany * kStagers) {
      uint2 entry[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i)
        if (first + i * kStagers < p.halo_voxels)
          entry[i] = *reinterpret_cast<const uint2*>(table + 2 * (first + i * kStagers));
#pragma unroll
      for (int i = 0; i < kMany; ++i) {
        if (first + i * kStagers >= p.halo_voxels) break;
        const bool inside = entry[i].x != kOutside;
        const char* at = inside ? from + entry[i].x : from;
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane, at += p.plane_bytes)
          copy_async(to + entry[i].y + plane * pitch, at, inside);
      }
    }
  }
};

}  // namespace voxgrad::cuda
