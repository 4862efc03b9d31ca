// The descriptions of a convolution and of a GPU from which planners choose kernels and tiles. A plan depends only on
// the problem, so that tests can check plans without a GPU.
#pragma once

#include <initializer_list>
#include <string>

#include "core/precision.h"
#include "core/view.h"
#include "cuda/conv/plan/axis_phases.h"

namespace voxgrad::cuda {

/// The arithmetic of the tensor cores (cuda/conv/common/mma.cuh). tf32x3 computes a float32 product as three TF32
/// products.
enum class ConvArithmetic : uint8_t { tf32, tf32x3, bf16, f16 };
/// Returns the name of an arithmetic, for messages.
const char* name(ConvArithmetic arithmetic);

/// The families of kernels: plain is in simt/, mma_sync and multistage_wgrad are in sm80/, fprop_dgrad and wgrad are in
/// sm90/, and the others are in direct/.
enum class ConvKernel : uint8_t {
  any,  ///< only in ConvChoice
  plain,
  mma_sync,
  multistage_wgrad,
  small_channel,
  few_inputs,
  few_outputs,
  pointwise,
  depthwise,
  fprop_dgrad,
  wgrad
};

/// Overrides of the planners' choices, for tests. A zero leaves the choice to the planner. The alignment equals the
/// size, because Clang would otherwise call a library for std::atomic<ConvChoice>.
struct alignas(8) ConvChoice {
  ConvKernel kernel = ConvKernel::any;  ///< use this family for the problems that it supports
  uint8_t copies : 2 = 0;    ///< use a rewrite, if it applies: 1: patches_as_channels; 2: channels_last_copies;
                             ///< 3: phases_as_channels
  bool unsplit : 1 = false;  ///< fprop_dgrad: no split-K
  uint8_t slide : 2 = 0;     ///< 1: no tiles that slide along depth; 2: only such tiles
  uint8_t columns : 2 = 0;   ///< fprop_dgrad: 1: one tile along the output channels per work unit; 2: all such tiles
  int8_t k_blocks = 0;       ///< fprop_dgrad: bytes of a row / 32; wgrad: channels of a row
  int8_t m_tiles = 0;        ///< m64 tiles of a warpgroup; multistage_wgrad: rows of a tile / 64
  int8_t pairs = 0;          ///< fprop_dgrad: 1: the warpgroups compute tiles in turn; 2: they share a tile
  int8_t cluster = 0;        ///< fprop_dgrad: CTAs of a cluster, 1 or 2; wgrad: 1: only partial sums in memory,
                             ///< 2: only sums in shared memory
  int16_t width = 0;         ///< columns of a tile; rows for small_channel and the weight gradient of mma_sync
  friend bool operator==(const ConvChoice&, const ConvChoice&) = default;
};
static_assert(sizeof(ConvChoice) == 8);
/// Sets the overrides for all later convolutions of the program. A width that is not compiled is ignored.
void force_conv_choice(ConvChoice choice);

/// A convolution as the CUDA kernels compute it. `in` is the tensor that the taps of the kernel read. `out` is the
/// result or, for the weight gradient, y.
struct ConvProblem {
  ConvPass pass = ConvPass::fprop;
  DType dtype = DType::f32;
  Float32Precision precision = Float32Precision::highest;
  int64_t batch = 1;
  int64_t groups = 1;
  int64_t in_channels = 1;   ///< per group
  int64_t out_channels = 1;  ///< per group
  Triple in_size{1};
  Triple out_size{1};
  Triple kernel{1};
  ConvGeometry geometry{};
  int64_t shared_limit = kMaxSharedBytes;  ///< maximum shared memory of a CTA in bytes; default: sm_90
  int multiprocessors = 132;               ///< SMs; default: H200
  bool wgmma = true;                       ///< the GPU is sm_90a and the program has code for it
  Triple in_stride{0};                     ///< elements, along D, H and W
  Triple out_stride{0};                    ///< elements, along D, H and W
  int64_t in_channel_stride = 1;
  int64_t out_channel_stride = 1;
  int64_t out_sample_stride = 0;
  bool in_channels_last = false;   ///< the channels of a voxel of `in` are contiguous
  bool out_channels_last = false;  ///< the channels of a voxel of `out` are contiguous
  bool in_aligned = true;          ///< TMA can read `in` if it is channels-last (is_tma_tensor())
  bool out_aligned = true;         ///< TMA can read `out` if it is channels-last
  bool in_dense = false;           ///< `in` is channels-last without gaps between voxels
  bool out_dense = false;          ///< `out` is channels-last without gaps between voxels
  bool in_planes = false;   ///< the voxels of each channel of `in` are contiguous, in aligned vectors of 16 bytes
  bool out_planes = false;  ///< the voxels of each channel of `out` are contiguous, in aligned vectors of 16 bytes
  bool weight_channels_last = false;  ///< channels-last weights, without gaps between taps along the width
  bool weight_rows = false;           ///< weight_row_stride() is positive
  ConvChoice choice{};
  friend bool operator==(const ConvProblem&, const ConvProblem&) = default;
};

/// Returns the problem for these views and their GPU, with the current precision and overrides. For a weight gradient,
/// `in` is x and `out` is y.
ConvProblem conv_problem(ConvPass pass, const View& in, const View& out, const View& w, const ConvGeometry& geometry);
/// Set the members of the problem that describe strides and alignment of the tensors.
void set_in_layout(ConvProblem& problem, const View& in);
void set_out_layout(ConvProblem& problem, const View& out);
void set_weight_layout(ConvProblem& problem, const View& w);
/// Returns whether the channels of each voxel are contiguous. A single channel is.
bool has_channels_innermost(const View& view);
/// Sets the strides of a view so that it is dense in the order `axes`, innermost first, with the innermost axis padded
/// to a multiple of 16 bytes. Returns the number of elements, including the padding.
int64_t lay_out(View& view, const std::array<int, 5>& axes);
/// Returns whether elements that are neighbors in the order `axes`, innermost first, are `stride` elements apart.
bool is_dense(const View& view, std::initializer_list<int> axes, int64_t stride = 1);
/// Returns the stride between the weights of all taps and all channels of axis 1, in any order, or 0 if they are not
/// equally spaced.
int64_t weight_row_stride(const View& w);
/// Returns the arithmetic of a problem. The dtype must not be f64.
ConvArithmetic arithmetic_of(const ConvProblem& problem);
/// Returns whether GPU `device` has wgmma and the program has code for it.
bool has_wgmma(int device);

/// The properties of a GPU from which attainable rates are estimated. The defaults are those of an H200.
struct ConvGpu {
  std::string name = "NVIDIA H200";
  int capability = 90;  ///< compute capability: 10 * major + minor
  int multiprocessors = 132;
  double clock = 1.98e9;                      ///< Hz, nominal
  double byte_rate = 2 * 3.201e9 * 6144 / 8;  ///< bytes per second of GPU memory, nominal
};
/// Returns the properties of GPU `device`, or those of an H200 if the GPU does not exist.
ConvGpu conv_gpu(int device);
/// Sets the members of the problem that depend on the GPU. Does nothing if GPU `device` does not exist.
void describe_device(ConvProblem& problem, int device);

/// Returns a description of the plan, and the attainable rates of the GPU for the problem's arithmetic and for memory.
ConvExplanation explain(const ConvProblem& problem, const ConvGpu& gpu = {});

}  // namespace voxgrad::cuda
