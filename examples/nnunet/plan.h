// nnU-Net's rules that derive the stages of a U-Net from a patch size and a voxel spacing.
#pragma once

#include <array>
#include <cstdint>

#include <voxgrad.h>

namespace nnunet {

using voxgrad::Triple;

/// Options of plan_unet other than the patch size and the spacing.
struct PlanOptions {
  int64_t in_channels = 1;
  int64_t num_classes = 2;
  bool residual = false;       ///< uses a residual encoder instead of plain convolutions
  int64_t base_features = 32;  ///< channels of the first stage
  int64_t max_features = 320;  ///< upper bound for the channels of a stage
  int64_t min_size = 4;        ///< minimum voxels along an axis after it is halved
};

/// The result of plan_unet.
struct Plan {
  voxgrad::nn::UNetOptions network;
  Triple patch_size;  ///< the requested patch size, rounded up to a multiple of the network's total stride
};

/// Returns the U-Net that nnU-Net v2 would choose for patches of `patch_size` voxels with `spacing`. Both arguments
/// have the order D, H, W. Only the ratios of the spacings matter, so the spacings may have any unit.
///
/// - Strides: an axis is long if it has at least 2 * min_size voxels. Each stage halves the long axes whose spacing is
///   less than twice the smallest spacing of all long axes. If only one axis meets this condition, it must have at
///   least 3 * min_size voxels. Stages are added until no axis can be halved.
/// - Kernel sizes: 1 along an axis while its spacing is at least twice the smallest spacing, then 3. The last stage has
///   kernel size 3 along all axes.
/// - Features: base_features in the first stage, doubled in each stage up to max_features.
/// - Depth: two convolutions per stage. A residual encoder has 1, 3, 4, 6, 6, ... blocks per stage instead, and its
///   decoder one convolution per stage.
///
/// Throws Error if no axis can be halved, or if a size or a spacing is not positive. The rules are those of
/// get_pool_and_conv_props, ExperimentPlanner and ResEncUNetPlanner (Isensee et al. 2021).
Plan plan_unet(const Triple& patch_size, const std::array<double, 3>& spacing, const PlanOptions& options = {});

}  // namespace nnunet
