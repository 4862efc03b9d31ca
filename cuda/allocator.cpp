// The caching allocator of GPU memory.
#include "cuda/detail/allocator.h"
#include "core/detail/divide.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <tuple>

#include "core/error.h"
#include "core/profiler.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGranule = 512;               // alignment of block sizes and addresses
constexpr size_t kMaxSmall = kMiB;             // largest request that is served from a small segment
constexpr size_t kSmallSegment = 2 * kMiB;     // size of a segment for small requests
constexpr size_t kMediumSegment = 20 * kMiB;   // size of a segment for other requests below half of this size
constexpr size_t kLargeGranule = 2 * kMiB;     // sizes of larger segments are rounded up to multiples of this size
constexpr size_t kMaxBytes = size_t{1} << 62;  // largest request; rounding it up cannot overflow

/// Returns the size of a new segment for a request of `bytes` bytes.
size_t segment_size(size_t bytes, bool small) {
  if (small) return kSmallSegment;
  return bytes < kMediumSegment / 2 ? kMediumSegment : round_up(bytes, kLargeGranule);
}

/// Returns the minimum size of the remainder of a split. A block whose remainder would be smaller is not split, because
/// such remainders are rarely reused.
constexpr size_t min_remainder(bool small) { return small ? kGranule : kMaxSmall; }

/// Returns whether a stream is being captured. deallocate() does not call make_wait() during a capture, because replays
/// run after all work that was queued before the capture, and the graph keeps the memory that its kernels use.
bool is_capturing(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

Allocator& Allocator::of(int device) {
  static auto* allocators = [] {
    auto* all = new std::array<Allocator*, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; ++i) (*all)[static_cast<size_t>(i)] = new Allocator(i);
    return all;
  }();
  return *(*allocators)[static_cast<size_t>(device)];
}

bool Allocator::BestFit::operator()(const Block* a, const Block* b) const {
  const auto key = [](const Block* block) {
    return std::tuple(block->small, reinterpret_cast<uintptr_t>(block->stream), block->bytes,
                      reinterpret_cast<uintptr_t>(block->data));
  };
  return key(a) < key(b);
}

void* Allocator::allocate(size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  if (bytes > kMaxBytes) throw_out_of_memory(bytes);
  const size_t rounded = round_up(bytes, kGranule);
  const bool small = rounded <= kMaxSmall;
  Block* block = find_free(rounded, small, stream);
  if (block == nullptr) block = allocate_segment(rounded, small, stream);
  if (block->bytes - rounded >= min_remainder(small)) split(block, rounded);
  live_.emplace(block->data, block);  // the last statement that may throw; if it throws, the block is still free

  block->entry = free_.extract(block);
  block->free = false;
  block->requested = bytes;
  stats_.current += static_cast<int64_t>(bytes);
  stats_.peak = std::max(stats_.peak, stats_.current);
  ++stats_.allocations;
  if (profiler::active())
    profiler::detail::record_memory(Device::cuda(device_), block->data, static_cast<int64_t>(bytes), stats_.current);
  return block->data;
}

void Allocator::deallocate(void* data, cudaStream_t stream) noexcept {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(data);
  if (found == live_.end()) return;
  Block* block = found->second;
  live_.erase(found);
  stats_.current -= static_cast<int64_t>(block->requested);
  if (profiler::active())
    profiler::detail::record_memory(Device::cuda(device_), data, -static_cast<int64_t>(block->requested),
                                    stats_.current);
  if (stream != block->stream && !is_capturing(stream) && !is_capturing(block->stream))
    make_wait(block->stream, stream);

  block->free = true;
  if (block->next && block->next->free) {
    free_.erase(block->next);
    block = merge(block, block->next);
  }
  if (block->previous && block->previous->free) {
    block->previous->entry = free_.extract(block->previous);
    block = merge(block->previous, block);
  }
  free_.insert(std::move(block->entry));
}

void Allocator::keep(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  kept_.insert(stream);
}

void Allocator::release(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  kept_.erase(stream);
}

bool Allocator::is_live(const void* data) {
  const std::lock_guard lock(mutex_);
  return live_.contains(data);
}

bool Allocator::belongs_to(const void* data, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(data);
  return found != live_.end() && found->second->stream == stream;
}

MemoryStats Allocator::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Allocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.current;
}

void Allocator::empty_cache() {
  check(!capture_under_way(device_), "empty_cache", "cannot wait for the device while a CUDA graph is being captured");
  const std::lock_guard lock(mutex_);
  release_cached();
}

/// Returns the smallest free block of `stream` with at least `bytes` bytes, or null if there is none.
Allocator::Block* Allocator::find_free(size_t bytes, bool small, cudaStream_t stream) {
  Block wanted{};
  wanted.bytes = bytes;
  wanted.small = small;
  wanted.stream = stream;
  const auto found = free_.lower_bound(&wanted);
  return found == free_.end() || (*found)->small != small || (*found)->stream != stream ? nullptr : *found;
}

/// Takes a segment from the driver and returns it as a free block.
Allocator::Block* Allocator::allocate_segment(size_t bytes, bool small, cudaStream_t stream) {
  auto block = std::make_unique<Block>();
  block->bytes = segment_size(bytes, small);
  block->stream = stream;
  block->small = small;
  block->free = true;
  // Allocate the set node first, so that the insertion below cannot throw.
  FreeBlocks single{block.get()};
  FreeBlocks::node_type entry = single.extract(single.begin());
  block->data = static_cast<char*>(allocate_from_driver(block->bytes));
  if (block->data == nullptr && block->bytes > bytes) {  // the unrounded size may still fit
    block->bytes = bytes;
    block->data = static_cast<char*>(allocate_from_driver(bytes));
  }
  if (block->data == nullptr && !capture_under_way(device_)) {
    release_cached();
    block->data = static_cast<char*>(allocate_from_driver(bytes));
  }
  if (block->data == nullptr) throw_out_of_memory(bytes);
  stats_.reserved += static_cast<int64_t>(block->bytes);
  ++stats_.device_allocations;
  free_.insert(std::move(entry));
  return block.release();
}

/// Calls cudaMalloc. Returns null if the driver has no memory left. Throws Error on any other failure.
void* Allocator::allocate_from_driver(size_t bytes) {
  const DeviceGuard guard(device_);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clear the error, so that no later check reports it
    return nullptr;
  }
  check_cuda(status, "cudaMalloc");
  return data;
}

/// Shortens a free block to `bytes` bytes and makes the remainder another free block.
void Allocator::split(Block* block, size_t bytes) {
  auto remainder = std::make_unique<Block>(Block{.data = block->data + bytes,
                                                 .bytes = block->bytes - bytes,
                                                 .requested = 0,
                                                 .stream = block->stream,
                                                 .small = block->small,
                                                 .free = true,
                                                 .previous = block,
                                                 .next = block->next,
                                                 .entry = {}});
  free_.insert(remainder.get());
  Block* rest = remainder.release();
  if (rest->next) rest->next->previous = rest;
  FreeBlocks::node_type entry = free_.extract(block);
  block->bytes = bytes;
  block->next = rest;
  free_.insert(std::move(entry));
}

/// Merges `next` into its neighbor `block` and returns `block`. Neither block may be in free_.
Allocator::Block* Allocator::merge(Block* block, Block* next) {
  block->bytes += next->bytes;
  block->next = next->next;
  if (block->next) block->next->previous = block;
  delete next;
  return block;
}

/// Returns to the driver all segments that consist of a single free block, except segments of CUDA graphs.
void Allocator::release_cached() {
  const DeviceGuard guard(device_);
  check_cuda(cudaDeviceSynchronize(), "empty_cache");  // queued work may still use the blocks
  for (auto it = free_.begin(); it != free_.end();) {
    Block* block = *it;
    if (block->previous || block->next || kept_.contains(block->stream)) {
      ++it;
      continue;
    }
    check_cuda(cudaFree(block->data), "cudaFree");
    stats_.reserved -= static_cast<int64_t>(block->bytes);
    it = free_.erase(it);
    delete block;
  }
}

/// Makes the stream `owner` wait for the work queued on `user`. Ignores errors, which come from earlier work or from
/// the shutdown of CUDA at the end of the process.
void Allocator::make_wait(cudaStream_t owner, cudaStream_t user) noexcept {
  int previous = device_;
  cudaGetDevice(&previous);
  cudaSetDevice(device_);
  if (event_ == nullptr) cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
  if (event_ != nullptr && cudaEventRecord(event_, user) == cudaSuccess) cudaStreamWaitEvent(owner, event_, 0);
  cudaGetLastError();
  cudaSetDevice(previous);
}

void Allocator::throw_out_of_memory(size_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  {
    const DeviceGuard guard(device_);
    cudaMemGetInfo(&free_bytes, &total_bytes);
    cudaGetLastError();
  }
  throw OutOfMemoryError(concat("out of memory on ", Device::cuda(device_), ": ", bytes, " bytes requested, ",
                                stats_.current, " in use by tensors, ", stats_.reserved, " reserved, ", free_bytes,
                                " free of ", total_bytes, " on the device"));
}

}  // namespace voxgrad::cuda
