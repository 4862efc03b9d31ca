// The warps that feed those of gather_wgmma.cuh: one copies weights to a ring of stages, three copy the inputs of a
// step, 8 words of channels of the halo, ahead. Both were packed before (pack.cu), so that nothing is left to do but to
// copy. What is full and what is empty goes by named barriers, and for weights by the barriers of bulk_copy.cuh.
#pragma once

#include "cuda/conv/bulk_copy.cuh"
#include "cuda/conv/gather_block.cuh"

namespace voxgrad::cuda {

/// What is handed over between the warps that feed and those that multiply: buffers of A; stages of the ring of B,
/// which are full when their bytes have come (bulk_copy.cuh).
template <class Tile>
struct GatherBarriers {
  static constexpr int kMostBuffers = 4, kResults = 1 + 3 * kMostBuffers;
  static constexpr int kOfA = 32 * Tile::kWarps + Tile::kStagers, kOfB = 32 * Tile::kWarps + Tile::kCopiers;  // threads
  __device__ static void full_a(int i, bool wait) { meet<kOfA>(1 + i, wait); }
  __device__ static void empty_a(int i, bool wait) { meet<kOfA>(1 + kMostBuffers + i, wait); }
  __device__ static void empty_b(int i, bool wait) { meet<kOfB>(1 + 2 * kMostBuffers + i, wait); }
  /// Of all that write results: those that multiply and those that stage.
  __device__ static void results() { meet<kOfA>(kResults, true); }

 private:
  template <int kThreads>
  __device__ static void meet(int barrier, bool wait) {
    if (wait)
      asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
    else
      asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }
};

/// A block's part of the work: classes from `first` to `last`, and how many stages of B they are.
template <class Tile>
struct GatherWork {
  int first, last, steps, stages;

  __device__ GatherWork(const GatherMma& p, const GatherPlace& place)
      : first(place.phase), last(p.transposed ? place.phase + Tile::kSlots : p.classes), stages(0) {
    for (int number = first; number < last; number += Tile::kSlots)
      stages += (p.class_begin[number + Tile::kSlots] - p.class_begin[number] + Tile::kStepTaps - 1) / Tile::kStepTaps;
    stages *= p.chunks;
    steps = (last - first) / Tile::kSlots * p.chunks;
  }
};

/// Copies B to the ring, stage by stage, in the order in which it is packed. By one warp.
template <class Tile>
__device__ void copy_weights(const GatherMma& p, const GatherPlace& place, uint32_t ring, uint32_t full) {
  constexpr int kStages = Tile::kStages, kStageBytes = 4 * Tile::kStepTaps * Tile::kTapWords;
  const GatherWork<Tile> work(p, place);
  const char* from = reinterpret_cast<const char*>(
      p.weights + ((int64_t{place.group} * p.column_tiles + place.column_tile) * p.class_begin[p.classes] +
                   p.class_begin[work.first]) *
                      p.chunks * (Tile::kTapWords / 4));
  int number = work.first, chunk = 0, tap = 0;
  for (int stage = 0; stage < work.stages; ++stage) {
    const int slot = stage % kStages;
    if (stage >= kStages) GatherBarriers<Tile>::empty_b(slot, true);
    const int left = p.class_begin[number + Tile::kSlots] - p.class_begin[number] - tap;
    const int bytes = min(left, Tile::kStepTaps) * (4 * Tile::kTapWords);
    if (threadIdx.x % 32 == 0) copy_bulk(ring + slot * kStageBytes, from, bytes, full + 8 * slot);
    __syncwarp();
    from += bytes;
    tap += Tile::kStepTaps;
    if (left > Tile::kStepTaps) continue;
    tap = 0;
    if (++chunk == p.chunks) chunk = 0, number += Tile::kSlots;
  }
}

/// Where A comes from and goes to. By threads 0 to kStagers, of which each takes every kStagers-th voxel of the halo.
template <class Tile>
struct GatherInputs {
  static constexpr int kStagers = Tile::kStagers, kPlanes = 2 * Tile::Arithmetic::kParts;  // of a step

  const GatherMma& p;
  const GatherPlace& place;
  int thread;
  uint32_t words;         // shared address of the first buffer
  uint32_t* table;        // of the voxels: bytes from the halo's corner, or kOutside; bytes from the staged corner
  int number, chunk = 0;  // class, chunk of channels
  const char* from;       // the halo's corner

  __device__ GatherInputs(const GatherMma& problem, const GatherPlace& at, uint32_t* shared, int of_thread)
      : p(problem),
        place(at),
        thread(of_thread),
        words(shared_address(shared)),
        table(shared + p.buffers * Tile::buffer_words(p)),
        number(place.phase) {
    find_corner();
  }
  /// Fills the table for the first step. By thread `thread` of `threads`.
  __device__ static void fill_table(const GatherMma& p, const GatherPlace& place, uint32_t* table, int thread,
                                    int threads) {
    const int fold = p.axis[2].fold, line = p.extent[2].value / fold;
    for (int v = thread; v < p.halo_voxels; v += threads) {  // residues apart: what neighbours read lies side by side
      int lines = v;
      const int w = p.extent[2].take(lines);
      table[2 * v + 1] = ((w % fold * (p.halo_voxels / p.extent[2].value) + lines) * line + w / fold) * kVoxelBytes;
    }
    locate_halo<2>(p, place, place.phase, table, kVoxelBytes, thread, threads);
  }
  __device__ void next_step(bool more) {
    if (!more) return;
    from += kPlanes * p.plane_bytes;
    if (++chunk < p.chunks) return;
    chunk = 0;
    ++number;
    locate_halo<2>(p, place, number, table, kVoxelBytes, thread, kStagers);
    find_corner();
  }
  __device__ void copy_to(int buffer) const {
    const uint32_t to = words + buffer * (4 * Tile::buffer_words(p)), pitch = p.rows.positions * kVoxelBytes;
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
    commit_copies();
  }

 private:
  __device__ void find_corner() {
    from = static_cast<const char*>(p.in) + halo_corner(p, place, number) * kVoxelBytes +
           (place.sample * p.groups + place.group) * p.chunks * (kPlanes * p.plane_bytes);
  }
};

/// Copies A in the background, as many steps ahead as there are buffers.
template <class Tile>
__device__ void copy_inputs(const GatherMma& p, const GatherPlace& place, uint32_t* words, int thread) {
  using Barriers = GatherBarriers<Tile>;
  const GatherWork<Tile> work(p, place);
  GatherInputs<Tile> inputs(p, place, words, thread);
  const int lag = p.buffers - 2;  // steps under way beside the one that is being queued
  int buffer = 0, arrived = 0;
  for (int step = 0; step < work.steps + lag; ++step) {
    if (step < work.steps) {
      if (step >= p.buffers) Barriers::empty_a(buffer, true);
      inputs.copy_to(buffer);
      if (++buffer == p.buffers) buffer = 0;
      inputs.next_step(step + 1 < work.steps);
    } else {
      commit_copies();
    }
    if (step < lag) continue;
    if (lag == 0)
      await_copies<0>();
    else if (lag == 1)
      await_copies<1>();
    else
      await_copies<2>();
    Barriers::full_a(arrived, false);
    if (++arrived == p.buffers) arrived = 0;
  }
}

}  // namespace voxgrad::cuda
