// A group of ranks that are measured, and how times become rows.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/scaling/options.h"
#include "core/device.h"
#include "nn/distributed/communicator.h"

namespace scaling {

using nlohmann::ordered_json;

struct Bench {
  const Options& options;
  voxgrad::distributed::Communicator& world;
  ordered_json about;  ///< of all rows: the GPUs, the simulation

  voxgrad::Device device() const { return world.device(); }
  /// A line of JSON; on rank 0 only, and at once, so that a run that is cut off has told what it did.
  void report(const char* what, const ordered_json& row) const;
  /// The numbers of all ranks.
  std::vector<double> gather(double value) const;
};

/// Milliseconds of a call.
struct Times {
  double slowest = 0, fastest = 0;  ///< of the ranks, medians over the rounds
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Rounds of `calls` calls, between waits for the device; all ranks begin each round together.
template <class F>
Times time_rounds(const Bench& bench, int calls, F&& call) {
  std::vector<double> slowest, fastest;
  for (int round = 0; round < bench.options.rounds; ++round) {
    bench.world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    voxgrad::synchronize(bench.device());
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    const std::vector<double> ms = bench.gather(time.count() / calls);
    slowest.push_back(*std::max_element(ms.begin(), ms.end()));
    fastest.push_back(*std::min_element(ms.begin(), ms.end()));
  }
  return {median(slowest), median(fastest)};
}

// The measurements, by their names on the command line:
void measure_step(const Bench& bench);
void measure_overlap(const Bench& bench);
void measure_buckets(const Bench& bench);
void measure_all_reduce(const Bench& bench);
void measure_spatial(const Bench& bench);

/// Memory of the size of DataParallel's buckets, in their order.
voxgrad::Tensors make_buckets(const Bench& bench);
/// Of reducing them one after the other, with nothing beside.
Times time_buckets(const Bench& bench, const voxgrad::Tensors& buckets);

}  // namespace scaling
