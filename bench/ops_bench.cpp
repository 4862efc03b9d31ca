// Convolutions, GroupNorm and elementwise operators on every device present: GFLOP/s and GB/s.
//
//   ops_bench --benchmark_filter=cuda
//
// On a GPU the time is taken by CUDA events around one call (manual time); on the CPU by the wall clock.
// FLOP are the useful ones: 2 * N * Cin * Cout / groups * taps * voxels, the input's for a transposed convolution, the
// output's for a convolution. Bytes are the least that must move: every input read once, every output written once;
// group_norm reads all of its inputs twice, first for the sums over a group.
#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <voxgrad.h>

#include "ops/kernels.h"

namespace {
namespace vg = voxgrad;

/// One call of `work`, timed by the device's own clock; seconds.
double timed(vg::Device device, const std::function<void()>& work) {
  if (device.is_cuda()) {
    vg::cuda::Event start(device.index), stop(device.index);
    start.record();
    work();
    stop.record();
    return stop.elapsed_ms_since(start) * 1e-3;
  }
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Case {
  double flop, bytes;  // of one call
  std::function<void()> work;
};

void measure(benchmark::State& state, vg::Device device, const std::function<Case()>& make) {
  const Case c = make();
  c.work();  // warms up: code is loaded, the allocator's cache filled
  vg::synchronize(device);
  for (auto _ : state) state.SetIterationTime(timed(device, c.work));
  using Counter = benchmark::Counter;
  if (c.flop > 0) state.counters["FLOP/s"] = Counter(c.flop, Counter::kIsIterationInvariantRate);
  state.counters["B/s"] = Counter(c.bytes, Counter::kIsIterationInvariantRate, Counter::kIs1000);
}

void add(const std::string& name, vg::Device device, std::function<Case()> make) {
  benchmark::RegisterBenchmark((name + '/' + vg::concat(device)).c_str(),
                               [=](benchmark::State& state) { measure(state, device, make); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

double bytes_of(const vg::Tensors& tensors) {
  double bytes = 0;
  for (const vg::Tensor& t : tensors) bytes += static_cast<double>(t.numel() * vg::item_size(t.dtype()));
  return bytes;
}

/// A transposed convolution, or a convolution: then `size` is still that of its input.
struct Convolution {
  const char* name;
  int64_t batch, in, out;
  vg::Triple size, kernel, stride, padding, output_padding, dilation;
  int64_t groups;
};

// KernelBench's ConvTranspose3d problems (level-problem) and two decoder stages; first the sizes for a GPU.
const Convolution kLarge[] = {
    {"L1-58", 16, 32, 16, {16, 32, 64}, {3, 5, 7}, 1, 0, 0, 1, 1},
    {"L1-61", 8, 48, 48, 64, 3, 1, 0, 0, 1, 1},
    {"L1-68", 16, 32, 64, 64, {3, 5, 5}, 1, 0, 0, 1, 1},
    {"L1-70", 8, 48, 24, 96, 3, 1, 0, 0, 1, 1},
    {"L1-72", 8, 32, 32, {12, 24, 48}, {3, 5, 7}, 2, {1, 2, 3}, 1, 1, 4},
    {"L1-73", 4, 32, 32, {32, 64, 128}, 3, 2, 1, 0, 1, 4},
    {"L1-77", 16, 32, 64, {16, 32, 32}, 3, 2, 1, 0, 2, 1},
    {"L2-61", 16, 64, 128, 32, 3, 1, 0, 0, 1, 1},
    {"L2-100", 16, 64, 128, {24, 48, 48}, 3, 2, 1, 0, 1, 1},
    {"L2-78", 16, 32, 64, 32, 5, 2, 2, 0, 1, 1},
    {"L2-72", 64, 3, 16, 32, 3, 2, 1, 0, 1, 1},
    {"dec256", 4, 256, 128, 16, 4, 2, 1, 0, 1, 1},
    {"dec64", 4, 64, 32, 64, 4, 2, 1, 0, 1, 1},
};
const Convolution kSmall[] = {
    {"48-24", 1, 48, 24, 32, 3, 1, 0, 0, 1, 1},
    {"64-128", 1, 64, 128, 16, 3, 1, 0, 0, 1, 1},
    {"dec64", 1, 64, 32, 16, 4, 2, 1, 0, 1, 1},
    {"grouped", 1, 32, 32, {16, 32, 64}, 3, 2, 1, 0, 1, 4},
};
// Encoder stages: convolutions that keep the size, that halve it, and one for each channel.
const Convolution kLargeForward[] = {
    {"enc32", 4, 32, 32, 96, 3, 1, 1, 0, 1, 1},
    {"enc64", 4, 32, 64, 128, 4, 2, 1, 0, 1, 1},
    {"enc256", 4, 128, 256, 32, 4, 2, 1, 0, 1, 1},
    {"depthwise", 4, 64, 64, 64, 3, 1, 1, 0, 1, 64},
};
const Convolution kSmallForward[] = {
    {"enc32", 1, 32, 32, 32, 3, 1, 1, 0, 1, 1},
    {"enc64", 1, 32, 64, 32, 4, 2, 1, 0, 1, 1},
    {"depthwise", 1, 64, 64, 32, 3, 1, 1, 0, 1, 64},
};

/// A convolution's tensors, named as conv3d has them: the kernels are conv3d's, of which conv_transpose3d's forward
/// pass is the data gradient.
struct Problem {
  vg::Tensor x, w, y;
  vg::ConvGeometry geometry;

  Problem(const Convolution& c, bool transposed, vg::Device device)
      : x(vg::randn({c.batch, c.in, c.size[0], c.size[1], c.size[2]}, {.device = device})),
        geometry{c.stride, c.padding, c.dilation, c.groups} {
    vg::NoGradGuard no_grad;
    const auto weight = [&](int64_t outer, int64_t inner) {
      return vg::randn({outer, inner / c.groups, c.kernel[0], c.kernel[1], c.kernel[2]}, {.device = device});
    };
    if (transposed) {
      w = weight(c.in, c.out);
      y = std::exchange(x, vg::conv_transpose3d(x, w, {},
                                                {.stride = c.stride,
                                                 .padding = c.padding,
                                                 .output_padding = c.output_padding,
                                                 .groups = c.groups,
                                                 .dilation = c.dilation}));
    } else {
      w = weight(c.out, c.in);
      y = vg::conv3d(x, w, {}, {.stride = c.stride, .padding = c.padding, .dilation = c.dilation, .groups = c.groups});
    }
  }
};

void forward(const Problem& p, const vg::Kernels& k) {
  k.conv_forward(p.y.view_out(), p.x.view_in(), p.w.view_in(), nullptr, p.geometry);
}
void data_gradient(const Problem& p, const vg::Kernels& k) {
  k.conv_backward_data(p.x.view_out(), p.y.view_in(), p.w.view_in(), nullptr, p.geometry);
}
void weight_gradient(const Problem& p, const vg::Kernels& k) {
  k.conv_backward_weight(p.w.view_out(), p.x.view_in(), p.y.view_in(), p.geometry);
}

void add_convolutions(vg::Device device, bool transposed, std::span<const Convolution> shapes) {
  const std::string function = transposed ? "conv_transpose3d/" : "conv3d/";
  using Kernel = void (*)(const Problem&, const vg::Kernels&);
  const std::pair<const char*, Kernel> passes[] = {{"/forward", transposed ? data_gradient : forward},
                                                   {"/data_gradient", transposed ? forward : data_gradient},
                                                   {"/weight_gradient", weight_gradient}};
  for (const Convolution& c : shapes)
    for (const auto& [pass, kernel] : passes)
      add(function + c.name + pass, device, [=, &c] {
        const auto p = std::make_shared<Problem>(c, transposed, device);
        const double flop = 2.0 * static_cast<double>(p->y.numel()) * static_cast<double>(p->w.numel() / p->w.size(0));
        return Case{flop, bytes_of({p->x, p->w, p->y}), [=] { kernel(*p, vg::kernels(device)); }};
      });
}

void add_elementwise_and_norm(vg::Device device) {
  const vg::Shape shape = device.is_cuda() ? vg::Shape{16, 128, 34, 34, 34} : vg::Shape{2, 64, 34, 34, 34};
  const auto simple = [&](const char* name, int tensors_moved, std::function<vg::Tensor(const vg::Tensor&)> op) {
    add(std::string(name), device, [=] {
      const vg::Tensor x = vg::rand(shape, {.device = device});
      return Case{0, tensors_moved * bytes_of({x}), [=] {
                    vg::NoGradGuard no_grad;
                    op(x);
                  }};
    });
  };
  simple("clone", 2, [](const vg::Tensor& x) { return x.clone(); });
  simple("relu", 2, [](const vg::Tensor& x) { return vg::relu(x); });
  simple("gelu", 2, [](const vg::Tensor& x) { return vg::gelu(x); });
  simple("add", 3, [](const vg::Tensor& x) { return x + x; });
  simple("sum", 1, [](const vg::Tensor& x) { return x.sum(); });
  simple("sum_per_channel", 1, [](const vg::Tensor& x) { return x.sum({0, 2, 3, 4}); });
  simple("group_norm/forward", 3, [](const vg::Tensor& x) { return vg::group_norm(x, 8); });
  add("group_norm/forward_backward", device, [=] {
    const vg::Tensor x = vg::rand(shape, {.device = device, .requires_grad = true});
    const vg::Tensor gamma = vg::ones({shape[1]}, {.device = device, .requires_grad = true});
    const vg::Tensor beta = vg::zeros({shape[1]}, {.device = device, .requires_grad = true});
    const vg::Tensor g = vg::rand(shape, {.device = device});
    return Case{0, 8 * bytes_of({x}), [=] { vg::grad({vg::group_norm(x, 8, gamma, beta)}, {x, gamma, beta}, {g}); }};
  });
}

}  // namespace

int main(int argc, char** argv) {
  for (const vg::Device device : {vg::Device::cuda(), vg::Device::cpu()}) {
    if (device.is_cuda() && !vg::cuda::is_available()) continue;
    const bool gpu = device.is_cuda();
    add_convolutions(device, true, gpu ? std::span<const Convolution>(kLarge) : kSmall);
    add_convolutions(device, false, gpu ? std::span<const Convolution>(kLargeForward) : kSmallForward);
    add_elementwise_and_norm(device);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
