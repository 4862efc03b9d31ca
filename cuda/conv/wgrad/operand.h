// Operands of the channels-last weight gradient (kernel.cuh): tensors of halves that TMA reads, or copies of others.
#pragma once

#include <optional>

#include "core/view.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_wgrad {

/// x or y, of some samples at a time. Of halves: itself, or a copy with its channels innermost. Of float32: a copy in
/// f16, each channel times the power of two that brings its largest value below 2^15; with two parts, what that loses
/// stands behind it, as samples of its own.
///
/// An f16 has the 11 bits of a TF32, and each sum runs over a whole channel: a value lies 2^-40 or less of its
/// channel's largest beside the truth, as much as is lost of that value when it is added.
class Operand {
 public:
  Operand(const View& view, int64_t groups, int parts, const Launch& launch);
  /// Memory for so many samples at a time.
  void allocate(int64_t samples);
  /// Those samples, behind each other by parts. Of its channels, those of a group begin at multiples of
  /// channel_pitch(). Overwrites the ones before.
  View samples(int64_t first, int64_t count);
  int channel_pitch() const { return channel_pitch_; }
  /// Bits of each channel's largest finite magnitude; null of halves.
  const uint32_t* maxima() const { return maxima_; }

 private:
  friend class Scales;
  bool as_it_lies() const;
  /// Whether its channels are innermost, vectors of 4 of them of one group, and all samples fit into the copy.
  bool suits_slices() const;
  View copy_of(const View& view) const;
  void find_maxima() const;
  void scale(const View& copy, const View& view) const;
  const View& view_;
  const Launch& launch_;
  int64_t groups_, samples_ = 0;
  int parts_, channel_pitch_;
  bool scaled_ = false;  // the copy is made
  uint32_t* maxima_ = nullptr;
  std::optional<Workspace> copy_;
};

/// Finds the factors of both operands; of few voxels, makes their copies, too. Both know of their memory by then.
class Scales {
 public:
  Scales(Operand& x, Operand& y, const Launch& launch);

 private:
  std::optional<Workspace> maxima_;
};

#ifdef __CUDACC__
/// The exponent of the factor for a channel with this maximum.
__device__ inline int scale_exponent(uint32_t maximum) {
  return maximum == 0 ? 0 : min(max(14 + 127 - static_cast<int>(maximum >> 23), -126), 126);
}
#endif

}  // namespace voxgrad::cuda::implicit_wgrad
