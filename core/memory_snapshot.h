// Who holds the memory: live bytes by the operator and the module that took them, at the peak.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "profiler.h"

namespace voxgrad::memory {

/// The blocks that one operator took, in one module.
struct Holder {
  /// The operator that wrote first into the block, or took it as workspace; null: it was written by the program, or
  /// taken before the recording began.
  profiler::Place place;
  int64_t bytes = 0;
  int64_t blocks = 0;  ///< 0: taken before the recording began
};

/// The largest holders first.
struct Snapshot {
  Device device;
  int64_t peak = 0;  ///< the sum of all holders
  std::vector<Holder> holders;

  std::string table() const;
  /// {"device": "cpu", "peak": 123, "holders": [{"op", "backward_of", "module", "bytes", "blocks"}, ...]}
  std::string json() const;
};

/// From now on notes who takes memory, on all devices and threads; false: no longer. A profiler::Session does so too
/// for as long as it lives. What was noted stays until the next recording begins.
void record_history(bool enabled = true);

/// What was live on `device` when most was, since the recording began or the last reset_peak().
Snapshot snapshot(Device device = Device::cpu());

namespace detail {

// Called by the allocators, within their locks, while profiler::active(). `current`: the bytes in live storages
// afterwards.
void note_allocation(Device device, const void* data, size_t bytes, int64_t current) noexcept;
void note_free(Device device, const void* data, size_t bytes, int64_t current) noexcept;
void note_reset(Device device) noexcept;
/// Names the operator that runs on this thread as the holder of a block that nobody wrote to yet.
void claim(Device device, const void* data) noexcept;
/// Of all recorders; what was noted before the first one starts is dropped.
void start();
void stop() noexcept;

}  // namespace detail
}  // namespace voxgrad::memory
