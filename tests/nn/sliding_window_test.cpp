// Tests of sliding-window inference against a loop over windows in double precision, and of batches, progress, devices
// and errors.
#include "nn/sliding_window.h"

#include <algorithm>
#include <cmath>

#include "core/autocast.h"
#include "core/autograd.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using nn::sliding_window_inference;
using nn::SlidingWindowOptions;

Tensor volume_of(const Shape& shape, DType dtype = f32) {
  Generator random(3);
  return rand(shape, {.dtype = dtype}, &random);
}

/// A model with two output channels. Each result depends on the position in the window, so that windows at wrong places
/// or with wrong mirroring change the results.
Tensor position_model(const Tensor& x) {
  const auto ramp = [&](int64_t axis) {
    Shape shape{1, 1, 1, 1, 1};
    shape[axis] = x.size(axis);
    return reshape(arange(0, static_cast<double>(x.size(axis)), 1, x.options()), shape);
  };
  const Tensor first = narrow(x, 1, 0, 1), last = narrow(x, 1, x.size(1) - 1, 1);
  return cat({first * (ramp(2) + 1) + ramp(4), last * last - ramp(3) * 0.5}, 1);
}
/// The same model for one voxel at position `at` of a window.
double position_model(int64_t channel, double first, double last, const std::array<int64_t, 3>& at) {
  const auto d = static_cast<double>(at[0]), h = static_cast<double>(at[1]), w = static_cast<double>(at[2]);
  return channel == 0 ? first * (d + 1) + w : last * last - h * 0.5;
}

/// Returns the start index of each window along one axis.
std::vector<int64_t> begins(int64_t size, int64_t window, double overlap) {
  int64_t count = 1;
  while (static_cast<double>(size - window) > static_cast<double>((count - 1) * window) * (1 - overlap)) ++count;
  std::vector<int64_t> all{0};
  for (int64_t i = 1; i < count; ++i)
    all.push_back(std::llrint(static_cast<double>((size - window) * i) / static_cast<double>(count - 1)));
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// Returns the weight of one voxel of a window, without the lower bound of all weights.
double weight_at(const SlidingWindowOptions& o, const std::array<int64_t, 3>& at) {
  double weight = o.sigma == 0 ? 1 : 10;
  for (size_t i = 0; i < 3 && o.sigma > 0; ++i) {
    const int64_t window = o.window.values[i];
    const double r = static_cast<double>(at[i] - window / 2) / (o.sigma * static_cast<double>(window));
    weight *= std::exp(-r * r / 2);
  }
  return weight;
}

/// Returns the lower bound of the weights: the smallest weight that is positive in f16.
double smallest_weight(const SlidingWindowOptions& o) {
  double smallest = 10;
  for (int64_t d = 0; d < o.window[0]; ++d)
    for (int64_t h = 0; h < o.window[1]; ++h)
      for (int64_t w = 0; w < o.window[2]; ++w)
        if (const double half = full({}, weight_at(o, {d, h, w}), {.dtype = f64}).to(f16).item(); half > 0)
          smallest = std::min(smallest, half);
  return smallest;
}

/// Returns the weighted mean of position_model over all windows and mirrorings at one voxel.
double expected(const Tensor& x, const SlidingWindowOptions& o, double min_weight, int64_t n, int64_t channel,
                const std::array<int64_t, 3>& voxel) {
  double sum = 0, total = 0;
  std::array<int64_t, 3> size{x.size(2), x.size(3), x.size(4)}, front{};
  for (size_t i = 0; i < 3; ++i) {
    front[i] = std::max<int64_t>(0, o.window.values[i] - size[i]) / 2;
    size[i] = std::max(size[i], o.window.values[i]);
  }
  const auto read = [&](int64_t c) { return x.at({n, c, voxel[0], voxel[1], voxel[2]}); };
  const double first = read(0), last = read(x.size(1) - 1);
  for (const int64_t d : begins(size[0], o.window[0], o.overlap))
    for (const int64_t h : begins(size[1], o.window[1], o.overlap))
      for (const int64_t w : begins(size[2], o.window[2], o.overlap)) {
        const std::array<int64_t, 3> begin{d, h, w};
        std::array<int64_t, 3> at{};
        bool inside = true;
        for (size_t i = 0; i < 3; ++i) {
          const int64_t window = o.window.values[i];
          at[i] = voxel[i] + front[i] - begin[i];
          inside = inside && at[i] >= 0 && at[i] < window;
        }
        if (!inside) continue;
        const double weight = std::max(weight_at(o, at), min_weight);
        for (int mirrored = 0; mirrored < 8; ++mirrored) {
          std::array<int64_t, 3> mirror_at = at;
          bool wanted = true;
          for (int i = 0; i < 3; ++i) {
            if (!(mirrored >> i & 1)) continue;
            const auto j = static_cast<size_t>(i);
            wanted = wanted && std::ranges::find(o.mirror_axes, i) != o.mirror_axes.end();
            mirror_at[j] = o.window[i] - 1 - at[j];
          }
          if (!wanted) continue;
          sum += weight * position_model(channel, first, last, mirror_at);
          total += weight;
        }
      }
  return sum / total;
}

void expect_matches_loop(const Tensor& found, const Tensor& x, const SlidingWindowOptions& o, double tolerance) {
  ASSERT_EQ(found.shape(), Shape({x.size(0), 2, x.size(2), x.size(3), x.size(4)}));
  const std::vector<double> values = found.to_vector();
  const double min_weight = smallest_weight(o);
  size_t i = 0;
  for (int64_t n = 0; n < x.size(0); ++n)
    for (int64_t channel = 0; channel < 2; ++channel)
      for (int64_t d = 0; d < x.size(2); ++d)
        for (int64_t h = 0; h < x.size(3); ++h)
          for (int64_t w = 0; w < x.size(4); ++w)
            ASSERT_NEAR(values[i++], expected(x, o, min_weight, n, channel, {d, h, w}), tolerance)
                << Dims{n, channel, d, h, w};
}

Tensor run(const Tensor& x, const SlidingWindowOptions& o) {
  return sliding_window_inference(
      x, [](const Tensor& windows) { return position_model(windows); }, o);
}

TEST(SlidingWindow, AveragesWindowsWithWeights) {
  struct Case {
    Shape shape;
    SlidingWindowOptions options;
  };
  const Case cases[] = {
      {{1, 1, 8, 8, 8}, {.window = 4}},
      {{2, 2, 7, 10, 9}, {.window = {4, 5, 6}}},
      {{1, 1, 9, 5, 6}, {.window = {4, 5, 3}, .overlap = 0}},
      {{1, 1, 9, 7, 6}, {.window = {5, 3, 4}, .overlap = 0.75, .sigma = 0.3}},
      {{1, 2, 5, 6, 7}, {.window = 3, .sigma = 0}},
      {{1, 1, 5, 6, 7}, {.window = {4, 3, 5}, .mirror_axes = {0, 1, 2}}},
      {{1, 1, 5, 6, 7}, {.window = {4, 3, 5}, .mirror_axes = {2}}},
      {{1, 1, 4, 3, 11}, {.window = {5, 6, 4}, .mirror_axes = {0, 1}}},  // smaller than the window by odd amounts
      {{2, 1, 2, 2, 2}, {.window = 5}},
      {{1, 1, 1, 9, 40}, {.window = {1, 4, 24}}},                // reaches the minimum weight
      {{1, 1, 6, 1, 1}, {.window = {2, 1, 1}, .overlap = 0.9}},  // the step is less than one voxel
  };
  for (const Device device : devices())
    for (const Case& c : cases) {
      const Tensor x = volume_of(c.shape), x64 = volume_of(c.shape, f64);
      expect_matches_loop(run(x.to(device), c.options), x, c.options, 1e-5);
      const Tensor y = run(x64.to(device), c.options);
      EXPECT_EQ(y.dtype(), f64);
      expect_matches_loop(y, x64, c.options, 1e-12);
    }
}

TEST(SlidingWindow, WindowsStartAsInNnUNet) {
  const Tensor x = reshape(arange(0, 110), {1, 1, 110, 1, 1});
  std::vector<double> begins;
  const auto model = [&](const Tensor& windows) {
    begins.push_back(windows.at({0, 0, 0, 0, 0}));
    return windows;
  };
  sliding_window_inference(x, model, {.window = {64, 1, 1}});
  EXPECT_EQ(begins, (std::vector<double>{0, 23, 46}));
  begins.clear();
  sliding_window_inference(x, model, {.window = {20, 1, 1}, .overlap = 0.9});
  EXPECT_EQ(begins.size(), 46u);  // steps of two voxels over a range of 90
  begins.clear();
  sliding_window_inference(x, model, {.window = {10, 1, 1}, .overlap = 0.9});
  EXPECT_EQ(begins.size(), 101u);
}

/// On a GPU, the kernels of a float32 convolution depend on the batch size. Those of a float64 convolution do not.
TEST(SlidingWindow, IsBitwiseEqualForAllBatchSizes) {
  const nn::Conv3d conv(2, 3, 3, 1, 1);
  for (const Device device : devices()) {
    const DType dtype = device.is_cuda() ? f64 : f32;
    const Tensor x = volume_of({2, 2, 9, 10, 11}, dtype).to(device), weight = conv.weight.to(device).to(dtype);
    const auto model = [&](const Tensor& windows) {
      EXPECT_FALSE(grad_enabled());
      return conv3d(windows, weight, {}, {.padding = 1});
    };
    SlidingWindowOptions options{.window = {5, 6, 4}, .mirror_axes = {1}};
    const std::vector<double> wanted = sliding_window_inference(x, model, options).to_vector();
    for (const int64_t batch : {2, 3, 4, 5, 1000}) {
      options.batch_size = batch;
      EXPECT_EQ(sliding_window_inference(x, model, options).to_vector(), wanted) << batch;
    }
  }
}

TEST(SlidingWindow, UsesSeparateDevicesForVolumeModelAndResult) {
  const Tensor x = volume_of({1, 1, 9, 10, 11});
  for (const Device device : devices())
    for (const auto& [from, to] : {std::pair{Device::cpu(), Device::cpu()}, std::pair{Device::cpu(), device},
                                   std::pair{device, Device::cpu()}}) {
      const auto model = [device = device](const Tensor& windows) {
        EXPECT_EQ(windows.device(), device);
        return position_model(windows);
      };
      const SlidingWindowOptions options{.window = 4, .batch_size = 7, .device = device, .accumulate = to};
      const Tensor y = sliding_window_inference(x.to(from), model, options);
      EXPECT_EQ(y.device(), to);
      expect_matches_loop(y, x, options, 1e-5);
    }
}

TEST(SlidingWindow, RunsTheModelInLowPrecision) {
  for (const Device device : devices()) {
    const Tensor x = volume_of({1, 1, 6, 6, 6}).to(device), weight = ones({1, 1, 1, 1, 1}, {.device = device});
    const auto model = [&](const Tensor& windows) {
      EXPECT_EQ(autocast::dtype(), bf16);
      const Tensor y = conv3d(windows, weight);
      EXPECT_EQ(y.dtype(), bf16);
      return y;
    };
    for (const Axes& axes : {Axes{}, Axes{0, 1}}) {
      const Tensor y =
          sliding_window_inference(x, model, {.window = 4, .sigma = 0, .mirror_axes = axes, .precision = bf16});
      EXPECT_EQ(y.dtype(), f32);
      const std::vector<double> values = y.to_vector(), wanted = x.to(bf16).to_vector();
      for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], wanted[i], 1e-6);
    }
    const autocast guard(bf16);  // the caller enables autocast
    EXPECT_EQ(sliding_window_inference(x, model, {.window = 4}).dtype(), f32);
  }
}

TEST(SlidingWindow, AveragesMirroredBf16ResultsInF32) {
  int64_t calls = 0;
  const auto model = [&](const Tensor& windows) { return full_like(windows, calls++ % 4 == 0 ? 256 : 1).to(bf16); };
  const Tensor y = sliding_window_inference(ones({1, 1, 4, 4, 4}), model, {.window = 4, .mirror_axes = {0, 2}});
  EXPECT_EQ(y.dtype(), f32);
  EXPECT_EQ(y.at({0, 0, 1, 2, 3}), 259.0 / 4);
}

TEST(SlidingWindow, ReportsProgressAndStopsOnRequest) {
  for (const Device device : devices()) {
    const Tensor x = volume_of({1, 1, 8, 8, 8}).to(device);
    std::vector<int64_t> seen;
    SlidingWindowOptions options{.window = 4, .batch_size = 10, .accumulate = Device::cpu()};
    options.progress = [&](int64_t done, int64_t total) {
      EXPECT_EQ(total, 27);
      seen.push_back(done);
      return true;
    };
    EXPECT_TRUE(run(x, options).defined());
    EXPECT_EQ(seen, (std::vector<int64_t>{10, 20, 27}));
    seen.clear();
    options.progress = [&](int64_t done, int64_t) {
      seen.push_back(done);
      return done < 20;
    };
    EXPECT_FALSE(run(x, options).defined());
    EXPECT_EQ(seen, (std::vector<int64_t>{10, 20}));
  }
}

TEST(SlidingWindow, RejectsInvalidOptionsAndModels) {
  const Tensor x = volume_of({1, 1, 6, 6, 6});
  EXPECT_ERROR(run({}, {.window = 4}), "volume is undefined");
  EXPECT_ERROR(run(x.to(i64), {.window = 4}), "floating");
  EXPECT_ERROR(run(x[0], {.window = 4}), "(N, C, D, H, W)");
  EXPECT_ERROR(run(narrow(x, 2, 0, 0), {.window = 4}), "(N, C, D, H, W) and not empty");
  EXPECT_ERROR(sliding_window_inference(x, {}, {.window = 4}), "the model is empty");
  EXPECT_ERROR(run(x, {.window = {4, 0, 4}}), "window must lie in");
  for (const double overlap : {-0.1, 1.0, double{NAN}})
    EXPECT_ERROR(run(x, {.window = 4, .overlap = overlap}), "overlap must lie in [0, 1)");
  EXPECT_ERROR(run(x, {.window = 4, .sigma = -1}), "sigma");
  EXPECT_ERROR(run(x, {.window = 4, .mirror_axes = {3}}), "sliding_window_inference");
  EXPECT_ERROR(run(x, {.window = 4, .mirror_axes = {2, -1}}), "contain an axis twice");
  EXPECT_ERROR(run(x, {.window = 4, .batch_size = 0}), "batch_size must be positive");
  EXPECT_ERROR(run(x, {.window = 4, .precision = f32}), "autocast");
  const auto infer = [&](const std::function<Tensor(const Tensor&)>& model) {
    return sliding_window_inference(x, model, {.window = 4});
  };
  EXPECT_ERROR(infer([](const Tensor&) { return Tensor(); }), "undefined");
  EXPECT_ERROR(infer([](const Tensor& w) { return w.to(i64); }), "floating");
  EXPECT_ERROR(infer([](const Tensor& w) { return narrow(w, 2, 0, 3); }), "the model must return (1, K, [4, 4, 4])");
  EXPECT_ERROR(infer([](const Tensor& w) { return w[0]; }), "the model must return");
  int64_t calls = 0;
  EXPECT_ERROR(infer([&](const Tensor& w) {
                 return ++calls == 1 ? w : cat({w, w}, 1);
               }),
               "the number of channels of the predictions must not change: expected 1, got ");
}

}  // namespace
}  // namespace voxgrad
