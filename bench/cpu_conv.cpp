// Transposed convolution on the CPU: forward, gradients and a whole forward + backward pass, in GFLOP/s and in
// percent of the rate of Eigen's 1024^3 float32 gemm, which is measured just before each.
//
//   cpu_conv --benchmark_filter=forward
//
// FLOP are the useful ones: 2 * N * Cin * Cout / groups * taps * input voxels, for each of the forward pass, the
// data gradient and the weight gradient. bench/compare_cpu.py runs this program against PyTorch.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>

#include "core/autograd.h"
#include "core/parallel.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/kernels.h"

// The library's kernels use Eigen without its threads. Here it runs as a user would run it, under a name of its own,
// so that the linker does not take one for the other.
#define Eigen EigenWithThreads
// GCC 12 takes the deliberately undefined operands of its own AVX-512 intrinsics for mistakes (its bug 105593).
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
  int64_t batch, in, out;
  vg::Triple size, kernel, stride, padding, output_padding, dilation;
  int64_t groups;

  vg::ConvTransposeOptions<3> options() const {
    return {
        .stride = stride, .padding = padding, .output_padding = output_padding, .groups = groups, .dilation = dilation};
  }
  double gflop() const {
    const int64_t taps = kernel[0] * kernel[1] * kernel[2], voxels = size[0] * size[1] * size[2];
    return 2e-9 * static_cast<double>(batch * in * out / groups * taps * voxels);
  }
  /// All numbers in the order of the members, for the peers' side of the comparison.
  std::string numbers() const {
    std::string text = vg::concat(batch, ' ', in, ' ', out);
    for (const vg::Triple* triple : {&size, &kernel, &stride, &padding, &output_padding, &dilation})
      for (int64_t value : triple->values) text += vg::concat(' ', value);
    return text + vg::concat(' ', groups);
  }
};

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
};

/// Median GFLOP/s of Eigen's gemm on as many threads as the kernels use.
double gemm_rate() {
  constexpr int kSize = 1024;
  static const Eigen::MatrixXf a = Eigen::MatrixXf::Random(kSize, kSize), b = a.transpose();
  static Eigen::MatrixXf c = a * b;
  Eigen::setNbThreads(vg::num_threads());
  std::array<double, 7> seconds{};
  for (double& s : seconds) {
    const auto start = std::chrono::steady_clock::now();
    c.noalias() = a * b;
    s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::sort(seconds.begin(), seconds.end());
  return 2e-9 * kSize * kSize * kSize / seconds[seconds.size() / 2];
}

/// Small integers, the same as in cpu_conv_torch.py: every sum is exact, so that the two sides can be compared.
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
  vg::Tensor x, w, g;  // g: the gradient of conv_transpose3d(x, w)

  explicit Tensors(const Problem& p)
      : x(integers({p.batch, p.in, p.size[0], p.size[1], p.size[2]}, 7, 17)),
        w(integers({p.in, p.out / p.groups, p.kernel[0], p.kernel[1], p.kernel[2]}, 5, 13)),
        g(integers(vg::conv_transpose3d(x, w, {}, p.options()).shape(), 3, 11)) {}
};

vg::ConvGeometry geometry(const Problem& p) { return {p.stride, p.padding, p.dilation, p.groups}; }

/// What is timed; returns the tensors that it made.
using Work = vg::Tensors (*)(const Problem&, const Tensors&);

vg::Tensors forward(const Problem& p, const Tensors& t) {
  const vg::NoGradGuard no_grad;
  return {vg::conv_transpose3d(t.x, t.w, {}, p.options())};
}

vg::Tensors data_gradient(const Problem& p, const Tensors& t) {
  vg::Tensor dx = vg::empty(t.x.shape());
  vg::cpu_kernels().conv_forward(dx.view_out(), t.g.view_in(), t.w.view_in(), nullptr, geometry(p));
  return {dx};
}

vg::Tensors weight_gradient(const Problem& p, const Tensors& t) {
  vg::Tensor dw = vg::empty(t.w.shape());
  vg::cpu_kernels().conv_backward_weight(dw.view_out(), t.g.view_in(), t.x.view_in(), geometry(p));
  return {dw};
}

vg::Tensors forward_backward(const Problem& p, const Tensors& t) {
  t.x.requires_grad_();
  t.w.requires_grad_();
  return vg::grad({vg::conv_transpose3d(t.x, t.w, {}, p.options())}, {t.x, t.w}, {t.g});
}

struct Pass {
  const char* name;
  Work work;
  double passes;  // how many times the forward pass's FLOP
};
const Pass kPasses[] = {{"forward", forward, 1},
                        {"data_gradient", data_gradient, 1},
                        {"weight_gradient", weight_gradient, 1},
                        {"forward_backward", forward_backward, 3}};

void measure(benchmark::State& state, const Problem& problem, const Pass& pass) {
  const double gemm = gemm_rate();
  const Tensors tensors(problem);
  vg::Tensors results = pass.work(problem, tensors);
  double seconds = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    results = pass.work(problem, tensors);
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state.SetIterationTime(now);
    seconds += now;
  }
  const double rate = pass.passes * problem.gflop() * static_cast<double>(state.iterations()) / seconds;
  state.SetLabel(problem.numbers());
  state.counters["GFLOP/s"] = rate;
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
