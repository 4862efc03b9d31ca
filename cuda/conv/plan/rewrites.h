// Rewrites: ways to compute a problem as another problem, for which a kernel family is faster or exists.
// cuda/conv/rewrites.h applies them to the tensors of a call.
#pragma once

#include <vector>

#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

enum class ConvRewrite : uint8_t {
  none,
  /// The taps along the width become channels of a kernel that is one voxel wide. This makes fewer and larger products.
  ///
  /// If the kernel is as wide as its stride (such as kernel 2, stride 2), the taps of neighboring results do not
  /// overlap: in a channels-last tensor, neighboring voxels are viewed as one voxel with more channels. With one input
  /// channel, taps may overlap. They become channels of an overlapping view of a padded copy, because the K dimension
  /// of the tensor cores would otherwise be mostly padding.
  width_as_channels,
  /// In a data gradient with a stride along the width, neighboring results of different phases (axis_phases.h) become
  /// channels of one voxel. This makes fewer and larger products, and longer stores.
  ///
  /// The stride along the width becomes 1. The weights are copied: tap t has, for phase r, the original tap
  /// r + padding + stride * (t - new padding), or zeros if it does not exist. An infinity or NaN causes NaN in all
  /// phases of the results that it reaches.
  phases_as_channels,
  /// Several groups of few channels become one group, because a product of the tensor cores has at least 16 channels.
  ///
  /// The weights of all groups form one larger weight tensor. Its elements are zero where the input channel and the
  /// output channel belong to different groups, and the gradients of these elements are discarded. Because the kernels
  /// multiply the zeros by inputs, an infinity or NaN in one group causes NaN in the groups that are merged with it.
  merged_groups,
  /// If the kernel is as large as its stride, all taps become channels of a copy of x, the tensor with the patches, and
  /// the kernel size becomes 1.
  patches_as_channels,
  /// A convolution with stride 1 is the data gradient of the convolution whose kernel is mirrored, and the other way
  /// round. Its weight gradient is that of the convolution with x and y exchanged, mirrored. A problem whose result has
  /// few channels becomes one whose input has few channels, or the other way round.
  mirrored,
  /// Tensors that are not channels-last are copied to channels-last, and so is the result in the opposite direction.
  /// Most families support only channels-last tensors. If one tensor is copied, the other is also copied if TMA cannot
  /// read it. If both are channels-last, sm90/ makes its own copies.
  channels_last_copies,
  /// Halves are computed with float32 copies of all tensors.
  float32_copies,
};

/// A problem that a rewrite yields.
struct RewrittenProblem {
  ConvRewrite rewrite;
  ConvProblem problem;
  int64_t merged_groups = 1;
  double cycles = 0;  ///< clocks that the copies of the rewrite cost
};

/// Returns the problems that a rewrite yields; none if the rewrite does not apply. ConvRewrite::none yields the problem
/// itself. ConvRewrite::merged_groups yields a problem for each number of merged groups.
std::vector<RewrittenProblem> rewritten_problems(ConvRewrite rewrite, const ConvProblem& problem);

}  // namespace voxgrad::cuda
