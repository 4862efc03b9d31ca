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

/// The CTA tile of a CTA.
struct DepthwiseTile {
  int channel;  ///< first channel
  int sample;
  int begin[3];  ///< first position along each axis
  int range;     ///< index of the CTA tile among those of the same channels

  __device__ explicit DepthwiseTile(const DepthwiseShape& p) {
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

/// Returns the TMA tensor map of planes of box[0] x box[1] voxels of a channels-last view.
inline CUtensorMap depthwise_map(const View& view, const std::array<int, 2>& box, const DepthwisePlan& plan,
                                 const char* op) {
  return describe_voxels(view, plan.channels, {1, 1, box[0], box[1]}, {1, 1, 1}, op, plan.tensor_cores);
}

/// The parameters of fprop and dgrad.
struct DepthwiseParams {
  CUtensorMap in;
  CUtensorMap out;
  DepthwiseShape tiles;
  const void* weights = nullptr;  ///< of the first tap of channel 0
  int64_t weight_stride[4] = {};  ///< elements, along channels, depth, height and width
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
  DepthwiseShape tiles;
  float* partial;  ///< [CTA tile][tap][channel]
  int x_depth;
  int y_depth;
  int channels;
  int padding[3] = {};
  int y_stages = 0;
  int y_bytes = 0;
  int y_stage_bytes = 0;  ///< y_bytes, rounded up for TMA
};

/// Copies the weights of `kCount` channels to shared memory as float32. The taps of a channel are kTapPitch floats
/// apart, and the channels are kChannelPitch floats apart.
template <class T, int K, int kCount, int kTapPitch, int kChannelPitch>
__device__ void load_depthwise_weights(const DepthwiseParams& p, int first_channel, float* weights) {
  constexpr int kTaps = K * K * K;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < kTaps * kCount; i += static_cast<int>(blockDim.x)) {
    const int channel = i / kTaps, tap = i % kTaps;
    const int from = min(first_channel + channel, p.channels - 1);  // results of further channels are not stored
    weights[tap * kTapPitch + channel * kChannelPitch] = static_cast<float>(
        static_cast<const T*>(p.weights)[from * p.weight_stride[0] + tap / (K * K) * p.weight_stride[1] +
                                         tap / K % K * p.weight_stride[2] + tap % K * p.weight_stride[3]]);
  }
}

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
