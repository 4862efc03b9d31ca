// Pointwise convolutions on the CPU. A pointwise convolution has a 1 x 1 x 1 kernel and neither stride nor padding. It
// is a matrix product of the weight and the channels of each sample.
#pragma once

#include "ops/cpu/conv_weights.h"

namespace voxgrad::cpu {

/// Merges the spatial axes of x and y into the last axis if the convolution is pointwise and the voxels of x and y are
/// equally spaced. Returns whether the axes are merged.
bool merge_voxels(View& x, View& y, const View& w, const ConvGeometry& geometry);

/// Returns whether multiply_pointwise() supports a pointwise convolution with merged axes, and is fast: contiguous
/// voxels, enough voxels for all threads, and weights that fit in the workspace.
template <class T>
bool has_many_voxels(const ConvProblem<T>& p) {
  constexpr int64_t kMinVoxels = 1024, kMaxWeights = 1 << 22;
  return p.out.stride[2] == 1 && p.in.stride[2] == 1 && p.out.size[2] >= kMinVoxels &&
         p.groups * p.out_channels() * p.in_channels() <= kMaxWeights;
}

/// Computes a convolution for which has_many_voxels() is true. Compiled for f32 and f64.
template <class T>
void multiply_pointwise(const ConvProblem<T>& problem);

/// Returns whether pointwise_weight_gradient() computes the weight gradient of a pointwise convolution with merged
/// axes: contiguous voxels and few channels.
bool has_few_products(const View& w, const View& x, const View& y, int64_t groups);

/// Computes the weight gradient of a pointwise convolution with merged axes. Compiled for f32 and f64.
template <class T>
void pointwise_weight_gradient(const View& w, const View& x, const View& y, int64_t groups);

}  // namespace voxgrad::cpu
