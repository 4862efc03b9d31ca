// Channels made voxels, and voxels made channels.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// (N, C r^3, D, H, W) to (N, C, rD, rH, rW), r = upscale_factor: y[n, c, rd + i, rh + j, rw + k] =
/// x[n, c r^3 + i r^2 + j r + k, d, h, w]. Also (N, C r^2, H, W), which is PyTorch's
/// pixel_shuffle, and (N, C r, L). Keeps x's memory format; any dtype. Throws Error where the channels do not divide.
/// Source: W. Shi et al., "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
/// Neural Network", CVPR 2016.
Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor);

/// The inverse of pixel_shuffle: (N, C, rD, rH, rW) to (N, C r^3, D, H, W), r = downscale_factor, with the same order
/// of channels; also (N, C, rH, rW), which is PyTorch's pixel_unshuffle, and (N, C, rL). Keeps x's memory format; any
/// dtype. Throws Error where the spatial sizes are not multiples of r.
Tensor pixel_unshuffle(const Tensor& x, int64_t downscale_factor);

}  // namespace voxgrad
