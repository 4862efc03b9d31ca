// Applies the rewrites of plan/rewrites.h to the tensors of a convolution.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {

/// A convolution after the rewrite of its plan. Owns the copies that the call refers to.
class RewrittenCall {
 public:
  /// Makes the copies of the rewrite. float32_copies is not supported; see through_float32().
  RewrittenCall(const ConvCall& original, const ConvPlan& plan, const Launch& launch);
  RewrittenCall(const RewrittenCall&) = delete;
  RewrittenCall& operator=(const RewrittenCall&) = delete;

  const ConvCall& call() const { return call_; }
  /// Copies the result to the tensor of the original call. Does nothing if the rewritten call writes this tensor.
  void finish() const;

 private:
  void view_width_as_channels(const ConvProblem& problem, const Launch& launch);
  void view_phases_as_channels(const ConvProblem& problem, const Launch& launch);
  void merge_groups(int64_t count, const Launch& launch);
  void copy_patches(const Launch& launch);
  void copy_to_channels_last(const Launch& launch);
  void mirror(const ConvProblem& problem);
  /// Gives each output channel of the call the bias of its original channel. Axis 1 of `to` contains the original
  /// channels, and all axes together the channels of the call.
  void repeat_bias(View to, const Launch& launch);

  ConvCall call_;
  std::optional<Workspace> copy_;
  std::optional<Workspace> other_copy_;
  View bias_;      ///< the bias of the call, if it is a copy
  View result_{};  ///< the result in a copy
  View target_{};  ///< the original result, in the same shape; rank 0 if the call writes it
};

/// Returns the part of a call with samples [first, first + count). Must not be called for weight gradients.
ConvCall samples_of(ConvCall call, int64_t first, int64_t count);

}  // namespace voxgrad::cuda
