// The geometry of the tensor-core convolutions, axis by axis: how a problem falls into parts in which neighbouring
// results read neighbouring inputs, whatever the stride and the dilation.
//
// Which input an output of an axis reads (ops/conv_geometry.h):
//
//   forward:    y[q] reads x[q * stride + k * dilation - padding]
//   transposed: x[phase + q * stride] reads y[q + (phase + padding - k * dilation) / stride], where that is whole
//
// A transposed convolution has a part for each phase of its *results*. A forward one has a part for each residue of
// its *inputs* modulo the stride: the result is the sum over the parts, in each of which the inputs residue,
// residue + stride, ... are a dense row of their own. On the innermost axis the residues are staged together instead
// ("folded"), so that what mma.sync reads from memory stays contiguous; in shared memory they lie apart again, and so
// they do in memory in what is packed for wgmma.
#pragma once

#include <cstdint>
#include <optional>

#include "core/view.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// Result number q of the part, with the part's tap t (tap tap_first + t * tap_step of the kernel), reads the row
/// position q * fold + start + t * step, which is the input position row * in_step + residue.
struct AxisPart {
  int first, count;          // results: first + q * out_step for q in [0, count)
  int residue, start, step;  // what they read
  int tap_first, tap_step, taps;
  /// Of the row positions / fold that q = 0 reads: the least, and how many there are.
  int low, span;
};

inline constexpr int kMaxParts = 8;

struct AxisParts {
  int64_t in_size;
  int in_step, out_step, fold;
  int kernel;  // taps in all
  int count;   // results of the largest part
  int max_span, max_taps;
  bool complete;  // every result belongs to a part with taps; the others are the bias alone
  int parts;
  AxisPart part[kMaxParts];
};

/// The parts of the axis: nothing if there are too many or numbers leave the range of the kernels (2^28).
std::optional<AxisParts> forward_parts(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation, bool fold);
std::optional<AxisParts> transposed_parts(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                          int64_t padding, int64_t dilation);
/// Gives all parts the halo of all of them.
void merge_halos(AxisParts& axis);

}  // namespace voxgrad::cuda
