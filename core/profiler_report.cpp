// The reports of a profiler session: rows, tables and trace.
#include <algorithm>
#include <cstdio>
#include <map>
#include <tuple>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/detail/json.h"
#include "core/profiler.h"

namespace voxgrad::profiler {
namespace {

/// Formats a positive number as "12.3", and other numbers as "-".
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

double ms(int64_t begin, int64_t end) { return static_cast<double>(end - begin) * 1e-6; }

Row row_of(const Event& e) {
  Row row{.calls = 1, .host_ms = ms(e.begin, e.end), .device_ms = ms(e.device_begin, e.device_end)};
  row.bytes = e.bytes;
  row.flop = e.flop;
  row.memory = e.memory;
  if (e.floor > 0 && row.device_ms > 0) row.floor_ms = e.floor * 1e3, row.floored_ms = row.device_ms;
  return row;
}

void add(Row& sum, const Row& row) {
  sum.calls += row.calls;
  sum.memory += row.memory;
  for (const auto part : {&Row::host_ms, &Row::device_ms, &Row::bytes, &Row::flop, &Row::floor_ms, &Row::floored_ms})
    sum.*part += row.*part;
}

/// Pads the text to the width of a column, or cuts out the middle of a text that is too long.
std::string cell(const std::string& text, size_t width) {
  if (text.size() <= width) return text + std::string(width - text.size(), ' ');
  const size_t half = (width - 2) / 2;
  return text.substr(0, width - 2 - half) + ".." + text.substr(text.size() - half);
}

std::string line(const std::string& name, const std::string& pass, const std::vector<std::string>& columns) {
  std::string text = cell(name, 32) + ' ' + cell(pass, 26);
  for (const std::string& column : columns)
    text += std::string(column.size() < 9 ? 10 - column.size() : 1, ' ') + column;
  return text;
}

std::string line(const Row& row, double all_ms) {
  return line(row.name, row.pass,
              {std::to_string(row.calls), number(row.host_ms, 3), number(row.device_ms, 3),
               number(100 * row.ms() / all_ms, 1), number(row.bytes * 1e-6, 1), number(row.bytes * 1e-6 / row.ms(), 1),
               number(row.flop * 1e-9, 2), number(row.flop * 1e-6 / row.ms(), 1),
               number(row.floored_ms > 0 ? 100 * row.floor_ms / row.floored_ms : 0, 0),
               number(static_cast<double>(row.memory) / (1 << 20), 2)}) +
         (row.shapes.empty() ? "" : "  " + row.shapes);
}

using Members = std::vector<std::pair<std::string, std::string>>;

std::string arguments(const Event& event) {
  Members about;
  if (event.place.node && event.kind == Kind::op) about.emplace_back("backward of", to_json(*event.place.node));
  if (event.place.module) about.emplace_back("module", to_json(*event.place.module));
  if (event.kind != Kind::op) return json_object(about);
  about.emplace_back("device", to_json(concat(event.device)));
  about.emplace_back("bytes", to_json(event.bytes));
  about.emplace_back("allocated", to_json(event.memory));
  if (!event.shapes.empty()) about.emplace_back("shapes", to_json(shapes_of(event)));
  if (event.flop > 0) about.emplace_back("flop", to_json(event.flop));
  if (event.floor > 0) about.emplace_back("floor us", to_json(event.floor * 1e6));
  return json_object(about);
}

/// Returns a trace event that names a process or a thread.
std::string metadata(const char* what, int process, int thread, const std::string& name) {
  return json_object({{"ph", to_json("M")},
                      {"name", to_json(what)},
                      {"pid", to_json(process)},
                      {"tid", to_json(thread)},
                      {"args", json_object({{"name", to_json(name)}})}});
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
    add(groups.try_emplace(key, std::move(named)).first->second, row_of(event));
  }
  std::vector<Row> rows;
  for (auto& [key, row] : groups) rows.push_back(std::move(row));
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.ms() > b.ms(); });
  return rows;
}

std::string Session::table(GroupBy group_by, size_t max_rows) const {
  const std::vector<Row> all = rows(group_by);
  Row sum;
  sum.name = "all";
  double all_ms = 0;
  for (const Row& row : all) {
    add(sum, row);
    all_ms += row.ms();
  }
  const char* name = group_by == GroupBy::module ? "module" : "operator";
  std::string text =
      line(name, "",
           {"calls", "host ms", "device ms", "% time", "MB", "GB/s", "GFLOP", "GFLOP/s", "% floor", "alloc MiB"}) +
      '\n';
  for (size_t i = 0; i < std::min(all.size(), max_rows); ++i) text += line(all[i], all_ms) + '\n';
  if (all.size() > max_rows) text += concat("(rows omitted: ", all.size() - max_rows, ")\n");
  return text + line(sum, all_ms) + concat("\nrecorded for ", number(ms(begin_, end_), 3), " ms\n");
}

std::string Session::memory_table(Device device) const {
  std::vector<const Event*> changes;
  for (const Event& e : events())
    if (e.kind == Kind::memory && e.device == device) changes.push_back(&e);
  if (changes.empty()) return concat("no memory was allocated or freed on ", device, '\n');
  const auto peak = std::ranges::max_element(changes, {}, &Event::memory);
  std::map<const void*, const Event*> live;
  for (auto change = changes.begin(); change <= peak; ++change) {
    if ((*change)->block_bytes > 0)
      live[(*change)->block] = *change;
    else
      live.erase((*change)->block);
  }

  struct Sum {
    int64_t bytes = 0, blocks = 0;
  };
  std::map<Place, Sum> groups;
  int64_t older = (*peak)->memory;  // bytes of blocks that were allocated before the session began
  for (const auto& [block, e] : live) {
    Sum& sum = groups[e->place];
    sum.bytes += e->block_bytes;
    ++sum.blocks;
    older -= e->block_bytes;
  }
  std::vector<std::pair<Place, Sum>> rows(groups.begin(), groups.end());
  std::stable_sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.second.bytes > b.second.bytes; });
  std::string text = concat("live on ", device, " at the peak of ", (*peak)->memory, " bytes\n");
  text += line("operator", "backward of", {"MiB", "blocks"}) + "  module\n";
  const auto mib = [](int64_t bytes) { return number(static_cast<double>(bytes) / (1 << 20), 3); };
  for (const auto& [place, sum] : rows)
    text += line(place.op ? *place.op : "(outside of operators)", place.node ? *place.node : "",
                 {mib(sum.bytes), std::to_string(sum.blocks)}) +
            (place.module ? "  " + *place.module : "") + '\n';
  return text + line("(before the session)", "", {mib(older), "-"}) + '\n';
}

std::string Session::trace() const {
  std::vector<std::string> all{metadata("process_name", 0, 0, "host")};
  // Key: (process, stream) for a stream, (-1 - thread, null) for a thread. Value: the number of the track.
  std::map<std::pair<int, void*>, int> tracks;
  std::vector<std::pair<std::pair<int64_t, int64_t>, std::string>> spans;  // sorted by (begin, -end)
  // The trace format calls the kind of an event its phase: X is a span, C the value of a counter at the time `begin`.
  const auto add_event = [&](char phase, Members about, int64_t begin, int64_t end, int process, int thread) {
    about.emplace_back("ph", to_json(std::string_view(&phase, 1)));
    about.emplace_back("ts", to_json(ms(begin_, begin) * 1e3));
    if (phase == 'X') about.emplace_back("dur", to_json(ms(begin, end) * 1e3));
    about.emplace_back("pid", to_json(process));
    about.emplace_back("tid", to_json(thread));
    spans.emplace_back(std::pair(begin, -end), json_object(about));
  };
  constexpr const char* kKinds[] = {"op", "backward", "module", "range", "memory", "layout copy"};
  for (const Event& e : events()) {
    if (e.kind == Kind::memory) {
      const std::string bytes = json_object({{"bytes", to_json(e.memory)}});
      add_event('C', {{"name", to_json(concat("memory of ", e.device))}, {"args", bytes}}, e.begin, e.end, 0, 0);
      continue;
    }
    const Members about{
        {"name", to_json(*e.name)}, {"cat", to_json(kKinds[static_cast<size_t>(e.kind)])}, {"args", arguments(e)}};
    if (tracks.try_emplace({-1 - e.thread, nullptr}, e.thread).second)
      all.push_back(metadata("thread_name", 0, e.thread, concat("thread ", e.thread)));
    add_event('X', about, e.begin, e.end, 0, e.thread);
    if (e.device_end == 0) continue;
    const int process = 1 + e.device.index;
    const auto [stream, fresh] = tracks.try_emplace({process, e.stream}, static_cast<int>(tracks.size()));
    if (fresh) {
      all.push_back(metadata("process_name", process, 0, concat(e.device)));
      all.push_back(metadata("thread_name", process, stream->second, concat("stream ", e.stream)));
    }
    add_event('X', about, e.device_begin, e.device_end, process, stream->second);
  }
  std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [time, event] : spans) all.push_back(std::move(event));
  return json_object({{"traceEvents", json_array(all)}});
}

void Session::save_trace(const std::filesystem::path& path) const { write_file(path, trace(), "save_trace"); }

}  // namespace voxgrad::profiler
