// Benchmark of convolutions and transposed convolutions. On the CPU, they run in float32. If a GPU is available, they
// also run on the GPU in float32 ("highest"), TF32 ("high") and bf16. Reports FLOP/s and B/s (measure.h).
//
//   conv_bench --benchmark_filter=cuda
//
// Benchmarks named host/... instead measure the time in which the host queues a convolution of a small tensor.
//
// A call counts 2 * N * Cin * Cout / groups * taps * voxels FLOP. `taps` is the number of positions of the kernel, and
// `voxels` is the number of voxels of the output or, for a transposed convolution, of the input.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <voxgrad.h>

#include "measure.h"
#include "ops/detail/kernels.h"

namespace {
namespace vg = voxgrad;
using vg::bench::add;
using vg::bench::bytes_of;
using vg::bench::Case;

/// A convolution or a transposed convolution. `size` is the size of the input in both cases.
struct Convolution {
  const char* name;
  int64_t batch;
  int64_t in;   // input channels
  int64_t out;  // output channels
  vg::Triple size;
  vg::Triple kernel;
  vg::Triple stride;
  vg::Triple padding;
  vg::Triple output_padding;
  vg::Triple dilation;
  int64_t groups;
};

// Transposed convolutions; the columns are the members of Convolution. kLarge is for a GPU and contains KernelBench's
// ConvTranspose3d problems, named L<level>-<problem>, and two decoder stages. kSmall is for the CPU and contains
// smaller problems.
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
// Convolutions of encoders: with stride 1, with stride 2, and depthwise. kLargeConv is for a GPU, kSmallConv for the
// CPU.
const Convolution kLargeConv[] = {
    {"enc32", 4, 32, 32, 96, 3, 1, 1, 0, 1, 1},
    {"enc64", 4, 32, 64, 128, 4, 2, 1, 0, 1, 1},
    {"enc256", 4, 128, 256, 32, 4, 2, 1, 0, 1, 1},
    {"depthwise", 4, 64, 64, 64, 3, 1, 1, 0, 1, 64},
};
const Convolution kSmallConv[] = {
    {"enc32", 1, 32, 32, 32, 3, 1, 1, 0, 1, 1},
    {"enc64", 1, 32, 64, 32, 4, 2, 1, 0, 1, 1},
    {"depthwise", 1, 64, 64, 32, 3, 1, 1, 0, 1, 64},
};

/// The input x, the weight w and the output y of a conv3d problem. A transposed convolution runs the kernels of conv3d
/// with x and y exchanged: its input is y, its output is x, and its forward pass is the data gradient of conv3d.
struct Problem {
  vg::Tensor x;
  vg::Tensor w;
  vg::Tensor y;
  vg::ConvGeometry geometry;

  Problem(const Convolution& c, bool transposed, vg::Device device, vg::DType dtype)
      : x(vg::randn({c.batch, c.in, c.size[0], c.size[1], c.size[2]}, {.device = device}).to(dtype)),
        geometry{c.stride, c.padding, c.dilation, c.groups} {
    vg::NoGradGuard no_grad;
    const auto weight = [&](int64_t outer, int64_t inner) {
      return vg::randn({outer, inner / c.groups, c.kernel[0], c.kernel[1], c.kernel[2]}, {.device = device}).to(dtype);
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

struct Mode {
  const char* name;
  vg::DType dtype;
  vg::Float32Precision precision;
};
const Mode kModes[] = {{"highest", vg::f32, vg::Float32Precision::highest},
                       {"high", vg::f32, vg::Float32Precision::high},
                       {"bf16", vg::bf16, vg::Float32Precision::highest}};

/// A pass of a convolution: the forward pass or a gradient.
struct Pass {
  const char* name;
  vg::ConvPass kernel;
  void (*run)(const Problem&, const vg::Kernels&);
};

Case convolution(const Convolution& c, bool transposed, vg::Device device, const Mode& mode, const Pass& pass) {
  const auto p = std::make_shared<Problem>(c, transposed, device, mode.dtype);
  const double flop = 2.0 * static_cast<double>(p->y.numel()) * static_cast<double>(p->w.numel() / p->w.size(0));
  const double bytes = bytes_of({p->x, p->w, p->y});
  const vg::Kernels& kernels = vg::kernels(device);
  vg::set_float32_precision(mode.precision);
  const vg::ConvExplanation limits =
      vg::explain_conv(pass.kernel, p->x.view_in(), p->w.view_in(), p->y.view_in(), p->geometry);
  const double floor = limits.flop_rate > 0 ? std::max(flop / limits.flop_rate, bytes / limits.byte_rate) : 0;
  return {.flop = flop,
          .bytes = bytes,
          .work =
              [=, &kernels] {
                vg::set_float32_precision(mode.precision);
                pass.run(*p, kernels);
              },
          .floor = floor};
}

void add_convolutions(vg::Device device, bool transposed, std::span<const Convolution> shapes) {
  const std::string function = transposed ? "conv_transpose3d/" : "conv3d/";
  const Pass fprop{"/forward", vg::ConvPass::fprop, forward};
  const Pass dgrad{"/data_gradient", vg::ConvPass::dgrad, data_gradient};
  const Pass wgrad{"/weight_gradient", vg::ConvPass::wgrad, weight_gradient};
  Pass passes[] = {fprop, dgrad, wgrad};
  if (transposed) {
    passes[0] = {fprop.name, dgrad.kernel, dgrad.run};
    passes[1] = {dgrad.name, fprop.kernel, fprop.run};
  }
  for (const Convolution& c : shapes)
    for (const Pass& pass : passes)
      for (const Mode& mode : std::span(kModes).first(device.is_cuda() ? 3 : 1))
        add(function + c.name + pass.name + '/' + mode.name, device,
            [=, &c, &mode] { return convolution(c, transposed, device, mode, pass); });
}

/// Registers convolutions of 12^3 voxels and 64 channels in channels-last format. The GPU computes such a convolution
/// in less time than the host needs to queue it. host/fill queues one launch of a small kernel, for comparison.
void add_host_times(vg::Device device) {
  add("host/fill", device,
      [=] {
        const vg::Tensor one = vg::empty({1}, {.device = device});
        return Case{.flop = 0,
                    .bytes = bytes_of({one}),
                    .work = [=, &kernels = vg::kernels(device)] { kernels.fill(one.view_out(), 1); },
                    .calls = 64,
                    .host = true};
      })
      ->Iterations(100)
      ->Unit(benchmark::kMicrosecond);
  static const Convolution kLayers[] = {{"conv3", 1, 64, 64, 12, 3, 1, 1, 0, 1, 1},
                                        {"strided", 1, 64, 64, 12, 3, 2, 1, 0, 1, 1},
                                        {"conv1", 1, 64, 64, 12, 1, 1, 0, 0, 1, 1},
                                        {"depthwise", 1, 64, 64, 12, 3, 1, 1, 0, 1, 64}};
  const std::pair<const char*, void (*)(const Problem&, const vg::Kernels&)> passes[] = {
      {"/forward", forward}, {"/data_gradient", data_gradient}, {"/weight_gradient", weight_gradient}};
  for (const Convolution& layer : kLayers)
    for (const auto& [pass, run] : passes)
      for (const Mode& mode : kModes)
        add(std::string("host/") + layer.name + pass + '/' + mode.name, device,
            [=, &layer, &mode, run = run] {
              const auto p = std::make_shared<Problem>(layer, false, device, mode.dtype);
              for (vg::Tensor* t : {&p->x, &p->w, &p->y}) *t = t->contiguous(vg::MemoryFormat::channels_last);
              return Case{.flop = 0,
                          .bytes = bytes_of({p->x, p->w, p->y}),
                          .work =
                              [=, &mode, &kernels = vg::kernels(device)] {
                                vg::set_float32_precision(mode.precision);
                                run(*p, kernels);
                              },
                          .calls = 64,
                          .host = true};
            })
            ->Iterations(100)
            ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  for (const vg::Device device : {vg::Device::cuda(), vg::Device::cpu()}) {
    if (device.is_cuda() && !vg::cuda::is_available()) continue;
    if (device.is_cuda()) add_host_times(device);
    add_convolutions(device, true, device.is_cuda() ? std::span<const Convolution>(kLarge) : kSmall);
    add_convolutions(device, false, device.is_cuda() ? std::span<const Convolution>(kLargeConv) : kSmallConv);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
