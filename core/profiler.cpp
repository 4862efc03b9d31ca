// Implements the recorder and the sessions of the profiler.
#include "core/profiler.h"

#include <chrono>
#include <exception>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/capture.h"
#include "core/error.h"
#ifdef VOXGRAD_NVTX
#include <nvtx3/nvToolsExt.h>
#else
#define nvtxRangePushA(name)
#define nvtxRangePop()
#endif

namespace voxgrad::profiler {
namespace {

thread_local Place current_place;
thread_local Event* op_event = nullptr;  // the event of the innermost operator that runs on this thread

struct Recorder {
  std::mutex mutex;
  std::set<std::string, std::less<>> names;
  std::vector<Event> events;  // the events of all running sessions
  // The blocks that were allocated outside operators and that no operator has written to yet. The key is the
  // address of the block. The value is the index of the allocation in `events`.
  std::unordered_map<const void*, size_t> unclaimed;
};
Recorder& recorder() {
  static auto* recorder = new Recorder;  // never destroyed: threads may end after main()
  return *recorder;
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Records a CUDA event. Returns null on the CPU and during a capture, in which the event would become part of the
/// graph.
std::shared_ptr<void> mark(Device device) {
  if (device.is_cpu() || Capture::current()) return nullptr;
  return runtime(device).mark(device.index);
}

}  // namespace

const Place& place() { return current_place; }

Name intern(std::string_view text) {
  const std::lock_guard lock(recorder().mutex);
  auto& names = recorder().names;
  const auto found = names.find(text);
  return &*(found != names.end() ? found : names.emplace(text).first);
}

/// Omits the event if there is no memory for it, because recording must not change the behavior of the program.
void Scope::start(Kind kind, std::string_view name, Name module, Device device) noexcept {
  try {
    auto open = std::make_unique<Event>(
        Event{.kind = kind, .name = intern(name), .place = current_place, .outer = current_place, .device = device});
    Event& event = *open;
    static std::atomic<int> threads{0};
    thread_local const int thread = threads++;
    event.thread = thread;
    if (kind == Kind::op) event.place.op = event.name;
    if (kind == Kind::module) event.place.module = event.name;
    if (kind == Kind::backward) {
      event.place.node = event.name;
      event.place.module = module;
    }
    if (kind == Kind::op && (event.marks[0] = mark(device))) event.stream = runtime(device).stream(device.index);
    nvtxRangePushA(event.name->c_str());
    current_place = event.place;
    if (kind == Kind::op) outer_op_ = std::exchange(op_event, &event);
    event.begin = now();
    open_ = open.release();
  } catch (const std::exception&) {
  }
}

void Scope::stop() noexcept {
  const std::unique_ptr<Event> open(std::exchange(open_, nullptr));
  Event& event = *open;
  event.end = now();
  // Do not restore the place after a range. A range that began within a call of a module may end after this call, and
  // its `outer` is then outdated.
  if (event.kind != Kind::range) current_place = event.outer;
  if (event.kind == Kind::op) op_event = outer_op_;
  nvtxRangePop();
  try {
    if (event.marks[0]) event.marks[1] = mark(event.device);
    const std::lock_guard lock(recorder().mutex);
    if (active()) recorder().events.push_back(std::move(event));
  } catch (const std::exception&) {
  }
}

void detail::record_memory(Device device, const void* block, int64_t bytes, int64_t live) noexcept {
  const std::lock_guard lock(recorder().mutex);
  if (!active()) return;
  auto& [mutex, names, events, unclaimed] = recorder();
  const int64_t time = now();
  try {
    events.push_back({.kind = Kind::memory,
                      .place = current_place,
                      .begin = time,
                      .end = time,
                      .device = device,
                      .memory = live,
                      .block = block,
                      .block_bytes = bytes});
    if (bytes < 0)
      unclaimed.erase(block);
    else if (op_event)
      op_event->memory += bytes;
    else
      unclaimed[block] = events.size() - 1;
  } catch (const std::bad_alloc&) {
  }
}

void detail::claim(const void* block) noexcept {
  auto& [mutex, names, events, unclaimed] = recorder();
  const std::lock_guard lock(mutex);
  const auto found = unclaimed.find(block);
  if (!op_event || found == unclaimed.end()) return;
  Event& allocation = events[found->second];
  allocation.place = current_place;
  op_event->memory += allocation.block_bytes;
  unclaimed.erase(found);
}

Session::Session() {
  const std::lock_guard lock(recorder().mutex);
  ++detail::recorders;
  begin_ = now();
}

Session::~Session() {
  if (recording_) end_recording();
}

void Session::end_recording() noexcept {
  recording_ = false;
  end_ = now();
  // Destroyed after the lock is released, because the destructors of CUDA events take locks.
  std::vector<Event> dropped;
  const std::lock_guard lock(recorder().mutex);
  try {
    for (const Event& event : recorder().events)
      if (event.begin >= begin_ && event.end <= end_) events_.push_back(event);
  } catch (const std::bad_alloc&) {  // keep the events for which there was memory
  }
  if (--detail::recorders > 0) return;
  dropped.swap(recorder().events);
  recorder().unclaimed.clear();
}

void Session::stop() {
  if (!recording_) return;
  end_recording();
  std::set<int> devices;
  for (const Event& event : events_)
    if (event.marks[1]) devices.insert(event.device.index);
  for (const int index : devices) {
    check(!Capture::current(), "profiler", "stop() cannot wait for the device while a CUDA graph is being captured");
    const Device device = Device::cuda(index);
    // All device times are relative to the anchor event. After synchronize(), the device has no pending work, so it
    // reaches the anchor event at about the host time `at`.
    synchronize(device);
    const std::shared_ptr<void> anchor = runtime(device).mark(index);
    runtime(device).elapsed_ms(anchor.get(), anchor.get());
    const int64_t at = now();
    const auto time_of = [&](const std::shared_ptr<void>& m) {
      return at - static_cast<int64_t>(runtime(device).elapsed_ms(m.get(), anchor.get()) * 1e6);
    };
    for (Event& event : events_) {
      if (event.device != device || !event.marks[1]) continue;
      event.device_begin = time_of(event.marks[0]);
      event.device_end = time_of(event.marks[1]);
    }
  }
  for (Event& event : events_) event.marks[0] = event.marks[1] = nullptr;
}

const std::vector<Event>& Session::events() const {
  check(!recording_, "profiler", "the session is still recording; call stop() first");
  return events_;
}

}  // namespace voxgrad::profiler
