// The geometry of the tensor-core convolutions, axis by axis: how a problem falls into phases in which neighbouring
// results read neighbouring inputs, whatever the stride and the dilation (ops/detail/conv_geometry.h):
//
//   fprop, wgrad: y[q] reads x[q * stride + k * dilation - padding]
//   dgrad:        x[phase + q * stride] reads y[q + (phase + padding - k * dilation) / stride], where that is whole
//
// Dgrad has a phase for each residue of its *results* modulo the stride. Fprop has one for each residue of its
// *inputs*: the result is the sum over them, in each of which the inputs residue, residue + stride, ... are a dense row
// of their own. On the innermost axis the residues are staged together instead ("folded"), so that what mma.sync reads
// from memory stays contiguous; in shared memory they lie apart again.
#pragma once

#include <cstdint>
#include <optional>

#include "core/view.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// Result number q of the phase, with the phase's tap t (tap tap_first + t * tap_step of the kernel), reads the row
/// position q * fold + start + t * step, which is the input position row * in_step + residue.
struct AxisPhase {
  int first, count;          // results: first + q * out_step for q in [0, count)
  int residue, start, step;  // what they read
  int tap_first, tap_step, taps;
  /// Of the row positions / fold that q = 0 reads: the least, and how many there are.
  int low, span;
};

inline constexpr int kMaxAxisPhases = 8;

struct AxisPhases {
  int64_t in_size;
  int in_step, out_step, fold;
  int kernel;  // taps in all
  int count;   // results of the largest phase
  int max_span;
  bool complete;  // every result belongs to a phase with taps; the others are the bias alone
  int phases;
  AxisPhase phase[kMaxAxisPhases];
};

/// The phases of the axis: nothing if there are too many or numbers leave the range of the kernels (2^28).
std::optional<AxisPhases> fprop_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation, bool fold);
std::optional<AxisPhases> dgrad_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation);
/// Gives all phases the halo of all of them.
void merge_halos(AxisPhases& axis);

}  // namespace voxgrad::cuda
