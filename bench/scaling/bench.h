// The context of a measurement on a group of ranks, and helpers for timing and reporting.
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

/// The options, the ranks, and the fields that are part of every report.
struct Bench {
  const Options& options;
  voxgrad::distributed::Communicator& world;
  /// Fields of every report: the GPU, the ranks and the size of a step. With --simulate, also the parameters of the
  /// simulated reductions.
  ordered_json about;

  voxgrad::Device device() const { return world.device(); }
  /// Prints one line of JSON on rank 0: the fields of `about`, the name `what` of the measurement, and `row`. Flushes
  /// the output, so that no completed row is lost if the run is aborted.
  void report(const char* what, const ordered_json& row) const;
  /// Returns the values of all ranks.
  std::vector<double> gather(double value) const;
};

/// Milliseconds per call. Both members are medians over the rounds.
struct Times {
  double slowest = 0;  ///< time of the slowest rank
  double fastest = 0;  ///< time of the fastest rank
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Measures `calls` calls of `call` in each round. The option --rounds sets the number of rounds. All ranks start a
/// round together. At the end of a round, each rank waits for its device.
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

// One function for each value of the option --what.
void measure_step(const Bench& bench);
void measure_overlap(const Bench& bench);
void measure_buckets(const Bench& bench);
void measure_all_reduce(const Bench& bench);
void measure_spatial(const Bench& bench);

/// Allocates the tensors that a step of DataParallel reduces, with the same sizes and dtypes and in the same order:
/// first a tensor of flags (one per parameter), then the buckets.
voxgrad::Tensors make_buckets(const Bench& bench);
/// Times the reductions of `buckets`. The reductions run one after another, with no other work running.
Times time_buckets(const Bench& bench, const voxgrad::Tensors& buckets);

}  // namespace scaling
