// The caching allocator of GPU memory: cudaMalloc takes from microseconds to milliseconds and cudaFree waits for the
// whole device, so freed blocks are kept and handed out again. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <mutex>
#include <set>
#include <unordered_map>

#include "core/device.h"

namespace voxgrad::cuda {

/// Memory of one GPU. Stream-ordered: a block belongs to the stream that it was allocated for, and goes back to that
/// stream's blocks when freed. What the next owner queues there runs after what the last one queued, so nobody
/// waits for anything. All members may be called from any thread.
///
/// Memory is taken from the driver in segments: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB,
/// else multiples of 2 MiB. A segment is a chain of blocks, split for a smaller request and merged with free
/// neighbours when freed. Small and large requests have segments of their own, so that a small tensor of long life
/// does not break up a large block.
class Allocator {
 public:
  /// The allocator of a GPU that exists. Never destroyed: tensors may outlive main().
  static Allocator& of(int device);

  /// At least `bytes` bytes, 512-byte aligned, for use on `stream`; null for 0 bytes. When the driver has no more,
  /// the cache is given back and it is asked again. Throws OutOfMemoryError.
  void* allocate(size_t bytes, cudaStream_t stream);
  /// `stream`: where the block was used last. If that is not the stream it belongs to, the latter waits for it.
  void deallocate(void* data, cudaStream_t stream) noexcept;
  /// From now on the blocks of `stream` belong to a CUDA graph, also those that are free: they stay until release(),
  /// after which they are ordinary blocks of that stream.
  void keep(cudaStream_t stream);
  void release(cudaStream_t stream);
  /// Whether `data` is a live block of `stream`.
  bool belongs_to(const void* data, cudaStream_t stream);
  MemoryStats stats();
  void reset_peak();
  /// Waits for the device and gives segments without live blocks back to the driver.
  void empty_cache();

 private:
  struct Block;
  /// By kind and stream, then by size: the first block not below a request is its best fit.
  struct BestFit {
    bool operator()(const Block* a, const Block* b) const;
  };
  using FreeBlocks = std::set<Block*, BestFit>;
  struct Block {
    char* data;
    size_t bytes;
    size_t requested;  // of a live block
    cudaStream_t stream;
    bool small;
    bool free;
    Block* previous;  // neighbours in the segment
    Block* next;
    FreeBlocks::node_type entry;  // of a live block: it is freed without taking memory
  };

  explicit Allocator(int device) : device_(device) {}
  Block* find_free(size_t bytes, bool small, cudaStream_t stream);
  Block* take_segment(size_t bytes, bool small, cudaStream_t stream);
  void* ask_driver(size_t bytes);
  void split(Block* block, size_t bytes);
  Block* merge(Block* block, Block* next);
  void release_cached();
  void let_wait(cudaStream_t owner, cudaStream_t user) noexcept;
  [[noreturn]] void throw_out_of_memory(size_t bytes);

  const int device_;
  std::mutex mutex_;
  FreeBlocks free_;
  std::unordered_map<const void*, Block*> live_;
  std::set<cudaStream_t> kept_;
  MemoryStats stats_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace voxgrad::cuda
