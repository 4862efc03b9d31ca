// Helpers shared by the planners of the convolutions.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "core/detail/divide.h"
#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Upper bound of the bytes of copied inputs. Some planners allow a single sample to exceed the bound.
inline constexpr int64_t kMaxCopied = int64_t{1} << 30;
/// Upper bound of the bytes of partial sums. The sums of a single range may exceed the bound.
inline constexpr int64_t kMaxSums = int64_t{256} << 20;

/// Planners of sums assume the 132 SMs of an H200 on every GPU, so that results are bitwise reproducible across GPUs.
inline constexpr int64_t kMultiprocessors = 132;

/// Returns whether float32 products are computed as three TF32 products.
inline bool three_products(const ConvProblem& p) { return arithmetic_of(p) == ConvArithmetic::tf32x3; }
/// Returns the maximum number of voxels that are added to one accumulator. Accumulators truncate, and the bound keeps
/// the error of the truncation small compared with the rounding of the inputs.
inline int most_voxels(const ConvProblem& p) { return three_products(p) ? 8192 : 16384; }
/// Returns the number of parts of an operand: high and low, or one.
inline int parts(const ConvProblem& p) { return three_products(p) ? 2 : 1; }
/// Returns the number of samples of a launch that copies `bytes` for each sample: at most kMaxCopied bytes, but at
/// least one sample.
inline int64_t samples_to_copy(const ConvProblem& p, int64_t bytes) {
  return std::clamp<int64_t>(kMaxCopied / std::max<int64_t>(bytes, 1), 1, p.batch);
}
/// Returns the number of elements per 32-bit word.
inline int elements_of(const ConvProblem& p) { return p.dtype == DType::f32 ? 1 : 2; }

/// Returns the phases of an axis (0: depth, 2: width); see fprop_phases() and dgrad_phases().
std::optional<AxisPhases> phases_of(const ConvProblem& p, int axis, bool fold);
/// Sets the phases of all axes. Returns the number of combinations of a phase of each axis, or 0 if there are more than
/// `most_phases` combinations or more than `most_taps` taps. `tma`: also returns 0 if TMA does not support a step or an
/// offset; otherwise, the width is folded.
int set_axes(const ConvProblem& p, AxisPhases (&axes)[3], bool tma, int64_t most_taps, int64_t most_phases);
/// Returns, for fprop and wgrad, the number of input positions along an axis up to the last one that a tap reads.
int64_t read_size(const ConvProblem& p, int axis);

/// Returns the number of products of a problem, including those of taps in the padding.
inline double macs(const ConvProblem& p) {
  double count = static_cast<double>(p.batch * p.groups * p.in_channels * p.out_channels);
  for (int a = 0; a < 3; ++a)
    count *= static_cast<double>(p.kernel[a] * (p.pass == ConvPass::dgrad ? p.in_size : p.out_size)[a]);
  return count;
}

/// Returns the clocks in which memory transfers `bytes`, as measured on an H200.
inline double memory_cycles(double bytes) { return bytes / 2350; }

/// Returns the candidate widths of tiles, at most `most`: those that divide `count` into nearly equal pieces.
std::vector<int> box_widths(int count, int most);

/// Returns whether one of the tensors is channels-last. A tensor with a single channel does not count.
inline bool is_channels_last(const ConvProblem& p) {
  return (p.in_channels_last && p.groups * p.in_channels > 1) || (p.out_channels_last && p.groups * p.out_channels > 1);
}

/// Returns whether TMA can read a channels-last view (N, C, D, H, W): all voxels begin at multiples of 16 bytes.
bool is_tma_tensor(const View& view);

/// Returns whether the offsets of input boxes from their CTA tile fit into 16 bits (params.h of sm90/fprop_dgrad
/// and sm90/wgrad).
inline bool has_short_offsets(const AxisPhases& axis) {
  const auto is_short = [&](int64_t row) { return std::abs(row) * axis.in_step < INT16_MAX - kMaxStep; };
  return std::all_of(axis.phase, axis.phase + axis.phases, [&](const AxisPhase& phase) {
    return is_short(phase.start) && is_short(phase.start + int64_t{phase.taps - 1} * phase.step);
  });
}

/// Returns the bytes of the input and the result of one sample.
inline int64_t sample_bytes(const ConvProblem& p) {
  const int64_t in = p.in_channels * p.in_size[0] * p.in_size[1] * p.in_size[2];
  const int64_t out = p.out_channels * p.out_size[0] * p.out_size[1] * p.out_size[2];
  return p.groups * (in + out) * static_cast<int64_t>(item_size(p.dtype));
}

}  // namespace voxgrad::cuda
