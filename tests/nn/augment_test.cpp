// Tests of augmentation: each step against a formula in double precision, labels, dtypes and memory formats.
#include "nn/data/augment.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <set>

#include "core/autocast.h"
#include "core/detail/philox.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using data::Augmentation;
using data::AugmentOptions;
using data::AugmentParams;
using data::Sample;
using Channel = AugmentParams::Channel;
using Point = std::array<double, 3>;

/// One channel, or one label map, in double precision.
struct Volume {
  Triple size;
  std::vector<double> values;

  explicit Volume(const Triple& s) : size(s), values(static_cast<size_t>(s[0] * s[1] * s[2])) {}
  explicit Volume(const Tensor& x) : size(x.size(0), x.size(1), x.size(2)), values(x.to_vector()) {}
  double& at(int64_t d, int64_t h, int64_t w) { return values[static_cast<size_t>((d * size[1] + h) * size[2] + w)]; }
  double read(int64_t d, int64_t h, int64_t w) const {
    const bool inside = d >= 0 && d < size[0] && h >= 0 && h < size[1] && w >= 0 && w < size[2];
    return inside ? values[static_cast<size_t>((d * size[1] + h) * size[2] + w)] : 0;
  }
  template <class F>
  static Volume of(const Triple& size, const F& f) {
    Volume v(size);
    for (int64_t d = 0; d < size[0]; ++d)
      for (int64_t h = 0; h < size[1]; ++h)
        for (int64_t w = 0; w < size[2]; ++w) v.at(d, h, w) = f(d, h, w);
    return v;
  }
};

void expect_near(const Tensor& found, const Volume& wanted, double tolerance, const char* what) {
  ASSERT_EQ(found.shape(), Shape(wanted.size.values)) << what;
  const std::vector<double> values = found.to_vector();
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], wanted.values[i], tolerance) << what << ' ' << i;
}

void expect_same(const Tensor& found, const Tensor& wanted) {
  ASSERT_EQ(found.shape(), wanted.shape());
  EXPECT_EQ(found.dtype(), wanted.dtype());
  EXPECT_EQ(found.to_vector(), wanted.to_vector());
}

constexpr Triple kSize{7, 10, 12};

Tensor image(int64_t samples, int64_t channels, DType dtype = f64, const Triple& size = kSize) {
  Generator random(7);
  return rand({samples, channels, size[0], size[1], size[2]}, {.dtype = f64}, &random).to(dtype);
}
/// Returns random label maps of the classes 0, 3, 5 and 200.
Tensor classes(int64_t samples, DType dtype, const Triple& size = kSize) {
  const Tensor values = tensor({0, 3, 5, 200}, {.dtype = i64});
  Generator random(8);
  const Tensor index = affine(rand({samples * size[0] * size[1] * size[2]}, {}, &random), 4, 0).to(i64);
  return reshape(gather(values, 0, index), {samples, 1, size[0], size[1], size[2]}).to(dtype);
}

AugmentParams params_of(int64_t channels) {
  AugmentParams params;
  params.channels.resize(static_cast<size_t>(channels));
  return params;
}
/// Returns parameters that enable every step.
AugmentParams busy_params(int64_t channels) {
  AugmentParams params = params_of(channels);
  params = {.rotation = {10, -20, 30},
            .scaling = {0.8, 1.1, 1.2},
            .elastic = 1,
            .noise = 0.1,
            .mirror = {true, false, true},
            .seed = 4,
            .channels = params.channels};
  for (Channel& c : params.channels)
    c = {.blur = {0.6, 0.8, 1},
         .brightness = 0.9,
         .contrast = 1.1,
         .low_resolution = 0.7,
         .gamma_inverted = 0.8,
         .gamma = 1.3};
  return params;
}

TEST(Augmentation, IdentityParametersKeepTheBits) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, f16, bf16})
      for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        const Tensor x = image(2, 3, dtype).to(device).contiguous(format), t = classes(2, i32).to(device);
        const Sample y = Augmentation().apply({x, t}, {params_of(3), params_of(3)});
        expect_same(y.input, x);
        expect_same(y.target, t);
        EXPECT_EQ(y.input.suggest_memory_format(), format);
        EXPECT_NE(y.input.raw_data(), x.raw_data());
        const Sample part = Augmentation({.size = Triple(4, 10, 7)}).apply({x, t}, {params_of(3), params_of(3)});
        expect_same(part.input, narrow(narrow(x, 2, 1, 4), 4, 2, 7));
        expect_same(part.target, narrow(narrow(t, 2, 1, 4), 4, 2, 7));
      }
}

// ---- resampling

Point rotated(Point p, int axis, double degrees) {
  const double angle = -degrees * std::numbers::pi / 180;
  const size_t a = static_cast<size_t>(axis + 1) % 3, b = static_cast<size_t>(axis + 2) % 3;
  const double x = p[a], y = p[b];
  p[a] = std::cos(angle) * x - std::sin(angle) * y;
  p[b] = std::sin(angle) * x + std::cos(angle) * y;
  return p;
}

/// Returns the position in the input at which `voxel` of the result is sampled. `from` is the size of the input and
/// `size` is the size of the result.
Point source(const AugmentParams& params, const Triple& from, const Triple& size, const Point& voxel,
             const Point& displacement = {}) {
  Point p;
  for (int i = 0; i < 3; ++i) {
    const auto j = static_cast<size_t>(i);
    p[j] = voxel[j] + displacement[j] - static_cast<double>(size[i] - 1) / 2;
  }
  for (int axis = 2; axis >= 0; --axis) p = rotated(p, axis, params.rotation[static_cast<size_t>(axis)]);
  for (int i = 0; i < 3; ++i) {
    const auto j = static_cast<size_t>(i);
    p[j] =
        p[j] * params.scaling[j] + static_cast<double>((from[i] - size[i]) / 2) + static_cast<double>(size[i] - 1) / 2;
  }
  return p;
}

double linear_at(const Volume& x, const Point& p) {
  const double d = std::floor(p[0]), h = std::floor(p[1]), w = std::floor(p[2]);
  double sum = 0;
  for (int corner = 0; corner < 8; ++corner) {
    const Point c{d + corner / 4, h + corner / 2 % 2, w + corner % 2};
    const double weight = (1 - std::fabs(p[0] - c[0])) * (1 - std::fabs(p[1] - c[1])) * (1 - std::fabs(p[2] - c[2]));
    sum += weight * x.read(std::lround(c[0]), std::lround(c[1]), std::lround(c[2]));
  }
  return sum;
}
double nearest_at(const Volume& x, const Point& p) {
  return x.read(std::lround(p[0]), std::lround(p[1]), std::lround(p[2]));
}

Point index(int64_t d, int64_t h, int64_t w) {
  return {static_cast<double>(d), static_cast<double>(h), static_cast<double>(w)};
}

TEST(Augmentation, RotationAndScalingMatchFormulas) {
  AugmentParams still = params_of(2), moved = params_of(2);
  moved.rotation = {12, -25, 31};
  moved.scaling = {0.8, 1.3, 1.1};
  for (const Device device : devices())
    for (const auto& [dtype, tolerance] : {std::pair{f64, 1e-12}, std::pair{f32, 1e-4}})
      for (const Triple& size : {kSize, Triple(4, 9, 6)}) {
        const Tensor x = image(3, 2, dtype), t = classes(3, u8);
        const Sample y = Augmentation({.size = size}).apply({x.to(device), t.to(device)}, {moved, still, moved});
        for (const int64_t n : {0, 2}) {
          for (int64_t c = 0; c < 2; ++c) {
            const Volume from(x[n][c]);
            expect_near(
                y.input[n][c],
                Volume::of(size,
                           [&](auto... voxel) { return linear_at(from, source(moved, kSize, size, index(voxel...))); }),
                tolerance, "image");
          }
          const Volume from(t[n][0]);
          expect_near(
              y.target[n][0],
              Volume::of(size,
                         [&](auto... voxel) { return nearest_at(from, source(moved, kSize, size, index(voxel...))); }),
              0, "labels");
        }
        expect_same(y.input[1], Augmentation({.size = size}).apply({x}, {still, still, still}).input[1]);
      }
}

TEST(Augmentation, PadsWithZerosOrTheBorder) {
  AugmentParams params = params_of(1);
  params.scaling = {2, 2, 2};
  const Tensor x = ones({1, 1, 4, 4, 4}), t = ones({1, 4, 4, 4}, {.dtype = i64});
  const Sample zeros = Augmentation().apply({x, t}, {params});
  EXPECT_EQ(zeros.input.at({0, 0, 0, 0, 0}), 0);
  const Sample border = Augmentation({.padding_mode = GridSampleOptions::Padding::border}).apply({x, t}, {params});
  EXPECT_EQ(border.input.at({0, 0, 0, 0, 0}), 1);
  EXPECT_EQ(border.target.at({0, 0, 0, 0}), 0);
}

/// The cubic B-spline over [-2, 2].
double spline(double x) {
  const double a = std::fabs(x);
  if (a >= 2) return 0;
  return a >= 1 ? std::pow(2 - a, 3) / 6 : (4 - 6 * a * a + 3 * a * a * a) / 6;
}

TEST(Augmentation, ElasticDeformationMatchesFormula) {
  AugmentParams params = params_of(1);
  params.rotation = {0, 15, 0};
  params.elastic = 1.5;
  params.seed = 99;
  const AugmentOptions options{.size = Triple(6, 9, 11), .resampled_axes = {true, true, false}, .elastic_spacing = 4};
  Generator random(derived_seed(99, 0, 0));
  const Tensor normals = randn({3, 5, 6, 6}, {.dtype = f64}, &random);
  const auto displacement = [&](size_t axis, const Point& voxel) {
    if (axis == 2) return 0.0;
    const std::vector<double> points = normals[static_cast<int64_t>(axis)].to_vector();
    double sum = 0;
    for (int64_t i = 0; i < 5 * 6 * 6; ++i)  // the first control point lies one spacing before the first voxel
      sum += points[static_cast<size_t>(i)] * spline(voxel[0] / 4 + 1 - static_cast<double>(i / 36)) *
             spline(voxel[1] / 4 + 1 - static_cast<double>(i / 6 % 6)) *
             spline(voxel[2] / 4 + 1 - static_cast<double>(i % 6));
    return 1.5 * sum;
  };
  for (const Device device : devices()) {
    const Tensor x = image(1, 1), t = classes(1, i64);
    const Sample y = Augmentation(options).apply({x.to(device), t.to(device)}, {params});
    const auto at = [&](int64_t d, int64_t h, int64_t w) {
      const Point voxel = index(d, h, w);
      return source(params, kSize, *options.size, voxel, {displacement(0, voxel), displacement(1, voxel), 0});
    };
    const Volume from(x[0][0]), labels(t[0][0]);
    expect_near(y.input[0][0], Volume::of(*options.size, [&](auto... v) { return linear_at(from, at(v...)); }), 1e-9,
                "image");
    expect_near(y.target[0][0], Volume::of(*options.size, [&](auto... v) { return nearest_at(labels, at(v...)); }), 0,
                "labels");
  }
}

// ---- intensities

Volume blurred(const Volume& x, int axis, double sigma, int64_t reach) {
  const int64_t size = x.size[axis];
  return Volume::of(x.size, [&](int64_t d, int64_t h, int64_t w) {
    double sum = 0, weights = 0;
    for (int64_t k = -reach; k <= reach; ++k) {
      std::array<int64_t, 3> at{d, h, w};
      int64_t& i = at[static_cast<size_t>(axis)];
      i = std::abs(i + k);
      if (i >= size) i = 2 * (size - 1) - i;
      const double weight = std::exp(-static_cast<double>(k * k) / (2 * sigma * sigma));
      sum += weight * x.read(at[0], at[1], at[2]);
      weights += weight;
    }
    return sum / weights;
  });
}

double mean_of(const Volume& x) {
  double sum = 0;
  for (const double v : x.values) sum += v;
  return sum / static_cast<double>(x.values.size());
}
double deviation_of(const Volume& x) {
  double sum = 0;
  const double mean = mean_of(x);
  for (const double v : x.values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(x.values.size()));
}
template <class F>
Volume mapped(Volume x, const F& f) {
  for (double& v : x.values) v = f(v);
  return x;
}

Volume with_contrast(const Volume& x, double factor) {
  const double low = std::ranges::min(x.values), high = std::ranges::max(x.values);
  return mapped(x, [&, mean = mean_of(x)](double v) { return std::clamp((v - mean) * factor + mean, low, high); });
}

Volume with_gamma(const Volume& x, double gamma) {
  const double low = std::ranges::min(x.values), high = std::ranges::max(x.values);
  const Volume y = mapped(x, [&](double v) { return std::pow((v - low) / (high - low), gamma) * (high - low) + low; });
  return mapped(y, [&, a = deviation_of(x) / deviation_of(y), from = mean_of(y), to = mean_of(x)](double v) {
    return (v - from) * a + to;
  });
}

Volume at_low_resolution(const Volume& x, const Triple& low) {
  const auto scale = [&](int i) { return static_cast<double>(x.size[i]) / static_cast<double>(low[i]); };
  const auto nearest = [&](int64_t i, int axis) {
    return static_cast<int64_t>(std::floor((static_cast<double>(i) + 0.5) * scale(axis)));
  };
  const Volume small = Volume::of(
      low, [&](int64_t d, int64_t h, int64_t w) { return x.read(nearest(d, 0), nearest(h, 1), nearest(w, 2)); });
  return Volume::of(x.size, [&](auto... voxel) {
    Point p = index(voxel...);
    for (int i = 0; i < 3; ++i) {
      double& at = p[static_cast<size_t>(i)];
      at = std::clamp((at + 0.5) / scale(i) - 0.5, 0.0, static_cast<double>(low[i] - 1));
    }
    return linear_at(small, p);
  });
}

TEST(Augmentation, IntensityStepsMatchFormulas) {
  const auto negated = [](const Volume& x) { return mapped(x, [](double v) { return -v; }); };
  struct Case {
    const char* name;
    Channel channel;
    std::function<Volume(const Volume&)> formula;
  };
  const Case cases[] = {
      {"blur",
       {.blur = {0.5, 0.7, 1}},
       [](const Volume& x) { return blurred(blurred(blurred(x, 0, 0.5, 1), 1, 0.7, 2), 2, 1, 3); }},
      {"wide blur", {.blur = {4, 0, 0}}, [](const Volume& x) { return blurred(x, 0, 4, 6); }},
      {"brightness", {.brightness = 0.8}, [](const Volume& x) { return mapped(x, [](double v) { return 0.8 * v; }); }},
      {"contrast", {.contrast = 1.25}, [](const Volume& x) { return with_contrast(x, 1.25); }},
      {"low resolution",
       {.low_resolution = 0.65},
       [](const Volume& x) {
         return at_low_resolution(x, {5, 6, 8});
       }},
      {"gamma", {.gamma = 1.4}, [](const Volume& x) { return with_gamma(x, 1.4); }},
      {"gamma, inverted",
       {.gamma_inverted = 0.7},
       [&](const Volume& x) { return negated(with_gamma(negated(x), 0.7)); }},
      {"order", {.blur = {0, 0, 1}, .brightness = 2, .contrast = 0.5, .gamma = 2}, [](const Volume& x) {
         return with_gamma(with_contrast(mapped(blurred(x, 2, 1, 3), [](double v) { return 2 * v; }), 0.5), 2);
       }}};
  for (const Device device : devices())
    for (const auto& [dtype, tolerance] : {std::pair{f64, 1e-11}, std::pair{f32, 2e-5}})
      for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
        for (const Case& c : cases) {
          const Tensor x = (image(2, 2, dtype) - 0.3).contiguous(format);
          AugmentParams params = params_of(2);
          params.channels[1] = c.channel;
          const Tensor y = Augmentation().apply({x.to(device)}, {params_of(2), params}).input;
          expect_near(y[1][1], c.formula(Volume(x[1][1])), tolerance, c.name);
          expect_same(y[0], x[0]);
          expect_same(y[1][0], x[1][0]);
        }
}

TEST(Augmentation, ConstantImagesStayFinite) {
  for (const Device device : devices()) {
    const Tensor x = full({1, 1, 1, 3, 1}, 2, {.device = device});
    AugmentParams params = busy_params(1);
    params.noise = 0;
    params.rotation = {};
    params.scaling = {1, 1, 1};
    params.elastic = 0;
    for (const double v : Augmentation().apply({x}, {params}).input.to_vector()) EXPECT_NEAR(v, 1.8, 1e-5);
  }
}

TEST(Augmentation, AddsTheSameNoiseToAllChannels) {
  AugmentParams params = params_of(2);
  params.noise = 0.25;
  params.seed = 12;
  Generator random(12);
  const Tensor x = image(1, 2, f32), wanted = randn({7, 10, 12}, {}, &random) * 0.25;
  for (const Device device : devices()) {
    const Tensor y = Augmentation().apply({x.to(device)}, {params}).input.to(Device::cpu());
    for (int64_t c = 0; c < 2; ++c) expect_near(y[0][c] - x[0][c], Volume(wanted), 1e-6, "noise");
  }
}

TEST(Augmentation, MirrorsTheGivenAxes) {
  AugmentParams params = params_of(2);
  params.mirror = {true, true, false};
  for (const Device device : devices()) {
    const Tensor x = image(2, 2, f32).to(device), t = classes(2, i64).to(device);
    const Sample y = Augmentation().apply({x, squeeze(t, 1)}, {params, params_of(2)});
    expect_same(y.input[0], flip(x[0], {1, 2}));
    expect_same(y.target[0], flip(t[0][0], {0, 1}));
    expect_same(y.input[1], x[1]);
    expect_same(y.target, stack({y.target[0], t[1][0]}));
  }
}

// ---- all steps together

TEST(Augmentation, CpuAndGpuAgree) {
  const Augmentation augment({.size = Triple(6, 9, 11), .elastic_spacing = 5});
  const std::vector<AugmentParams> params{busy_params(2), params_of(2), busy_params(2)};
  const Sample batch{image(3, 2, f32), classes(3, i32)};
  const Sample wanted = augment.apply(batch, params);
  for (const Device device : devices()) {
    const Sample y = augment.apply({batch.input.to(device), batch.target.to(device)}, params);
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t c = 0; c < 2; ++c) expect_near(y.input[n][c], Volume(wanted.input[n][c]), 1e-4, "image");
    const Tensor others = ne(y.target.to(Device::cpu()), wanted.target);
    EXPECT_LE(others.sum().item(), 2);  // a position halfway between two voxels may round either way
    const autocast guard(bf16);         // augmentation ignores autocast
    expect_same(augment.apply({batch.input.to(device), batch.target.to(device)}, params).input, y.input);
  }
}

TEST(Augmentation, RoundsLowPrecisionOnce) {
  for (const Device device : devices())
    for (const DType dtype : {f16, bf16}) {
      const Tensor x = image(1, 1, dtype).to(device);
      const Tensor y = Augmentation().apply({x}, {busy_params(1)}).input;
      expect_same(y, Augmentation().apply({x.to(f32)}, {busy_params(1)}).input.to(dtype));
    }
}

TEST(Augmentation, KeepsTheSetOfClasses) {
  for (const Device device : devices())
    for (const DType dtype : {u8, i32, i64}) {
      const Tensor t = classes(1, dtype).to(device);
      const Sample y = Augmentation().apply({image(1, 1, f16).to(device), t}, {busy_params(1)});
      EXPECT_EQ(y.target.dtype(), dtype);
      const std::vector<double> values = y.target.to_vector();
      EXPECT_EQ(std::set<double>(values.begin(), values.end()), (std::set<double>{0, 3, 5, 200}));
    }
}

}  // namespace
}  // namespace voxgrad
