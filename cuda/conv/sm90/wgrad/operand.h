// Prepares the operands of the channels-last weight gradient (kernel.cuh): the tensors themselves if TMA can read them
// and their elements are halves, otherwise copies.
#pragma once

#include <optional>

#include "core/view.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_wgrad {

/// One operand, x or y, for a number of samples at a time. The operand of halves is the tensor itself or a
/// channels-last copy. The operand of float32 is a copy in f16, in which each channel is multiplied by the power of two
/// that brings its largest value below 2^15. With two parts, the rounding errors of this copy follow as additional
/// samples.
///
/// f16 has 11 significant bits, as TF32 has. A value below the range of f16 has an error of at most 2^-40 of the
/// largest value of its channel. This rarely matters, because each sum runs over a whole channel.
class Operand {
 public:
  Operand(const View& view, int64_t groups, int parts, const Launch& launch);
  /// Allocates memory for `samples` samples at a time.
  void allocate(int64_t samples);
  /// Returns samples [first, first + count), one part after another. The channels of a group begin at multiples of
  /// channel_pitch(). Overwrites the samples of the previous call.
  View samples(int64_t first, int64_t count);
  int channel_pitch() const { return channel_pitch_; }
  /// Returns the bits of the largest finite magnitude of each channel; null for halves.
  const uint32_t* maxima() const { return maxima_; }

 private:
  friend class Scales;
  /// Returns whether the tensor needs no copy.
  bool as_it_lies() const;
  /// Returns whether the tensor is channels-last with vectors of 4 channels within groups, and all samples fit into the
  /// copy.
  bool suits_slices() const;
  View copy_of(const View& view) const;
  void find_maxima() const;
  void scale(const View& copy, const View& view) const;
  const View& view_;
  const Launch& launch_;
  int64_t groups_;
  int64_t samples_ = 0;  ///< samples for which the copy has memory
  int parts_;
  int channel_pitch_;
  bool scaled_ = false;  ///< Scales has already made the copy
  uint32_t* maxima_ = nullptr;
  std::optional<Workspace> copy_;
};

/// Computes the scale factors of both operands, and for small tensors also their scaled copies. Call allocate() of both
/// operands first.
class Scales {
 public:
  Scales(Operand& x, Operand& y, const Launch& launch);

 private:
  std::optional<Workspace> maxima_;
};

}  // namespace voxgrad::cuda::implicit_wgrad
