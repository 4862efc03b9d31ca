// The caching allocator of GPU memory. cudaMalloc can take milliseconds, and cudaFree waits for the whole device. The
// allocator therefore keeps freed blocks and reuses them. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <mutex>
#include <set>
#include <unordered_map>

#include "core/device.h"

namespace voxgrad::cuda {

/// The memory of one GPU. Allocation is stream-ordered: a block belongs to the stream for which it was allocated, and
/// is reused only for that stream. Work of the block's next owner is queued after the work of the previous owner in the
/// same stream, so that no wait is needed. All members may be called from any thread.
///
/// The allocator takes segments from the driver: 2 MiB for requests up to 1 MiB, 20 MiB for requests below 10 MiB,
/// otherwise multiples of 2 MiB. A segment is a chain of blocks. Blocks are split for smaller requests and merged with
/// free neighbors when they are freed. Small and large requests use different segments, so that a long-lived small
/// tensor does not fragment a large block.
class Allocator {
 public:
  /// Returns the allocator of an existing GPU. The allocator is never destroyed, because tensors may outlive main().
  static Allocator& of(int device);

  /// Returns at least `bytes` bytes, aligned to 512 bytes, for use on `stream`; null for 0 bytes. If the driver has no
  /// memory left, returns unused segments to the driver and tries again. Throws OutOfMemoryError if the second attempt
  /// also fails.
  void* allocate(size_t bytes, cudaStream_t stream);
  /// Frees a block that was last used on `stream`. If the block belongs to another stream, that stream waits for
  /// `stream`.
  void deallocate(void* data, cudaStream_t stream) noexcept;
  /// Marks `stream` as the stream of a CUDA graph: free blocks of the stream are not returned to the driver until
  /// release().
  void keep(cudaStream_t stream);
  /// Reverses keep(): free blocks of `stream` may again be returned to the driver.
  void release(cudaStream_t stream);
  /// Returns whether `data` is a live block.
  bool is_live(const void* data);
  /// Returns whether `data` is a live block of `stream`.
  bool belongs_to(const void* data, cudaStream_t stream);
  MemoryStats stats();
  /// Sets the peak of the statistics to the current value.
  void reset_peak();
  /// Waits for the device and returns segments without live blocks to the driver. Throws Error during a capture.
  void empty_cache();

 private:
  struct Block;
  /// Orders blocks by `small` and stream, then by size and address. The first block that is not less than a request is
  /// the best fit.
  struct BestFit {
    bool operator()(const Block* a, const Block* b) const;
  };
  using FreeBlocks = std::set<Block*, BestFit>;
  struct Block {
    char* data;
    size_t bytes;
    size_t requested;  ///< bytes that the caller requested; valid for live blocks
    cudaStream_t stream;
    bool small;  ///< the block is in a segment for small requests
    bool free;
    Block* previous;  ///< previous block of the segment, or null
    Block* next;      ///< next block of the segment, or null
    /// While the block is live, the node that was extracted from free_. Inserting this node again needs no memory, so
    /// that freeing the block cannot fail.
    FreeBlocks::node_type entry;
  };

  explicit Allocator(int device) : device_(device) {}
  Block* find_free(size_t bytes, bool small, cudaStream_t stream);
  Block* allocate_segment(size_t bytes, bool small, cudaStream_t stream);
  void* allocate_from_driver(size_t bytes);
  void split(Block* block, size_t bytes);
  Block* merge(Block* block, Block* next);
  void release_cached();
  void make_wait(cudaStream_t owner, cudaStream_t user) noexcept;
  [[noreturn]] void throw_out_of_memory(size_t bytes);

  const int device_;
  std::mutex mutex_;
  FreeBlocks free_;
  std::unordered_map<const void*, Block*> live_;  ///< the live blocks by address
  std::set<cudaStream_t> kept_;                   ///< streams for which keep() was called
  MemoryStats stats_;
  cudaEvent_t event_ = nullptr;  ///< created and reused by make_wait()
};

}  // namespace voxgrad::cuda
