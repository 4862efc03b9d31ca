// Which convolution kernel takes which problem, and how: a pure function of the problem, tested on the host.
#pragma once

#include <string>

#include "core/precision.h"
#include "core/view.h"
#include "cuda/conv/axis_phases.h"

namespace voxgrad::cuda {

/// How tensor cores multiply (cuda/conv/common/mma.cuh).
enum class ConvArithmetic : uint8_t { tf32, tf32x3, bf16, f16 };
const char* name(ConvArithmetic arithmetic);

/// The families of kernels on tensor cores, by their folders.
enum class ConvKernel : uint8_t { mma_sync, small_channel, fprop_dgrad, wgrad };

/// What tests ask for in place of what the planner would choose (0). Aligned to its size: else Clang calls a library
/// for an atomic of it.
struct alignas(8) ConvChoice {
  bool plain : 1 = false;          // the plain kernel
  bool mma_sync : 1 = false;       // no wgmma
  bool small_channel : 1 = false;  // kernels of few channels wherever they can be
  bool unsplit : 1 = false;        // fprop_dgrad: no split-K
  uint8_t slide : 2 = 0;           // 1: never, 2: only tiles that slide along depth
  int8_t k_blocks = 0;             // fprop_dgrad: row bytes / 32; wgrad: channels of a row
  int8_t m_tiles = 0;              // of a warpgroup: m64 tiles
  int8_t pairs = 0;                // fprop_dgrad: 2: both warpgroups share a tile; 1: they take turns
  int16_t width = 0;               // of a tile: columns, or rows (mma_sync's weight gradient; small_channel)
  friend bool operator==(const ConvChoice&, const ConvChoice&) = default;
};
/// Of the whole program, for the convolutions to come. A width that is not compiled is passed over.
void force_conv_choice(ConvChoice choice);

/// A convolution as its kernels see it: `in` is read at taps, `out` (or, for the weight gradient, the lattice y) is
/// even.
struct ConvProblem {
  ConvPass pass = ConvPass::fprop;
  DType dtype = DType::f32;
  Float32Precision precision = Float32Precision::highest;
  int64_t batch = 1, groups = 1, in_channels = 1, out_channels = 1;  // channels of a group
  Triple in_size{1}, out_size{1}, kernel{1};
  ConvGeometry geometry{};
  int64_t shared_limit = 227 * 1024;  // bytes of shared memory that a block may have: sm_90's
  int multiprocessors = 132;          // an H200's
  bool wgmma = true;                  // the GPU has that instruction, and the program its code: sm_90a
  Triple in_stride{0}, out_stride{0};
  int64_t in_channel_stride = 1, out_channel_stride = 1, out_sample_stride = 0;
  bool in_channels_last = false, out_channels_last = false;  // a voxel's channels are contiguous
  bool in_aligned = true, out_aligned = true;                // if they are, TMA reads them so (is_tma_tensor())
  bool in_dense = false, out_dense = false;                  // in that order, all voxels are, without gaps
  bool weight_channels_last = false;  // so are, of the weights' second axis, those of the taps along the width
  ConvChoice choice{};
  friend bool operator==(const ConvProblem&, const ConvProblem&) = default;
};

/// The problem of these views and of their GPU, with the precision and the choice that are set now. In a weight
/// gradient `in` is x and `out` the lattice y.
ConvProblem conv_problem(ConvPass pass, const View& in, const View& out, const View& w, const ConvGeometry& geometry);
/// Not for f64.
ConvArithmetic arithmetic_of(const ConvProblem& problem);
/// Whether GPU `device` has wgmma, and this program code for it.
bool has_wgmma(int device);
/// Whether its products may be wgmma's.
bool may_use_wgmma(const ConvProblem& problem);

/// What rates follow from. An H200's.
struct ConvGpu {
  std::string name = "NVIDIA H200";
  int capability = 90, multiprocessors = 132;
  double clock = 1.98e9, byte_rate = 2 * 3.201e9 * 6144 / 8;  // nominal, a second
};
/// GPU `device`; where there is none, an H200.
ConvGpu conv_gpu(int device);
/// Fills in what plans depend on of GPU `device`, if there is one.
void describe_device(ConvProblem& problem, int device);

/// The plan in words, and the rates of the GPU: the arithmetic's (f64: tensor cores', if they have it), and memory's.
ConvExplanation explain(const ConvProblem& problem, const ConvGpu& gpu = {});

}  // namespace voxgrad::cuda
