// A ring of stages in shared memory between a producer warp, which issues TMA copies, and the consumer warpgroups.
#pragma once

#include "cuda/conv/common/concepts.h"
#include "cuda/conv/common/tma.cuh"

namespace voxgrad::cuda {

/// The position of a producer or consumer in the ring. A producer calls acquire() and commit(), issues the copies, and
/// calls next(). A consumer calls wait(), starts its products, calls next(), and releases the stage when the products
/// are done.
class Pipeline {
 public:
  static constexpr int kBarrierBytes = 16;  // of a stage: full, empty

  __device__ Pipeline(uint32_t barriers, int stages) : barriers_(barriers), stages_(stages) {}
  /// Initializes the barriers. One thread must call it before other threads use the ring. `consumers` is the number of
  /// warpgroups that read each stage, in all CTAs that share the copies.
  __device__ void init(int consumers) const {
    for (int i = 0; i < stages_; ++i) {
      init_barrier(full(i), 1);
      init_barrier(empty(i), consumers);
    }
  }
  __device__ int stage() const { return stage_; }
  /// Returns to a stage of the first round.
  __device__ void restart(int stage) { stage_ = stage, round_ = 0; }
  __device__ void next() {
    if (++stage_ == stages_) stage_ = 0, ++round_;
  }
  __device__ void skip(int count) {
    for (stage_ += count; stage_ >= stages_; stage_ -= stages_) ++round_;
  }

  /// Waits until the stage is free.
  __device__ void acquire() const {
    if (round_ > 0) wait_barrier(empty(stage_), round_ - 1);
  }
  /// Makes the stage full when this number of bytes has been copied with barrier().
  __device__ void commit(uint32_t bytes) const { expect_bytes(full(stage_), bytes); }
  __device__ uint32_t barrier() const { return full(stage_); }

  /// Waits until the stage is full.
  __device__ void wait() const { wait_barrier(full(stage_), round_); }
  /// Frees a stage. One thread of each consumer warpgroup must call it. `ctas` is the number of CTAs of the cluster
  /// that share the copies, 1 or 2.
  __device__ void release(int stage, int ctas = 1) const {
    arrive(empty(stage));
    if (ctas > 1) arrive_at(static_cast<int>(blockIdx.x) % 2 ^ 1, empty(stage));
  }

 private:
  __device__ uint32_t full(int i) const { return barriers_ + kBarrierBytes * i; }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }
  uint32_t barriers_;
  int stages_;
  int stage_ = 0;
  int round_ = 0;
};
static_assert(StageRing<Pipeline>);

}  // namespace voxgrad::cuda
