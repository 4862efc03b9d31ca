// The second kernel of split-K of weight gradients: adds the partial sums of all splits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/view.h"

namespace voxgrad::cuda {

/// A weight gradient (output channels, input channels, D, H, W) in memory.
struct WeightLayout {
  void* data = nullptr;
  int64_t out_stride = 0;  ///< elements, as all strides
  int64_t in_stride = 0;
  int64_t tap_stride[3] = {};
  int kernel[3] = {};
  bool by_taps = false;  ///< taps are closer in memory than input channels

  WeightLayout() = default;
  explicit WeightLayout(const View& w)
      : data(w.data),
        out_stride(w.stride[0]),
        in_stride(w.stride[1]),
        tap_stride{w.stride[2], w.stride[3], w.stride[4]},
        kernel{static_cast<int>(w.size[2]), static_cast<int>(w.size[3]), static_cast<int>(w.size[4])},
        by_taps(w.stride[1] != 1) {}
#ifdef __CUDACC__
  /// Returns the elements from the first tap of a weight to this tap.
  __device__ int64_t tap_offset(int tap) const {
    int64_t offset = 0;
    for (int a = 2; a >= 0; --a) {
      offset += tap % kernel[a] * tap_stride[a];
      tap /= kernel[a];
    }
    return offset;
  }
#endif
};

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
