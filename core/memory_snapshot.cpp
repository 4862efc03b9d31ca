#include "core/memory_snapshot.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/io/detail/json.h"

namespace voxgrad::memory {
namespace {

using profiler::Place;

struct Block {
  Place place;
  int64_t bytes;
};
struct Held {
  int64_t bytes = 0, blocks = 0;
};

/// What is live on a device, and what was at the peak. That is put down when the first block is freed after a new peak:
/// as long as memory only grows, there is nothing to keep.
struct DeviceHistory {
  std::unordered_map<const void*, Block> blocks;
  std::map<Place, Held> live, at_peak;
  int64_t current = 0, peak = 0;
  int64_t noted = 0;  // bytes of `blocks`
  int64_t before_peak = 0;
  bool is_peak = true;  // now

  void put_down() {
    if (!std::exchange(is_peak, false)) return;
    at_peak = live;
    before_peak = current - noted;
  }
  void take(const Place& place, int64_t bytes, int64_t count) {
    Held& held = live[place];
    held.bytes += bytes;
    held.blocks += count;
    if (held.blocks == 0) live.erase(place);
  }
};

struct History {
  std::mutex mutex;
  int recorders = 0;
  std::map<std::pair<DeviceType, int>, DeviceHistory> devices;

  /// Of the device, of which `current` bytes are live before the change that is to be noted.
  DeviceHistory& of(Device device, int64_t current) {
    const auto [entry, fresh] = devices.try_emplace({device.type, device.index});
    if (fresh) entry->second.current = entry->second.peak = current;
    return entry->second;
  }
};
History& history() {
  static auto* history = new History;  // never destroyed: tensors may outlive main()
  return *history;
}

/// Notes what `change` does to the history; without memory for it, it is left out.
template <class F>
void note(const F& change) noexcept {
  const std::lock_guard lock(history().mutex);
  if (history().recorders == 0) return;
  try {
    change();
  } catch (const std::bad_alloc&) {
  }
}

std::string text_of(profiler::Name name) { return name ? *name : ""; }

}  // namespace

void detail::note_allocation(Device device, const void* data, size_t size, int64_t current) noexcept {
  const auto bytes = static_cast<int64_t>(size);
  note([&] {
    DeviceHistory& h = history().of(device, current - bytes);
    h.current = current;
    if (current > h.peak) {
      h.peak = current;
      h.is_peak = true;
    }
    const Block block{profiler::place(), bytes};
    h.take(block.place, bytes, 1);
    h.blocks.insert_or_assign(data, block);
    h.noted += bytes;
    if (profiler::Event* op = profiler::Scope::current_op()) op->memory += bytes;
    profiler::detail::record_memory(device, current);
  });
}

void detail::note_free(Device device, const void* data, size_t size, int64_t current) noexcept {
  note([&] {
    DeviceHistory& h = history().of(device, current + static_cast<int64_t>(size));
    h.put_down();
    h.current = current;
    if (const auto entry = h.blocks.extract(data)) {
      h.take(entry.mapped().place, -entry.mapped().bytes, -1);
      h.noted -= entry.mapped().bytes;
    }
    profiler::detail::record_memory(device, current);
  });
}

void detail::note_reset(Device device) noexcept {
  note([&] {
    const auto found = history().devices.find({device.type, device.index});
    if (found == history().devices.end()) return;
    found->second.peak = found->second.current;
    found->second.is_peak = true;
  });
}

void detail::claim(Device device, const void* data) noexcept {
  profiler::Event* const op = profiler::Scope::current_op();
  note([&] {
    const auto at = history().devices.find({device.type, device.index});
    if (!op || at == history().devices.end()) return;
    const auto found = at->second.blocks.find(data);
    if (found == at->second.blocks.end() || found->second.place.op) return;
    Block& block = found->second;
    at->second.take(op->place, block.bytes, 1);
    at->second.take(block.place, -block.bytes, -1);
    block.place = op->place;
    op->memory += block.bytes;
  });
}

void detail::start() {
  const std::lock_guard lock(history().mutex);
  if (history().recorders++ == 0) history().devices.clear();
  ++profiler::detail::recorders;
}

void detail::stop() noexcept {
  const std::lock_guard lock(history().mutex);
  --profiler::detail::recorders;
  if (--history().recorders > 0) return;
  for (auto& [device, devices_history] : history().devices) {
    devices_history.put_down();
    devices_history.blocks.clear();
  }
}

void record_history(bool enabled) {
  static std::atomic<bool> recording{false};
  if (recording.exchange(enabled) != enabled) enabled ? detail::start() : detail::stop();
}

Snapshot snapshot(Device device) {
  const int64_t current = stats(device).current;
  const std::lock_guard lock(history().mutex);
  const auto found = history().devices.find({device.type, device.index});
  DeviceHistory untouched;
  untouched.current = untouched.peak = current;
  const DeviceHistory& h = found != history().devices.end() ? found->second : untouched;
  Snapshot result{device, h.peak, {}};
  const int64_t before = h.is_peak ? h.current - h.noted : h.before_peak;
  if (before > 0) result.holders.push_back({{}, before, 0});
  for (const auto& [place, held] : h.is_peak ? h.live : h.at_peak)
    result.holders.push_back({place, held.bytes, held.blocks});
  std::stable_sort(result.holders.begin(), result.holders.end(),
                   [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  return result;
}

std::string Snapshot::table() const {
  char line[512];
  std::snprintf(line, sizeof line, "%10s %7s %7s  %-24s %-20s %s\n", "MiB", "%", "blocks", "operator", "backward of",
                "module");
  std::string text = concat("live on ", device, " at the peak of ", peak, " bytes\n") + line;
  for (const Holder& h : holders) {
    const std::string op = h.place.op ? *h.place.op : h.blocks > 0 ? "(written by the program)" : "(taken before)";
    std::snprintf(line, sizeof line, "%10.3f %7.1f %7lld  %-24s %-20s %s\n", static_cast<double>(h.bytes) / (1 << 20),
                  peak > 0 ? 100 * static_cast<double>(h.bytes) / static_cast<double>(peak) : 0,
                  static_cast<long long>(h.blocks), op.c_str(), text_of(h.place.node).c_str(),
                  text_of(h.place.module).c_str());
    text += line;
  }
  return text;
}

std::string Snapshot::json() const {
  std::vector<std::string> list;
  for (const Holder& h : holders)
    list.push_back(json_object({{"op", to_json(text_of(h.place.op))},
                                {"backward_of", to_json(text_of(h.place.node))},
                                {"module", to_json(text_of(h.place.module))},
                                {"bytes", to_json(h.bytes)},
                                {"blocks", to_json(h.blocks)}}));
  return json_object({{"device", to_json(concat(device))}, {"peak", to_json(peak)}, {"holders", json_array(list)}});
}

}  // namespace voxgrad::memory
