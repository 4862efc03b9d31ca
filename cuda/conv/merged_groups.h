// Some groups of few channels as one: tensor cores multiply blocks of 16 channels and more, however few a group has.
//
// The weights become those of a convolution of fewer groups, with zeros where an input and an output channel are of
// different groups; of a weight gradient, what belongs to such pairs is left out. An infinity or NaN of one group
// makes NaN of the others with which it is merged, too.
#pragma once

#include <optional>

#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {

/// The same convolution with `count` groups as one, for as long as it lives.
class MergedGroups {
 public:
  MergedGroups(const ConvCall& call, int64_t count, const Launch& launch);
  const ConvCall& call() const { return call_; }
  /// Behind a weight gradient: the weights that were asked for.
  void finish() const;

 private:
  ConvCall call_;
  std::optional<Workspace> weights_;
  View diagonal_, asked_;  // the same weights of merged groups, and alone: (groups, merged, out, in, taps)
};

}  // namespace voxgrad::cuda
