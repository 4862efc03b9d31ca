#include "core/profiler.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "core/capture.h"
#include "core/error.h"
#include "core/memory_snapshot.h"
#ifdef VOXGRAD_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace voxgrad::profiler {
namespace {

thread_local Place current_place;

struct Recorder {
  std::mutex mutex;
  std::set<std::string, std::less<>> names;
  std::vector<Event> events;  // while there are sessions
  int sessions = 0;
};
Recorder& recorder() {
  static auto* recorder = new Recorder;  // never destroyed: threads may end after main()
  return *recorder;
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int thread_number() {
  static std::atomic<int> next{0};
  thread_local const int number = next++;
  return number;
}

/// None on the CPU, and none in a capture, where an event would become part of the graph.
std::shared_ptr<void> mark(Device device) {
  if (device.is_cpu() || Capture::current()) return nullptr;
  return runtime(device).mark(device.index);
}

void enter_range([[maybe_unused]] const char* name) {
#ifdef VOXGRAD_NVTX
  nvtxRangePushA(name);
#endif
}
void leave_range() {
#ifdef VOXGRAD_NVTX
  nvtxRangePop();
#endif
}

}  // namespace

const Place& place() { return current_place; }

Name intern(std::string_view text) {
  const std::lock_guard lock(recorder().mutex);
  auto& names = recorder().names;
  const auto found = names.find(text);
  return &*(found != names.end() ? found : names.emplace(text).first);
}

struct Scope::Open {
  Event event;
  Place outer;
};

Event* Scope::event() const { return open_ ? &open_->event : nullptr; }

/// What is recorded must not change what the program does: without memory for it, it is left out.
void Scope::start(Kind kind, std::string_view name, Name module, Device device) noexcept {
  try {
    auto open = std::make_unique<Open>();
    Event& event = open->event;
    open->outer = current_place;
    event.kind = kind;
    event.name = intern(name);
    event.place = current_place;
    event.device = device;
    if (kind == Kind::op) event.place.op = event.name;
    if (kind == Kind::module) event.place.module = event.name;
    if (kind == Kind::backward) {
      event.place.node = event.name;
      event.place.module = module;
    }
    event.thread = thread_number();
    if (kind == Kind::op && (event.marks[0] = mark(device))) event.stream = runtime(device).stream(device.index);
    enter_range(event.name->c_str());
    current_place = event.place;
    event.begin = now();
    open_ = open.release();
  } catch (const std::exception&) {
  }
}

void Scope::stop() noexcept {
  const std::unique_ptr<Open> open(std::exchange(open_, nullptr));
  Event& event = open->event;
  event.end = now();
  current_place = open->outer;
  leave_range();
  try {
    if (event.marks[0]) event.marks[1] = mark(event.device);
    const std::lock_guard lock(recorder().mutex);
    if (recorder().sessions > 0) recorder().events.push_back(std::move(event));
  } catch (const std::exception&) {
  }
}

Session::Session() {
  memory::detail::start_session();
  const std::lock_guard lock(recorder().mutex);
  if (recorder().sessions++ == 0) recorder().events.clear();
  begin_ = now();
}

Session::~Session() {
  if (recording_) end_recording();
}

void Session::end_recording() noexcept {
  recording_ = false;
  end_ = now();
  memory_ = memory::detail::stop_session(begin_, end_);
  std::vector<Event> dropped;  // which may take CUDA's locks
  const std::lock_guard lock(recorder().mutex);
  try {
    for (const Event& event : recorder().events)
      if (event.begin >= begin_ && event.end <= end_) events_.push_back(event);
  } catch (const std::bad_alloc&) {  // what there was memory for
  }
  if (--recorder().sessions == 0) dropped.swap(recorder().events);
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
    synchronize(device);  // so that the anchor's time is now
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

void Session::check_stopped() const { check(!recording_, "profiler", "the session is recording: call stop() before"); }

const std::vector<Event>& Session::events() const {
  check_stopped();
  return events_;
}

const std::vector<MemorySample>& Session::memory_samples() const {
  check_stopped();
  return memory_;
}

}  // namespace voxgrad::profiler
