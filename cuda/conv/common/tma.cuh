// Asynchronous copies between global and shared memory by Hopper's TMA, mbarriers that count copied bytes or arrived
// threads, and the state of a producer or consumer of a pipeline. After a copy by TMA, wgmma needs no fence.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/conv/sm90/wgmma.cuh"

namespace voxgrad::cuda {

/// The position of a producer or consumer in a pipeline: the stage, and the number of completed rounds over all stages.
struct PipelineState {
  int stage = 0;
  int round = 0;
  __device__ void next(int stages) {
    if (++stage == stages) stage = 0, ++round;
  }
};

/// Initializes a barrier for `threads` arrivals per round. Other threads may use the barrier after fence_barrier_init()
/// and __syncthreads(), or cluster_sync() if other CTAs of the cluster use it.
__device__ inline void init_barrier(uint32_t barrier, int threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives at the same barrier in the CTA `rank` of the cluster.
__device__ inline void arrive_at(int rank, uint32_t barrier) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 "
      "_, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// Waits until all threads of the cluster have called this function, except those that have exited.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
/// Like cluster_sync(), but does not make the writes of a thread visible to the others. Does not wait for reads either:
/// a thread must have used all values that it has read from the other CTA.
__device__ inline void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}
/// Returns the address of this location of shared memory in the CTA `rank` of the cluster.
__device__ inline const float* in_cta(int rank, const float* shared) {
  const float* address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return address;
}
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives at the barrier. The current round of the barrier ends when `bytes` bytes have been copied.
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Copies the box of a tensor that begins at these coordinates (innermost first) to shared memory. The address must be
/// a multiple of 128 bytes. Elements outside of the tensor are zero.
__device__ inline void tma_load(uint32_t shared, const CUtensorMap& tensor, int c, int x, int y, int z, int n,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(shared),
      "l"(&tensor), "r"(c), "r"(x), "r"(y), "r"(z), "r"(n), "r"(barrier)
      : "memory");
}
__device__ inline void tma_load(uint32_t shared, const CUtensorMap& tensor, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(&tensor), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

/// Copies a box from shared memory to the tensor asynchronously. The requirements are those of bulk_store(). Elements
/// of the box that are outside of the tensor are not copied.
__device__ inline void tma_store(const CUtensorMap& tensor, uint32_t shared, int c, int x, int y, int z, int n) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&tensor),
      "r"(shared), "r"(c), "r"(x), "r"(y), "r"(z), "r"(n)
      : "memory");
}

/// Copies the box to the same address of shared memory in each CTA of `ctas`, a bit set of ranks in the cluster. The
/// copied bytes count for the barrier at the same address in each of these CTAs.
__device__ inline void tma_multicast(uint32_t shared, const CUtensorMap& tensor, int x, int y, int z, uint32_t barrier,
                                     uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&tensor), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ctas)
      : "memory");
}

/// Prefetches a tensor map. Otherwise, the first copy would wait for the map.
__device__ inline void prefetch_tensor(const CUtensorMap& tensor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor) : "memory");
}

/// Prefetches a range of bytes into L2, extended to multiples of 16 bytes.
__device__ inline void prefetch_bulk(const void* global, uint32_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(global), begin = first & ~uintptr_t{15};
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin),
               "r"(static_cast<uint32_t>((first + bytes + 15 - begin) & ~uintptr_t{15})));
}

/// Copies from shared to global memory asynchronously. Addresses and `bytes` must be multiples of 16. Before the call,
/// the threads that wrote the data must call fence_async_proxy() and pass a barrier.
__device__ inline void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until at most kPending of the groups that this thread committed are still being read from shared memory.
template <int kPending>
__device__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Waits until round `round` (0, 1, ...) has ended. The barrier must not be more than one round ahead.
__device__ inline void wait_barrier(uint32_t barrier, int round) {
  uint32_t done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(round & 1)
                 : "memory");
  } while (!done);
}

}  // namespace voxgrad::cuda
