// Pooling, upsampling, padding and pixel-shuffle layers.
#pragma once

#include <vector>

#include "../ops/pad.h"
#include "../ops/pixel_shuffle.h"
#include "../ops/pool.h"
#include "sequential.h"

namespace voxgrad::nn {

/// Maximum or average pooling over N spatial axes; see ops/pool.h for the options. The stride is kernel_size by
/// default. Constructors: MaxPool3d(2), MaxPool3d(Triple(1, 2, 2)), MaxPool3d(3, 2, 1) (kernel size, stride, padding),
/// MaxPool3d(2, {.ceil_mode = true}) and MaxPool3d{{.kernel_size = 2}}. The constructors throw Error for invalid
/// options.
template <class Options, int N, Tensor (*function)(const Tensor&, const Options&)>
class Pool : public Layer {
 public:
  explicit Pool(const Options& options) : options_(options) {
    options_.validate(concat(Options::kLayer, N, 'd').c_str());
  }
  explicit Pool(const Extent<N>& kernel_size) : Pool(Options{.kernel_size = kernel_size}) {}
  Pool(const Extent<N>& kernel_size, const Extent<N>& stride, const Extent<N>& padding = 0)
      : Pool(Options{.kernel_size = kernel_size, .stride = stride, .padding = padding}) {}
  /// Takes all options except kernel_size from `rest`.
  Pool(const Extent<N>& kernel_size, Options rest) : Pool((rest.kernel_size = kernel_size, rest)) {}
  Tensor forward(const Tensor& x) const override { return function(x, options_); }
  std::string class_name() const override { return concat(Options::kLayer, N, 'd'); }
  std::string extra_repr() const override {
    return concat("kernel_size=", options_.kernel_size, ", stride=", options_.stride.value_or(options_.kernel_size),
                  ", padding=", options_.padding, options_.ceil_mode ? ", ceil_mode=true" : "");
  }

 private:
  Options options_;
};
using MaxPool1d = Pool<MaxPoolOptions<1>, 1, max_pool1d>;
using MaxPool2d = Pool<MaxPoolOptions<2>, 2, max_pool2d>;
using MaxPool3d = Pool<MaxPoolOptions<3>, 3, max_pool3d>;
using AvgPool1d = Pool<AvgPoolOptions<1>, 1, avg_pool1d>;
using AvgPool2d = Pool<AvgPoolOptions<2>, 2, avg_pool2d>;
using AvgPool3d = Pool<AvgPoolOptions<3>, 3, avg_pool3d>;

/// Pools to the spatial size output_size; see adaptive_avg_pool3d in ops/pool.h. The constructor throws Error unless
/// the size is positive.
template <LayerName name, int N, Tensor (*function)(const Tensor&, const Extent<N>&)>
class AdaptivePool : public Layer {
 public:
  explicit AdaptivePool(const Extent<N>& output_size) : output_size_(output_size) {
    for (const int64_t size : output_size.values)
      check(size > 0, name.text, "output_size must be positive, got ", output_size);
  }
  Tensor forward(const Tensor& x) const override { return function(x, output_size_); }
  std::string class_name() const override { return name.text; }
  std::string extra_repr() const override { return concat("output_size=", output_size_); }

 private:
  Extent<N> output_size_;
};
using AdaptiveAvgPool1d = AdaptivePool<"AdaptiveAvgPool1d", 1, adaptive_avg_pool1d>;
using AdaptiveAvgPool2d = AdaptivePool<"AdaptiveAvgPool2d", 2, adaptive_avg_pool2d>;
using AdaptiveAvgPool3d = AdaptivePool<"AdaptiveAvgPool3d", 3, adaptive_avg_pool3d>;
using AdaptiveMaxPool1d = AdaptivePool<"AdaptiveMaxPool1d", 1, adaptive_max_pool1d>;
using AdaptiveMaxPool2d = AdaptivePool<"AdaptiveMaxPool2d", 2, adaptive_max_pool2d>;
using AdaptiveMaxPool3d = AdaptivePool<"AdaptiveMaxPool3d", 3, adaptive_max_pool3d>;

/// Resamples the spatial axes; see voxgrad::interpolate. The constructor throws Error for invalid options. Example:
///
///     Upsample{{.scale_factor = 2, .mode = InterpolateMode::trilinear}}
class Upsample : public Layer {
 public:
  explicit Upsample(const InterpolateOptions& options) : options_(options) { options.validate("Upsample"); }
  Tensor forward(const Tensor& x) const override { return interpolate(x, options_); }
  std::string extra_repr() const override {
    const InterpolateOptions& o = options_;
    return concat(o.size ? concat("size=", o.size->values) : concat("scale_factor=", *o.scale_factor),
                  ", mode=", o.mode);
  }

 private:
  InterpolateOptions options_;
};

/// Pads the last N axes by `all` elements on all sides, or by one amount per side. As in PyTorch, the first two amounts
/// apply before and after the last axis, the next two before and after the second last axis, and so on. Negative
/// amounts crop. ConstantPad fills the padding with `value`. The constructor throws Error unless there are 2 N amounts.
template <LayerName name, int N, PadMode mode>
class Pad : public Layer {
 public:
  explicit Pad(int64_t all, double value = 0) : Pad(std::vector<int64_t>(2 * N, all), value) {}
  explicit Pad(const std::vector<int64_t>& amounts, double value = 0) : amounts_(amounts), value_(value) {
    check(amounts.size() == 2 * N, name.text, "takes ", 2 * N, " amounts, got ", amounts.size());
  }
  Tensor forward(const Tensor& x) const override { return pad(x, amounts_, mode, value_); }
  std::string class_name() const override { return name.text; }
  std::string extra_repr() const override {
    return concat("padding=", Dims(amounts_), mode == PadMode::constant ? concat(", value=", value_) : "");
  }

 private:
  std::vector<int64_t> amounts_;
  double value_;  // used by PadMode::constant
};
using ReflectionPad1d = Pad<"ReflectionPad1d", 1, PadMode::reflect>;
using ReflectionPad2d = Pad<"ReflectionPad2d", 2, PadMode::reflect>;
using ReflectionPad3d = Pad<"ReflectionPad3d", 3, PadMode::reflect>;
using ReplicationPad1d = Pad<"ReplicationPad1d", 1, PadMode::replicate>;
using ReplicationPad2d = Pad<"ReplicationPad2d", 2, PadMode::replicate>;
using ReplicationPad3d = Pad<"ReplicationPad3d", 3, PadMode::replicate>;
using CircularPad3d = Pad<"CircularPad3d", 3, PadMode::circular>;
using ConstantPad1d = Pad<"ConstantPad1d", 1, PadMode::constant>;
using ConstantPad2d = Pad<"ConstantPad2d", 2, PadMode::constant>;
using ConstantPad3d = Pad<"ConstantPad3d", 3, PadMode::constant>;
using ZeroPad3d = Pad<"ZeroPad3d", 3, PadMode::constant>;

/// PixelShuffle3d rearranges (N, C r^3, D, H, W) to (N, C, rD, rH, rW) for the factor r; PixelUnshuffle3d is its
/// inverse. See ops/pixel_shuffle.h. PyTorch has only the 2-D forms. The constructor throws Error unless the factor is
/// positive.
template <bool shuffles>
class PixelRearrangement3d : public Layer {
 public:
  explicit PixelRearrangement3d(int64_t factor) : factor_(factor) {
    check(factor > 0, kName, kFactor, " must be positive, got ", factor);
  }
  Tensor forward(const Tensor& x) const override {
    check(x.dim() == 5, kName, "input must be (N, C, D, H, W), got ", describe(x));
    return shuffles ? pixel_shuffle(x, factor_) : pixel_unshuffle(x, factor_);
  }
  std::string class_name() const override { return kName; }
  std::string extra_repr() const override { return concat(kFactor, '=', factor_); }

 private:
  static constexpr const char* kName = shuffles ? "PixelShuffle3d" : "PixelUnshuffle3d";
  static constexpr const char* kFactor = shuffles ? "upscale_factor" : "downscale_factor";
  int64_t factor_;
};

using PixelShuffle3d = PixelRearrangement3d<true>;
using PixelUnshuffle3d = PixelRearrangement3d<false>;

}  // namespace voxgrad::nn
