// The kernel parameters of the implicit GEMM of channels-last convolutions (kernel.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda::implicit_gemm {

/// One TMA box of inputs and the taps that read it.
struct Load {
  int16_t offset[3];  ///< offset of the box from the CTA tile, in input positions: depth, height, width
  uint16_t first_tap;
  uint16_t taps;
};

/// A tap within its box.
struct Tap {
  int16_t shift;    ///< offset of operand A from the beginning of the box, in rows
  uint16_t weight;  ///< index of the tap in the kernel
};

/// The results of one implicit GEMM: all results (fprop), or a stride phase (dgrad).
struct Phase {
  uint16_t first_load;
  uint16_t loads;
  uint16_t depth_loads;  ///< boxes of each tap along the depth, if boxes outside of the inputs are omitted; otherwise 0
  uint16_t box_stages;   ///< stages of weights of a box, if all boxes have the same number
  int weight_stages;     ///< stages of weights of a chunk
  int first_stage;       ///< first stage of weights that stay in shared memory
  int first[3];          ///< first result along each axis
  int count[3];          ///< results along each axis
};

/// Sample, depth, height, width.
using Coordinates = int[4];

/// The parameters of fprop_dgrad_kernel. In tf32x3, `input` has twice the samples and `weight` twice the taps; the
/// second half are the low parts (split_copy()).
struct Params : FpropDgradShape {
  CUtensorMap input;   ///< (C, W, H, D, N), boxes of box[] voxels
  CUtensorMap weight;  ///< (K, N, tap), or (N, K, tap) if the output channels are innermost
  EpilogueParams epilogue;
  void* out;
  int64_t out_stride[4];   ///< strides of sample, depth, height and width, in elements
  int64_t channel_stride;  ///< elements from one channel of the results to the next
  float* partial;          ///< split-K: dense (split, N, D, H, W, C); otherwise null
  int64_t partial_stride;  ///< elements from one split to the next
  bool vectors;            ///< channels of a voxel can be stored 16 bytes at a time
  int samples;
  Divisor product_chunks;  ///< chunks of one product
  int resident_chunks;     ///< chunks whose boxes are loaded once: the low and the high parts
  int taps;                ///< taps of the convolution kernel
  int k_group;             ///< channels from one group to the next along K of the weights
  int n_group;             ///< channels from one group to the next along N of the weights
  int in_channels;         ///< per group
  int out_channels;        ///< per group
  Divisor phase_units;     ///< units of a phase. The units of the first phase have the first numbers
  // The digits of a unit's number in its phase, least significant first. The group is the rest.
  Divisor columns;   ///< units along the output channels
  Divisor split;     ///< splits of K
  Divisor tiles[4];  ///< units along sample, depth, height and width; the width is the least significant. One more
                     ///< along the samples if `cluster` does not divide their number
  int in_step[3];
  int out_step[3];
  int in_depth;       ///< planes of the inputs
  int box_depth;      ///< planes of the inputs from the first to the last one of a box
  Coordinates unit;   ///< results of a work unit
  Divisor extent[3];  ///< size of the box: width, height, depth
  int units;          ///< work units of all clusters
  int box_rows;       ///< rows that TMA loads
  int kept_taps;      ///< taps per chunk if all weights stay in shared memory; otherwise 0
  int kept_stages;    ///< stages of kept weights for one tile of output channels
  int slide_step;     ///< sliding: taps from the weights of one block of columns to those of the next
  int input_bytes;    ///< bytes of a stage: the box, rounded up
  Phase phase_of[kMaxFpropDgradPhases];  ///< in descending order of their K
  Load load[kMaxFpropDgradTaps];
  Tap tap[kMaxFpropDgradTaps];
};

static_assert(sizeof(Params) <= kMaxParameterBytes);
// Boxes and taps have 16-bit indices. has_short_offsets() checks Load::offset. A row has at least 32 bytes.
static_assert(2 * kMaxFpropDgradTaps <= UINT16_MAX && kMaxSharedBytes / 32 <= INT16_MAX);

/// The parameters of the kernel that adds the partial results of split-K in the order of the splits.
struct ReduceParams {
  const float* partial;
  int64_t partial_stride;
  int64_t voxels;
  int splits;
  int channels;
  EpilogueParams epilogue;
  void* out;
  int64_t out_stride[4];
  int64_t channel_stride;
  Divisor size[3];    ///< width, height, depth
  bool voxels_first;  ///< neighboring threads handle neighboring voxels, otherwise neighboring channels
};

/// Launches the kernel of a tile. `n_major` states that the output channels of the weights are contiguous.
template <class Arithmetic>
void launch_tile(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas, int shared_bytes,
                 cudaStream_t stream);

}  // namespace voxgrad::cuda::implicit_gemm
