// Helpers of the benchmarks: a registered benchmark measures one function, its FLOP/s and its B/s.
//
// On a GPU, times come from CUDA events around one call, or around several calls of a memory-bound operator, so that
// they do not include the host. On the CPU, times are wall-clock times. The counters are:
//   FLOP/s    floating-point operations per call, divided by the time
//   B/s       minimum memory traffic per call, divided by the time: each input is read once and each output is written
//             once
//   of_copy   B/s divided by the B/s of copying a float32 tensor. The copy is measured once for each device.
//   of_floor  estimate of the minimum time in which the GPU can compute the FLOP and move the bytes (see
//             voxgrad::explain_conv3d), divided by the measured time
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>
#include <string>

#include <voxgrad.h>

namespace voxgrad::bench {

/// Returns the mean seconds per call of `work` over `calls` calls. On a GPU, measures the time of the GPU by CUDA
/// events or, if `host` is true, the time in which the host queues the calls.
inline double timed(Device device, const std::function<void()>& work, int calls = 1, bool host = false) {
  synchronize(device);
  if (device.is_cuda() && !host) {
    cuda::Event start(device.index), stop(device.index);
    start.record();
    for (int call = 0; call < calls; ++call) work();
    stop.record();
    return stop.elapsed_ms_since(start) * 1e-3 / calls;
  }
  const auto start = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

/// A function to time and its cost.
struct Case {
  double flop;                 // per call
  double bytes;                // minimum memory traffic per call
  std::function<void()> work;  // one call
  int calls = 1;               // calls that are timed together
  double copy_rate = 0;        // B/s of a copy, for of_copy; 0: of_copy is not reported
  double floor = 0;            // minimum seconds, for of_floor; 0: of_floor is not reported
  bool host = false;           // time the host instead of the GPU
};

/// Calls `make`, calls the returned function once as a warm-up, and times the function in each iteration of `state`.
inline void measure(benchmark::State& state, Device device, const std::function<Case()>& make) {
  const Case c = make();
  c.work();  // warm-up: loads kernels and fills the allocator's cache
  synchronize(device);
  double seconds = 0;
  for (auto _ : state) {
    const double time = timed(device, c.work, c.calls, c.host);
    state.SetIterationTime(time);
    seconds += time;
  }
  using Counter = benchmark::Counter;
  if (c.flop > 0) state.counters["FLOP/s"] = Counter(c.flop, Counter::kIsIterationInvariantRate);
  state.counters["B/s"] = Counter(c.bytes, Counter::kIsIterationInvariantRate, Counter::kIs1000);
  if (c.floor > 0) state.counters["of_floor"] = c.floor * static_cast<double>(state.iterations()) / seconds;
  if (c.copy_rate > 0)
    state.counters["of_copy"] = c.bytes * static_cast<double>(state.iterations()) / seconds / c.copy_rate;
}

/// Registers a benchmark named `name`/`device`. `make` runs before the measurement and returns the function to time.
inline auto* add(const std::string& name, Device device, std::function<Case()> make) {
  return benchmark::RegisterBenchmark((name + '/' + concat(device)).c_str(),
                                      [=](benchmark::State& state) { measure(state, device, make); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

/// Returns the sum of the sizes of the tensors in bytes.
inline double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const Tensor& t : tensors) bytes += static_cast<double>(t.numel() * item_size(t.dtype()));
  return bytes;
}

}  // namespace voxgrad::bench
