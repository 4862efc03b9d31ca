// Implements sliding-window inference.
#include "nn/sliding_window.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "core/autocast.h"
#include "core/autograd.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/detail/checks.h"
#include "ops/detail/halves.h"
#include "ops/detail/volume.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad::nn {
namespace {

constexpr const char* kOp = "sliding_window_inference";

/// The position of a window: the index of its sample, and the indices of its first voxel along D, H, W.
using Place = std::array<int64_t, 4>;

/// Returns the first voxel of each window along an axis.
std::vector<int64_t> window_starts(int64_t size, int64_t window, double overlap) {
  const auto last = static_cast<double>(size - window);
  const double step = std::max(1.0, static_cast<double>(window) * (1 - overlap));
  const double steps = std::ceil(last / step - 1e-9);  // tolerance, because 1 - 0.9 is less than 0.1
  std::vector<int64_t> all{0};
  for (double i = 1; i <= steps; ++i) all.push_back(std::llrint(last * i / steps));
  return all;
}

std::vector<Place> places(const Tensor& volume, const SlidingWindowOptions& o) {
  std::vector<int64_t> starts[3];
  for (int i = 0; i < 3; ++i) starts[i] = window_starts(volume.size(i + 2), o.window[i], o.overlap);
  std::vector<Place> all;
  for (int64_t n = 0; n < volume.size(0); ++n)
    for (const int64_t d : starts[0])
      for (const int64_t h : starts[1])
        for (const int64_t w : starts[2]) all.push_back({n, d, h, w});
  return all;
}

/// Returns the weights (D, H, W) of a window's voxels.
Tensor weights_of(const SlidingWindowOptions& o, const TensorOptions& kind) {
  constexpr double kMax = 10;  // nnU-Net's largest weight
  Tensor weights = ones({1, 1, 1}, {.dtype = f64});
  for (int i = 0; i < 3; ++i) {
    if (o.sigma == 0) break;
    const int64_t size = o.window[i];
    const Tensor from_center = arange(0, static_cast<double>(size), 1, {.dtype = f64}) - size / 2;
    Shape shape{1, 1, 1};
    shape[i] = size;
    const double scale = std::sqrt(0.5) / (o.sigma * static_cast<double>(size));
    weights = weights * reshape(exp(neg(pow(from_center * scale, 2))), shape);
  }
  weights = expand(weights, o.window.values) * (o.sigma == 0 ? 1 : kMax);
  // Weights that f16 rounds to 0 get the smallest positive weight.
  const Tensor halves = weights.to(f16).to(f64);
  const Tensor smallest = amin(where(gt(halves, 0), halves, kMax));
  return maximum(o.sum_dtype == f16 ? halves : weights, smallest).to(kind.device, kind.dtype);
}

/// Returns the part of x, (C, D, H, W) or (D, H, W), that a window covers.
Tensor part(const Tensor& x, const Place& place, const Triple& window) {
  return part_of(x, {place[1], place[2], place[3]}, window.values);
}

/// Returns the mean of the model's predictions over all combinations of mirrored axes.
Tensor predict(const Tensor& windows, const WindowModel& model, const SlidingWindowOptions& o) {
  Tensor sum;
  for (int64_t mirrored = 0; mirrored < int64_t{1} << o.mirror_axes.size(); ++mirrored) {
    Dims axes;
    for (int64_t i = 0; i < o.mirror_axes.size(); ++i)
      if (mirrored >> i & 1) axes.push_back(normalize_axis(o.mirror_axes[i], 3, kOp) + 2);
    Tensor y;
    {
      std::optional<autocast> guard;
      if (o.precision) guard.emplace(*o.precision);
      y = model(axes.empty() ? windows : flip(windows, axes));
    }
    check_floating(kOp, y, "the model's prediction");
    Shape expected = windows.shape();
    if (y.dim() == 5) expected[1] = y.size(1);
    check(y.shape() == expected, kOp, "the model must return (", windows.size(0), ", K, ", o.window, ") for ",
          describe(windows), ", got ", describe(y));
    if (!axes.empty()) y = flip(y, axes);
    sum = sum.defined() ? sum.to(widened(sum.dtype())) + y : y;
  }
  return o.mirror_axes.empty() ? sum : sum / static_cast<double>(int64_t{1} << o.mirror_axes.size());
}

/// Accumulates the weighted sum of the predictions, and the sum of the weights.
class Sums {
 public:
  Sums(const Tensor& volume, const SlidingWindowOptions& o)
      : options_(o), shape_(volume.shape()), device_(o.accumulate.value_or(volume.device())) {}
  Device device() const { return device_; }

  void add(const Tensor& predictions, std::span<const Place> places) {
    if (!sum_.defined()) {
      const DType widest = widened(predictions.dtype());
      const TensorOptions kind{options_.sum_dtype == f16 ? f16 : widest, device_};
      shape_[1] = predictions.size(1);
      sum_ = zeros(shape_, kind);
      total_ = zeros({shape_[2], shape_[3], shape_[4]}, kind);
      weights_ = weights_of(options_, kind);
    }
    check(predictions.size(1) == shape_[1], kOp, "the number of channels of the predictions must not change: expected ",
          shape_[1], ", got ", describe(predictions));
    for (size_t i = 0; i < places.size(); ++i) {
      const Tensor sum = part(select(sum_, 0, places[i][0]), places[i], options_.window);
      const Tensor prediction = select(predictions, 0, static_cast<int64_t>(i));
      // The CPU adds one channel at a time, which needs less memory. A GPU adds all channels at once, which needs fewer
      // kernels.
      const int64_t step = device_.is_cpu() ? 1 : shape_[1];
      for (int64_t c = 0; c < shape_[1]; c += step) add_weighted(sum.narrow(0, c, step), prediction.narrow(0, c, step));
      if (places[i][0] == 0) part(total_, places[i], options_.window).add_(weights_);
    }
  }
  /// Divides the sum by the total weight in place, and returns the quotient.
  Tensor mean() {
    for (const Tensor& sample : split(sum_, 1))
      for (const Tensor& channel : split(sample, 1, 1))
        channel.copy_(channel / total_);  // one channel at a time, which needs little memory
    return sum_;
  }

 private:
  void add_weighted(const Tensor& sum, const Tensor& prediction) const {
    if (sum.dtype() == f16)  // only the new sum is rounded, not the product
      sum.copy_(sum.to(f32) + prediction.to(f32) * weights_.to(f32));
    else
      sum.add_(prediction.to(sum.dtype()) * weights_);
  }

  const SlidingWindowOptions& options_;
  Shape shape_;
  Device device_;
  Tensor sum_, total_, weights_;
};

/// Runs the model on all windows of a volume that is at least as large as the window. Returns an undefined tensor if
/// `progress` cancels. On a GPU, the predictions of a batch are added to the sums after the next batch has been queued.
/// If the sums are on the CPU, the predictions are copied from the GPU on a separate stream, so that the copy does not
/// wait for the next batch.
Tensor inference(const Tensor& volume, const WindowModel& model, const SlidingWindowOptions& o) {
  const Device device = o.device.value_or(volume.device());
  const std::vector<Place> all = places(volume, o);
  Sums sums(volume, o);
  std::optional<cuda::Stream> stream;
  std::optional<cuda::Event> computed;
  if (device.is_cuda() && sums.device().is_cpu()) {
    stream.emplace(device.index);
    computed.emplace(device.index);
  }
  struct Batch {
    std::span<const Place> places;
    Tensor predictions;
  } waiting;  // computed or queued, but not yet added
  /// Adds the waiting batch. Returns false to cancel.
  const auto add_waiting = [&] {
    {
      std::optional<cuda::StreamGuard> guard;
      if (stream) guard.emplace(*stream);
      waiting.predictions = waiting.predictions.to(sums.device());
    }
    sums.add(waiting.predictions, waiting.places);
    waiting.predictions = {};
    const int64_t done = waiting.places.data() + waiting.places.size() - all.data();
    return !o.progress || o.progress(done, static_cast<int64_t>(all.size()));
  };
  const auto batch_size = static_cast<size_t>(o.batch_size);
  for (size_t begin = 0; begin < all.size(); begin += batch_size) {
    Batch next{std::span(all).subspan(begin, std::min(batch_size, all.size() - begin)), {}};
    Tensors windows;
    for (const Place& place : next.places) windows.push_back(part(select(volume, 0, place[0]), place, o.window));
    next.predictions = predict(stack(windows).to(device), model, o);
    if (waiting.predictions.defined() && !add_waiting()) return {};
    waiting = std::move(next);
    if (device.is_cpu() && !add_waiting()) return {};
    if (!stream) continue;
    computed->record();
    const cuda::StreamGuard guard(*stream);
    computed->wait();
  }
  if (waiting.predictions.defined() && !add_waiting()) return {};
  return sums.mean();
}

void validate(const Tensor& volume, const WindowModel& model, const SlidingWindowOptions& o) {
  check_floating(kOp, volume, "volume");
  check(volume.dim() == 5 && volume.numel() > 0, kOp, "volume must be (N, C, D, H, W) and not empty, got ",
        describe(volume));
  check(static_cast<bool>(model), kOp, "the model is empty");
  check_extent(kOp, "window", o.window.values, 1);
  check(o.overlap >= 0 && o.overlap < 1, kOp, "overlap must lie in [0, 1), got ", o.overlap);
  check(o.sigma >= 0 && std::isfinite(o.sigma), kOp, "sigma must be finite and not negative, got ", o.sigma);
  check(o.sum_dtype == f32 || o.sum_dtype == f16, kOp, "sum_dtype must be f32 or f16, got ", o.sum_dtype);
  check(o.batch_size > 0, kOp, "batch_size must be positive, got ", o.batch_size);
  bool seen[3] = {};
  for (const int64_t axis : o.mirror_axes)
    check(!std::exchange(seen[normalize_axis(axis, 3, kOp)], true), kOp,
          "mirror_axes must not contain an axis twice, got ", o.mirror_axes);
}

}  // namespace

Tensor sliding_window_inference(const Tensor& volume, const WindowModel& model, const SlidingWindowOptions& options) {
  validate(volume, model, options);
  const NoGradGuard no_grad;
  std::vector<int64_t> amounts;
  for (int i = 2; i >= 0; --i) {
    const int64_t missing = std::max<int64_t>(0, options.window[i] - volume.size(i + 2));
    amounts.insert(amounts.end(), {missing / 2, missing - missing / 2});
  }
  const bool padded = std::ranges::any_of(amounts, [](int64_t n) { return n > 0; });
  const Tensor result = inference(padded ? pad(volume, amounts) : volume, model, options);
  if (!padded || !result.defined()) return result;
  for (int64_t& amount : amounts) amount = -amount;
  return pad(result, amounts);
}

}  // namespace voxgrad::nn
