// Treats the taps along the width as channels of a kernel that is one voxel wide, which makes fewer and larger
// products.
//
// If the kernel is as wide as its stride (such as kernel 2, stride 2), the taps of neighboring results do not overlap:
// in a channels-last tensor, `taps` neighboring voxels are viewed as one voxel with `taps` times the channels. With one
// input channel, taps may overlap. They become channels of an overlapping view of a padded copy, because the K
// dimension of the tensor cores would otherwise be mostly padding.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {

/// A convolution with taps along the width as channels. The problem must satisfy suits_width_as_channels(). Owns the
/// copies that the call refers to.
class WidthAsChannels {
 public:
  WidthAsChannels(const ConvCall& call, const ConvProblem& problem, const Launch& launch);
  const ConvCall& call() const { return call_; }

 private:
  /// Repeats the bias for every tap, because the taps of the result are channels.
  void repeat_bias(const Launch& launch);

  ConvCall call_;
  std::optional<Workspace> padded_, biases_;
  View bias_;
};

}  // namespace voxgrad::cuda
