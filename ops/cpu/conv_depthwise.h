// Depthwise convolutions on the CPU.
#pragma once

#include "ops/cpu/conv_weights.h"

namespace voxgrad::cpu {

/// Returns whether the functions below compute a convolution with the weight `w`: each group has one channel of x and
/// few channels of y.
bool is_depthwise(const View& w, const ConvGeometry& geometry);

/// Computes a forward or transposed depthwise convolution. Outputs without taps are not written. Compiled for f32 and
/// f64.
template <class T>
void convolve_depthwise(const ConvProblem<T>& problem);

/// Computes the gradient of the weight of a depthwise convolution. Compiled for f32 and f64.
template <class T>
void depthwise_weight_gradient(const View& w, const View& x, const View& y, const ConvGeometry& geometry);

}  // namespace voxgrad::cpu
