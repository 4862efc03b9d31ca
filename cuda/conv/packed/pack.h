// Packing of weights for the implicit GEMMs, and of inputs for those of them that use wgmma.
#pragma once

#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/plan.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

struct PackWeights {
  const void* weight;
  int64_t group_stride, in_stride, out_stride, tap_stride[3];
  int groups, in_channels, out_channels;      // channels of a group
  int columns, column_tiles, k_blocks, taps;  // columns: output channels of a tile; taps: of all classes
  int slide;                                  // taps along depth that are columns, one behind the other
  int stage_k_blocks;                         // k-blocks whose taps follow each other, tap by tap of a k-block
  int tile_phases;                            // classes that follow each other so many k-blocks at a time
  bool wgmma;                                 // slabs as in wgmma.cuh, not fragments
  AxisPhases axis[3];
};

template <class Arithmetic>
size_t packed_bytes(const PackWeights& p);
template <class Arithmetic>
void pack_weights(const PackWeights& p, void* packed, cudaStream_t stream);

struct PackInputs {
  const void* in;
  int64_t stride[5];
  int64_t batch;
  int groups, channels, k_blocks;  // channels of a group; k-blocks of 8 words of them
  int size[3];
  Divisor step[3];      // residues of an axis; those of the width are packed apart
  int run;              // voxels of each, zero beyond the last
  Divisor lines, line;  // of a plane, and voxels of one, in all residues
  uint32_t is_read[3];  // bits: residues that a tap reads; others are left out. Steps above 32 are 1 here: all are read
  unsigned* counter;    // or null; set to 0: of the CTA tiles that were taken (producer.cuh)
};

/// As fprop or dgrad and, of halves, wgrad of this problem read its inputs, all samples.
PackInputs pack_inputs_of(const ConvProblem& problem, const View& in);
/// Of one sample.
template <class Arithmetic>
size_t packed_bytes(const PackInputs& p);
template <class Arithmetic>
void pack_inputs(const PackInputs& p, void* packed, cudaStream_t stream);

}  // namespace voxgrad::cuda
