// Benchmark of convolutions on the CPU: the forward pass, each gradient, and a complete forward and backward pass.
// Reports GFLOP/s, also as a percentage of the rate of Eigen's 1024^3 float32 matrix product (gemm) in the same run.
//
//   cpu_conv --benchmark_filter=forward
//
// The forward pass, the data gradient and the weight gradient count as 2 * N * Cin * Cout / groups * taps * voxels FLOP
// each. `taps` is the number of positions of the kernel, and `voxels` is the number of voxels of the output or, for a
// transposed convolution, of the input. bench/compare_cpu.py runs this program and PyTorch alternately.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <limits>
#include <string>

#include "core/autograd.h"
#include "core/thread_pool.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/detail/kernels.h"

// The library compiles Eigen without threads; this program compiles Eigen with threads. A different namespace keeps the
// linker from merging the two versions of a function.
#define Eigen EigenWithThreads
// GCC 12 warns about uninitialized operands in its own AVX-512 headers, which leave them uninitialized on purpose (GCC
// bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace {
namespace vg = voxgrad;

struct Problem {
  const char* name;
  int64_t batch;
  int64_t in;       // input channels
  int64_t out;      // output channels
  vg::Triple size;  // size of the input, also for a transposed convolution
  vg::Triple kernel;
  vg::Triple stride;
  vg::Triple padding;
  vg::Triple output_padding;
  vg::Triple dilation;
  int64_t groups;
  bool transposed = true;

  vg::Tensor run(const vg::Tensor& x, const vg::Tensor& w) const {
    if (!transposed)
      return vg::conv3d(x, w, {}, {.stride = stride, .padding = padding, .dilation = dilation, .groups = groups});
    return vg::conv_transpose3d(x, w, {}, {stride, padding, output_padding, groups, dilation});
  }
  vg::Shape weight_shape() const {
    return {transposed ? in : out, (transposed ? out : in) / groups, kernel[0], kernel[1], kernel[2]};
  }
  double gflop() const {
    const int64_t taps = kernel[0] * kernel[1] * kernel[2];
    int64_t voxels = 1;
    for (int a = 0; a < 3; ++a)
      voxels *= transposed ? size[a] : (size[a] + 2 * padding[a] - dilation[a] * (kernel[a] - 1) - 1) / stride[a] + 1;
    return 2e-9 * static_cast<double>(batch * in * out / groups * taps * voxels);
  }
  /// Returns all numbers in the order of the members, separated by spaces: the input format of cpu_conv_torch.py.
  std::string numbers() const {
    std::string text = vg::concat(batch, ' ', in, ' ', out);
    for (const vg::Triple* triple : {&size, &kernel, &stride, &padding, &output_padding, &dilation})
      for (int64_t value : triple->values) text += vg::concat(' ', value);
    return text + vg::concat(' ', groups, ' ', int{transposed});
  }
};

// The columns are the members of Problem.
const Problem kProblems[] = {
    {"(2,32,16,(8,16,32)) k(3,5,7)", 2, 32, 16, {8, 16, 32}, {3, 5, 7}, 1, 0, 0, 1, 1},
    {"(2,48,48,16^3) k3", 2, 48, 48, 16, 3, 1, 0, 0, 1, 1},
    {"(1,48,24,32^3) k3", 1, 48, 24, 32, 3, 1, 0, 0, 1, 1},
    {"(2,32,32,(6,12,24)) k(3,5,7) s2 p(1,2,3) op1 g4", 2, 32, 32, {6, 12, 24}, {3, 5, 7}, 2, {1, 2, 3}, 1, 1, 4},
    {"(1,32,32,(16,32,64)) k3 s2 p1 g4", 1, 32, 32, {16, 32, 64}, 3, 2, 1, 0, 1, 4},
    {"(2,32,64,(8,16,16)) k3 s2 p1 dil2", 2, 32, 64, {8, 16, 16}, 3, 2, 1, 0, 2, 1},
    {"(1,64,128,16^3) k3", 1, 64, 128, 16, 3, 1, 0, 0, 1, 1},
    {"(1,128,64,16^3) k4 s2 p1", 1, 128, 64, 16, 4, 2, 1, 0, 1, 1},
    {"(1,32,16,32^3) k4 s2 p1", 1, 32, 16, 32, 4, 2, 1, 0, 1, 1},
    {"conv (1,1,32,48^3) k3 p1", 1, 1, 32, 48, 3, 1, 1, 0, 1, 1, false},
    {"conv (1,32,32,48^3) k3 p1", 1, 32, 32, 48, 3, 1, 1, 0, 1, 1, false},
    {"conv (1,32,64,48^3) k3 s2 p1", 1, 32, 64, 48, 3, 2, 1, 0, 1, 1, false},
    {"conv (1,128,128,12^3) k3 p1", 1, 128, 128, 12, 3, 1, 1, 0, 1, 1, false},
    {"conv (2,320,320,4^3) k3 p1", 2, 320, 320, 4, 3, 1, 1, 0, 1, 1, false},
    {"conv (1,32,3,48^3) k1", 1, 32, 3, 48, 1, 1, 0, 0, 1, 1, false},
    {"conv (1,3,32,48^3) k1", 1, 3, 32, 48, 1, 1, 0, 0, 1, 1, false},
    {"conv (1,32,32,48^3) k1", 1, 32, 32, 48, 1, 1, 0, 0, 1, 1, false},
    {"conv (1,128,256,24^3) k1", 1, 128, 256, 24, 1, 1, 0, 0, 1, 1, false},
    {"conv (2,320,320,6^3) k1", 2, 320, 320, 6, 1, 1, 0, 0, 1, 1, false},
    {"conv (1,32,32,48^3) k3 p1 depthwise", 1, 32, 32, 48, 3, 1, 1, 0, 1, 32, false},
    {"conv (1,128,128,12^3) k3 p1 depthwise", 1, 128, 128, 12, 3, 1, 1, 0, 1, 128, false},
    {"conv (1,32,32,48^3) k5 p2 depthwise", 1, 32, 32, 48, 5, 1, 2, 0, 1, 32, false},
    {"conv (1,32,32,48^3) k3 s2 p1 depthwise", 1, 32, 32, 48, 3, 2, 1, 0, 1, 32, false},
};

/// Returns the median GFLOP/s of Eigen's gemm, which uses the same number of threads as voxgrad's kernels. With one
/// thread, the rate is computed from the CPU time, because other programs may be running.
double gemm_rate() {
  constexpr int kSize = 1024;
  static const Eigen::MatrixXf a = Eigen::MatrixXf::Random(kSize, kSize), b = a.transpose();
  static Eigen::MatrixXf c = a * b;
  Eigen::setNbThreads(vg::num_threads());
  std::array<double, 7> seconds{};
  for (double& s : seconds) {
    const std::clock_t cpu = std::clock();
    const auto start = std::chrono::steady_clock::now();
    c.noalias() = a * b;
    s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (vg::num_threads() == 1) s = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  }
  std::sort(seconds.begin(), seconds.end());
  return 2e-9 * kSize * kSize * kSize / seconds[seconds.size() / 2];
}

/// Fills a tensor with the same small integers as cpu_conv_torch.py. All sums are exact, so the results of voxgrad and
/// PyTorch must be equal.
vg::Tensor integers(const vg::Shape& shape, int64_t factor, int64_t modulus) {
  vg::Tensor t = vg::empty(shape);
  float* data = t.mutable_data<float>();
  for (int64_t i = 0; i < t.numel(); ++i) data[i] = static_cast<float>(i * factor % modulus - modulus / 2);
  return t;
}

double checksum(const vg::Tensor& t) {
  double sum = 0;
  const float* data = t.data<float>();
  for (int64_t i = 0; i < t.numel(); ++i) sum += data[i] * static_cast<double>(i % 29 - 14);
  return sum;
}

struct Tensors {
  vg::Tensor x;
  vg::Tensor w;
  vg::Tensor g;  // gradient of the output

  explicit Tensors(const Problem& p)
      : x(integers({p.batch, p.in, p.size[0], p.size[1], p.size[2]}, 7, 17)),
        w(integers(p.weight_shape(), 5, 13)),
        g(integers(p.run(x, w).shape(), 3, 11)) {}
};

vg::ConvGeometry geometry(const Problem& p) { return {p.stride, p.padding, p.dilation, p.groups}; }

/// A function to time. Returns the output or the gradients.
using Work = vg::Tensors (*)(const Problem&, const Tensors&);

vg::Tensors forward(const Problem& p, const Tensors& t) {
  const vg::NoGradGuard no_grad;
  return {p.run(t.x, t.w)};
}

vg::Tensors data_gradient(const Problem& p, const Tensors& t) {
  vg::Tensor dx = vg::empty(t.x.shape());
  const auto gradient = p.transposed ? vg::cpu_kernels().conv_forward : vg::cpu_kernels().conv_backward_data;
  gradient(dx.view_out(), t.g.view_in(), t.w.view_in(), nullptr, geometry(p));
  return {dx};
}

vg::Tensors weight_gradient(const Problem& p, const Tensors& t) {
  vg::Tensor dw = vg::empty(t.w.shape());
  const vg::Tensor &x = p.transposed ? t.g : t.x, &y = p.transposed ? t.x : t.g;
  vg::cpu_kernels().conv_backward_weight(dw.view_out(), x.view_in(), y.view_in(), geometry(p));
  return {dw};
}

vg::Tensors forward_backward(const Problem& p, const Tensors& t) {
  t.x.requires_grad_();
  t.w.requires_grad_();
  return vg::grad({p.run(t.x, t.w)}, {t.x, t.w}, {t.g});
}

struct Pass {
  const char* name;
  Work work;
  double flop_ratio;  // FLOP, as a multiple of the FLOP of the forward pass
};
const Pass kPasses[] = {{"forward", forward, 1},
                        {"data_gradient", data_gradient, 1},
                        {"weight_gradient", weight_gradient, 1},
                        {"forward_backward", forward_backward, 3}};

void measure(benchmark::State& state, const Problem& problem, const Pass& pass) {
  const double gemm = gemm_rate();
  const Tensors tensors(problem);
  vg::Tensors results = pass.work(problem, tensors);
  double seconds = 0, min_cpu = std::numeric_limits<double>::infinity();
  for (auto _ : state) {
    const std::clock_t cpu = std::clock();
    const auto start = std::chrono::steady_clock::now();
    results = pass.work(problem, tensors);
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state.SetIterationTime(now);
    seconds += now;
    min_cpu = std::min(min_cpu, static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
  }
  const double rate = pass.flop_ratio * problem.gflop() * static_cast<double>(state.iterations()) / seconds;
  state.SetLabel(problem.numbers());
  state.counters["GFLOP/s"] = rate;
  state.counters["cpu_ms"] = 1e3 * min_cpu;
  state.counters["gemm"] = gemm;
  state.counters["%gemm"] = 100 * rate / gemm;
  double sum = 0;
  for (const vg::Tensor& result : results) sum += checksum(result);
  state.counters["checksum"] = sum;
}

}  // namespace

int main(int argc, char** argv) {
  for (const Problem& problem : kProblems)
    for (const Pass& pass : kPasses)
      benchmark::RegisterBenchmark((std::string(problem.name) + '/' + pass.name).c_str(),
                                   [&](benchmark::State& state) { measure(state, problem, pass); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
