#include "nn/conv_layers.h"

#include <algorithm>
#include <cmath>

#include "nn/init.h"

namespace voxgrad::nn {
namespace {

/// What both kinds of convolution ask of their options.
template <class Options>
void check_options(const std::string& layer, const Options& options) {
  const char* op = layer.c_str();
  const int64_t in = options.in_channels, out = options.out_channels, groups = options.groups;
  check(in > 0 && out > 0, op, "in_channels and out_channels must be positive, got ", in, " and ", out);
  check(groups > 0 && in % groups == 0 && out % groups == 0, op, "groups = ", groups, " does not divide ", in,
        " input and ", out, " output channels");
  const auto at_least = [&](const char* name, const auto& extent, int64_t least) {
    for (int64_t value : extent.values) check(value >= least, op, name, " must be at least ", least, ", got ", extent);
  };
  at_least("kernel_size", options.kernel_size, 1);
  at_least("stride", options.stride, 1);
  at_least("dilation", options.dilation, 1);
  at_least("padding", options.padding, 0);
}

/// weight (rows, columns, kernel...) and bias (channels) as PyTorch draws them: in both, the bound is
/// 1 / sqrt(fan_in).
template <int N>
void make_parameters(Tensor& weight, Tensor& bias, int64_t rows, int64_t columns, const Extent<N>& kernel_size,
                     int64_t channels, bool with_bias) {
  Shape shape{rows, columns};
  for (int64_t size : kernel_size.values) shape.push_back(size);
  weight = empty(shape, {.requires_grad = true});
  init::kaiming_uniform_(weight, {.a = std::sqrt(5.0)});
  if (!with_bias) return;
  bias = empty({channels}, {.requires_grad = true});
  const double bound = 1 / std::sqrt(static_cast<double>(init::calculate_fans(weight).in));
  init::uniform_(bias, -bound, bound);
}

}  // namespace

template <int N>
Conv<N>::Conv(const Options& given) : options_(given) {
  check_options(concat("Conv", N, 'd'), given);
  make_parameters<N>(weight, bias, given.out_channels, given.in_channels / given.groups, given.kernel_size,
                     given.out_channels, given.bias);
}

template <int N>
Tensor Conv<N>::forward(const Tensor& x) const {
  const ConvOptions<N> geometry{
      .stride = options_.stride, .padding = options_.padding, .dilation = options_.dilation, .groups = options_.groups};
  if constexpr (N == 1) return conv1d(x, weight, bias, geometry);
  if constexpr (N == 2) return conv2d(x, weight, bias, geometry);
  if constexpr (N == 3) return conv3d(x, weight, bias, geometry);
}

template <int N>
ConvTranspose<N>::ConvTranspose(const Options& given) : options_(given) {
  const std::string layer = concat("ConvTranspose", N, 'd');
  check_options(layer, given);
  for (int i = 0; i < N; ++i)
    check(given.output_padding[i] >= 0 && given.output_padding[i] < std::max(given.stride[i], given.dilation[i]),
          layer.c_str(), "output_padding must be smaller than stride or dilation and not negative, got output_padding ",
          given.output_padding, ", stride ", given.stride, ", dilation ", given.dilation);
  make_parameters<N>(weight, bias, given.in_channels, given.out_channels / given.groups, given.kernel_size,
                     given.out_channels, given.bias);
}

namespace {

template <int N, class Options>
Tensor transposed(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                  std::optional<Extent<N>> output_size) {
  const ConvTransposeOptions<N> geometry{.stride = options.stride,
                                         .padding = options.padding,
                                         .output_padding = output_size ? Extent<N>(0) : options.output_padding,
                                         .groups = options.groups,
                                         .dilation = options.dilation,
                                         .output_size = output_size};
  if constexpr (N == 1) return conv_transpose1d(x, weight, bias, geometry);
  if constexpr (N == 2) return conv_transpose2d(x, weight, bias, geometry);
  if constexpr (N == 3) return conv_transpose3d(x, weight, bias, geometry);
}

}  // namespace

template <int N>
Tensor ConvTranspose<N>::forward(const Tensor& x) const {
  return transposed<N>(x, weight, bias, options_, std::nullopt);
}

template <int N>
Tensor ConvTranspose<N>::forward(const Tensor& x, const Extent<N>& output_size) const {
  return transposed<N>(x, weight, bias, options_, output_size);
}

template class Conv<1>;
template class Conv<2>;
template class Conv<3>;
template class ConvTranspose<1>;
template class ConvTranspose<2>;
template class ConvTranspose<3>;

}  // namespace voxgrad::nn
