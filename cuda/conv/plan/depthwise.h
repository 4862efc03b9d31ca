// Plans of depthwise convolutions (one input channel and one output channel per group) of channels-last tensors, for
// the kernels depthwise.cu and depthwise_mma.cu (fprop and dgrad) and depthwise_wgrad.cu and depthwise_mma_wgrad.cu.
//
// TMA copies the input planes with their halo to a ring of stages in shared memory, and a CTA moves along the depth. On
// CUDA cores, which compute in float32 for every dtype, a lane computes one channel and a warp computes a patch of a
// plane. On tensor cores (depthwise_mma*.cu), a warp computes one channel of a plane.
#pragma once

#include <array>
#include <optional>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Channels of a CTA on CUDA cores: one per lane.
inline constexpr int kDepthwiseChannels = 32;
/// Floats from the weights of one tap to those of the next in shared memory on CUDA cores. Avoids bank conflicts.
inline constexpr int kDepthwiseWeightPitch = kDepthwiseChannels + 1;
/// Channels of a CTA on tensor cores: one per warp.
inline constexpr int kDepthwiseMmaChannels = 16;
/// Rows of a patch.
inline constexpr int kDepthwisePatch = 4;
/// Alignment of a box in shared memory, in bytes.
inline constexpr int kDepthwiseAlignment = 128;
/// Alignment of the boxes of the kernels on tensor cores, which are swizzled.
inline constexpr int kDepthwiseMmaAlignment = 256;
/// Returns the bytes of a box of this many rows and columns.
constexpr int depthwise_box_bytes(const std::array<int, 2>& box, int channels, DType dtype) {
  return box[0] * box[1] * channels * static_cast<int>(item_size(dtype));
}
/// Returns the columns of a patch of wgrad.
constexpr int depthwise_wgrad_columns(int kernel, int stride) { return kernel == 3 && stride == 1 ? 8 : 4; }
/// Returns the patches of a CTA of wgrad. One warp per tap along the depth computes each patch.
constexpr int depthwise_wgrad_patches(int kernel) { return kernel == 7 ? 2 : 4; }

/// Shared memory of the kernels on tensor cores, in bytes. A plane is that of one channel. 16 bytes times an odd number
/// are from one plane to the next, so that eight planes occupy different banks.
struct DepthwiseMmaShared {
  static constexpr int buffers = 4;                                   ///< number of planes of each kind
  static constexpr int box = 20 * 20 * kDepthwiseMmaChannels * 2;     ///< an input plane, as TMA copies it
  static constexpr int output = 16 * 16 * kDepthwiseMmaChannels * 2;  ///< an output plane or plane of y, likewise
  static constexpr int row = 80;                                      ///< a row of an input plane of a channel
  static constexpr int plane = 20 * row + 16;                         ///< an input plane of a channel
  static constexpr int results = 16 * 32 + 16;                        ///< an output plane or a plane of y of a channel
  static constexpr int barriers = 64;                                 ///< barriers and flags
  static constexpr int weights = 125 * kDepthwiseMmaChannels * 4;     ///< weights of all channels, or sums of wgrad
  static constexpr int bytes =
      buffers * (box + output + kDepthwiseMmaChannels * (plane + results)) + barriers + weights;
};

/// The part of the plan that the kernels need: the division of the output into CTA tiles. A position is a voxel of the
/// output.
struct DepthwiseShape {
  int channels{};                ///< channels of a CTA
  std::array<int, 2> patches{};  ///< patches of a CTA along height and width, one per warp; on CUDA cores only
  std::array<int, 2> tile{};     ///< positions of a CTA tile along height and width
  std::array<int, 2> box{};      ///< input positions of a CTA tile along height and width, with the halo
  std::array<int, 3> tiles{};    ///< CTA tiles along each axis
  int chunk{};                   ///< positions of a CTA tile along the depth
  int channel_blocks{};          ///< CTAs among which the channels are divided
  int stages{};                  ///< input planes in shared memory
  int box_bytes{};
  int stage_bytes{};  ///< box_bytes, rounded up for TMA
};

/// The plan of a depthwise convolution.
struct DepthwisePlan : DepthwiseShape {
  int kernel{};         ///< size along each axis: 3, 5 or 7
  int stride{};         ///< along each axis: 1 or 2
  bool transposed{};    ///< dgrad with a stride; dgrad with stride 1 is computed as fprop
  bool tensor_cores{};  ///< computed by depthwise_mma() or depthwise_mma_wgrad()
  int shared_bytes{};   ///< dynamic shared memory of a CTA
  int64_t ctas{};       ///< CTAs of the grid
  double cycles{};      ///< cost according to the planner's model
};

/// Returns nothing unless the problem is a depthwise convolution of channels-last tensors that TMA can read, with a
/// kernel of 3^3, 5^3 or 7^3, the stride 1 or 2 along all axes, and no dilation. For dgrad with stride 2, each padding
/// must have the same parity as kernel / 2 (rounded down).
std::optional<DepthwisePlan> plan_depthwise(const ConvProblem& problem);
/// Returns the bytes of the partial sums of wgrad; 0 for the other passes.
int64_t workspace_bytes(const ConvProblem& problem, const DepthwisePlan& plan);
/// Returns the planes of y in shared memory of wgrad. A plane stays until the last tap along the depth has read it.
constexpr int depthwise_y_stages(int kernel, int stride, int stages) {
  return (kernel - 1 + stages + stride - 1) / stride;
}

}  // namespace voxgrad::cuda
