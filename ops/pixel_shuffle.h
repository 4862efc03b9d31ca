// Rearrangement of channels into voxels (sub-pixel convolution) and back.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Rearranges x (N, C r^3, D, H, W) to y (N, C, rD, rH, rW), where r = upscale_factor:
/// y[n, c, rd + i, rh + j, rw + k] = x[n, c r^3 + i r^2 + j r + k, d, h, w]. Also accepts (N, C r^2, H, W), as in
/// PyTorch, and (N, C r, L). Supports any dtype. The result has the memory format of x. Throws Error if r^3 (r^2 for
/// images, r for signals) does not divide the number of channels. Source: W. Shi et al., "Real-Time Single Image and
/// Video Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network", CVPR 2016.
Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor);

/// Inverts pixel_shuffle: rearranges x (N, C, rD, rH, rW) to (N, C r^3, D, H, W), where r = downscale_factor. Also
/// accepts (N, C, rH, rW), as in PyTorch, and (N, C, rL). Supports any dtype. The result has the memory format of x.
/// Throws Error if a spatial size is not a multiple of r.
Tensor pixel_unshuffle(const Tensor& x, int64_t downscale_factor);

}  // namespace voxgrad
