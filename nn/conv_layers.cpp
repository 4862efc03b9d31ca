// Implements the convolution layers.
#include "nn/conv_layers.h"

#include <cmath>
#include <vector>

#include "nn/init.h"

namespace voxgrad::nn {
namespace {

template <int N>
ConvOptions<N> function_options(const typename Conv<N>::Options& o) {
  return {.stride = o.stride, .padding = o.padding, .dilation = o.dilation, .groups = o.groups};
}

template <int N>
ConvTransposeOptions<N> function_options(const typename ConvTranspose<N>::Options& o) {
  return {.stride = o.stride,
          .padding = o.padding,
          .output_padding = o.output_padding,
          .groups = o.groups,
          .dilation = o.dilation};
}

/// Checks the options of Conv and ConvTranspose.
template <int N, class Options>
void check_options(const std::string& layer, const Options& options) {
  const char* op = layer.c_str();
  const int64_t in = options.in_channels, out = options.out_channels, groups = options.groups;
  check(in > 0 && out > 0, op, "in_channels and out_channels must be positive, got ", in, " and ", out);
  check(groups > 0 && in % groups == 0 && out % groups == 0, op, "groups = ", groups,
        " must be positive and divide in_channels = ", in, " and out_channels = ", out);
  for (int64_t size : options.kernel_size.values)
    check(size > 0, op, "kernel_size must be positive, got ", options.kernel_size);
  function_options<N>(options).validate(op);
  if constexpr (requires { options.padding.same; })
    check(!options.padding.same || options.stride == Extent<N>(1), op, "padding 'same' needs stride 1, got stride ",
          options.stride);
}

/// Creates the tensors weight (rows, columns, kernel...) and, if `with_bias`, bias (channels). As in PyTorch, the
/// elements of both tensors are drawn from U(-b, b) with b = 1 / sqrt(fan_in).
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

/// Describes the options as PyTorch does: channels, kernel size and stride, then other options that are not the
/// default.
template <class Options>
std::string describe_options(const Options& o) {
  const Options defaults;
  std::string text =
      concat(o.in_channels, ", ", o.out_channels, ", kernel_size=", o.kernel_size, ", stride=", o.stride);
  const auto add = [&](const char* name, const auto& value, const auto& default_value) {
    if (!(value == default_value)) text += concat(", ", name, '=', value);
  };
  add("padding", o.padding, defaults.padding);
  if constexpr (requires { o.output_padding; }) add("output_padding", o.output_padding, defaults.output_padding);
  add("dilation", o.dilation, defaults.dilation);
  add("groups", o.groups, defaults.groups);
  if (!o.bias) text += ", bias=false";
  if constexpr (requires { o.padding_mode; }) add("padding_mode", o.padding_mode, PadMode::zeros);
  return text;
}

}  // namespace

template <int N>
Conv<N>::Conv(const Options& options) : options_(options) {
  check_options<N>(concat("Conv", N, 'd'), options);
  make_parameters<N>(weight, bias, options.out_channels, options.in_channels / options.groups, options.kernel_size,
                     options.out_channels, options.bias);
}

template <int N>
Tensor Conv<N>::prepare_input(const Tensor& x, ConvOptions<N>& options) const {
  const Tensor input = in_memory_format(x, N + 2);
  if (options_.padding_mode == PadMode::zeros && !options_.padding.same) return input;
  std::vector<int64_t> amounts;
  bool symmetric = true;  // whether each axis has equal padding at its beginning and at its end
  for (int axis = N - 1; axis >= 0; --axis) {
    const int64_t same = options.dilation[axis] * (options_.kernel_size[axis] - 1);
    const int64_t total = options_.padding.same ? same : 2 * options.padding[axis];
    amounts.push_back(total / 2);
    amounts.push_back(total - total / 2);
    symmetric = symmetric && total % 2 == 0;
    options.padding[axis] = total / 2;
  }
  if (options_.padding_mode == PadMode::zeros && symmetric) return input;
  options.padding = 0;
  return pad(input, amounts, options_.padding_mode);
}

template <int N>
Tensor Conv<N>::forward_with(const Tensor& x, const Tensor& other_weight, const NormActivation& epilogue) const {
  ConvOptions<N> options = function_options<N>(options_);
  const Tensor input = prepare_input(x, options);
  return conv_norm_activation(input, other_weight, bias, options, epilogue);
}

template <int N>
std::string Conv<N>::extra_repr() const {
  return describe_options(options_);
}
template <int N>
std::string ConvTranspose<N>::extra_repr() const {
  return describe_options(options_);
}

template <int N>
ConvTranspose<N>::ConvTranspose(const Options& options) : options_(options) {
  check_options<N>(concat("ConvTranspose", N, 'd'), options);
  make_parameters<N>(weight, bias, options.in_channels, options.out_channels / options.groups, options.kernel_size,
                     options.out_channels, options.bias);
}

template <int N>
Tensor ConvTranspose<N>::forward_with(const Tensor& x, const Tensor& other_weight,
                                      const NormActivation& epilogue) const {
  return conv_norm_activation(in_memory_format(x, N + 2), other_weight, bias, function_options<N>(options_), epilogue);
}

template <int N>
Tensor ConvTranspose<N>::forward(const Tensor& x, const Extent<N>& output_size) const {
  ConvTransposeOptions<N> options = function_options<N>(options_);
  options.output_size = output_size;
  return conv_norm_activation(in_memory_format(x, N + 2), weight, bias, options, {});
}

template class Conv<1>;
template class Conv<2>;
template class Conv<3>;
template class ConvTranspose<1>;
template class ConvTranspose<2>;
template class ConvTranspose<3>;

}  // namespace voxgrad::nn
