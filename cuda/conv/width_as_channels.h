// Taps along the width as channels, and the kernel one voxel wide: fewer and larger products.
//
// Where the kernel is as wide as its stride (k2 s2 and the like), the channels-last voxels that a tap reads, or writes,
// lie between those of the others: as many of them as there are taps are one voxel with as many times the channels.
// Of one input channel, the taps of neighbours overlap; they become channels of a view of a padded copy, since the
// tensor cores' K would be mostly filling else.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {

/// The same convolution of other views, for as long as it lives, if suits_width_as_channels().
class WidthAsChannels {
 public:
  WidthAsChannels(const ConvCall& call, const ConvProblem& problem, const Launch& launch);
  const ConvCall& call() const { return call_; }

 private:
  /// For each channel of the results.
  void repeat_bias(const Launch& launch);

  ConvCall call_;
  std::optional<Workspace> padded_, biases_;
  View bias_;
};

}  // namespace voxgrad::cuda
