// Which operators ran, how long they took, and what they moved and allocated.
//
// Operators are seen where they call a kernel (ops/profiled_kernels.cpp), gradients where the engine visits a node,
// modules where they are called (nn/module.h). With nothing recording, each of these is one relaxed load.
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

namespace voxgrad::profiler {

/// A text that is kept for good; equal texts have equal pointers.
using Name = const std::string*;
Name intern(std::string_view text);

namespace detail {
/// Sessions, and the memory history (core/memory_snapshot.h).
inline std::atomic<int> recorders{0};
void record_memory(Device device, int64_t bytes);
}  // namespace detail
/// Whether anything is being recorded.
inline bool active() { return detail::recorders.load(std::memory_order_relaxed) != 0; }

enum class Kind : uint8_t { op, backward, module, range, memory };

/// Where a thread is: the operator, the node whose gradient is being computed, and the path of the module; each null
/// outside of any. A gradient is of the module that recorded its node.
struct Place {
  Name op = nullptr, node = nullptr, module = nullptr;
  friend auto operator<=>(const Place&, const Place&) = default;
};
/// Of this thread. Known while something is being recorded.
const Place& place();

/// A span of a thread's time; of Kind::memory: that so many bytes are live on `device` at `begin`.
struct Event {
  Kind kind = Kind::op;
  Name name = nullptr;
  Place place{}, outer{};      ///< during and before it
  int thread = 0;              ///< threads are numbered as they are met
  int64_t begin = 0, end = 0;  ///< on the host: nanoseconds of steady_clock

  // Of an operator:
  Device device;
  void* stream = nullptr;
  int64_t device_begin = 0, device_end = 0;  ///< in the stream, on the host's clock; 0 where that is not known
  std::vector<Shape> shapes{};               ///< results first
  double bytes = 0;                          ///< of results and operands, each counted once
  double flop = 0;                           ///< 0: not known
  double floor = 0;                          ///< seconds that the device needs at least; 0: not known
  int64_t memory = 0;                        ///< bytes allocated for results and as workspace
  std::shared_ptr<void> marks[2]{};          ///< in the stream, until the session reads them
};

/// Records the time until its end as an Event, and names this thread's Place in the meantime; nothing if nothing is
/// being recorded. An exception ends it like anything else. What follows `name` in the constructors is evaluated only
/// if it is needed.
class [[nodiscard]] Scope {
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
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  /// Null if nothing is being recorded.
  Event* event() const { return open_; }
  /// The innermost operator's on this thread; null outside of any.
  static Event* current_op();

 private:
  void start(Kind kind, std::string_view name, Name module, Device device) noexcept;
  void stop() noexcept;

  Event* open_ = nullptr;
};

/// A range of the program's own: `profiler::RecordFunction range("augment");`
class [[nodiscard]] RecordFunction : Scope {
 public:
  [[nodiscard]] explicit RecordFunction(std::string_view name) : Scope(Kind::range, name) {}
};

/// What a row of a table is about: an operator, forward and in the gradient of each kind of node by itself; an operator
/// with given shapes; or a module, forward and backward.
enum class GroupBy : uint8_t { op, shape, module };

/// The sum over some operators.
struct Row {
  std::string name{};
  std::string pass{};    ///< "forward", "backward of conv"; by module "forward", "backward"
  std::string shapes{};  ///< by shape only
  int64_t calls = 0;
  double host_ms = 0, device_ms = 0;
  double bytes = 0, flop = 0;
  double floor_ms = 0, floored_ms = 0;  ///< the floors that are known, and the time of the operators that have one
  int64_t memory = 0;

  /// On the device, where that is not the host.
  double ms() const { return device_ms > 0 ? device_ms : host_ms; }
};

/// Records the operators of all threads for as long as it lives, as torch.profiler.profile does:
///
///   vg::profiler::Session profile;
///   train_step();
///   profile.stop();
///   std::cout << profile.table();
///   profile.save_trace("trace.json");
///
/// - A session has what began and ended while it recorded. Sessions may nest and overlap, on one thread or several.
/// - On a GPU the times are those between CUDA events around each operator, in its stream, and stop() waits for the
///   device; nothing does before. What is done while a CUDA graph is captured has times on the host only; a replay is
///   one operator. Operators call several kernels at times: copies of operands and reductions of partial sums count
///   with them.
/// - FLOP are known of convolutions (useful ones: 2 for each tap that meets a voxel) and matrix products; floors, where
///   the device's rates are known (on GPUs an H200's, see explain_conv3d), are the larger of arithmetic's and memory's.
/// - In a build with CUDA, all spans are NVTX ranges too.
/// - The second call of a recomputed function counts as backward.
class [[nodiscard]] Session {
 public:
  [[nodiscard]] Session();
  /// Drops what was recorded if stop() was not called. Waits for nothing.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Ends the recording; a second call does nothing. Throws Error if work on the device failed, and while a CUDA graph
  /// is being captured: then times on the device are not known. It waits for all GPUs that were recorded: of ranks that
  /// are threads of one process, no other may be in a collective that this one has yet to come to.
  void stop();

  // What was recorded; all of it throws Error before stop().
  const std::vector<Event>& events() const;  ///< by the time of their end
  /// Sorted by time, the longest first.
  std::vector<Row> rows(GroupBy group_by = GroupBy::op) const;
  /// The rows as text, those of the least time left out.
  std::string table(GroupBy group_by = GroupBy::op, size_t most_rows = 40) const;
  /// For chrome://tracing and ui.perfetto.dev: a track for each thread and each stream, and the memory over time.
  std::string trace() const;
  /// Writes trace() into a file. Throws Error if it cannot.
  void save_trace(const std::filesystem::path& path) const;

 private:
  void end_recording() noexcept;

  bool recording_ = true;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Event> events_;
};

}  // namespace voxgrad::profiler
