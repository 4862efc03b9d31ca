// Measurements of whole training steps: their time, the overlap of reductions with the backward pass, and the times at
// which buckets are full.
#include <cmath>
#include <cstdio>
#include <deque>
#include <mutex>
#include <numeric>

#include "bench/scaling/observed.h"
#include "bench/scaling/stepper.h"
#include "core/profiler.h"
#include "ops/create.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

using Events = std::deque<vg::cuda::Event>;  // a deque, because events cannot be moved

/// Times single steps on this rank. Returns the standard deviation of their durations in ms.
double jitter_of(const Bench& bench, Execution& step) {
  Events events;
  for (int i = 0; i <= bench.options.steps; ++i) events.emplace_back(bench.device().index);
  events[0].record();
  for (int i = 1; i <= bench.options.steps; ++i) {
    step();
    events[static_cast<size_t>(i)].record();
  }
  // The first step is excluded: its duration includes the time that the host takes to queue it.
  std::vector<double> ms;
  for (size_t i = 2; i < events.size(); ++i) ms.push_back(events[i].elapsed_ms_since(events[i - 1]));
  if (ms.size() < 2) return 0;
  const double mean = std::accumulate(ms.begin(), ms.end(), 0.0) / static_cast<double>(ms.size());
  double squares = 0;
  for (const double value : ms) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(ms.size() - 1));
}

/// Returns true if `value` is equal on all ranks.
bool same_on_all_ranks(const Bench& bench, uint64_t value) {
  const auto expected = static_cast<int64_t>(value);
  const vg::Tensor all = bench.world.all_gather(vg::from_span<int64_t>(std::span(&expected, 1), {1}));
  for (const int64_t other : all.to_vector<int64_t>())
    if (other != expected) return false;
  return true;
}

/// Writes a profiler trace of three steps. The trace contains all ranks that run as threads of this process.
void write_trace(const Bench& bench, Stepper& stepper) {
  // stop() waits for the GPUs of all ranks. The mutex keeps the other ranks from starting a collective until stop()
  // returns.
  static std::mutex stopping;
  std::unique_lock lock(stopping, std::defer_lock);
  std::optional<vg::profiler::Session> session;
  bench.world.barrier();
  if (bench.world.rank() == 0) {
    lock.lock();
    session.emplace();
  }
  bench.world.barrier();
  for (int i = 0; i < 3; ++i) stepper.step();
  bench.world.barrier();
  if (!session) return lock.lock();  // waits for rank 0
  session->stop();
  session->save_trace(bench.options.trace);
}

void measure_step(const Bench& bench, const std::string& mode, const std::string& scheme, bool graph) {
  Stepper stepper(bench, bench.world, mode, scheme);
  Execution step(bench, graph, [&] { stepper.step(); });
  vg::memory::reset_peak(bench.device());
  const Times times = time_rounds(bench, bench.options.steps, step);
  const uint64_t checksum = stepper.checksum();
  const std::vector<double> losses = bench.gather(stepper.training->loss.item());
  const std::vector<double> peaks = bench.gather(static_cast<double>(vg::memory::stats(bench.device()).peak));
  const std::vector<double> jitters = bench.gather(jitter_of(bench, step));
  const double ranks = bench.world.size();
  char bits[20];
  std::snprintf(bits, sizeof bits, "%016llx", static_cast<unsigned long long>(checksum));
  const bool same = same_on_all_ranks(bench, checksum);
  bench.report("step", {{"mode", mode},
                        {"scheme", scheme},
                        {"graph", graph},
                        {"wire", bench.options.wire},
                        {"bucket_mb", bench.options.bucket_mb},
                        {"ms", times.slowest},
                        {"ms_fastest_rank", times.fastest},
                        {"jitter_ms", *std::max_element(jitters.begin(), jitters.end())},
                        {"volumes_per_s", ranks * static_cast<double>(bench.options.batch) / times.slowest * 1e3},
                        {"peak_gb", *std::max_element(peaks.begin(), peaks.end()) / 1e9},
                        {"loss", std::accumulate(losses.begin(), losses.end(), 0.0) / ranks},
                        {"checksum", bits},
                        {"same_on_all_ranks", same}});
  if (!bench.options.trace.empty() && !graph && scheme == "ddp") write_trace(bench, stepper);
}

/// The times of a step in ms.
struct Timeline {
  std::vector<double> ready;  ///< per bucket: from the start of the backward pass until the bucket is full
  double forward = 0;         ///< duration of the forward pass
  double wait = 0;            ///< from the time at which the last bucket is full to the end of the backward pass
  double update = 0;          ///< duration of the optimizer step
};

/// Returns the bytes of each reduction of a step.
ordered_json describe(const std::vector<ObservedCommunicator::Reduction>& reductions) {
  ordered_json sizes = ordered_json::array();
  for (const auto& reduction : reductions) sizes.push_back(reduction.numel * vg::item_size(reduction.dtype));
  return sizes;
}

/// Queues steps one after another, as in training, and returns their timelines. The host waits only after the last
/// step. `sizes` receives the bytes of the buckets.
std::vector<Timeline> observe(const Bench& bench, Stepper& stepper, ObservedCommunicator& world, ordered_json& sizes) {
  std::vector<std::vector<ObservedCommunicator::Reduction>> reductions;
  std::deque<Events> marks;
  for (int i = 0; i < bench.options.steps; ++i) {
    Events& events = marks.emplace_back();
    const auto mark = [&] { events.emplace_back(bench.device().index).record(); };
    mark();
    stepper.training->forward();
    mark();
    stepper.training->backward();
    mark();
    stepper.training->update();
    mark();
    reductions.push_back(world.take());
  }
  std::vector<Timeline> timelines;
  for (size_t i = 0; i < marks.size(); ++i) {
    Timeline& timeline = timelines.emplace_back();
    timeline.forward = marks[i][1].elapsed_ms_since(marks[i][0]);
    for (const auto& reduction : reductions[i])
      timeline.ready.push_back(reduction.ready->elapsed_ms_since(marks[i][1]));
    timeline.wait = marks[i][2].elapsed_ms_since(marks[i][1]) - timeline.ready.back();
    timeline.update = marks[i][3].elapsed_ms_since(marks[i][2]);
  }
  sizes = describe(reductions.back());
  return timelines;
}

double median_of(const std::vector<Timeline>& timelines, const std::function<double(const Timeline&)>& part) {
  std::vector<double> values;
  for (const Timeline& timeline : timelines) values.push_back(part(timeline));
  return median(values);
}

}  // namespace

void measure_step(const Bench& bench) {
  for (const std::string& mode : bench.options.modes)
    for (const std::string& scheme : bench.options.schemes)
      each_execution(bench, [&](bool graph) {
        if (graph && scheme == "zero") return;  // a step with ZeroRedundancy cannot be captured
        measure_step(bench, mode, scheme, graph);
      });
}

void measure_overlap(const Bench& bench) {
  if (bench.world.size() == 1) return bench.report("overlap", {{"skipped", "a single rank has no reductions"}});
  const double alone = time_buckets(bench, make_buckets(bench)).slowest;
  for (const std::string& mode : bench.options.modes)
    each_execution(bench, [&](bool graph) {
      Stepper stepper(bench, bench.world, mode, "ddp");
      Execution local_step(bench, graph, [&] { stepper.step(false); });
      const double ms_without = time_rounds(bench, bench.options.steps, local_step).slowest;
      Execution reduced_step(bench, graph, [&] { stepper.step(); });
      const double ms_with = time_rounds(bench, bench.options.steps, reduced_step).slowest;
      bench.report("overlap", {{"mode", mode},
                               {"graph", graph},
                               {"wire", bench.options.wire},
                               {"ms_with", ms_with},
                               {"ms_without", ms_without},
                               {"ms_buckets_alone", alone},
                               {"hidden", 1 - (ms_with - ms_without) / alone}});
    });
}

void measure_buckets(const Bench& bench) {
  if (bench.world.size() == 1)
    return bench.report("buckets", {{"skipped", "a single rank has no buckets; use --simulate"}});
  for (const std::string& mode : bench.options.modes) {
    ObservedCommunicator world(bench.world);
    Stepper stepper(bench, world, mode, "ddp");
    for (int i = 0; i < bench.options.warmup; ++i) stepper.step();
    world.take();
    ordered_json sizes;
    std::vector<Timeline> timelines = observe(bench, stepper, world, sizes);
    // Exclude the first step: its duration includes the time that the host takes to queue it.
    if (timelines.size() > 1) timelines.erase(timelines.begin());
    ordered_json ready = ordered_json::array();
    for (size_t b = 0; b < sizes.size(); ++b)
      ready.push_back(median_of(timelines, [b](const Timeline& t) { return t.ready[b]; }));
    bench.report("buckets", {{"mode", mode},
                             {"wire", bench.options.wire},
                             {"bucket_mb", bench.options.bucket_mb},
                             {"bytes", sizes},
                             {"ready_ms", ready},
                             {"forward_ms", median_of(timelines, [](const Timeline& t) { return t.forward; })},
                             {"wait_ms", median_of(timelines, [](const Timeline& t) { return t.wait; })},
                             {"update_ms", median_of(timelines, [](const Timeline& t) { return t.update; })}});
  }
}

}  // namespace scaling
