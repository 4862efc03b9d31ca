// Parameters and helpers of the kernels for depthwise convolutions.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/common/tensor_map.h"
#include "cuda/conv/common/tma.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/depthwise.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda {

/// The division of the output into CTA tiles.
struct DepthwiseTiles {
  int tiles[3];   ///< CTA tiles along each axis
  int chunk;      ///< positions of a CTA tile along the depth
  int tile[2];    ///< positions of a CTA tile along height and width
  int box[2];     ///< input positions of a CTA tile along height and width
  int patches_x;  ///< patches of a CTA tile along the width
  int channels;   ///< channels of a CTA
  int channel_blocks;
  int stages;
  int box_bytes;
  int stage_bytes;  ///< box_bytes, rounded up for TMA
};

/// The CTA tile of a CTA.
struct DepthwiseTile {
  int channel;  ///< first channel
  int sample;
  int begin[3];  ///< first position along each axis
  int range;     ///< index of the CTA tile among those of the same channels

  __device__ explicit DepthwiseTile(const DepthwiseTiles& p) {
    int index = static_cast<int>(blockIdx.x);
    const auto take = [&](int count) {
      const int digit = index % count;
      index /= count;
      return digit;
    };
    channel = take(p.channel_blocks) * p.channels;
    range = index;
    begin[2] = take(p.tiles[2]) * p.tile[1];
    begin[1] = take(p.tiles[1]) * p.tile[0];
    begin[0] = take(p.tiles[0]) * p.chunk;
    sample = index;
  }
};

/// Returns the dynamic shared memory, aligned for TMA.
__device__ inline unsigned char* depthwise_shared(unsigned char* shared) {
  return shared + (-shared_address(shared) & (kDepthwiseAlignment - 1));
}

/// Returns the division into tiles of a plan.
inline DepthwiseTiles depthwise_tiles(const DepthwisePlan& plan, DType dtype) {
  DepthwiseTiles t{};
  for (int a = 0; a < 3; ++a) t.tiles[a] = static_cast<int>(plan.tiles[a]);
  for (int a = 0; a < 2; ++a) {
    t.tile[a] = plan.tile[a];
    t.box[a] = plan.box[a];
  }
  t.chunk = static_cast<int>(plan.chunk);
  t.patches_x = plan.patches[1];
  t.channels = plan.channels;
  t.channel_blocks = static_cast<int>(plan.channel_blocks);
  t.stages = plan.stages;
  t.box_bytes = depthwise_box_bytes(plan.box, plan.channels, dtype);
  t.stage_bytes = round_up(t.box_bytes, kDepthwiseAlignment);
  return t;
}

/// Returns the TMA tensor map of planes of box[0] x box[1] voxels of a channels-last view.
inline CUtensorMap depthwise_map(const View& view, const std::array<int, 2>& box, const DepthwisePlan& plan,
                                 const char* op) {
  return describe(SwizzledTensor{.data = view.data,
                                 .dtype = view.dtype,
                                 .size = {view.size[1], view.size[4], view.size[3], view.size[2], view.size[0]},
                                 .stride = {1, view.stride[4], view.stride[3], view.stride[2], view.stride[0]},
                                 .box = {plan.channels, box[1], box[0], 1, 1},
                                 .step = {1, 1, 1, 1, 1},
                                 .row_bytes = plan.tensor_cores ? 2 * plan.channels : 0,
                                 .rank = 5},
                  op);
}

/// The parameters of fprop and dgrad.
struct DepthwiseParams {
  CUtensorMap in;
  CUtensorMap out;
  DepthwiseTiles tiles;
  const float* weights;  ///< [tap][channel]
  bool flipped;          ///< dgrad with stride 1: the taps in reverse order
  EpilogueParams epilogue;
  int in_depth;
  int out_depth;
  int channels;
  int padding[3] = {};   ///< padding of fprop, or of dgrad with a stride
  int output_bytes = 0;  ///< bytes of an output plane in shared memory
};

/// The parameters of wgrad.
struct DepthwiseWgradParams {
  CUtensorMap x;
  CUtensorMap y;
  DepthwiseTiles tiles;
  float* partial;  ///< [CTA tile][tap][channel]
  int x_depth;
  int y_depth;
  int channels;
  int padding[3] = {};
  int y_stages = 0;
  int y_bytes = 0;
  int y_stage_bytes = 0;  ///< y_bytes, rounded up for TMA
};

/// Computes fprop or dgrad of a plan for tensor cores (depthwise_mma.cu).
void depthwise_mma(const ConvCall& call, const DepthwisePlan& plan, const DepthwiseParams& p, const Launch& launch);
/// Computes the partial sums of wgrad of a plan for tensor cores (depthwise_mma_wgrad.cu).
void depthwise_mma_wgrad(const ConvCall& call, const DepthwisePlan& plan, const DepthwiseWgradParams& p,
                         const Launch& launch);
/// Computes the weight gradient (depthwise_wgrad.cu).
void depthwise_wgrad(const ConvCall& call, const ConvProblem& problem, const DepthwisePlan& plan, const Launch& launch);

/// Calls body.operator()<T, K, S>() for the dtype, kernel size and stride of a plan.
template <class Body>
void with_depthwise_kernel(DType dtype, const DepthwisePlan& plan, const Body& body) {
  dispatch_cuda(Types<float, BFloat16, Float16>(), dtype, "conv", [&]<class T>() {
    with_width<3, 5, 7>(plan.kernel, [&]<int K>() {
      with_width<1, 2>(plan.stride, [&]<int S>() { body.template operator()<T, K, S>(); });
    });
  });
}

}  // namespace voxgrad::cuda
