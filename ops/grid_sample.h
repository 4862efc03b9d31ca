// Sampling of images and volumes at the positions of a grid, as in spatial transformers and image registration.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Options of grid_sample, with the same meanings as in PyTorch.
struct GridSampleOptions {
  bool nearest = false;  ///< reads the nearest voxel instead of interpolating linearly
  enum class Padding : uint8_t { zeros, border, reflection };
  Padding padding_mode = Padding::zeros;  ///< values at positions outside x
  bool align_corners = false;  ///< -1 and 1 are the centers of the outermost voxels instead of their outer edges
};

/// Samples a volume x (N, C, D, H, W) at the positions in grid (N, D', H', W', 3), or an image x (N, C, H, W) at the
/// positions in grid (N, H', W', 2). A position consists of coordinates along W, H and D, or along W and H. Each
/// coordinate is -1 at one end of its axis and 1 at the other. Returns (N, C, D', H', W') or (N, C, H', W') in the
/// memory format of x. The grid must have the dtype of x. For x in bf16 or f16, the grid may also be f32, which keeps
/// the precision of the positions. With `nearest`, the gradient with respect to the grid is zero.
///
/// The gradients cannot be differentiated again. On CUDA, the gradient with respect to x is summed in 64-bit fixed
/// point, so that it does not depend on the order of summation. The sums need 8 bytes per element of x. Let dy
/// be the gradient with respect to the result. Each term of a sum is rounded to a multiple of a power of two that is at
/// most max|dy| * D'H'W' * 2^-59. If an element of dy is not finite, the whole gradient with respect to x is NaN.
Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options = {});

/// Returns the grid (N, D, H, W, 3) of the affine maps theta (N, 3, 4) for a volume of `size` (N, C, D, H, W), or the
/// grid (N, H, W, 2) of theta (N, 2, 3) for an image of `size` (N, C, H, W): grid[n, d, h, w] = theta[n] (x, y, z, 1),
/// where (x, y, z) is the position of voxel (d, h, w).
Tensor affine_grid(const Tensor& theta, const Shape& size, bool align_corners = false);

}  // namespace voxgrad
