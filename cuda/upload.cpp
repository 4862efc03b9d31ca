// Copies from pageable host memory, through rings of page-locked buffers.
#include "cuda/detail/upload.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

constexpr size_t kPiece = size_t{4} << 20;  // bytes of a page-locked buffer

/// A page-locked buffer, and the event recorded after its last copy.
struct Slot {
  std::mutex mutex;
  void* data = nullptr;
  cudaEvent_t copied = nullptr;

  /// Waits until the buffer may be overwritten.
  void acquire() {
    if (copied == nullptr) check_cuda(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "copy");
    if (data == nullptr) check_cuda(cudaMallocHost(&data, kPiece), "copy");
    check_cuda(cudaEventSynchronize(copied), "copy");
  }
};

/// The buffers of a stream. Up to four threads, one per slot, can copy at the same time.
struct Ring {
  std::array<Slot, 4> slots;
  std::atomic<size_t> next = 0;
};

/// Returns the ring of a stream. Each stream has its own ring, so that a copy never waits for the work of another
/// stream.
Ring& ring_of(int device, cudaStream_t stream) {
  using Rings = std::map<std::pair<int, cudaStream_t>, Ring>;
  static std::mutex mutex;
  static auto* rings = new Rings;  // never destroyed: the driver frees the memory when the process ends
  const std::lock_guard lock(mutex);
  return (*rings)[{device, stream}];
}

}  // namespace

void upload(void* to, const void* from, size_t bytes, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  Ring& ring = ring_of(device, stream);
  for (size_t done = 0; done < bytes; done += kPiece) {
    Slot& slot = ring.slots[ring.next++ % ring.slots.size()];
    const std::lock_guard lock(slot.mutex);
    slot.acquire();
    const size_t piece = std::min(kPiece, bytes - done);
    std::memcpy(slot.data, static_cast<const char*>(from) + done, piece);
    check_cuda(cudaMemcpyAsync(static_cast<char*>(to) + done, slot.data, piece, cudaMemcpyHostToDevice, stream),
               "copy");
    check_cuda(cudaEventRecord(slot.copied, stream), "copy");
  }
}

}  // namespace voxgrad::cuda
