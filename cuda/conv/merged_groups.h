// Computes several groups of few channels as one group, because a product of the tensor cores has at least 16 channels.
//
// The weights of all groups form one larger weight tensor. Its elements are zero where the input channel and the output
// channel belong to different groups, and the gradients of these elements are discarded. Because the kernels multiply
// the zeros by inputs, an infinity or NaN in one group causes NaN in the groups that are merged with it.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {

/// A convolution with `count` groups merged into one. Owns the merged weights.
class MergedGroups {
 public:
  MergedGroups(const ConvCall& call, int64_t count, const Launch& launch);
  const ConvCall& call() const { return call_; }
  /// Copies a weight gradient to the weights of the original call. Does nothing for other passes.
  void finish() const;

 private:
  ConvCall call_;
  std::optional<Workspace> weights_;
  View diagonal_;  ///< the original weights within the merged ones: (groups, merged, out, in, taps)
  View original_;  ///< the weights of the original call, in the same shape
};

}  // namespace voxgrad::cuda
