// Fprop and dgrad of depthwise convolutions of channels-last halves with kernels of 3^3 or 5^3 and stride 1: an
// implicit GEMM per channel by mma.sync, with TMA.
//
// A warp computes one channel of a tile of 16 x 16 results. For the taps of one depth kd, the results at 2 rows and 4
// columns are the product of the inputs at 6 rows (3^3: 4 rows) and 8 columns with a banded matrix, whose element
// ((y, x), (i, j)) is the tap (y - i, x - j). An m16n8k16 product covers 2 rows. Its 16 rows are the 8 pairs of rows of
// the tile, in columns 0 and 8 or in columns 4 and 12. A warp keeps the banded matrices of all taps in
// registers and moves along the depth. It adds each input plane to the accumulators of all output planes to which this
// plane contributes.
//
// TMA copies input planes as [row][column][channel], with zeros outside of the volume. The warps of the CTA transpose
// each plane together to [channel][row][column], and result planes back, which TMA stores.
//
// A banded matrix multiplies inputs outside of its band by zero, which would turn an infinite or NaN input into NaN
// results that do not depend on this input. Such inputs are therefore added by FMA instructions and replaced by zeros.
#include "cuda/conv/direct/depthwise_mma.cuh"

namespace voxgrad::cuda {
namespace {

using namespace banded;

/// Transposes a row of results of all channels to [row][column][channel], with the 32-byte swizzle.
__device__ inline void transpose_results(uint32_t results, uint32_t output, int row, int lane) {
  // Matrix m of ldmatrix: 8 channels from m % 2 * 8 on by 8 columns from m / 2 * 8 on.
  uint32_t v[4];
  load_transposed(v, results + static_cast<uint32_t>(lane % 16 * Bytes::results + (lane / 16 * kTile + row) * 16));
  const int column = lane / 4 ^ row / 8 * 4;  // see BandedSums::finish()
  const uint32_t to = output + static_cast<uint32_t>((row * kTile + column) * 32 + column / 4 * 16 + lane % 4 * 4);
#pragma unroll
  for (int m = 0; m < 4; ++m) store_shared((m % 2 ? to ^ 16 : to) + m / 2 * 256, v[m]);
}

/// The accumulators of a lane: 16 x 16 results of a warp in K output planes. Plane kd is the one to which the current
/// input plane contributes through the taps kd. `sum` and `band` are fragments of m16n8k16 (common/mma.cuh). Column
/// 4i + j of a product is row i of a pair of rows and column j of 4 columns. sum[kd][n] has the columns from 4n and
/// from 4n + 8 on. band[kd][m] belongs to rows 2m and 2m + 1 of the inputs.
template <class T, int K>
struct BandedSums {
  static constexpr int kPairs = (K + 1) / 2;  // pairs of rows of the inputs around a block
  Accumulator sum[K][2];
  uint32_t band[K][kPairs][2];
  const float* weights;  ///< of the channel

  /// Computes the banded matrices of a channel.
  __device__ explicit BandedSums(const float* taps) : sum{}, weights(taps) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int kd = 0; kd < K; ++kd)
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        float tap[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int ky = i - lane / 16, kx = lane % 4 * 2 + j - lane / 4 % 4;
          tap[j] = ky >= 0 && ky < K && kx >= 0 && kx < K ? weights[(kd * K + ky) * K + kx] : 0.0f;
        }
        band[kd][i / 2][i % 2] = round_pair<T>(tap[0], tap[1], -INFINITY);
      }
  }

  /// Adds an input plane, whose inputs must be finite.
  __device__ void add(uint32_t plane) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t from =
        plane + static_cast<uint32_t>(row_offset(lane / 16) + lane % 8 * Bytes::row + lane / 8 % 2 * 32);
#pragma unroll
    for (int m = 0; m < kPairs; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t a[4];
        load_matrices(a, from + m * Bytes::row + n * 16);
#pragma unroll
        for (int kd = K - 1; kd >= 0; --kd) multiply_fragments<T>(sum[kd][n], a, band[kd][m][0], band[kd][m][1]);
      }
  }

  /// Adds the infinite and NaN inputs of a plane by FMA instructions, and replaces them by zeros.
  __device__ void extract_not_finite(uint32_t plane) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 2, column = lane % 2 * 2;
#pragma unroll 1
    for (int tap = 0; tap < K * K; ++tap)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T x;
          const int x_column = column + n * 4 + i / 2 * 8 + i % 2 + tap % K;
          asm volatile("ld.shared.u16 %0, [%1];"
                       : "=h"(x.bits)
                       : "r"(plane + row_offset(row + tap / K) + column_offset(x_column))
                       : "memory");
          if (isfinite(static_cast<float>(x))) continue;
#pragma unroll
          for (int kd = 0; kd < K; ++kd)
            sum[kd][n][i] = fmaf(weights[kd * K * K + tap], static_cast<float>(x), sum[kd][n][i]);
        }
    __syncwarp();
#pragma unroll 1
    for (uint32_t at = plane + lane * 4; at < plane + kInputs * Bytes::row; at += 128) {
      const uint32_t pair = load_shared(at);
      uint32_t zero = 0;
      add_zero_times<T>(zero, pair);
      store_shared(at, (zero & 0xffff ? 0 : pair & 0xffff) | (zero >> 16 ? 0 : pair & 0xffff0000));
    }
    __syncwarp();
  }

  /// Writes the results of the last plane, which is complete, to `results`. The first and last 4 columns of 8 are
  /// exchanged in rows 8 to 15, so that the lanes store to different banks.
  __device__ void finish(uint32_t results, float bias, float floor) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t to = results + static_cast<uint32_t>(lane / 2 * 16 + lane / 16 * 8 + lane % 2 * 4);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared((n ? to ^ 8 : to) + i * (kTile * 16),
                     round_pair<T>(sum[K - 1][n][2 * i] + bias, sum[K - 1][n][2 * i + 1] + bias, floor));
  }
  /// Moves the accumulators on to the next input plane.
  __device__ void advance() {
#pragma unroll
    for (int kd = K - 1; kd >= 0; --kd)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[kd][n][i] = kd > 0 ? sum[kd - 1][n][i] : 0.0f;
  }
};

/// The planes of a CTA tile. Input plane number 0 is the first one; planes before the volume are skipped. Step s also
/// transposes the results that plane s - 4 completed.
template <int K>
struct FpropSteps : Steps {
  const DepthwiseParams& p;
  const DepthwiseTile tile;
  int first;   ///< position of plane 0 along the depth
  int head;    ///< number of the input plane that completes the first output plane
  int planes;  ///< number of input planes

  __device__ FpropSteps(const DepthwiseParams& params, const Shared& memory, int warp_index)
      : Steps{memory, warp_index, static_cast<int>(threadIdx.x) % 32}, p(params), tile(params.tiles) {
    const int begin = tile.begin[0] - p.padding[0];
    first = max(begin, min(0, begin + K - 1));
    head = K - 1 - (first - begin);
    planes = min(p.tiles.chunk, p.out_depth - tile.begin[0]) + head;
  }

  /// Begins to load an input plane, if it exists.
  __device__ void load(int number) const {
    if (number >= planes) return;
    expect_bytes(shared.loaded(number), Bytes::box);
    tma_load(shared.box(number), p.in, tile.channel, tile.begin[2] - p.padding[2], tile.begin[1] - p.padding[1],
             first + number, tile.sample, shared.loaded(number));
  }
  /// Begins to store the output plane that an input plane completed, if there is one.
  __device__ void store(int number) const {
    if (number < head) return;
    tma_store(p.out, shared.output(number), tile.channel, tile.begin[2], tile.begin[1], tile.begin[0] + number - head,
              tile.sample);
    bulk_store_commit();
  }

  __device__ void begin(int step) const {
    if (!Steps::begin(step)) return;
    load(step + 2);
    store(step - 6);
  }
  /// Transposes this warp's part of the planes.
  template <class T>
  __device__ void transpose(int step) const {
    if (step < planes) {
      wait_loaded(step);
      if (transpose_box<T>(shared.box(step), shared.plane(step), warp, lane))
        store_shared(shared.not_finite(step), static_cast<uint32_t>(step));
    }
    if (const int done = step - 4; done >= head) {
      transpose_results(shared.result(done), shared.output(done), warp, lane);
      fence_async_proxy();
    }
  }
  __device__ void end(int step) const {
    if (warp == kWarps - 1) bulk_store_wait<0>();  // TMA has read the output plane before a warp overwrites it
    Steps::end(step);
  }
};

/// Launch: one CTA per CTA tile and 16 channels in a 1-D grid, one warp per channel. Dynamic shared memory:
/// DepthwiseMmaShared.
template <class T, int K>
__global__ void __launch_bounds__(kThreads, 1) depthwise_mma(const __grid_constant__ DepthwiseParams p) {
  wait_for_previous_kernels();
  if (!VOXGRAD_HAS_WGMMA) return;
  extern __shared__ unsigned char dynamic_shared[];
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const Shared shared(dynamic_shared);
  const FpropSteps<K> steps(p, shared, warp);
  const int planes = steps.planes, channel = steps.tile.channel;
  if (threadIdx.x == 0) steps.start([&](int number) { steps.load(number); });
  load_depthwise_weights<T, K, kWarps, 1, K * K * K>(p, channel, shared.weights);
  __syncthreads();

  const float bias = p.epilogue.bias_of<T>(channel + warp);
  BandedSums<T, K> sums(shared.weights + warp * K * K * K);
  int step = 0;
#pragma unroll 1
  for (; step < 2; ++step) {
    steps.begin(step);
    steps.template transpose<T>(step);
    steps.end(step);
  }
  // Half of the warps begin with the products, so that the tensor cores are not idle while the other warps transpose.
  const bool products_first = warp / 4 % 2;
#pragma unroll 1
  for (; step < planes + 2; ++step) {
    steps.begin(step);
    if (!products_first) steps.template transpose<T>(step);
    const int number = step - 2;
    const uint32_t plane = shared.plane(number) + warp * Bytes::plane;
    if (load_shared(shared.not_finite(number)) == static_cast<uint32_t>(number)) sums.extract_not_finite(plane);
    sums.add(plane);
    if (number >= steps.head) sums.finish(shared.result(number) + warp * Bytes::results, bias, p.epilogue.floor);
    sums.advance();
    if (products_first) steps.template transpose<T>(step);
    steps.end(step);
  }
#pragma unroll 1
  for (; step < planes + 6; ++step) {
    steps.begin(step);
    if (step < planes + 4) steps.template transpose<T>(step);
    steps.end(step);
  }
}

}  // namespace

void depthwise_mma(const ConvCall& call, const DepthwisePlan& plan, const DepthwiseParams& p, const Launch& launch) {
  dispatch_cuda(Types<BFloat16, Float16>(), call.out.dtype, call.op, [&]<class T>() {
    with_width<3, 5>(plan.kernel, [&]<int K>() {
      launch_kernel(call.op, depthwise_mma<T, K>, static_cast<unsigned>(plan.ctas), kThreads, plan.shared_bytes,
                    launch.stream, p);
    });
  });
}

}  // namespace voxgrad::cuda
