// The second kernel of split-K of weight gradients: adds the partial sums of all splits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/view.h"

namespace voxgrad::cuda {

/// Partial sums in the order (split, group, output channel, tap, input channel), without gaps within a split.
struct WgradSplits {
  const float* partial;
  int64_t split_stride;  ///< elements from one split to the next
  int splits;
  int in_channels;                     ///< per group
  int out_channels;                    ///< per group
  const uint32_t* x_maxima = nullptr;  ///< maxima of the scaled channels of x (sm90/wgrad/operand.h), or null
  const uint32_t* y_maxima = nullptr;  ///< maxima of the scaled channels of y, or null
};

/// Adds the partial sums of all splits in a fixed order, divides by the scales of the channels, and stores the weight
/// gradient `w` in its layout and dtype.
void reduce_wgrad_splits(const View& w, const WgradSplits& sums, cudaStream_t stream);

#ifdef __CUDACC__
/// Returns the exponent of the scale factor of a channel. `maximum` is the largest magnitude, as the bits of a float.
__device__ inline int scale_exponent(uint32_t maximum) {
  return maximum == 0 ? 0 : min(max(14 + 127 - static_cast<int>(maximum >> 23), -126), 126);
}
/// Divides a sum by the scales of its channels of x and y.
__device__ inline float unscaled(float sum, uint32_t x_maximum, uint32_t y_maximum) {
  return ldexpf(sum, -scale_exponent(x_maximum) - scale_exponent(y_maximum));
}
#endif

}  // namespace voxgrad::cuda
