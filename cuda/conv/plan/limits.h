// The capacities that planners and kernels share: the lengths of arrays in kernel parameters and in shared memory, and
// limits of the hardware. Planners reject problems and plans that exceed them.
#pragma once

#include <cstdint>

namespace voxgrad::cuda {

/// Bytes of parameters of a kernel, on sm_70 and newer.
inline constexpr int kMaxParameterBytes = 32764;
/// Bytes of shared memory of a CTA on sm_90.
inline constexpr int kMaxSharedBytes = 227 * 1024;
/// Limits of TMA: positions of a box along an axis, and the step from one position to the next.
inline constexpr int kMaxBox = 256;
inline constexpr int kMaxStep = 8;
/// Work units of a persistent kernel: the index of a unit plus the number of CTAs stays below 2^31.
inline constexpr int64_t kMaxUnits = int64_t{1} << 30;
/// Bytes of shared memory through which a warp stores halves (common/store_vectors.cuh).
inline constexpr int kStagedBytes = 2048;
/// Phases of an axis (axis_phases.h).
inline constexpr int kMaxAxisPhases = 8;

// sm80: taps and classes of a problem (MmaSyncPlan, MmaSyncWgradPlan).
inline constexpr int kMaxMmaSyncTaps = 1024;
inline constexpr int kMaxMmaSyncClasses = 64;
/// Fprop and dgrad: results of a CTA tile, and words (common/mma.cuh) of input channels in a k-block.
inline constexpr int kMmaSyncRows = 256;
inline constexpr int kMmaSyncKWords = 8;
/// Fprop and dgrad: stages of weights, and taps of a stage. `tap_words` are the words of weights of one tap.
inline constexpr int kMmaSyncWeightStages = 3;
constexpr int mma_sync_stage_taps(int tap_words) { return tap_words > 256 ? 4 : 8; }
/// Bytes of shared memory with which two CTAs fit on an SM of sm_90.
inline constexpr int kMaxMmaSyncSharedBytes = 112 * 1024;
/// Wgrad: words of y per channel in a k-tile, and words from one channel to the next in shared memory.
inline constexpr int kMmaSyncKTileWords = 128;
inline constexpr int kMmaSyncKTilePitch = kMmaSyncKTileWords + 4;
/// Wgrad: blocks of 8 columns of a CTA tile with this number of rows.
constexpr int mma_sync_wgrad_columns(int rows, bool three) { return 4 * (rows > 32 || three ? 7 : 14); }

// sm90/fprop_dgrad: taps, phases, and stages of each ring, and of the weights of several tiles of output channels that
// stay in shared memory. The kernel stores a position in a CTA tile as seven bits per axis.
inline constexpr int kMaxFpropDgradTaps = 512;
inline constexpr int kMaxFpropDgradPhases = 64;
inline constexpr int kMaxFpropDgradStages = 8;
inline constexpr int kMaxFpropDgradWeightStages = 16;
inline constexpr int kMaxFpropDgradSide = 127;
/// M64 tiles of a CTA tile.
inline constexpr int kMaxFpropDgradTiles = 8;
/// Bytes of shared memory for barriers, the list of rows, results, and alignment.
constexpr int fprop_dgrad_static_bytes(bool halves) { return 6 * 1024 + (halves ? 8 : 1) * kStagedBytes; }

// sm90/wgrad: taps, sets of taps, boxes of all sets, and stages.
inline constexpr int kMaxWgradTaps = 343;
inline constexpr int kMaxWgradSets = 64;
inline constexpr int kMaxWgradBoxes = 384;
inline constexpr int kMaxWgradStages = 6;
/// M64 tiles of a warpgroup.
inline constexpr int kMaxWgradMTiles = 7;
/// Steps of 16 voxels in a tile.
inline constexpr int kMaxWgradSteps = 32;
/// Bytes of shared memory for barriers, the list of taps and alignment.
inline constexpr int kWgradStaticBytes = 2 * 1024;

// direct/small_channel: channels of a group, of either tensor, and planes in shared memory.
inline constexpr int kMaxSmallChannels = 16;
inline constexpr int kMaxSmallChannelStages = 8;
/// Fprop and dgrad: pairs of units in a plane (SmallChannelPlan::pairs).
inline constexpr int kMaxSmallChannelPairs = 512;
/// Bytes of shared memory for barriers and for the system.
inline constexpr int kSmallChannelStaticBytes = 1536;

// direct/depthwise: warps of a CTA of fprop and dgrad, each of which computes a patch, and stages of a plan.
inline constexpr int kMaxDepthwiseWarps = 4;
inline constexpr int kMaxDepthwiseStages = 4;

// direct/few_inputs: input channels; pairs of an input channel and a tap; sizes, strides, paddings and dilations along
// an axis; and inputs of a box along an axis.
inline constexpr int kMaxFewInputs = 8;
inline constexpr int kMaxFewInputsTaps = 2048;
inline constexpr int kMaxFewInputsSize = 1 << 20;
inline constexpr int kMaxFewInputsSide = 4096;

// direct/few_outputs: output channels; sizes and paddings, and taps and strides, along an axis.
inline constexpr int kMaxFewOutputs = 4;
inline constexpr int kMaxFewOutputsSize = 1 << 20;
inline constexpr int kMaxFewOutputsTaps = 15;

/// direct/pointwise: channels of the tensor with many channels.
inline constexpr int kMaxPointwiseChannels = 2048;

}  // namespace voxgrad::cuda
