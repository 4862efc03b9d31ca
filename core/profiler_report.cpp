// What a profiler session says: rows, table, trace.
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/profiler.h"

namespace voxgrad::profiler {
namespace {

using nlohmann::json;

/// "12.3", "-" for nothing.
std::string number(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return value > 0 ? text : "-";
}

std::string shapes_of(const Event& event) {
  std::string text;
  for (const Shape& shape : event.shapes) text += concat(text.empty() ? "" : " ", shape);
  return text;
}

void add(Row& row, const Event& event) {
  const double device_ms = event.device_ms();
  ++row.calls;
  row.host_ms += event.host_ms();
  row.device_ms += device_ms;
  row.bytes += event.bytes;
  row.flop += event.flop;
  row.memory += event.memory;
  if (event.floor <= 0 || device_ms <= 0) return;
  row.floor_ms += event.floor * 1e3;
  row.floored_ms += device_ms;
}

/// The text in a column, cut in its middle.
std::string cell(const std::string& text, size_t width) {
  if (text.size() <= width) return text + std::string(width - text.size(), ' ');
  const size_t half = (width - 2) / 2;
  return text.substr(0, width - 2 - half) + ".." + text.substr(text.size() - half);
}

template <class... Columns>
std::string line(const std::string& name, const std::string& pass, const Columns&... columns) {
  std::string text = cell(name, 32) + ' ' + cell(pass, 26);
  const auto append = [&text](const std::string& column) {
    text += std::string(column.size() < 9 ? 10 - column.size() : 1, ' ') + column;
  };
  (append(columns), ...);
  return text;
}

std::string line(const Row& row, double all_ms) {
  return line(row.name, row.pass, std::to_string(row.calls), number(row.host_ms, 3), number(row.device_ms, 3),
              number(100 * row.ms() / all_ms, 1), number(row.bytes * 1e-6, 1), number(row.bytes * 1e-6 / row.ms(), 1),
              number(row.flop * 1e-9, 2), number(row.flop * 1e-6 / row.ms(), 1),
              number(row.floored_ms > 0 ? 100 * row.floor_ms / row.floored_ms : 0, 0),
              number(static_cast<double>(row.memory) / (1 << 20), 2)) +
         (row.shapes.empty() ? "" : "  " + row.shapes);
}

/// Events of a trace in the order of their time; an outer one before those within it.
class Trace {
 public:
  explicit Trace(int64_t start) : start_(start) {}

  void span(int64_t begin, int64_t end, json event) {
    event.update({{"ph", "X"}, {"ts", microseconds(begin)}, {"dur", static_cast<double>(end - begin) / 1e3}});
    events_.emplace_back(std::pair(begin, -end), std::move(event));
  }
  void memory(const MemorySample& s) {
    json event{
        {"ph", "C"}, {"ts", microseconds(s.time)}, {"pid", 0}, {"tid", 0}, {"name", concat("memory of ", s.device)}};
    event["args"] = {{"bytes", s.bytes}};
    events_.emplace_back(std::pair(s.time, -s.time), std::move(event));
  }
  /// The name of a process or a thread.
  void name(const char* what, int process, int thread, const std::string& text) {
    names_.push_back({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", text}}}});
  }
  std::string text() {
    std::stable_sort(events_.begin(), events_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    json all = std::move(names_);
    for (auto& [key, event] : events_) all.push_back(std::move(event));
    return json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(all)}}.dump(-1, ' ', false,
                                                                                 json::error_handler_t::replace);
  }

 private:
  double microseconds(int64_t time) const { return static_cast<double>(time - start_) / 1e3; }

  int64_t start_;
  json names_ = json::array();
  std::vector<std::pair<std::pair<int64_t, int64_t>, json>> events_;
};

json arguments(const Event& event) {
  json about = json::object();
  if (event.place.node && event.kind == Kind::op) about["backward of"] = *event.place.node;
  if (event.place.module) about["module"] = *event.place.module;
  if (event.kind != Kind::op) return about;
  about.update({{"device", concat(event.device)}, {"bytes", event.bytes}, {"allocated", event.memory}});
  if (!event.shapes.empty()) about["shapes"] = shapes_of(event);
  if (event.flop > 0) about["flop"] = event.flop;
  if (event.floor > 0) about["floor us"] = event.floor * 1e6;
  return about;
}

}  // namespace

std::vector<Row> Session::rows(GroupBy group_by) const {
  std::map<std::tuple<std::string, std::string, std::string>, Row> groups;
  for (const Event& event : events()) {
    if (event.kind != Kind::op) continue;
    const auto& [op, node, module] = event.place;
    const bool by_module = group_by == GroupBy::module;
    Row named{.name = !by_module ? *event.name
                      : module   ? *module
                                 : "(outside of modules)",
              .pass = !node       ? "forward"
                      : by_module ? "backward"
                                  : "backward of " + *node,
              .shapes = group_by == GroupBy::shape ? shapes_of(event) : ""};
    const std::tuple key(named.name, named.pass, named.shapes);
    add(groups.try_emplace(key, std::move(named)).first->second, event);
  }
  std::vector<Row> rows;
  for (auto& [key, row] : groups) rows.push_back(std::move(row));
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.ms() > b.ms(); });
  return rows;
}

std::string Session::table(GroupBy group_by, size_t most_rows) const {
  const std::vector<Row> all = rows(group_by);
  double ms = 0;
  Row sum;
  sum.name = "all";
  for (const Row& row : all) {
    ms += row.ms();
    sum.calls += row.calls;
    sum.host_ms += row.host_ms;
    sum.device_ms += row.device_ms;
    sum.bytes += row.bytes;
    sum.flop += row.flop;
    sum.floor_ms += row.floor_ms;
    sum.floored_ms += row.floored_ms;
    sum.memory += row.memory;
  }
  const char* name = group_by == GroupBy::module ? "module" : "operator";
  std::string text = line(name, "", "calls", "host ms", "device ms", "% time", "MB", "GB/s", "GFLOP", "GFLOP/s",
                          "% floor", "alloc MiB") +
                     '\n';
  for (size_t i = 0; i < std::min(all.size(), most_rows); ++i) text += line(all[i], ms) + '\n';
  if (all.size() > most_rows) text += concat("(", all.size() - most_rows, " more rows)\n");
  return text + line(sum, ms) +
         concat("\nrecorded for ", number(static_cast<double>(end_ - begin_) * 1e-6, 3), " ms\n");
}

std::string Session::trace() const {
  Trace trace(begin_);
  std::map<int, bool> threads;
  std::map<std::pair<int, void*>, int> streams;
  trace.name("process_name", 0, 0, "host");
  constexpr const char* kKinds[] = {"op", "backward", "module", "range"};
  for (const Event& event : events()) {
    json about{{"name", *event.name}, {"cat", kKinds[static_cast<size_t>(event.kind)]}, {"args", arguments(event)}};
    if (threads.emplace(event.thread, true).second)
      trace.name("thread_name", 0, event.thread, concat("thread ", event.thread));
    if (event.device_end > 0) {
      const int process = 1 + event.device.index;
      const auto [stream, fresh] = streams.try_emplace({process, event.stream}, static_cast<int>(streams.size()));
      if (fresh) {
        trace.name("process_name", process, 0, concat(event.device));
        trace.name("thread_name", process, stream->second, event.stream ? concat("stream ", event.stream) : "stream 0");
      }
      json there = about;
      there.update({{"pid", process}, {"tid", stream->second}});
      trace.span(event.device_begin, event.device_end, std::move(there));
    }
    about.update({{"pid", 0}, {"tid", event.thread}});
    trace.span(event.begin, event.end, std::move(about));
  }
  for (const MemorySample& sample : memory_) trace.memory(sample);
  return trace.text();
}

void Session::save_trace(const std::filesystem::path& path) const { write_file(path, trace(), "save_trace"); }

}  // namespace voxgrad::profiler
