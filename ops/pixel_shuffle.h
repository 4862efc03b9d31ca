// Channels made voxels: upsampling by what a convolution computed.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// (N, C r^3, D, H, W) to (N, C, rD, rH, rW), r = upscale_factor: y[n, c, rd + i, rh + j, rw + k] =
/// x[n, c r^3 + i r^2 + j r + k, d, h, w]. Also (N, C r^2, H, W), which is PyTorch's
/// pixel_shuffle, and (N, C r, L). Keeps x's memory format; any dtype. Throws Error where the channels do not divide.
/// Source: W. Shi et al., "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
/// Neural Network", CVPR 2016.
Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor);

}  // namespace voxgrad
