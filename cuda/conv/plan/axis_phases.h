// The geometry of the tensor core convolutions along one axis. A problem is divided into phases, in which neighboring
// results read neighboring inputs for any stride and dilation (ops/detail/conv_geometry.h):
//
//   fprop, wgrad: y[q] reads x[q * stride + k * dilation - padding]
//   dgrad:        x[phase + q * stride] reads y[q + (phase + padding - k * dilation) / stride],
//                 if the index of y is an integer
//
// Fprop is the forward convolution, dgrad the gradient of its input, and wgrad the gradient of its weights. A tap k is
// an element of the kernel.
//
// Dgrad has one phase for each residue of the *results* modulo the stride. Fprop has one phase for each residue of the
// *inputs*, and a result is the sum over the phases. The inputs of a phase (residue, residue + stride, ...) form a
// dense row. An axis can also be *folded*: all residues then belong to one phase and are loaded together. The mma.sync
// kernels fold the innermost axis, so that they read contiguous memory. In shared memory, they store the residues
// separately.
#pragma once

#include <cstdint>
#include <optional>

#include "core/half.h"
#include "core/view.h"
#include "cuda/conv/plan/limits.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// One phase. Its results are first + q * out_step for q in [0, count). Its taps are taps tap_first + t * tap_step of
/// the kernel for t in [0, taps). Result q with tap t reads row position r = q * fold + start + t * step, which is
/// input position r * in_step + residue.
struct AxisPhase {
  int first;
  int count;
  int residue;
  int start;
  int step;
  int tap_first;
  int tap_step;
  int taps;
  int low;   ///< lowest row position that result q = 0 reads, divided by `fold`
  int span;  ///< highest row position that result q = 0 reads, divided by `fold`, minus `low`, plus 1
};

/// The phases of an axis.
struct AxisPhases {
  int64_t in_size;
  int in_step;    ///< input positions from one row position to the next
  int out_step;   ///< result positions from one q to the next
  int fold;       ///< residues that share a row
  int kernel;     ///< taps of the kernel
  int count;      ///< results of the largest phase
  int max_span;   ///< largest span of a phase
  bool complete;  ///< whether every result belongs to a phase; results without a phase are the bias alone
  int phases;     ///< number of phases
  AxisPhase phase[kMaxAxisPhases];
};

/// Returns the phases of an axis, or nothing if there are more than kMaxAxisPhases or positions exceed the range of the
/// kernels (2^28). `fold` folds the residues.
std::optional<AxisPhases> fprop_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation, bool fold);
std::optional<AxisPhases> dgrad_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation);
/// Splits the number of a class, a combination of one phase of each axis, into the phases. Phases of the width vary
/// fastest.
VG_HOST_DEVICE inline void split_class(const AxisPhases (&axis)[3], int number, int (&phase)[3]) {
  for (int a = 2; a >= 0; --a) {
    phase[a] = number % axis[a].phases;
    number /= axis[a].phases;
  }
}
/// Sets `low` and `span` of every phase to those of the union of all phases.
void merge_halos(AxisPhases& axis);

}  // namespace voxgrad::cuda
