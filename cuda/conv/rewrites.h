// Applies the rewrites of plan/rewrites.h to the tensors of a convolution.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {

/// A convolution with taps along the width as channels. Owns the copies that the call refers to.
class WidthAsChannels {
 public:
  /// `problem` is the problem after the rewrite.
  WidthAsChannels(const ConvCall& call, const ConvProblem& problem, const Launch& launch);
  const ConvCall& call() const { return call_; }

 private:
  /// Repeats the bias for every tap, because the taps of the result are channels.
  void repeat_bias(const Launch& launch);

  ConvCall call_;
  std::optional<Workspace> padded_;  ///< the padded copy of the input
  std::optional<Workspace> biases_;  ///< the repeated bias
  View bias_;                        ///< view of biases_
};

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
  View diagonal_;  ///< the original weights within the merged weights: (groups, merged, out, in, taps)
  View original_;  ///< the weights of the original call, in the same shape
};

/// A convolution with all taps as channels. Owns the copy of the tensor with the patches.
class PatchesAsChannels {
 public:
  PatchesAsChannels(const ConvCall& call, const Launch& launch);
  const ConvCall& call() const { return call_; }
  /// Copies the results of dgrad to the result of the original call. Does nothing for other passes.
  void finish() const;

 private:
  ConvCall call_;
  std::optional<Workspace> copy_;
  std::optional<Workspace> biases_;
  View bias_;      ///< the bias of each channel of the copy
  View patches_;   ///< the copy as (batch, channels, D, taps, H, taps, W, taps)
  View original_;  ///< the tensor of the original call, in the same shape
};

/// Returns the call whose kernel is mirrored (ConvRewrite::mirrored). `problem` is the problem after the rewrite.
ConvCall mirrored(ConvCall call, const ConvProblem& problem);

/// Returns the part of a call with samples [first, first + count). Must not be called for weight gradients.
ConvCall samples_of(ConvCall call, int64_t first, int64_t count);

}  // namespace voxgrad::cuda
