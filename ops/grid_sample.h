// Reading images and volumes at the positions of a grid: spatial transformers, warping by a displacement field.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

struct GridSampleOptions {
  bool nearest = false;  ///< the nearest voxel, rather than bilinear or trilinear
  enum class Padding : uint8_t { zeros, border, reflection };
  Padding padding_mode = Padding::zeros;
  bool align_corners = false;
};

/// y[n, :, d, h, w] = x at grid[n, d, h, w] = (x, y, z), positions along W, H and D: -1 and 1 are the centres of the
/// outer voxels (align_corners), or their outer edges. x (N, C, D, H, W) and grid (N, D', H', W', 3), or x (N, C, H, W)
/// and grid (N, H', W', 2); the result is (N, C, D', H', W') or (N, C, H', W'), in x's memory format. Halves of x may
/// come with a grid of float32, in which positions are computed. With `nearest` the gradient in the grid is zero.
///
/// Gradients of any order; those of second and higher order are composed of other operators, slower, and take a few
/// tensors of the result's size for each of the eight corners. The gradient in x is summed on CUDA in 64-bit integers,
/// whose sum does not depend on its order: their unit is a power of two, at most max|dy| * D'H'W' * 2^-59, and 8 bytes
/// are taken for each element of x. Where dy is not finite, all of that gradient is NaN.
Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options = {});

/// The grid that reads an image or a volume of `size` (N, C, D, H, W) through the maps theta (N, 3, 4), respectively
/// (N, C, H, W) through theta (N, 2, 3): grid[n, d, h, w] = theta[n] (x, y, z, 1), with positions as above.
Tensor affine_grid(const Tensor& theta, const Shape& size, bool align_corners = false);

}  // namespace voxgrad
