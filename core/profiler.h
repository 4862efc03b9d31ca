// The profiler: records operators with their time, memory traffic and allocations.
//
// Operators are recorded where they call a kernel (ops/profiled_kernels.cpp). Gradients are recorded where the engine
// visits a node, and modules where they are called (nn/module.h). Without a session, each of these places costs one
// relaxed atomic load.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "dims.h"
#include "noncopyable.h"

namespace voxgrad::profiler {

/// A text that is never freed. Equal texts have equal pointers.
using Name = const std::string*;
/// Returns the name with the given text, and stores the text at the first call. Several threads may call intern.
Name intern(std::string_view text);

namespace detail {

inline std::atomic<int> recorders{0};  ///< sessions that are recording

/// Records that a block of `bytes` bytes was allocated, or freed if `bytes` is negative. `live` is the number of bytes
/// in live storages afterwards. Allocators call this function while active(), before they hand out or reuse the block.
void record_memory(Device device, const void* block, int64_t bytes, int64_t live) noexcept;
/// Attributes a block to the operator that runs on this thread, unless an operator has already allocated the block or
/// written to it.
void claim(const void* block) noexcept;

}  // namespace detail

/// Returns whether a session is recording.
inline bool active() { return detail::recorders.load(std::memory_order_relaxed) != 0; }

/// The kinds of events. `layout_copy` is a copy to a different memory format by contiguous(), in the program or within
/// operators; copies that a kernel makes in its workspace do not count.
enum class Kind : uint8_t { op, backward, module, range, memory, layout_copy };

/// The position of a thread in the program. While a gradient is computed, `module` is the module that recorded the
/// node.
struct Place {
  Name op = nullptr;    ///< the running operator, or null
  Name node = nullptr;  ///< the node whose gradient is being computed, or null
  Name module{};        ///< the path of the module that was called, or null
  friend auto operator<=>(const Place&, const Place&) = default;
};
/// Returns the place of this thread. Valid only while a session records.
const Place& place();

/// A time span on a thread. For Kind::memory, the point in time at which a block was allocated or freed.
struct Event {
  Kind kind = Kind::op;
  Name name = nullptr;
  Place place{};      ///< place of the thread during the event; for Kind::memory, place of the block's first writer
  Place outer{};      ///< place of the thread before the event
  int thread = 0;     ///< number of the thread; threads are numbered in the order of their first events
  int64_t begin = 0;  ///< start on the host, in nanoseconds of steady_clock
  int64_t end = 0;    ///< end on the host, in nanoseconds of steady_clock

  // For operators:
  Device device;
  void* stream = nullptr;
  int64_t device_begin = 0;          ///< start in the stream, on the host's clock; 0 if unknown
  int64_t device_end = 0;            ///< end in the stream, on the host's clock; 0 if unknown
  std::vector<Shape> shapes{};       ///< shapes of the results, then of the operands; at most 8
  double bytes = 0;                  ///< bytes of results and operands, each tensor counted once
  double flop = 0;                   ///< floating-point operations; 0 if unknown
  double floor = 0;                  ///< minimum time on the device in seconds; 0 if unknown
  int64_t memory = 0;                ///< bytes allocated for results and as workspace
  std::shared_ptr<void> marks[2]{};  ///< CUDA events, until the session reads them

  // For Kind::memory, where `memory` is the number of bytes in live storages afterwards:
  const void* block = nullptr;
  int64_t block_bytes = 0;  ///< negative if the block was freed
};

/// Records the lifetime of this object as an Event, and changes the Place of this thread during this lifetime. Does
/// nothing if no session records. A name that is expensive to create can be passed as a function that returns the name;
/// this function is called only while a session records.
class [[nodiscard]] Scope : NonCopyable {
 public:
  [[nodiscard]] Scope(Kind kind, std::string_view name, Name module = nullptr, Device device = {}) {
    if (active()) [[unlikely]]
      start(kind, name, module, device);
  }
  template <std::invocable Text>
  [[nodiscard]] Scope(Kind kind, const Text& name) {
    if (active()) [[unlikely]]
      start(kind, name(), nullptr, {});
  }
  ~Scope() {
    if (open_) [[unlikely]]
      stop();
  }
  /// Returns the event, or null if no session records.
  Event* event() const { return open_; }

 private:
  void start(Kind kind, std::string_view name, Name module, Device device) noexcept;
  void stop() noexcept;

  Event* open_ = nullptr;
  Event* outer_op_ = nullptr;  // the operator on this thread that contains this scope
};

/// Records a range of the program: `profiler::RecordFunction range("augment");`
class [[nodiscard]] RecordFunction : Scope {
 public:
  [[nodiscard]] explicit RecordFunction(std::string_view name) : Scope(Kind::range, name) {}
};

/// Selects the rows of a table. `op`: for each operator, one row for the forward calls, and one row for each kind of
/// node in whose backward function the operator is called. `shape`: the rows of `op`, split by shapes. `module`: one
/// row per module for the forward pass, and one for the backward pass.
enum class GroupBy : uint8_t { op, shape, module };

/// Sums over a group of operators.
struct Row {
  std::string name{};
  std::string pass{};    ///< "forward" or "backward of conv"; for GroupBy::module, "forward" or "backward"
  std::string shapes{};  ///< for GroupBy::shape only
  int64_t calls = 0;
  double host_ms = 0, device_ms = 0;
  double bytes = 0, flop = 0;
  double floor_ms = 0;    ///< sum of the known minimum times
  double floored_ms = 0;  ///< device time of the operators whose minimum time is known
  int64_t memory = 0;

  /// Returns the time on the device, or on the host for CPU operators.
  double ms() const { return device_ms > 0 ? device_ms : host_ms; }
};

/// Records the operators of all threads until stop(), as torch.profiler.profile does:
///
///     vg::profiler::Session profile;
///     train_step();
///     profile.stop();
///     std::cout << profile.table();
///     profile.save_trace("trace.json");
///
/// - A session contains the events that began and ended while it recorded. Sessions may nest and overlap, on one or on
///   several threads.
/// - On a GPU, times are measured by CUDA events around each operator in its stream. Only stop() waits for the device.
///   Operators that are captured into a CUDA graph have host times only; a replay counts as one operator. The time of
///   an operator includes copies of its operands and reductions of partial sums.
/// - FLOP counts are known for matrix products and convolutions. In a convolution, each multiplication counts as
///   2 FLOP; multiplications with the padding are not counted.
/// - The minimum time of an operator is an estimate: the longer of two times, one for the arithmetic and one for the
///   memory traffic, at the rates of the device that explain_conv3d uses.
/// - In a build with CUDA, all events are also NVTX ranges.
/// - The second call of a function by autograd::recompute() counts as backward.
class [[nodiscard]] Session : NonCopyable {
 public:
  [[nodiscard]] Session();
  /// Discards the events if stop() was not called. Does not wait for the device.
  ~Session();

  /// Ends the recording and waits for all recorded GPUs. A second call does nothing. Throws Error if work on a device
  /// failed, and during the capture of a CUDA graph. If several ranks are threads of one process, stop() also waits for
  /// the GPUs of the other ranks. A rank that waits in a collective which this rank has not called yet would then cause
  /// a deadlock.
  void stop();

  // Results. All of these functions throw Error before stop().
  const std::vector<Event>& events() const;  ///< sorted by end time
  /// Returns rows sorted by time, the longest first.
  std::vector<Row> rows(GroupBy group_by = GroupBy::op) const;
  /// Returns the rows as text, at most `max_rows` of them.
  std::string table(GroupBy group_by = GroupBy::op, size_t max_rows = 40) const;
  /// Returns a table of the blocks that were live on `device` at the peak of its memory use during the session. A block
  /// belongs to the operator that allocated it or was the first to write to it.
  std::string memory_table(Device device = Device::cpu()) const;
  /// Returns a trace for chrome://tracing and ui.perfetto.dev, with a track for each thread and stream, and the memory
  /// over time.
  std::string trace() const;
  /// Writes trace() to a file. Throws Error if the file cannot be written.
  void save_trace(const std::filesystem::path& path) const;

 private:
  void end_recording() noexcept;

  bool recording_ = true;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Event> events_;
};

}  // namespace voxgrad::profiler
