// Adds the partial sums of the splits of a weight gradient.
#include "cuda/conv/common/wgrad_splits.h"

#include "cuda/conv/plan/common.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {

/// The parameters of the kernels. `sums` has the order of axes of WgradSplits.
struct Params {
  WgradSplits sums;
  int slices;            ///< slices of the splits, each added by one warp
  int taps;              ///< taps of the kernel
  int taps_of_block;     ///< taps that a CTA of reduce_reordered() adds
  Divisor out_channels;  ///< per group
  WeightLayout weight;
  Divisor channel_tiles;  ///< tiles of kLanes input channels
  Divisor tap_tiles;      ///< tiles of taps_of_block taps
};

constexpr int kLanes = 32, kWarps = 8;
constexpr int kMaxTapsOfBlock = 343;  // their sums fit into 48 KiB of shared memory

/// Adds the partial sums of weights that have the layout of the partial sums. A warp adds 32 vectors of 4 elements. If
/// `slices` is more than 1, this number of warps shares the splits of the same vectors. Launch: kLanes * kWarps threads
/// per CTA in a 1-D grid. Static shared memory: four floats per thread.
template <class T>
__global__ void __launch_bounds__(kLanes* kWarps) reduce_in_order(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  __shared__ float of_slice[kWarps][4][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int slice = warp % p.slices, at_once = kWarps / p.slices;
  const int64_t first = ((int64_t{blockIdx.x} * at_once + warp / p.slices) * kLanes + lane) * 4;
  const int begin = p.sums.splits * slice / p.slices, end = p.sums.splits * (slice + 1) / p.slices;
  float sum[4] = {};
  if (first < p.sums.split_stride)
#pragma unroll 8
    for (int split = begin; split < end; ++split) {
      float x[4];
      load_values<4>(p.sums.partial + split * p.sums.split_stride + first, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += x[i];
    }
  if (p.slices > 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) of_slice[warp][i][lane] = sum[i];
    __syncthreads();
    for (int other = 1; slice == 0 && other < p.slices; ++other)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += of_slice[warp + other][i][lane];
  }
  if (slice > 0 || first >= p.sums.split_stride) return;
  if (p.sums.x_maxima) {
    const int channel = static_cast<int>(first % p.sums.in_channels);
    const int of_y = static_cast<int>(first / (int64_t{p.taps} * p.sums.in_channels));
    const int of_x = p.out_channels.divide(of_y) * p.sums.in_channels + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = unscaled(sum[i], p.sums.x_maxima[of_x + i], p.sums.y_maxima[of_y]);
  }
  store_values<4>(static_cast<T*>(p.weight.data) + first, sum);
}

/// Adds the partial sums of weights in any layout. A CTA adds several taps of 32 input channels for one output
/// channel. `slices` warps share the splits of a tap. Launch: kLanes * kWarps threads per CTA in a 1-D grid. Dynamic
/// shared memory: the sums of a CTA. Static shared memory: one float per thread.
template <class T>
__global__ void __launch_bounds__(kLanes* kWarps) reduce_reordered(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  extern __shared__ float sums[];  // [channel][tap], with an odd pitch to avoid bank conflicts
  __shared__ float of_slice[kWarps][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  int block = static_cast<int>(blockIdx.x);
  const int first_channel = p.channel_tiles.take_digit(block) * kLanes,
            first_tap = p.tap_tiles.take_digit(block) * p.taps_of_block;
  const int channels = min(p.sums.in_channels - first_channel, kLanes), taps = min(p.taps - first_tap, p.taps_of_block);
  const float* const from =
      p.sums.partial + (int64_t{block} * p.taps + first_tap) * p.sums.in_channels + first_channel + lane;
  const int slice = warp % p.slices, at_once = kWarps / p.slices, pitch = p.taps_of_block | 1;
  const int begin = p.sums.splits * slice / p.slices, end = p.sums.splits * (slice + 1) / p.slices;
  for (int tap = warp / p.slices; tap - warp / p.slices < taps; tap += at_once) {
    float sum = 0;
    if (tap < taps && lane < channels)
#pragma unroll 8
      for (int split = begin; split < end; ++split)
        sum += from[split * p.sums.split_stride + int64_t{tap} * p.sums.in_channels];
    if (p.slices > 1) {
      of_slice[warp][lane] = sum;
      __syncthreads();
      if (slice == 0)
        for (int i = 1; i < p.slices; ++i) sum += of_slice[warp + i][lane];
      __syncthreads();
    }
    if (slice == 0 && tap < taps) sums[lane * pitch + tap] = sum;
  }
  __syncthreads();
  const int x_channel = p.out_channels.divide(block) * p.sums.in_channels + first_channel;
  T* const out = static_cast<T*>(p.weight.data) + block * p.weight.out_stride + first_channel * p.weight.in_stride;
  for (int i = static_cast<int>(threadIdx.x); i < channels * taps; i += kLanes * kWarps) {
    const bool by_taps = p.weight.by_taps;
    const int channel = by_taps ? i / taps : i % channels, tap = by_taps ? i % taps : i / channels;
    const int64_t offset = channel * p.weight.in_stride + p.weight.tap_offset(first_tap + tap);
    const float sum = sums[channel * pitch + tap];
    out[offset] =
        T(p.sums.x_maxima ? unscaled(sum, p.sums.x_maxima[x_channel + channel], p.sums.y_maxima[block]) : sum);
  }
}

}  // namespace

void reduce_wgrad_splits(const View& w, const WgradSplits& sums, cudaStream_t stream) {
  Params p{};
  p.sums = sums;
  p.slices = sums.splits >= 32 ? 8 : sums.splits >= 16 ? 4 : sums.splits >= 8 ? 2 : 1;
  p.taps = static_cast<int>(w.size[2] * w.size[3] * w.size[4]);
  p.out_channels = Divisor(sums.out_channels);
  p.weight = WeightLayout(w);
  constexpr Types<float, BFloat16, Float16> kTypes;
  if (is_dense(w, {1, 4, 3, 2, 0}) && sums.in_channels % 4 == 0 && is_tma_tensor(w)) {
    const int64_t of_block = 4 * kLanes * (kWarps / p.slices);
    dispatch_cuda(kTypes, w.dtype, "conv", [&]<class T>() {
      launch_kernel("conv weight gradient: sum of splits", reduce_in_order<T>,
                    static_cast<unsigned>(divide_up(sums.split_stride, of_block)), kLanes * kWarps, 0, stream, p);
    });
    return;
  }
  const int channel_tiles = divide_up(sums.in_channels, kLanes);
  const int64_t enough = 4 * kMultiprocessors / std::max<int64_t>(w.size[0] * channel_tiles, 1);
  p.taps_of_block =
      std::min(static_cast<int>(divide_up(p.taps, std::clamp<int64_t>(enough, 1, p.taps))), kMaxTapsOfBlock);
  p.channel_tiles = Divisor(channel_tiles);
  p.tap_tiles = Divisor(divide_up(p.taps, p.taps_of_block));
  const unsigned blocks = static_cast<unsigned>(w.size[0] * channel_tiles * p.tap_tiles.value());
  const int shared = static_cast<int>(sizeof(float)) * kLanes * (p.taps_of_block | 1);
  dispatch_cuda(kTypes, w.dtype, "conv", [&]<class T>() {
    launch_kernel("conv weight gradient: sum of splits", reduce_reordered<T>, blocks, kLanes * kWarps, shared, stream,
                  p);
  });
}

}  // namespace voxgrad::cuda
