// Benchmark of operators on the CPU and, if available, on a GPU: convolutions, memory-bound operators, kernels of
// optimizers, data loading and augmentation. Reports FLOP/s and B/s.
//
//   ops_bench --benchmark_filter=cuda
//
// On a GPU, times come from CUDA events around one call, or around several calls of a memory-bound operator, so that
// they do not include the host. Benchmarks named host/... instead time the host, which queues calls on small tensors.
// On the CPU, times are wall-clock times. The counters are:
//   FLOP/s    2 * N * Cin * Cout / groups * taps * voxels FLOP per call, divided by the time. `voxels` is the number of
//             voxels of the output or, for a transposed convolution, of the input.
//   B/s       minimum memory traffic per call, divided by the time: each input is read once and each output is written
//             once. The inputs of group_norm count twice, because it must sum over a group before it can normalize.
//   of_copy   B/s divided by the B/s of copying a float32 tensor. The copy is measured once for each device.
//   of_floor  estimate of the minimum time in which the GPU can compute the FLOP and move the bytes (see
//             voxgrad::explain_conv3d), divided by the measured time
//
// On a GPU, convolutions run in float32 ("highest"), TF32 ("high") and bf16.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <voxgrad.h>

#include "ops/detail/kernels.h"

namespace {
namespace vg = voxgrad;

/// Returns the mean seconds per call of `work` over `calls` calls. On a GPU, measures the work of the GPU by CUDA
/// events, or the time in which the host queues it.
double timed(vg::Device device, const std::function<void()>& work, int calls = 1, bool host = false) {
  vg::synchronize(device);
  if (device.is_cuda() && !host) {
    vg::cuda::Event start(device.index), stop(device.index);
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

void measure(benchmark::State& state, vg::Device device, const std::function<Case()>& make) {
  const Case c = make();
  c.work();  // warm-up: loads kernels and fills the allocator's cache
  vg::synchronize(device);
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

benchmark::internal::Benchmark* add(const std::string& name, vg::Device device, std::function<Case()> make) {
  return benchmark::RegisterBenchmark((name + '/' + vg::concat(device)).c_str(),
                                      [=](benchmark::State& state) { measure(state, device, make); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

double bytes_of(const vg::Tensors& tensors) {
  double bytes = 0;
  for (const vg::Tensor& t : tensors) bytes += static_cast<double>(t.numel() * vg::item_size(t.dtype()));
  return bytes;
}

/// A convolution or a transposed convolution. `size` is the size of the input in both cases.
struct Convolution {
  const char* name;
  int64_t batch, in, out;
  vg::Triple size, kernel, stride, padding, output_padding, dilation;
  int64_t groups;
};

// Transposed convolutions; the columns are the members of Convolution. kLarge, for a GPU, contains KernelBench's
// ConvTranspose3d problems (L<level>-<problem>) and two decoder stages. kSmall, for the CPU, contains smaller problems.
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
  vg::Tensor x, w, y;
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

/// Registers convolutions of 12^3 voxels and 64 channels in channels-last format, whose GPU time is shorter than the
/// time in which the host queues them.
void add_host_times(vg::Device device) {
  static const Convolution kLayers[] = {{"conv3", 1, 64, 64, 12, 3, 1, 1, 0, 1, 1},
                                        {"strided", 1, 64, 64, 12, 3, 2, 1, 0, 1, 1},
                                        {"conv1", 1, 64, 64, 12, 1, 1, 0, 0, 1, 1},
                                        {"depthwise", 1, 64, 64, 12, 3, 1, 1, 0, 1, 64}};
  const std::pair<const char*, void (*)(const Problem&, const vg::Kernels&)> passes[] = {
      {"/forward", forward}, {"/data_gradient", data_gradient}, {"/weight_gradient", weight_gradient}};
  for (const Convolution& layer : kLayers)
    for (const auto& [pass, run] : passes)
      for (const Mode& mode : kModes)
        add(std::string("host/") + layer.name + pass + '/' + mode.name, device, [=, &layer, &mode, run = run] {
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
        })->Iterations(100);
}

/// Returns the B/s of copying a float32 tensor. The first call for a device measures the median of 11 copies of a
/// tensor of `shape`; later calls return the same value.
double copy_rate(vg::Device device, const vg::Shape& shape, int calls) {
  static std::map<bool, double> rates;
  double& rate = rates[device.is_cuda()];
  if (rate > 0) return rate;
  const vg::Tensor from = vg::rand(shape, {.device = device}), to = vg::empty_like(from);
  const auto copy = [&] { vg::kernels(device).copy(to.view_out(), from.view_in()); };
  copy();
  std::vector<double> times;
  for (int run = 0; run < 11; ++run) times.push_back(timed(device, copy, calls));
  std::sort(times.begin(), times.end());
  return rate = bytes_of({from, to}) / times[times.size() / 2];
}

/// A dtype and a memory format.
struct Form {
  std::string name;
  vg::DType dtype;
  vg::MemoryFormat format;

  vg::Tensor random(const vg::Shape& shape, vg::Device device) const {
    return vg::rand(shape, {.device = device}).to(dtype).contiguous(format);
  }
};
const Form kForms[] = {{"/f32", vg::f32, vg::MemoryFormat::contiguous},
                       {"/bf16", vg::bf16, vg::MemoryFormat::contiguous},
                       {"/f32/channels_last", vg::f32, vg::MemoryFormat::channels_last},
                       {"/bf16/channels_last", vg::bf16, vg::MemoryFormat::channels_last}};

/// Registers memory-bound operators on tensors of `shape`. `calls` calls are timed together. Each operator is
/// registered with its minimum memory traffic, as a multiple of the bytes of its input.
void add_operators(vg::Device device, const vg::Shape& shape, int calls, const Form& form) {
  const auto simple = [&](const char* name, double tensors_moved, std::function<vg::Tensor(const vg::Tensor&)> op) {
    add(std::string(name) + form.name, device, [=] {
      const vg::Tensor x = form.random(shape, device);
      const auto work = [=] {
        vg::NoGradGuard no_grad;
        op(x);
      };
      return Case{0, tensors_moved * bytes_of({x}), work, calls, copy_rate(device, shape, calls)};
    });
  };
  simple("clone", 2, [](const vg::Tensor& x) { return x.clone(); });
  const bool last = form.format == vg::MemoryFormat::channels_last;
  const auto other = last ? vg::MemoryFormat::contiguous : vg::MemoryFormat::channels_last;
  simple(last ? "to_contiguous" : "to_channels_last", 2, [=](const vg::Tensor& x) { return x.contiguous(other); });
  const double converted = form.dtype == vg::f32 ? 1.5 : 3;
  simple(last ? "to_contiguous/convert" : "to_channels_last/convert", converted,
         [=, to = form.dtype == vg::f32 ? vg::bf16 : vg::f32](const vg::Tensor& x) {
           const vg::Tensor y = vg::empty(x.shape(), {.dtype = to, .device = device}, other);
           vg::kernels(device).copy(y.view_out(), x.view_in());
           return y;
         });
  simple("relu", 2, [](const vg::Tensor& x) { return vg::relu(x); });
  simple("gelu", 2, [](const vg::Tensor& x) { return vg::gelu(x); });
  simple("mul_scalar", 2, [](const vg::Tensor& x) { return x * 1.5; });
  simple("add_bias", 2, [bias = vg::rand({shape[1], 1, 1, 1}, {.device = device}).to(form.dtype)](const vg::Tensor& x) {
    return x + bias;
  });
  simple("cat", 4, [](const vg::Tensor& x) { return vg::cat({x, x}, 1); });
  simple("crop", 2 * 32. / 34, [](const vg::Tensor& x) {  // removes one voxel at each end of W
    return x.narrow(4, 1, x.size(4) - 2).contiguous();
  });
  simple("sum", 1, [](const vg::Tensor& x) { return x.sum(); });
  simple("sum_rows", 1, [](const vg::Tensor& x) { return x.sum({4}); });
  simple("sum_volumes", 1, [](const vg::Tensor& x) { return x.sum({2, 3, 4}); });
  simple("sum_samples", 1, [](const vg::Tensor& x) { return x.sum({0}); });
  simple("sum_per_channel", 1, [](const vg::Tensor& x) { return x.sum({0, 2, 3, 4}); });
  simple("amax", 1, [](const vg::Tensor& x) { return vg::amax(x); });
  simple("argmax", 1, [](const vg::Tensor& x) { return vg::argmax(x, 1); });
  simple("argmax_all", 1, [](const vg::Tensor& x) { return vg::argmax(x); });
  simple("cumsum", 2, [](const vg::Tensor& x) { return vg::cumsum(x, 1); });
  simple("sort", 2, [](const vg::Tensor& x) { return vg::sort(x, 1).values; });
  simple("logsumexp", 1, [](const vg::Tensor& x) { return vg::logsumexp(x, 1); });
  simple("group_norm/forward", 3, [](const vg::Tensor& x) { return vg::group_norm(x, 8); });
  simple("instance_norm/forward", 3, [](const vg::Tensor& x) { return vg::instance_norm(x); });
  simple("softmax", 2, [](const vg::Tensor& x) { return vg::softmax(x, 1); });
  const auto with_gradient = [&](const char* name, double moved, std::function<vg::Tensor(const vg::Tensor&)> op) {
    simple(name, moved, op);
    add(std::string(name) + "/backward" + form.name, device, [=] {
      const vg::Tensor x = form.random(shape, device).requires_grad_(), y = op(x), dy = vg::ones_like(y);
      const auto work = [=] { vg::grad({y}, {x}, {dy}, true); };
      return Case{0, moved * bytes_of({x}), work, calls, copy_rate(device, shape, calls)};
    });
  };
  // Pooling with stride 2 reads the input and writes 1/8 as many elements. The bytes of max_pool3d's indices are not
  // counted.
  with_gradient("max_pool", 1.125, [](const vg::Tensor& x) { return vg::max_pool3d(x, {.kernel_size = 2}); });
  with_gradient("avg_pool", 1.125, [](const vg::Tensor& x) { return vg::avg_pool3d(x, {.kernel_size = 2}); });
  with_gradient("avg_pool_3", 1.125,
                [](const vg::Tensor& x) { return vg::avg_pool3d(x, {.kernel_size = 3, .stride = 2, .padding = 1}); });
  const vg::Shape eighth{shape[0] / 8, shape[1], shape[2], shape[3], shape[4]};
  for (const auto& [kind, mode] : {std::pair{"upsample_nearest", vg::InterpolateMode::nearest},
                                   std::pair{"upsample_trilinear", vg::InterpolateMode::trilinear}})
    for (const bool backward : {false, true})  // 1/8 of the samples, each upsampled to 8 times its voxels
      add(std::string(kind) + (backward ? "/backward" : "") + form.name, device, [=, chosen = mode] {
        const vg::Tensor x = form.random(eighth, device).requires_grad_();
        const vg::InterpolateOptions options{.scale_factor = 2, .mode = chosen};
        const vg::Tensor y = vg::interpolate(x, options), dy = vg::ones_like(y);
        const auto work = [=] {
          if (backward) return static_cast<void>(vg::grad({y}, {x}, {dy}, true));
          vg::NoGradGuard no_grad;
          vg::interpolate(x, options);
        };
        return Case{0, bytes_of({x, y}), work, calls, copy_rate(device, shape, calls)};
      });
}

/// Registers kernels that the benchmark calls directly, without an operator.
void add_kernels(vg::Device device, const vg::Shape& shape, int calls, const Form& form) {
  // Registers a kernel whose memory traffic is `moves` times the bytes of a tensor. `make` receives `tensors` random
  // tensors and returns the function to time.
  const auto kernel = [&](const char* name, int tensors, int moves,
                          std::function<std::function<void()>(const vg::Tensors&, const vg::Kernels&)> make) {
    add(std::string(name) + form.name, device, [=] {
      vg::Tensors t;
      for (int i = 0; i < tensors; ++i) t.push_back(form.random(shape, device));
      return Case{0, moves * bytes_of({t[0]}), make(t, vg::kernels(device)), calls, copy_rate(device, shape, calls)};
    });
  };
  for (const auto& pair : {std::pair{"add", vg::BinaryOp::add}, std::pair{"relu/backward", vg::BinaryOp::relu_grad},
                           std::pair{"gelu/backward", vg::BinaryOp::gelu_grad}})
    kernel(pair.first, 3, 3, [op = pair.second](const vg::Tensors& t, const vg::Kernels& k) {
      return [=, &k] { k.binary(op, t[0].view_out(), t[1].view_in(), t[2].view_in(), 0, 1); };
    });
  kernel("group_norm/backward", 3, 5, [=](const vg::Tensors& t, const vg::Kernels& k) {
    const vg::Shape rows{shape[0], shape[1], shape[2] * shape[3] * shape[4]};
    vg::Tensors v;
    for (const vg::Tensor& volume : t) v.push_back(volume.view(rows));
    const vg::TensorOptions parameters{vg::f32, device};
    const vg::Tensor statistics = vg::full({shape[0], 8, 2}, 0.5, {vg::f64, device}),
                     means = vg::empty_like(statistics);
    const vg::Tensor gamma = vg::ones({shape[1]}, parameters);
    const vg::Tensor dgamma = vg::empty_like(gamma), dbeta = vg::empty_like(gamma);
    return [=, &k] {
      const vg::View g = gamma.view_in(), dg = dgamma.view_out(), db = dbeta.view_out();
      k.group_norm_backward({v[0].view_out(), &dg, &db}, means.view_out(), v[1].view_in(), v[2].view_in(),
                            statistics.view_in(), &g, nullptr, {}, nullptr);
    };
  });
  if (form.dtype != vg::f32 || form.format != vg::MemoryFormat::contiguous) return;
  const auto views = [](const vg::Tensors& t) {
    vg::StepViews list{t[0].view_out(), t[1].view_in(), {}};
    for (size_t i = 2; i < t.size(); ++i) list.state[i - 2] = t[i].view_out();
    return std::vector{list};
  };
  kernel("sgd", 3, 5, [=](const vg::Tensors& t, const vg::Kernels& k) {
    return [=, &k] { k.step("SGD", views(t), vg::SgdStep{.lr = 1e-3, .momentum = 0.9}, {}); };
  });
  kernel("adam", 4, 7, [=](const vg::Tensors& t, const vg::Kernels& k) {
    return [=, &k] { k.step("Adam", views(t), vg::AdamStep{.lr = 1e-3, .step = 3}, {}); };
  });
}

constexpr int64_t kPatchSide = 32;
constexpr double kPatchBytes = 2.0 * sizeof(float) * kPatchSide * kPatchSide * kPatchSide;  // read and written

/// Returns a random patch of a volume. If `turned`, permutes and mirrors the axes of the patch.
vg::Tensor cut_patch(const vg::Tensor& head, bool turned, vg::Generator& random) {
  vg::Tensor patch = head;
  for (int64_t axis = 0; axis < 3; ++axis)
    patch = patch.narrow(axis, random.next_below(head.size(axis) - kPatchSide + 1), kPatchSide);
  patch = patch.contiguous();
  return turned ? vg::flip(patch.permute({2, 0, 1}), {0, 2}).contiguous() : patch;
}

/// Registers the extraction of random patches of 32^3 voxels from a volume, with and without permuting and mirroring
/// axes.
void add_patches(vg::Device device) {
  for (const bool turned : {false, true})
    add(turned ? "patch/turned" : "patch", device, [=] {
      const vg::Tensor head = vg::rand({181, 217, 181}, {.device = device});
      const auto random = std::make_shared<vg::Generator>(1);
      return Case{0, kPatchBytes, [=] { cut_patch(head, turned, *random); }};
    });
}

/// Registers data loading for two ranks. Two loaders run concurrently; each loader has `workers` threads and reads 64
/// batches of 32 samples. A sample consists of a patch of 32^3 voxels and the same patch at half the resolution.
/// Batches are copied to `device`.
void add_loaders(vg::Device device, int workers) {
  add("patch/loaders/" + std::to_string(workers), device, [=] {
    constexpr int64_t kPatches = 64 * 32;
    const vg::Tensor head = vg::rand({181, 217, 181});
    const auto patches = std::make_shared<vg::data::FunctionDataset>(kPatches, [=](int64_t, vg::Generator& random) {
      const vg::Tensor patch = cut_patch(head, true, random).unsqueeze(0);
      return vg::data::Sample{vg::avg_pool3d(patch.unsqueeze(0), {.kernel_size = 2}).squeeze(0), patch};
    });
    return Case{0, 2 * kPatches * kPatchBytes, [=] {
                  const auto load = [&] {
                    vg::data::Loader loader(*patches, {.batch_size = 32, .num_workers = workers, .device = device});
                    for (const auto& [low, high] : loader) benchmark::DoNotOptimize(high.raw_data());
                  };
                  std::thread other(load);
                  load();
                  other.join();
                }};
  });
}

/// Registers nnU-Net's augmentation of two patches of 128^3 voxels (64^3 on the CPU): with the default probabilities,
/// and with every step applied to every sample.
void add_augmentation(vg::Device device) {
  using vg::data::AugmentOptions;
  const auto batch = [=](const char* name, const AugmentOptions& options) {
    add(name, device, [=] {
      const int64_t n = device.is_cuda() ? 128 : 64;
      const vg::Tensor x = vg::rand({2, 1, n, n, n}, {.device = device});
      const vg::data::Sample sample{x, (x * 8).to(vg::u8)};
      const auto random = std::make_shared<vg::Generator>(1);
      const vg::data::Augmentation augment(options);
      return Case{0, 2 * bytes_of({sample.input, sample.target}), [=] { augment(sample, *random); }};
    });
  };
  AugmentOptions all;
  for (vg::data::AugmentStep* step : {&all.rotation, &all.scaling, &all.elastic, &all.noise, &all.blur, &all.brightness,
                                      &all.contrast, &all.low_resolution, &all.gamma_inverted, &all.gamma})
    step->p = step->channel_p = 1;
  batch("augment", {});
  batch("augment/every_step", all);
}

}  // namespace

int main(int argc, char** argv) {
  for (const vg::Device device : {vg::Device::cuda(), vg::Device::cpu()}) {
    if (device.is_cuda() && !vg::cuda::is_available()) continue;
    const bool gpu = device.is_cuda();
    if (gpu) add_host_times(device);
    add_convolutions(device, true, gpu ? std::span<const Convolution>(kLarge) : kSmall);
    add_convolutions(device, false, gpu ? std::span<const Convolution>(kLargeConv) : kSmallConv);
    // Vectorized loads need rows that start at a multiple of 16 bytes. Rows of 64 or 128 elements do, rows of 34 do
    // not.
    const vg::Shape odd = gpu ? vg::Shape{24, 128, 34, 34, 34} : vg::Shape{2, 64, 34, 34, 34};
    const vg::Shape even = gpu ? vg::Shape{8, 32, 64, 64, 128} : vg::Shape{2, 16, 32, 64, 64};
    for (const auto& [shape, suffix] : {std::pair(odd, ""), std::pair(even, "/even")})
      for (Form form : kForms) {
        form.name += suffix;
        add_operators(device, shape, gpu ? 8 : 1, form);
        add_kernels(device, shape, gpu ? 8 : 1, form);
      }
    add_patches(device);
    for (const int workers : {1, 4, 8}) add_loaders(device, workers);
    add_augmentation(device);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
