// Implements nnU-Net's data augmentation.
#include "nn/data/augment.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/detail/philox.h"
#include "ops/create.h"
#include "ops/detail/checks.h"
#include "ops/detail/halves.h"
#include "ops/detail/volume.h"
#include "ops/elementwise.h"
#include "ops/interpolate.h"
#include "ops/linalg.h"
#include "ops/pad.h"
#include "ops/reduce.h"

namespace voxgrad::data {
namespace {

constexpr const char* kOp = "data::Augmentation";

// ---- random parameters

/// Draws a number from [low, high).
double uniform(Generator& random, double low, double high) {
  const GeneratorState state = random.reserve(1, f64);
  return low + (high - low) * philox_uniform<double>(state.seed, state.offset, 0);
}

double uniform(Generator& random, const AugmentStep& step) { return uniform(random, step.low, step.high); }

/// Draws a number from the range of the step. Numbers below 1 and numbers above 1 are equally likely.
double around_one(Generator& random, const AugmentStep& step) {
  const bool below = random.bernoulli(0.5) ? step.low < 1 : step.high <= 1;
  return below ? uniform(random, step.low, std::min(step.high, 1.0))
               : uniform(random, std::max(step.low, 1.0), step.high);
}

AugmentParams draw_sample(const AugmentOptions& o, int64_t channels, Generator& random) {
  AugmentParams params;
  const GeneratorState own = random.reserve(1, f64);
  params.seed = derived_seed(own.seed, static_cast<int64_t>(own.offset), 0);
  params.channels.resize(static_cast<size_t>(channels));
  if (random.bernoulli(o.rotation.p))
    for (size_t i = 0; i < 3; ++i) params.rotation[i] = o.rotation_axes[i] ? uniform(random, o.rotation) : 0;
  if (random.bernoulli(o.scaling.p)) {
    const double scale = uniform(random, o.scaling);
    for (size_t i = 0; i < 3; ++i) params.scaling[i] = o.resampled_axes[i] ? scale : 1;
  }
  if (random.bernoulli(o.elastic.p)) params.elastic = uniform(random, o.elastic);
  if (random.bernoulli(o.noise.p)) params.noise = uniform(random, o.noise);
  /// Calls f(channel) for each channel to which the step applies.
  const auto for_channels = [&](const AugmentStep& step, const auto& f) {
    if (!random.bernoulli(step.p)) return;
    for (AugmentParams::Channel& channel : params.channels)
      if (random.bernoulli(step.channel_p)) f(channel);
  };
  using Channel = AugmentParams::Channel;
  for_channels(o.blur, [&](Channel& c) {
    for (double& sigma : c.blur) sigma = uniform(random, o.blur);
  });
  for_channels(o.brightness, [&](Channel& c) { c.brightness = around_one(random, o.brightness); });
  for_channels(o.contrast, [&](Channel& c) { c.contrast = around_one(random, o.contrast); });
  for_channels(o.low_resolution, [&](Channel& c) { c.low_resolution = uniform(random, o.low_resolution); });
  for_channels(o.gamma_inverted, [&](Channel& c) { c.gamma_inverted = around_one(random, o.gamma_inverted); });
  for_channels(o.gamma, [&](Channel& c) { c.gamma = around_one(random, o.gamma); });
  for (size_t i = 0; i < 3; ++i) params.mirror[i] = o.mirror_axes[i] && random.bernoulli(o.mirror_p);
  return params;
}

// ---- resampling

/// Returns the first index, along spatial axis i, of the centered part of x with the spatial size `size`.
int64_t center_start(const Tensor& x, const Triple& size, int i) { return (x.size(i + 2) - size[i]) / 2; }

/// Returns the centered part of x (N, C, D, H, W) with the spatial size `size`.
Tensor cropped(const Tensor& x, const Triple& size) {
  return part_of(x, {center_start(x, size, 0), center_start(x, size, 1), center_start(x, size, 2)}, size.values);
}

/// Returns the matrix theta of affine_grid for a sample. As affine_grid requires, the rows and columns of theta are in
/// the order W, H, D, and coordinates range from -1 to 1.
std::array<double, 12> theta_of(const AugmentParams& params, const Tensor& x, const Triple& size) {
  // The matrix m rotates an offset from the center of the output volume about the axes W, H and D. The code below
  // scales the rotated offset to an offset from the center of the input volume.
  double m[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}};
  for (const int axis : {2, 1, 0}) {
    const double angle = params.rotation[static_cast<size_t>(axis)] * std::numbers::pi / 180;
    for (int j = 0; j < 3; ++j) {
      double &a = m[(axis + 1) % 3][j], &b = m[(axis + 2) % 3][j];
      const double old = a;
      a = std::cos(angle) * old + std::sin(angle) * b;
      b = std::cos(angle) * b - std::sin(angle) * old;
    }
  }
  std::array<double, 12> theta{};
  for (int to = 0; to < 3; ++to) {
    double* const row = theta.data() + 4 * (2 - to);
    const auto length = static_cast<double>(x.size(to + 2)), scale = params.scaling[static_cast<size_t>(to)];
    for (int from = 0; from < 3; ++from) row[2 - from] = scale * m[to][from] * static_cast<double>(size[from]) / length;
    row[3] = static_cast<double>(2 * center_start(x, size, to) + size[to]) / length - 1;
  }
  return theta;
}

/// Returns a tensor (size, points) with the cubic B-spline weight of each control point at each voxel of an axis. The
/// control points are `spacing` voxels apart.
Tensor spline_weights(int64_t size, double spacing, const TensorOptions& kind) {
  const int64_t points = static_cast<int64_t>(static_cast<double>(size - 1) / spacing) + 4;
  std::vector<double> weights(static_cast<size_t>(size * points));
  for (int64_t i = 0; i < size; ++i) {
    const double at = static_cast<double>(i) / spacing, first = std::floor(at), t = at - first, u = 1 - t;
    double* const w = weights.data() + i * points + static_cast<int64_t>(first);
    w[0] = u * u * u / 6;
    w[1] = 2.0 / 3 - t * t * (2 - t) / 2;
    w[2] = 2.0 / 3 - u * u * (2 - u) / 2;
    w[3] = t * t * t / 6;
  }
  return from_span<double>(weights, {size, points}).to(kind.device, kind.dtype);
}

/// Returns a smooth random field (3, D, H, W). The displacements at its control points have standard deviation 1.
Tensor displacements(const Triple& size, double spacing, uint64_t seed, const TensorOptions& kind) {
  std::array<Tensor, 3> weights;
  for (int i = 0; i < 3; ++i) weights[static_cast<size_t>(i)] = spline_weights(size[i], spacing, kind);
  const auto& [d, h, w] = weights;
  Generator random(seed);
  const Tensor points = randn({3, d.size(1), h.size(1), w.size(1)}, kind, &random);
  const Tensor planes = matmul(h, matmul(points, transpose(w, 0, 1)));
  return reshape(matmul(d, flatten(planes, 2)), {3, size[0], size[1], size[2]});
}

// ---- intensity steps of a channel (D, H, W)

/// Applies a Gaussian blur along `axis`, with reflected edges. The kernel has the same size as nnU-Net's.
Tensor blurred(const Tensor& x, int64_t axis, double sigma) {
  const int64_t size = x.size(axis), radius = std::min(std::lround(3 * sigma - 0.25), size - 1);
  if (radius <= 0) return x;
  const auto weight = [=](int64_t k) { return std::exp(-static_cast<double>(k * k) / (2 * sigma * sigma)); };
  double sum = 1;
  for (int64_t k = 1; k <= radius; ++k) sum += 2 * weight(k);
  std::vector<int64_t> amounts(6, 0);
  std::fill_n(amounts.begin() + 2 * (2 - axis), 2, radius);
  const Tensor padded = squeeze(pad(unsqueeze(x, 0), amounts, PadMode::reflect), 0), y = x / sum;
  for (int64_t k = 1; k <= radius; ++k)
    y.add_(narrow(padded, axis, radius - k, size) + narrow(padded, axis, radius + k, size), weight(k) / sum);
  return y;
}

Tensor with_contrast(const Tensor& x, double factor) {
  const Tensor center = mean(x);
  return minimum(maximum(affine(x - center, factor, 0) + center, amin(x)), amax(x));
}

Tensor at_low_resolution(const Tensor& x, double scale, const std::array<bool, 3>& axes) {
  Shape size = x.shape();
  for (int64_t i = 0; i < 3; ++i)
    if (axes[static_cast<size_t>(i)])
      size[i] = std::max<int64_t>(1, std::llrint(static_cast<double>(x.size(i)) * scale));
  const Tensor volume = reshape(x, {1, 1, x.size(0), x.size(1), x.size(2)});
  const Tensor low = interpolate(volume, {.size = size, .mode = InterpolateMode::nearest_exact});
  return reshape(interpolate(low, {.size = x.shape(), .mode = InterpolateMode::trilinear}), x.shape());
}

Tensor with_gamma(const Tensor& x, double exponent) {
  constexpr double kMinDivisor = 1e-7;  // lower bound of divisors, which would be 0 for a constant channel
  const Tensor low = amin(x), range = amax(x) - low;
  const Tensor y = pow((x - low) / clamp_min(range, kMinDivisor), exponent) * range + low;
  const Tensor scale = std(x, {}, 0) / clamp_min(std(y, {}, 0), kMinDivisor);
  return (y - mean(y)) * scale + mean(x);
}

/// Applies the intensity steps to a channel. Returns x itself if no step applies.
Tensor change_channel(const Tensor& x, const AugmentParams::Channel& c, const std::array<bool, 3>& resampled_axes) {
  Tensor y = x;
  for (int64_t axis = 0; axis < 3; ++axis) y = blurred(y, axis, c.blur[static_cast<size_t>(axis)]);
  if (c.brightness != 1) y = affine(y, c.brightness, 0);
  if (c.contrast != 1) y = with_contrast(y, c.contrast);
  if (c.low_resolution != 1) y = at_low_resolution(y, c.low_resolution, resampled_axes);
  if (c.gamma_inverted != 1) y = neg(with_gamma(neg(y), c.gamma_inverted));
  if (c.gamma != 1) y = with_gamma(y, c.gamma);
  return y;
}

// ---- a batch

/// The tensors of a batch. The results are filled sample by sample.
struct Batch {
  Tensor x;         // input (N, C, D, H, W)
  Tensor labels;    // (N, 1, D, H, W) or undefined
  Tensor y;         // result of x
  Tensor y_labels;  // result of labels
  Triple size;      // D, H, W of the results
};

/// Returns whether the parameters require resampling.
bool needs_resampling(const AugmentParams& p) {
  return p.elastic != 0 || p.rotation != std::array<double, 3>{} || p.scaling != std::array<double, 3>{1, 1, 1};
}

/// Fills the results with the central part of the inputs. If the parameters of a sample contain a rotation, a scaling
/// or an elastic deformation, resamples this sample.
void resample(const Batch& b, const std::vector<AugmentParams>& params, const AugmentOptions& o) {
  std::vector<double> maps;
  for (const AugmentParams& p : params)
    if (needs_resampling(p)) std::ranges::copy(theta_of(p, b.x, b.size), std::back_inserter(maps));
  const TensorOptions kind{b.y.dtype(), b.y.device()};
  const auto count = static_cast<int64_t>(maps.size() / 12);
  // One copy transfers the matrices of all samples to the device.
  const Tensor thetas = from_span<double>(maps, {count, 3, 4}).to(kind.device, kind.dtype);
  for (int64_t n = 0, moved = 0; n < b.x.size(0); ++n) {
    const auto part = [n](const Tensor& t) { return narrow(t, 0, n, 1); };
    const AugmentParams& p = params[static_cast<size_t>(n)];
    if (!needs_resampling(p)) {
      part(b.y).copy_(cropped(part(b.x), b.size));
      if (b.labels.defined()) part(b.y_labels).copy_(cropped(part(b.labels), b.size));
      continue;
    }
    const Tensor theta = narrow(thetas, 0, moved++, 1);
    const Tensor grid = affine_grid(theta, {1, 1, b.size[0], b.size[1], b.size[2]});
    if (p.elastic != 0) {
      const Tensor field = displacements(b.size, o.elastic_spacing, derived_seed(p.seed, 0, 0), kind);
      for (int i = 0; i < 3; ++i)
        if (o.resampled_axes[static_cast<size_t>(i)])
          grid.add_(unsqueeze(select(field, 0, i), 3) * select(theta, 2, 2 - i),
                    2 * p.elastic / static_cast<double>(b.size[i]));
    }
    part(b.y).copy_(grid_sample(part(b.x), grid, {.padding_mode = o.padding_mode}));
    if (b.labels.defined()) part(b.y_labels).copy_(grid_sample(part(b.labels).to(kind.dtype), grid, {.nearest = true}));
  }
}

/// Applies noise and the intensity steps to a sample (C, D, H, W), in place.
void apply_intensity_steps(const Tensor& volume, const AugmentParams& p, const AugmentOptions& o) {
  if (p.noise != 0) {
    Generator random(p.seed);
    const Shape shape{volume.size(1), volume.size(2), volume.size(3)};
    volume.add_(randn(shape, volume.options(), &random), p.noise);
  }
  for (int64_t c = 0; c < volume.size(0); ++c) {
    const Tensor channel = select(volume, 0, c);
    const Tensor result = change_channel(channel, p.channels[static_cast<size_t>(c)], o.resampled_axes);
    if (!result.is_same(channel)) channel.copy_(result);
  }
}

/// Mirrors a sample (C, D, H, W) in place.
void mirror(const Tensor& volume, const AugmentParams& p) {
  Dims axes;
  for (int64_t i = 0; i < 3; ++i)
    if (p.mirror[static_cast<size_t>(i)]) axes.push_back(i + 1);
  if (!axes.empty()) volume.copy_(flip(volume, axes));
}

// ---- checks of the arguments

/// The limits within which the range [low, high] of a step must lie.
struct StepLimits {
  const char* name;
  AugmentStep AugmentOptions::*step;
  double min;
  double max;
};
constexpr double kMaxValue = 1e6;
constexpr StepLimits kLimits[] = {
    {"rotation", &AugmentOptions::rotation, -360, 360},
    {"scaling", &AugmentOptions::scaling, 1e-3, 1e3},
    {"elastic", &AugmentOptions::elastic, 0, kMaxValue},
    {"noise", &AugmentOptions::noise, 0, kMaxValue},
    {"blur", &AugmentOptions::blur, 0, 1e3},
    {"brightness", &AugmentOptions::brightness, 0, kMaxValue},
    {"contrast", &AugmentOptions::contrast, 0, kMaxValue},
    {"low_resolution", &AugmentOptions::low_resolution, 1e-3, 1},
    {"gamma_inverted", &AugmentOptions::gamma_inverted, 1e-3, 1e3},
    {"gamma", &AugmentOptions::gamma, 1e-3, 1e3},
};

void check_input(const Tensor& x) {
  check_floating(kOp, x);
  check(x.dim() == 5, kOp, "input must be (N, C, D, H, W), got ", describe(x));
}

void check_batch(const Sample& batch, const std::vector<AugmentParams>& params, const Triple& size) {
  const Tensor &x = batch.input, &t = batch.target;
  for (const AugmentParams& p : params)
    check(static_cast<int64_t>(p.channels.size()) == x.size(1), kOp, "the number of channels in params must be ",
          x.size(1), ", got ", p.channels.size(), "; the input is ", describe(x));
  check(static_cast<int64_t>(params.size()) == x.size(0), kOp, "the number of samples in params must be ", x.size(0),
        ", got ", params.size(), "; the input is ", describe(x));
  for (int i = 0; i < 3; ++i)
    check(size[i] > 0 && size[i] <= x.size(i + 2), kOp, "size ", size, " must lie within the input, ", describe(x));
  if (!t.defined()) return;
  Shape shape = x.shape(), flat = shape;
  shape[1] = 1;
  flat.erase(1);
  check(t.shape() == shape || t.shape() == flat, kOp, "the target of ", describe(x), " must be ", shape, " or ", flat,
        ", got ", describe(t));
  check(!is_floating(t.dtype()), kOp, "the target must have an integer dtype, got ", describe(t));
  check(t.device() == x.device(), kOp, "tensors are on different devices: ", describe(x), " and ", describe(t));
}

}  // namespace

Augmentation::Augmentation(const AugmentOptions& o) : options_(o) {
  for (const auto& [name, step, min, max] : kLimits) {
    const auto [p, low, high, channel_p] = o.*step;
    check(p >= 0 && p <= 1 && channel_p >= 0 && channel_p <= 1, kOp, name, ": p and channel_p must lie in [0, 1], got ",
          p, " and ", channel_p);
    check(low >= min && low <= high && high <= max, kOp, name, " must be a range within [", min, ", ", max, "], got [",
          low, ", ", high, "]");
  }
  check(o.mirror_p >= 0 && o.mirror_p <= 1, kOp, "mirror_p must lie in [0, 1], got ", o.mirror_p);
  check(o.elastic_spacing >= 1 && o.elastic_spacing <= kMaxValue, kOp, "elastic_spacing must lie in [1, ", kMaxValue,
        "], got ", o.elastic_spacing);
}

std::vector<AugmentParams> Augmentation::draw(int64_t samples, int64_t channels, Generator& random) const {
  check(samples >= 0 && channels >= 0, kOp, "samples and channels must not be negative, got ", samples, " and ",
        channels);
  std::vector<AugmentParams> params;
  for (int64_t n = 0; n < samples; ++n) params.push_back(draw_sample(options_, channels, random));
  return params;
}

Sample Augmentation::apply(const Sample& batch, const std::vector<AugmentParams>& params) const {
  const Tensor &x = batch.input, &t = batch.target;
  check_input(x);
  const Triple size = options_.size.value_or(spatial_size(x));
  check_batch(batch, params, size);
  const NoGradGuard no_grad;
  const autocast disabled(bf16, false);
  const DType dtype = widened(x.dtype());
  Batch b{x.to(dtype), t, empty_volume(x, x.size(1), size, dtype), {}, size};
  if (t.defined()) {
    b.labels = t.dim() == 4 ? unsqueeze(t, 1) : t;
    b.y_labels = empty_volume(b.labels, 1, size, t.dtype());
  }
  resample(b, params, options_);
  for (int64_t n = 0; n < x.size(0); ++n) {
    const AugmentParams& p = params[static_cast<size_t>(n)];
    apply_intensity_steps(select(b.y, 0, n), p, options_);
    mirror(select(b.y, 0, n), p);
    if (t.defined()) mirror(select(b.y_labels, 0, n), p);
  }
  return {b.y.to(x.dtype()), t.defined() && t.dim() == 4 ? squeeze(b.y_labels, 1) : b.y_labels};
}

Sample Augmentation::operator()(const Sample& batch, Generator& random) const {
  check_input(batch.input);
  return apply(batch, draw(batch.input.size(0), batch.input.size(1), random));
}

}  // namespace voxgrad::data
