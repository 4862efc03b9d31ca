// Convolutions of one input channel, of which the tensor cores' K would be mostly filling: a tap along the width
// becomes a channel, and the kernel one voxel wide.
#pragma once

#include "core/view.h"
#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// The same convolution (fprop or wgrad) of other views, for as long as it lives, if suits_width_as_channels().
class WidthAsChannels {
 public:
  WidthAsChannels(const View& in, const View& w, const View& out, const ConvGeometry& geometry, const Launch& launch);

  View in, w;
  ConvGeometry geometry;

 private:
  Workspace padded_;
};

}  // namespace voxgrad::cuda
