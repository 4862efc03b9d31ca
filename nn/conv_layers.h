// Convolution layers. Names, shapes and initial distributions of the parameters are PyTorch's.
//
// For a wrong name in `Conv3d conv{{.kernel = 3}}` compilers only say that no constructor matches. With the type
// written out, `Conv3d conv{Conv3d::Options{.kernel = 3}}`, they name the field that does not exist.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

#include "../ops/fused.h"
#include "../ops/pad.h"
#include "module.h"

namespace voxgrad::nn {

/// Padding of a convolution layer: numbers, or a name as in PyTorch. "valid" is 0; "same" keeps the sizes and needs
/// stride 1. With an even kernel, "same" pads one more element behind an axis than in front of it.
template <int N>
struct ConvPadding : Extent<N> {
  using Extent<N>::Extent;
  constexpr ConvPadding(const Extent<N>& sizes) : Extent<N>(sizes) {}
  /// Throws for another name.
  ConvPadding(const char* name) : Extent<N>(0), same(std::string_view(name) == "same") {
    check(same || std::string_view(name) == "valid", "Conv", "padding must be numbers, same or valid, got ", name);
  }
  friend constexpr bool operator==(const ConvPadding&, const ConvPadding&) = default;
  friend constexpr bool operator==(const ConvPadding& a, const Extent<N>& b) { return a == ConvPadding(b); }
  friend std::ostream& operator<<(std::ostream& out, const ConvPadding& p) {
    return p.same ? out << "same" : out << static_cast<const Extent<N>&>(p);
  }

  bool same = false;
};

/// Cross-correlation over N spatial axes; see voxgrad::conv3d. weight (out, in / groups, kernel...), bias (out),
/// both from U(-b, b) with b = 1 / sqrt(in / groups * kernel elements). Throws Error for sizes or options that
/// no input fits.
template <int N>
class Conv : public Layer {
 public:
  struct Options {
    int64_t in_channels = 0;
    int64_t out_channels = 0;
    Extent<N> kernel_size{0};
    Extent<N> stride{1};
    ConvPadding<N> padding{0};  ///< or "same" or "valid"
    Extent<N> dilation{1};
    int64_t groups = 1;
    bool bias = true;
    PadMode padding_mode = PadMode::zeros;  ///< of what: zeros, reflect, replicate or circular; see voxgrad::pad
  };
  explicit Conv(const Options& given);
  /// In PyTorch's order: Conv3d(1, 8, 3), Conv3d(1, 8, 3, 2, 1).
  Conv(int64_t in_channels, int64_t out_channels, const Extent<N>& kernel_size, const Extent<N>& stride = 1,
       const ConvPadding<N>& padding = 0, const Extent<N>& dilation = 1, int64_t groups = 1, bool with_bias = true,
       PadMode padding_mode = PadMode::zeros)
      : Conv(Options{in_channels, out_channels, kernel_size, stride, padding, dilation, groups, with_bias,
                     padding_mode}) {}
  /// (N, in, spatial...) to (N, out, spatial...).
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// With another weight in place of the layer's.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight) const;
  /// With what follows, as one operation (ops/fused.h).
  Tensor forward(const Tensor& x, const NormActivation& what) const;

  std::string extra_repr() const override;
  const Options& options() const { return options_; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  /// The input in the layer's memory format, with the padding that `options` then do not add.
  Tensor prepared(const Tensor& x, ConvOptions<N>& options) const;

  Options options_;
};

/// Transposed convolution over N spatial axes; see voxgrad::conv_transpose3d. weight (in, out / groups, kernel...),
/// bias (out), both from U(-b, b) with b = 1 / sqrt(out / groups * kernel elements).
template <int N>
class ConvTranspose : public Layer {
 public:
  struct Options {
    int64_t in_channels = 0;
    int64_t out_channels = 0;
    Extent<N> kernel_size{0};
    Extent<N> stride{1};
    Extent<N> padding{0};
    Extent<N> output_padding{0};
    int64_t groups = 1;
    bool bias = true;
    Extent<N> dilation{1};
  };
  explicit ConvTranspose(const Options& given);
  ConvTranspose(int64_t in_channels, int64_t out_channels, const Extent<N>& kernel_size, const Extent<N>& stride = 1,
                const Extent<N>& padding = 0, const Extent<N>& output_padding = 0, int64_t groups = 1,
                bool with_bias = true, const Extent<N>& dilation = 1)
      : ConvTranspose(Options{in_channels, out_channels, kernel_size, stride, padding, output_padding, groups,
                              with_bias, dilation}) {}
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// As Conv's.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight) const;
  /// With the output's spatial size in place of output_padding.
  Tensor forward(const Tensor& x, const Extent<N>& output_size) const;
  Tensor forward(const Tensor& x, const NormActivation& what) const;

  std::string extra_repr() const override;
  const Options& options() const { return options_; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)
  Tensor operator()(const Tensor& x, const Extent<N>& output_size) const { return forward(x, output_size); }

 private:
  Options options_;
};

using Conv1d = Conv<1>;
using Conv2d = Conv<2>;
using Conv3d = Conv<3>;
using ConvTranspose1d = ConvTranspose<1>;
using ConvTranspose2d = ConvTranspose<2>;
using ConvTranspose3d = ConvTranspose<3>;

}  // namespace voxgrad::nn
