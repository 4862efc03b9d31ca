// nnU-Net's rule that chooses the stages of a U-Net from a patch size and a voxel spacing.
#pragma once

#include <array>
#include <cstdint>

#include <voxgrad.h>

namespace nnunet {

using voxgrad::Triple;

/// What plan_unet chooses the network by, beside patch and spacing.
struct PlanOptions {
  int64_t in_channels = 1, num_classes = 2;
  bool residual = false;
  int64_t base_features = 32, max_features = 320;
  int64_t min_size = 4;  ///< voxels along an axis, below which it is not halved
};

struct Plan {
  voxgrad::nn::UNetOptions network;
  Triple patch_size;  ///< the one asked for, made larger to a multiple of the network's total stride
};

/// nnU-Net v2's stages for patches of `patch_size` voxels of this `spacing` (of D, H and W, in any one unit). From
/// stage to stage the axes are halved whose spacing is below twice the smallest of those that still have 2 min_size
/// voxels (a single one only if it has 3 min_size); an axis' kernel size is 1 until its spacing is below twice the
/// smallest, then 3, and in the last stage 3. Features double up to max_features. Convolutions: 2 a stage; residual: 1,
/// 3, 4, 6, 6, ... blocks, and 1 convolution on the way up. Throws Error if no axis can be halved once, and for sizes
/// and spacings that are not positive.
///
/// Isensee et al. 2021 (nnU-Net v2: get_pool_and_conv_props, ExperimentPlanner and ResEncUNetPlanner).
Plan plan_unet(const Triple& patch_size, const std::array<double, 3>& spacing, const PlanOptions& options = {});

}  // namespace nnunet
