// Wgrad of depthwise convolutions of channels-last halves with stride 1: one matrix product per channel by mma.sync,
// with TMA and split-K.
//
// A warp computes one channel. A tile of 16 x 16 positions of y consists of 32 blocks of 2 rows and 4 columns. For one
// plane of x and one plane of y, the warp multiplies the inputs around each block (6 x 8 rows of a matrix, one column
// per block) by the block's elements of y (2 x 4 columns, one row per block). The element ((r, c), (i, j)) of the
// product is part of the sum of the tap (r - i, c - j). An element without such a tap is not used, so infinities do not
// spread to other taps. Along height and width, zeros outside of the tensors are multiplied, too, as on CUDA cores. All
// sums stay in registers while the warp moves along the depth. The warp multiplies each plane of x by the K planes of y
// to which this plane contributes. At the end, it adds up the 8 elements of each tap and stores partial sums, which
// wgrad_reduce() adds.
#include "cuda/conv/direct/depthwise_mma.cuh"

namespace voxgrad::cuda {
namespace {

using namespace banded;

/// Transposes a box of y to [channel][columns / 4][rows / 2][2 rows][4 columns].
__device__ inline void transpose_y(uint32_t box, uint32_t planes, int warp, int lane) {
  // A warp copies 8 channels of two rows. Matrix m of ldmatrix: 8 columns from m / 2 * 8 on by 8 channels. The last 4
  // columns belong to the other row than the first 4, so that the lanes store to different banks.
  const int half = warp % 2, rows = warp / 2, pair = lane % 4;
  const int row = 2 * rows + (lane / 8 + lane / 4) % 2, column = lane / 16 * 8 + lane % 8;
  uint32_t v[4];
  load_transposed(v, box + static_cast<uint32_t>((row * kTile + column) * 32 + (half + column / 4) % 2 * 16));
  const uint32_t to = planes + static_cast<uint32_t>((half * 8 + lane / 4) * Bytes::results + rows * 16 +
                                                     pair / 2 * (128 + 8) + pair % 2 * 4);
#pragma unroll
  for (int m = 0; m < 4; ++m) store_shared((m % 2 ? to ^ 8 : to) + m / 2 * 256, v[m]);
}

/// The accumulators of a lane and the latest K planes of y. `sum` and `y` are fragments of m16n8k16 (common/mma.cuh).
/// sum[kd][m] belongs to the tap kd along the depth and to rows 2m and 2m + 1 of the inputs. y[kd] is the plane that
/// the current plane of x multiplies at the tap kd: the blocks in columns 0 and 8, and those in columns 4 and 12.
template <class T, int K>
struct TapSums {
  static constexpr int kPairs = (K + 1) / 2;  // pairs of rows of the inputs around a block
  Accumulator sum[K][kPairs] = {};
  uint32_t y[K][4] = {};

  /// Multiplies a plane of x by the latest K planes of y, and moves on to the next planes. `y_plane` is the plane of y
  /// at the tap 0. Planes of y below 0 or from `y_planes` on do not exist. They must not be replaced by zeros, because
  /// x may be infinite.
  __device__ void multiply_plane(uint32_t x_plane, uint32_t latest_y, int y_plane, int y_planes) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_transposed(y[0], latest_y + static_cast<uint32_t>(lane % 8 * 16 + lane / 8 % 2 * 256 + lane / 16 * 128));
    const uint32_t from =
        x_plane + static_cast<uint32_t>(row_offset(lane / 8 % 2) + lane % 8 * Bytes::row + lane / 16 * 32);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < kPairs; ++m) {
        uint32_t x[4];
        load_transposed(x, from + m * Bytes::row + n * 16);
#pragma unroll
        for (int kd = K - 1; kd >= 0; --kd)
          if (static_cast<uint32_t>(y_plane - kd) < static_cast<uint32_t>(y_planes))
            multiply_fragments<T>(sum[kd][m], x, y[kd][2 * n], y[kd][2 * n + 1]);
      }
#pragma unroll
    for (int kd = K - 1; kd > 0; --kd)
#pragma unroll
      for (int i = 0; i < 4; ++i) y[kd][i] = y[kd - 1][i];
  }

  /// Adds up the 8 elements of each tap, and stores the sums as [tap][channel]. `scratch` is memory of the warp.
  __device__ void reduce(uint32_t scratch, float* taps) const {
    constexpr int kRow = 66 * sizeof(float);  // inputs x 8 elements, and padding against bank conflicts
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int kd = 0; kd < K; ++kd) {
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kPairs; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          store_shared(scratch + (2 * m + i / 2) * kRow + lane * 8 + i % 2 * 4, __float_as_uint(sum[kd][m][i]));
      __syncwarp();
      if (lane >= K * K) continue;
      float total = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = lane / K + i / 4, column = lane % K + i % 4;
        total += __uint_as_float(load_shared(scratch + static_cast<uint32_t>(row * kRow + column * 32 + i * 4)));
      }
      taps[(kd * K * K + lane) * kWarps] = total;
    }
  }
};

/// The planes of a CTA tile. Number n is plane first + n of x, if this plane is inside of the volume, and plane
/// y_first + n of the chunk of y, if the chunk has this plane.
template <int K>
struct WgradSteps : Steps {
  const DepthwiseWgradParams& p;
  const DepthwiseTile tile;
  int first;  ///< may be negative
  int y_first;
  int y_planes;  ///< planes of y in the chunk
  int planes;    ///< all numbers; 0 or negative if the whole chunk depends on padding only

  __device__ WgradSteps(const DepthwiseWgradParams& params, const Shared& memory, int warp_index)
      : Steps{memory, warp_index, static_cast<int>(threadIdx.x) % 32}, p(params), tile(params.tiles) {
    const int begin = tile.begin[0] - p.padding[0];
    first = max(begin, 1 - K);
    y_first = first - begin;
    y_planes = min(p.tiles.chunk, p.y_depth - tile.begin[0]);
    planes = min(begin + y_planes + K - 1, p.x_depth) - first;
  }

  __device__ bool has_x(int number) const { return first + number >= 0; }
  __device__ bool has_y(int number) const { return y_first + number < y_planes; }

  /// Begins to load planes of x and y.
  __device__ void load(int number) const {
    if (number >= planes) return;
    const uint32_t barrier = shared.loaded(number);
    expect_bytes(barrier, (has_x(number) ? Bytes::box : 0) + (has_y(number) ? Bytes::output : 0));
    if (has_x(number))
      tma_load(shared.box(number), p.x, tile.channel, tile.begin[2] - p.padding[2], tile.begin[1] - p.padding[1],
               first + number, tile.sample, barrier);
    if (has_y(number))
      tma_load(shared.output(number), p.y, tile.channel, tile.begin[2], tile.begin[1], tile.begin[0] + y_first + number,
               tile.sample, barrier);
  }
  /// Transposes this warp's part of the planes.
  template <class T>
  __device__ void transpose(int number) const {
    if (number >= planes) return;
    wait_loaded(number);
    if (has_y(number)) transpose_y(shared.output(number), shared.result(number), warp, lane);
    if (has_x(number)) transpose_box<T>(shared.box(number), shared.plane(number), warp, lane);
  }
  /// Multiplies the plane of x by the planes of y in the chunk. Multiplies nothing if `number` is negative.
  template <class T>
  __device__ void multiply(TapSums<T, K>& sums, int number) const {
    sums.multiply_plane(shared.plane(number) + warp * Bytes::plane, shared.result(number) + warp * Bytes::results,
                        has_x(number) ? y_first + number : -1, y_planes);
  }
};

/// Computes partial sums of the weight gradient. Launch: one CTA per CTA tile and 16 channels in a 1-D grid, one warp
/// per channel. Dynamic shared memory: DepthwiseMmaShared.
template <class T, int K>
__global__ void __launch_bounds__(kThreads, 1) depthwise_mma_wgrad(const __grid_constant__ DepthwiseWgradParams p) {
  wait_for_previous_kernels();
  if (!VOXGRAD_HAS_WGMMA) return;
  extern __shared__ unsigned char dynamic_shared[];
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const Shared shared(dynamic_shared);
  const WgradSteps<K> steps(p, shared, warp);
  if (threadIdx.x == 0) steps.start([&](int number) { steps.load(number); });
  __syncthreads();

  TapSums<T, K> sums;
  // Half of the warps begin with the products, so that the tensor cores are not idle while the other warps transpose.
  const bool products_first = warp / 4 % 2;
#pragma unroll 1
  for (int step = 0; step < steps.planes + 2; ++step) {
    if (steps.begin(step)) steps.load(step + 2);
    if (!products_first) steps.template transpose<T>(step);
    steps.multiply(sums, step - 2);
    if (products_first) steps.template transpose<T>(step);
    steps.end(step);
  }
  sums.reduce(shared.plane(0) + warp * Bytes::plane, shared.weights + warp);
  __syncthreads();
  float* const partial = p.partial + int64_t{steps.tile.range} * K * K * K * p.channels + steps.tile.channel;
  for (int i = static_cast<int>(threadIdx.x); i < K * K * K * kWarps; i += kThreads)
    partial[int64_t{i / kWarps} * p.channels + i % kWarps] = shared.weights[i];
}

}  // namespace

void depthwise_mma_wgrad(const ConvCall& call, const DepthwisePlan& plan, const DepthwiseWgradParams& p,
                         const Launch& launch) {
  dispatch_cuda(Types<BFloat16, Float16>(), call.out.dtype, call.op, [&]<class T>() {
    with_width<3, 5>(plan.kernel, [&]<int K>() {
      launch_kernel(call.op, depthwise_mma_wgrad<T, K>, static_cast<unsigned>(plan.ctas), kThreads, plan.shared_bytes,
                    launch.stream, p);
    });
  });
}

}  // namespace voxgrad::cuda
