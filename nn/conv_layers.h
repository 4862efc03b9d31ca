// Convolution layers. The names, shapes and initial distributions of their parameters are those of PyTorch. In the
// shapes below, "spatial..." stands for the sizes of all spatial axes, for example D, H, W, and "kernel..." stands for
// the sizes of the kernel along these axes. U(-b, b) is the uniform distribution on [-b, b).
//
// If an option's name is misspelled, as in `Conv3d conv{{.kernel = 3}}`, compilers only report that no constructor
// matches. If the type is written out, as in `Conv3d conv{Conv3d::Options{.kernel = 3}}`, compilers name the unknown
// field.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

#include "../ops/fused.h"
#include "../ops/pad.h"
#include "module.h"

namespace voxgrad::nn {

/// Padding of a convolution layer: one number per axis, or "same" or "valid" as in PyTorch. "valid" means no padding.
/// "same" keeps the spatial sizes and requires stride 1. If the total padding of an axis is odd, "same" pads one more
/// element at its end.
template <int N>
struct ConvPadding : Extent<N> {
  using Extent<N>::Extent;
  constexpr ConvPadding(const Extent<N>& sizes) : Extent<N>(sizes) {}
  /// Throws Error unless `name` is "same" or "valid".
  ConvPadding(const char* name) : Extent<N>(0), same(std::string_view(name) == "same") {
    check(same || std::string_view(name) == "valid", "Conv", "padding must be numbers, 'same' or 'valid', got '", name,
          '\'');
  }
  friend constexpr bool operator==(const ConvPadding&, const ConvPadding&) = default;
  friend constexpr bool operator==(const ConvPadding& a, const Extent<N>& b) { return a == ConvPadding(b); }
  friend std::ostream& operator<<(std::ostream& out, const ConvPadding& p) {
    return p.same ? out << "same" : out << static_cast<const Extent<N>&>(p);
  }

  bool same = false;
};

/// Convolution (cross-correlation) over N spatial axes, from (batch, in_channels, spatial...) to (batch, out_channels,
/// spatial...); see voxgrad::conv3d. The batch axis may be omitted. The parameters are weight (out_channels,
/// in_channels / groups, kernel...) and bias (out_channels). Weight and bias start from U(-b, b) with b = 1 /
/// sqrt(in_channels / groups * K), where K is the number of elements of a kernel. The constructor throws Error if a
/// size is not positive, if groups does not divide the channels, or if an option is invalid.
template <int N>
class Conv : public Layer {
 public:
  struct Options {
    int64_t in_channels = 0;
    int64_t out_channels = 0;
    Extent<N> kernel_size{0};
    Extent<N> stride{1};
    ConvPadding<N> padding{0};  ///< elements on both sides of each axis, "same" or "valid"
    Extent<N> dilation{1};
    int64_t groups = 1;
    bool bias = true;
    PadMode padding_mode = PadMode::zeros;  ///< zeros, reflect, replicate or circular; see voxgrad::pad
  };
  explicit Conv(const Options& options);
  /// Takes the options in PyTorch's order: Conv3d(1, 8, 3), Conv3d(1, 8, 3, 2, 1).
  Conv(int64_t in_channels, int64_t out_channels, const Extent<N>& kernel_size, const Extent<N>& stride = 1,
       const ConvPadding<N>& padding = 0, const Extent<N>& dilation = 1, int64_t groups = 1, bool with_bias = true,
       PadMode padding_mode = PadMode::zeros)
      : Conv(Options{in_channels, out_channels, kernel_size, stride, padding, dilation, groups, with_bias,
                     padding_mode}) {}
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// Computes the convolution, followed by a normalization and an activation, in one operation (ops/fused.h).
  Tensor forward(const Tensor& x, const NormActivation& epilogue) const { return forward_with(x, weight, epilogue); }
  /// Computes forward(x, epilogue) with `other_weight` instead of the layer's weight.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight, const NormActivation& epilogue = {}) const;

  std::string extra_repr() const override;
  const Options& options() const { return options_; }
  Tensor weight;
  Tensor bias;
  VG_MODULE(weight, bias)

 private:
  /// Returns the input in the layer's memory format. Sets the padding in `options`. If the operator does not support
  /// the padding, pads the input instead and sets the padding in `options` to 0.
  Tensor prepare_input(const Tensor& x, ConvOptions<N>& options) const;

  Options options_;
};

/// Transposed convolution over N spatial axes, from (batch, in_channels, spatial...) to (batch, out_channels,
/// spatial...); see voxgrad::conv_transpose3d. The parameters are weight (in_channels, out_channels / groups,
/// kernel...) and bias (out_channels). Weight and bias start from U(-b, b) with b = 1 / sqrt(out_channels / groups *
/// K), where K is the number of elements of a kernel. The constructor throws Error under the same conditions as the
/// constructor of Conv.
template <int N>
class ConvTranspose : public Layer {
 public:
  struct Options {
    int64_t in_channels = 0;
    int64_t out_channels = 0;
    Extent<N> kernel_size{0};
    Extent<N> stride{1};
    Extent<N> padding{0};
    Extent<N> output_padding{0};  ///< elements added at the end of each axis of the result
    int64_t groups = 1;
    bool bias = true;
    Extent<N> dilation{1};
  };
  explicit ConvTranspose(const Options& options);
  /// Takes the options in PyTorch's order: ConvTranspose3d(8, 4, 2, 2).
  ConvTranspose(int64_t in_channels, int64_t out_channels, const Extent<N>& kernel_size, const Extent<N>& stride = 1,
                const Extent<N>& padding = 0, const Extent<N>& output_padding = 0, int64_t groups = 1,
                bool with_bias = true, const Extent<N>& dilation = 1)
      : ConvTranspose(Options{in_channels, out_channels, kernel_size, stride, padding, output_padding, groups,
                              with_bias, dilation}) {}
  Tensor forward(const Tensor& x) const override { return forward_with(x, weight); }
  /// Computes forward(x) with a result of spatial size `output_size`. Ignores the option output_padding.
  Tensor forward(const Tensor& x, const Extent<N>& output_size) const;
  /// Computes the transposed convolution, followed by a normalization and an activation, in one operation.
  Tensor forward(const Tensor& x, const NormActivation& epilogue) const { return forward_with(x, weight, epilogue); }
  /// Computes forward(x, epilogue) with `other_weight` instead of the layer's weight.
  Tensor forward_with(const Tensor& x, const Tensor& other_weight, const NormActivation& epilogue = {}) const;

  std::string extra_repr() const override;
  const Options& options() const { return options_; }
  Tensor weight;
  Tensor bias;
  VG_MODULE(weight, bias)
  /// Calls forward(x, output_size).
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
