// Benchmark of the profiler's overhead per operator: relu of eight floats, with the profiler off and with the profiler
// recording. To measure the overhead while the profiler is off, the program also compares kernels(), which checks
// whether a profiler records, with a function that does not check. Prints the median nanoseconds per call.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <voxgrad.h>

#include "bench/no_options.h"
#include "ops/detail/kernels.h"

namespace {
namespace vg = voxgrad;

const vg::Kernels& kernels_without_check(vg::Device device) {
  return device.is_cuda() ? vg::cuda_kernels() : vg::cpu_kernels();
}

/// Runs relu like ops/elementwise.cpp, but without autograd. `table` is a function that returns the kernels of a
/// device.
template <class Table>
void relu(const Table& table, const vg::Tensor& x) {
  const vg::Tensor y = vg::empty_like(x);
  table(x.device()).unary(vg::UnaryOp::relu, y.view_out(), x.view_in(), 0, 0);
}

template <class F>
double nanoseconds(const F& call) {
  constexpr int kCalls = 20000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kCalls;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  take_no_options(argc, argv,
                  "usage: profiler_overhead\n\n"
                  "Prints the median nanoseconds of relu of eight floats with the profiler off and recording.\n");
  const vg::Tensor x = vg::ones({8});
  std::vector<double> unchecked, checked, profiler_off, profiler_recording;
  for (int round = 0; round < 101; ++round) {
    unchecked.push_back(nanoseconds([&] { relu(kernels_without_check, x); }));
    checked.push_back(
        nanoseconds([&] { relu([](vg::Device device) -> const vg::Kernels& { return vg::kernels(device); }, x); }));
    profiler_off.push_back(nanoseconds([&] { vg::relu(x); }));
  }
  for (int round = 0; round < 5; ++round) {
    const vg::profiler::Session session;
    profiler_recording.push_back(nanoseconds([&] { vg::relu(x); }));
  }
  std::printf("relu without the check %.1f ns, with the check %.1f ns: ratio %.3f\n", median(unchecked),
              median(checked), median(checked) / median(unchecked));
  std::printf("vg::relu with the profiler off %.1f ns, recording %.1f ns\n", median(profiler_off),
              median(profiler_recording));
}
