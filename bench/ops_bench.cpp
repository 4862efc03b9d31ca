// Benchmark of memory-bound operators, kernels of optimizers, data loading and augmentation on the CPU and, if
// available, on a GPU. Reports B/s (measure.h).
//
//   ops_bench --benchmark_filter=cuda
//
// The inputs of group_norm count twice in B/s, because the operator must sum over a group before it can normalize.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <voxgrad.h>

#include "measure.h"
#include "ops/detail/kernels.h"

namespace {
namespace vg = voxgrad;
using vg::bench::add;
using vg::bench::bytes_of;
using vg::bench::Case;

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
  for (int run = 0; run < 11; ++run) times.push_back(vg::bench::timed(device, copy, calls));
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
