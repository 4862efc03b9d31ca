// A convolution with ReLU, or ReLU and group_norm, behind it: the results and gradients of the chain of functions, of
// any order, in fewer passes over memory, with nothing saved but the ReLU's output. nn::Sequential uses these by
// itself.
//
// `Options` is ConvOptions<N> (conv1d, conv2d, conv3d) or ConvTransposeOptions<N> (conv_transpose1d, ...), for N = 1, 2
// and 3. Arguments and errors are those of the functions in the chain.
#pragma once

#include "ops/conv.h"

namespace voxgrad {

template <class Options>
Tensor conv_relu(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options);

/// group_norm's arguments, apart from its input.
struct GroupNormArguments {
  int64_t num_groups = 1;
  Tensor weight{}, bias{};
  double eps = 1e-5;
};
template <class Options>
Tensor conv_relu_group_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
                            const GroupNormArguments& norm);

/// group_norm(relu(x)): one pass less in the backward pass.
Tensor relu_group_norm(const Tensor& x, const GroupNormArguments& norm);

}  // namespace voxgrad
