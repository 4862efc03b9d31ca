// The warps that feed those of gather_wgmma.cuh: one copies weights to a ring of stages, three stage the inputs of a
// step, 8 words of channels of the halo, ahead. What is full and what is empty goes by named barriers, and for weights
// by the barriers of bulk_copy.cuh.
#pragma once

#include "cuda/conv/bulk_copy.cuh"
#include "cuda/conv/gather_block.cuh"

namespace voxgrad::cuda {

/// What is handed over between the warps that feed and those that multiply: buffers of A; stages of the ring of B,
/// which are full when their bytes have come (bulk_copy.cuh).
template <class Tile>
struct GatherBarriers {
  static constexpr int kMostBuffers = 4;
  static constexpr int kOfA = 32 * Tile::kWarps + Tile::kStagers, kOfB = 32 * Tile::kWarps + Tile::kCopiers;  // threads
  __device__ static void full_a(int i, bool wait) { meet<kOfA>(1 + i, wait); }
  __device__ static void empty_a(int i, bool wait) { meet<kOfA>(1 + kMostBuffers + i, wait); }
  __device__ static void empty_b(int i, bool wait) { meet<kOfB>(1 + 2 * kMostBuffers + i, wait); }

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

/// Where A comes from and goes to. By threads 0 to kStagers.
template <class Tile>
struct GatherInputs {
  using Element = typename Tile::Arithmetic::Element;
  static constexpr int kStagers = Tile::kStagers, kChannels = StagedVoxel<typename Tile::Arithmetic>::kChannels;

  const GatherMma& p;
  const GatherPlace& place;
  int thread;
  uint32_t words;  // shared address of the first buffer
  uint32_t* offsets;
  int* targets;
  const char* in;
  int64_t channel_bytes;
  HaloStage<kStagers> stage;

  __device__ GatherInputs(const GatherMma& problem, const GatherPlace& at, uint32_t* shared, int of_thread)
      : p(problem),
        place(at),
        thread(of_thread),
        words(shared_address(shared)),
        offsets(shared + p.buffers * kChunk * p.pitch),
        targets(reinterpret_cast<int*>(offsets + p.rounds * kStagers)),
        in(reinterpret_cast<const char*>(static_cast<const Element*>(p.in) + place.sample * p.in_stride[0] +
                                         place.group * int64_t{p.in_channels} * p.in_stride[1])),
        channel_bytes(p.in_stride[1] * static_cast<int64_t>(sizeof(Element))),
        stage{place.phase, 0, 0} {
    stage.locate(p, place, offsets, sizeof(Element), thread);
    stage.place_words(p, targets, thread);
  }
  /// Of this step: the first channel of the halo's corner, and how many there are.
  __device__ const char* base() const {
    return in + stage.corner * static_cast<int64_t>(sizeof(Element)) + stage.chunk * kChannels * channel_bytes;
  }
  __device__ int channels() const { return p.in_channels - stage.chunk * kChannels; }
  __device__ uint32_t buffer(int i) const { return words + i * (kChunk * p.pitch * 4); }
  __device__ void next_step(bool more) {
    if (++stage.chunk < p.chunks || !more) return;
    stage.chunk = 0;
    ++stage.number;
    stage.locate(p, place, offsets, sizeof(Element), thread);
  }
};

/// Rounds a voxel's words to the nearest TF32, once the hardware has truncated them; what is not finite stays.
__device__ inline void round_words(uint32_t at, uint32_t pitch) {
  uint32_t word[kChunk];
#pragma unroll
  for (int c = 0; c < kChunk; ++c) word[c] = load_shared(at + c * pitch);
#pragma unroll
  for (int c = 0; c < kChunk; ++c) {
    if (fabsf(__uint_as_float(word[c])) < INFINITY) word[c] += 0x1000u;
    store_shared(at + c * pitch, word[c]);
  }
}

/// Stages A in the background, as many steps ahead as there are buffers, and rounds it where it lies.
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
      const char* const base = inputs.base();
      const int channels = inputs.channels();
      for (int round = 0; round < p.rounds; ++round) {
        const uint32_t offset = inputs.offsets[thread + round * Tile::kStagers];
        const int real = offset == kOutside ? 0 : channels;
        const char* from = offset == kOutside ? base : base + offset;
        uint32_t to = inputs.buffer(buffer) + inputs.targets[thread + round * Tile::kStagers];
#pragma unroll
        for (int c = 0; c < kChunk; ++c, to += p.pitch * 4) {
          copy_word_async(to, from, c < real);
          from += inputs.channel_bytes;
        }
      }
      if (++buffer == p.buffers) buffer = 0;
      inputs.next_step(step + 1 < work.steps);
    }
    commit_copies();
    if (step < lag) continue;
    if (lag == 0)
      await_copies<0>();
    else if (lag == 1)
      await_copies<1>();
    else
      await_copies<2>();
    if constexpr (Tile::Arithmetic::kRounds)
      for (int round = 0; round < p.rounds; ++round)
        round_words(inputs.buffer(arrived) + inputs.targets[thread + round * Tile::kStagers], p.pitch * 4);
    Barriers::full_a(arrived, false);
    if (++arrived == p.buffers) arrived = 0;
  }
}

/// Stages A through registers, in which it is paired: while one batch of voxels is stored, the next is on its way.
template <class Tile>
__device__ void pair_inputs(const GatherMma& p, const GatherPlace& place, uint32_t* words, int thread) {
  using Barriers = GatherBarriers<Tile>;
  using Voxel = StagedVoxel<typename Tile::Arithmetic>;
  constexpr int kStagers = Tile::kStagers;
  const GatherWork<Tile> work(p, place);
  GatherInputs<Tile> inputs(p, place, words, thread);
  Voxel voxel[2];
  int load_step = 0, load_round = 0, store_step = 0, store_round = 0, buffer = 0;
  const auto load = [&](Voxel& to) {
    if (load_step == work.steps) return;
    const uint32_t offset = inputs.offsets[thread + load_round * kStagers];
    to.load(inputs.base() + offset, inputs.channel_bytes, offset == kOutside ? 0 : inputs.channels());
    if (++load_round < p.rounds) return;
    load_round = 0;
    inputs.next_step(++load_step < work.steps);
  };
  const auto store = [&](const Voxel& from) {
    if (store_round == 0 && store_step >= p.buffers) Barriers::empty_a(buffer, true);
    from.store(inputs.buffer(buffer) + inputs.targets[thread + store_round * kStagers], p.pitch * 4);
    if (++store_round < p.rounds) return;
    store_round = 0;
    ++store_step;
    Barriers::full_a(buffer, false);
    if (++buffer == p.buffers) buffer = 0;
  };
  load(voxel[0]);
  while (store_step < work.steps) {
    load(voxel[1]);
    store(voxel[0]);
    if (store_step == work.steps) break;
    load(voxel[0]);
    store(voxel[1]);
  }
}

}  // namespace voxgrad::cuda
