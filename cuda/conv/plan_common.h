// What all planners of the convolutions say.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "core/detail/divide.h"
#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

/// Bytes of copied inputs at a time, unless a single sample takes more and its planner allows that; of partial sums,
/// unless those of a single range are more.
inline constexpr int64_t kMaxCopied = int64_t{1} << 30, kMaxSums = int64_t{256} << 20;

/// Of TMA: positions of a box's axis; from one that is copied to the next.
inline constexpr int kMaxBox = 256, kMaxStep = 8;

/// An H200's. Plans of sums go by them on every GPU: the sums of others shall have the same bits.
inline constexpr int64_t kMultiprocessors = 132;

inline bool three_products(const ConvProblem& p) { return arithmetic_of(p) == ConvArithmetic::tf32x3; }
/// Voxels that may be added to one accumulator. It truncates: so few that this is not seen beside the inputs' rounding.
inline int most_voxels(const ConvProblem& p) { return three_products(p) ? 8192 : 16384; }
/// High and low, or one.
inline int parts(const ConvProblem& p) { return three_products(p) ? 2 : 1; }
/// Of a word.
inline int elements_of(const ConvProblem& p) { return p.dtype == DType::f32 ? 1 : 2; }

std::optional<AxisPhases> phases_of(const ConvProblem& p, int axis, bool fold);
/// Of fprop and wgrad: positions of the inputs along an axis up to the last one that a tap reads.
int64_t read_size(const ConvProblem& p, int axis);

/// Whether inputs are read often enough, and by enough columns, that wgmma makes up for a pass that copies them
/// (plan.cpp).
bool pays_to_copy(const ConvProblem& p);

/// The widths of tiles that are worth a look: those that divide `count` into n near-equal pieces.
std::vector<int> box_widths(int count, int most);

/// Whether one of the tensors is. One channel lies so either way.
inline bool is_channels_last(const ConvProblem& p) {
  return (p.in_channels_last && p.groups * p.in_channels > 1) || (p.out_channels_last && p.groups * p.out_channels > 1);
}

/// Whether TMA reads a (N, C, D, H, W) view with its channels innermost as it lies: addresses in multiples of 16 bytes.
bool is_tma_tensor(const View& view);

/// Whether the kernel is as wide as its stride, so that the voxels of the strided tensor that belong to one of the
/// other lie side by side.
inline bool has_width_of_stride(const ConvProblem& p) {
  const ConvGeometry& g = p.geometry;
  const int64_t stride = g.stride[2];
  if (stride == 1 || p.kernel[2] != stride || g.dilation[2] > 1 || g.padding[2] > 0 || p.groups > 1) return false;
  if (!p.weight_channels_last) return false;
  return p.pass == ConvPass::dgrad ? p.out_channels_last && p.out_stride[2] == p.out_channels &&
                                         p.out_size[2] == p.in_size[2] * stride && p.groups * p.out_channels > 1
                                   : p.in_channels_last && p.in_stride[2] == p.in_channels;
}
/// Whether channels-last kernels take it with the taps along the width as channels (width_as_channels.h).
inline bool suits_width_as_channels(const ConvProblem& p) {
  const ConvChoice& c = p.choice;
  if (!is_channels_last(p) || !may_use_wgmma(p) || p.dtype == DType::f64 || c.plain || c.small_channel) return false;
  const bool one_channel = p.pass != ConvPass::dgrad && p.in_channels == 1 && p.groups == 1 && p.kernel[2] > 1 &&
                           p.out_channels > 8 && p.out_channels_last;
  return one_channel || has_width_of_stride(p);
}
/// That problem.
ConvProblem with_width_as_channels(ConvProblem p);

/// With `count` groups as one (merged_groups.h): products grow as many times, where they are not filled up anyway.
inline ConvProblem with_merged_groups(ConvProblem p, int64_t count) {
  p.groups /= count;
  p.in_channels *= count;
  p.out_channels *= count;
  return p;
}
inline bool may_merge_groups(const ConvProblem& p, int64_t count) {
  return count == 1 || (count <= p.groups && (count == 2 || count * std::max(p.in_channels, p.out_channels) <= 64));
}
/// Whether the channels of a group begin at multiples of 32 bytes, as tensor cores take them.
inline bool has_wide_groups(const ConvProblem& p) {
  const int64_t wide = 32 / static_cast<int64_t>(item_size(p.dtype));
  return p.in_channels % wide == 0 && p.out_channels % wide == 0;
}
/// Clocks of the copies of weights that it takes.
inline constexpr double kMergingGroups = 4000;

/// Few channels on both sides have kernels of their own (small_channel/plan.h).
inline bool is_narrow(const ConvProblem& p) { return p.in_channels <= 8 && p.out_channels <= 8 && p.choice.width == 0; }

/// Whether boxes of inputs are no further from their CTA tile than 16 bits tell (params.h of the channels-last
/// kernels).
inline bool has_short_offsets(const AxisPhases& axis) {
  const auto is_short = [&](int64_t row) { return std::abs(row) * axis.in_step < INT16_MAX - kMaxStep; };
  return std::all_of(axis.phase, axis.phase + axis.phases, [&](const AxisPhase& phase) {
    return is_short(phase.start) && is_short(phase.start + int64_t{phase.taps - 1} * phase.step);
  });
}
/// Of a persistent kernel, so that a number of one and of a grid add up below 2^31.
inline constexpr int64_t kMaxUnits = int64_t{1} << 30;

/// Of a sample's input and result.
inline int64_t sample_bytes(const ConvProblem& p) {
  const int64_t in = p.in_channels * p.in_size[0] * p.in_size[1] * p.in_size[2];
  const int64_t out = p.out_channels * p.out_size[0] * p.out_size[1] * p.out_size[2];
  return p.groups * (in + out) * static_cast<int64_t>(item_size(p.dtype));
}

}  // namespace voxgrad::cuda
