// Fprop and dgrad of depthwise convolutions of channels-last halves with stride 1: an implicit GEMM per channel by
// mma.sync, with TMA.
//
// A warp computes one channel. For a row (kd, ky) of taps, 8 neighboring results along the width are the product of 16
// neighboring inputs with a banded matrix (16 x 8), whose element (i, j) is the tap i - j of the row. The rows of an
// m16n8k16 product are 16 neighboring rows of a plane. A warp keeps the banded matrices of all rows of taps in
// registers and moves along the depth. It adds each input plane to the accumulators of all K output planes to which
// this plane contributes.
//
// TMA copies input planes as [row][column][channel], with zeros outside of the volume. All warps of the CTA transpose a
// plane to [channel][row][column] while others compute with the previous plane. Result planes are transposed back.
//
// A banded matrix multiplies inputs outside of its band by zero, which would turn an infinite or NaN input into NaN
// results that do not depend on this input. A plane with such an input is therefore computed by FMA instructions.
#include "cuda/conv/direct/depthwise.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kWarps = kDepthwiseMmaChannels, kThreads = 32 * kWarps;
constexpr int kTile = 16;      // rows and columns of results
constexpr int kRowBytes = 48;  // bytes of 24 inputs in [channel][row][column]

/// A result tensor with channels innermost.
struct DepthwiseOutput {
  void* data;
  int64_t stride[4];  ///< elements from one sample, plane, row and column to the next
  int size[2];        ///< rows and columns
};

__device__ inline void load_matrices(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices(uint32_t (&v)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}
__device__ inline void store_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

/// Returns a number whose bits 15 and 31 are set where a half of the pair is infinite or NaN.
template <class T>
__device__ uint32_t not_finite(uint32_t pair) {
  constexpr uint32_t kLowest = std::is_same_v<T, BFloat16> ? 0x00800080 : 0x04000400;  // lowest bits of the exponents
  return (pair & 0x7fff7fff) + kLowest;
}

/// The dynamic shared memory of a CTA. The addresses are those of the shared state space.
template <int K>
struct Shared {
  static constexpr DepthwiseMmaShared kBytes{K};
  uint32_t boxes;    ///< the stages
  uint32_t planes;   ///< two input planes as [channel][row][column]
  uint32_t results;  ///< two output planes as [channel][row][column]
  float* weights;    ///< [channel][tap]

  __device__ Shared(unsigned char* begin, int stages) {
    unsigned char* const aligned = begin + (-shared_address(begin) & (kDepthwiseMmaAlignment - 1));
    boxes = shared_address(aligned);
    planes = boxes + static_cast<uint32_t>(stages * kBytes.box);
    results = planes + static_cast<uint32_t>(2 * kWarps * kBytes.plane);
    weights = reinterpret_cast<float*>(aligned + stages * kBytes.box + 2 * kWarps * (kBytes.plane + kBytes.results));
  }
  /// Returns the address of an input or output plane of a channel.
  __device__ uint32_t plane(int number, int channel) const {
    return planes + static_cast<uint32_t>((number % 2 * kWarps + channel) * kBytes.plane);
  }
  __device__ uint32_t result(int number, int channel) const {
    return results + static_cast<uint32_t>((number % 2 * kWarps + channel) * kBytes.results);
  }
};

/// Transposes a box to planes. Returns whether an input that this lane copied is infinite or NaN.
template <class T, int K>
__device__ bool transpose_box(const Shared<K>& shared, uint32_t box, int number) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kBlocks = (kTile + K - 1) * 3 / 2;  // of 16 neighboring columns in memory order, by 16 channels
  uint32_t bad = 0;
#pragma unroll
  for (int i = 0; i < (kBlocks + kWarps - 1) / kWarps; ++i) {
    const int block = i * kWarps + warp;
    if (block >= kBlocks) break;
    // Each matrix of ldmatrix has 8 columns by 8 channels. TMA has exchanged the halves of some voxels (32-byte
    // swizzle).
    const int voxel = block * 16 + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    uint32_t pairs[4];
    load_transposed(pairs, box + static_cast<uint32_t>(voxel * 32 + (half ^ voxel / 4 % 2) * 16));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      bad |= not_finite<T>(pairs[m]);
      const int channel = m % 2 * 8 + lane / 4;
      store_word(shared.plane(number, channel) + static_cast<uint32_t>(block * 32 + m / 2 * 16 + lane % 4 * 4),
                 pairs[m]);
    }
  }
  return bad & 0x80008000;
}

/// The accumulators of a lane: 16 x 16 results of a warp in K output planes. Plane kd is the one to which the current
/// input plane contributes through the taps kd. `sum` and `band` are fragments of m16n8k16 (common/mma.cuh).
template <class T, int K>
struct BandedSums {
  Accumulator sum[K][2];
  uint32_t band[K * K][2];

  /// Computes the banded matrices of a channel.
  __device__ explicit BandedSums(const float* weights) : sum{} {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int row = 0; row < K * K; ++row)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float taps[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int tap = lane % 4 * 2 + i * 8 + j - lane / 4;
          taps[j] = tap >= 0 && tap < K ? weights[row * K + tap] : 0.0f;
        }
        band[row][i] = round_pair<T>(taps[0], taps[1], -INFINITY);
      }
  }

  /// Adds an input plane.
  __device__ void add(uint32_t plane) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t row = plane + static_cast<uint32_t>(lane % 16 * kRowBytes),
                   column = static_cast<uint32_t>(lane / 16 * 16);
#pragma unroll
    for (int ky = 0; ky < K; ++ky) {
      uint32_t a[4], last[2];
      load_matrices(a, row + ky * kRowBytes + column);
      load_matrices(last, row + ky * kRowBytes + 32);
      const uint32_t b[4] = {a[2], a[3], last[0], last[1]};
#pragma unroll
      for (int kd = 0; kd < K; ++kd) {
        const uint32_t(&taps)[2] = band[kd * K + ky];
        if constexpr (std::is_same_v<T, BFloat16>) {
          mma_bf16(sum[kd][0], a, taps[0], taps[1]);
          mma_bf16(sum[kd][1], b, taps[0], taps[1]);
        } else {
          mma_f16(sum[kd][0], a, taps[0], taps[1]);
          mma_f16(sum[kd][1], b, taps[0], taps[1]);
        }
      }
    }
  }

  /// Adds an input plane that may contain infinite or NaN inputs.
  __device__ void add_by_fma(uint32_t plane, const float* weights) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t first = plane + static_cast<uint32_t>(lane / 4 * kRowBytes + lane % 4 * 4);
#pragma unroll 1
    for (int tap = 0; tap < K * K; ++tap)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T x;
          asm volatile("ld.shared.u16 %0, [%1];"
                       : "=h"(x.bits)
                       : "r"(first + (i / 2 * 8 + tap / K) * kRowBytes + (n * 8 + i % 2 + tap % K) * 2)
                       : "memory");
#pragma unroll
          for (int kd = 0; kd < K; ++kd)
            sum[kd][n][i] = fmaf(weights[kd * K * K + tap], static_cast<float>(x), sum[kd][n][i]);
        }
  }

  /// Writes the results of the last plane, which is complete, to `results`, and moves the other planes on.
  __device__ void finish(uint32_t results, float bias, float floor) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t to = results + static_cast<uint32_t>(lane / 4 * 32 + lane % 4 * 4);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_word(to + i * 256 + n * 16,
                   round_pair<T>(sum[K - 1][n][2 * i] + bias, sum[K - 1][n][2 * i + 1] + bias, floor));
  }
  __device__ void advance() {
#pragma unroll
    for (int kd = K - 1; kd >= 0; --kd)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[kd][n][i] = kd > 0 ? sum[kd - 1][n][i] : 0.0f;
  }
};

/// The results that a lane stores: 8 channels of a voxel of each plane. A warp stores a row.
template <class T>
struct ResultVector {
  T* first;  ///< in the first plane of the CTA tile, or null outside of the tensor

  __device__ ResultVector(const DepthwiseOutput& out, const DepthwiseTile& tile) : first(nullptr) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = tile.begin[1] + static_cast<int>(threadIdx.x) / 32;
    const int column = tile.begin[2] + lane % 4 / 2 * 8 + lane / 4;
    if (row < out.size[0] && column < out.size[1])
      first = static_cast<T*>(out.data) + tile.sample * out.stride[0] + tile.begin[0] * out.stride[1] +
              row * out.stride[2] + column * out.stride[3] + tile.channel + lane % 2 * 8;
  }
  /// Stores the results of an output plane.
  template <int K>
  __device__ void store(const Shared<K>& shared, int number, int64_t plane_offset) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    // Matrix m of ldmatrix: 8 channels from m % 2 * 8 on by 8 columns from m / 2 * 8 on.
    uint32_t v[4];
    load_transposed(
        v, shared.result(number, lane / 8 % 2 * 8 + lane % 8) + static_cast<uint32_t>(warp * 32 + lane / 16 * 16));
    transpose_quad(v);
    if (first) *reinterpret_cast<uint4*>(first + plane_offset) = {v[0], v[1], v[2], v[3]};
  }
};

/// The position of a box in the input.
struct Corner {
  int channel, column, row, plane, sample;
};

/// The copies of input planes by TMA. Plane number 0 is the first one that the CTA tile reads.
template <int K>
struct PlaneLoads {
  const DepthwiseParams& p;
  const Corner& corner;  ///< of plane 0; in shared memory
  uint32_t boxes;        ///< address of the first stage
  uint32_t barriers;     ///< address of the first barrier
  int planes;            ///< number of planes

  __device__ uint32_t box(int number) const {
    return boxes + static_cast<uint32_t>(number % p.tiles.stages * DepthwiseMmaShared(K).box);
  }
  __device__ uint32_t barrier(int number) const {
    return barriers + static_cast<uint32_t>(8 * (number % p.tiles.stages));
  }
  /// Begins to load a plane, if it exists. One thread calls this function.
  __device__ void load(int number) const {
    if (number >= planes) return;
    expect_bytes(barrier(number), static_cast<uint32_t>(DepthwiseMmaShared(K).box));
    tma_load(box(number), p.in, corner.channel, corner.column, corner.row, corner.plane + number, corner.sample,
             barrier(number));
  }
  __device__ void start() const {
    for (int s = 0; s < p.tiles.stages; ++s) init_barrier(barrier(s), 1);
    fence_barrier_init();
    for (int number = 0; number < p.tiles.stages; ++number) load(number);
  }
  __device__ void wait(int number) const { wait_barrier(barrier(number), number / p.tiles.stages); }
};

/// Copies the weights of the CTA's channels to shared memory, as [channel][tap].
template <int K>
__device__ void load_weights(const DepthwiseParams& p, int first_channel, float* weights) {
  constexpr int kTaps = K * K * K;
  for (int i = static_cast<int>(threadIdx.x); i < kTaps * kWarps; i += kThreads) {
    const int tap = i / kWarps, channel = i % kWarps;
    weights[channel * kTaps + tap] =
        p.weights[int64_t{p.flipped ? kTaps - 1 - tap : tap} * p.channels + first_channel + channel];
  }
}

struct Params {
  DepthwiseParams base;
  DepthwiseOutput out;
};

/// Launch: one CTA per CTA tile and 16 channels in a 1-D grid, one warp per channel. Dynamic shared memory:
/// DepthwiseMmaShared.
template <class T, int K>
__global__ void __launch_bounds__(kThreads, 1) depthwise_mma(const __grid_constant__ Params params) {
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ uint64_t barriers[kMaxDepthwiseStages];
  __shared__ Corner corner;
  __shared__ uint32_t has_not_finite[3];  // of the planes number, number + 1 and number + 2, modulo 3
  const DepthwiseParams& p = params.base;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const Shared<K> shared(dynamic_shared, p.tiles.stages);
  const DepthwiseTile tile(p.tiles);
  const int planes = min(p.tiles.chunk, p.out_depth - tile.begin[0]) + K - 1;
  const PlaneLoads<K> loads{p, corner, shared.boxes, shared_address(barriers), planes};
  if (threadIdx.x == 0) {
    corner = {tile.channel, tile.begin[2] - p.padding[2], tile.begin[1] - p.padding[1], tile.begin[0] - p.padding[0],
              tile.sample};
    loads.start();
    for (uint32_t& flag : has_not_finite) flag = 0;
  }
  load_weights<K>(p, tile.channel, shared.weights);
  __syncthreads();

  const float* const weights = shared.weights + warp * K * K * K;
  const float bias =
      p.bias ? convert<float>(static_cast<const T*>(p.bias)[(tile.channel + warp) * p.bias_stride]) : 0.0f;
  const ResultVector<T> vector(params.out, tile);
  BandedSums<T, K> sums(weights);
  const auto compute = [&](int number) {
    if (const int z = corner.plane + number; z >= 0 && z < p.in_depth) {
      if (has_not_finite[number % 3] == 0)
        sums.add(shared.plane(number, warp));
      else
        sums.add_by_fma(shared.plane(number, warp), weights);
    }
    if (number >= K - 1) sums.finish(shared.result(number, warp), bias, p.floor);
    sums.advance();
  };
  // Iteration `number` transposes plane number + 1, adds plane number, and stores the output plane that the previous
  // iteration completed. Half of the warps begin with the products, so that the tensor cores are not idle while the
  // other warps transpose.
  const int products = warp / 4 % 2;
  for (int number = -1; number < planes; ++number) {
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      if (part == products) {
        if (number >= 0) compute(number);
        continue;
      }
      if (number + 1 < planes) {
        loads.wait(number + 1);
        if (transpose_box<T>(shared, loads.box(number + 1), number + 1)) has_not_finite[(number + 1) % 3] = 1;
      }
      if (number >= K) vector.store(shared, number - 1, (number - K) * params.out.stride[1]);
    }
    __syncthreads();
    if (threadIdx.x > 0) continue;
    if (number >= 0) has_not_finite[number % 3] = 0;
    loads.load(number + 1 + p.tiles.stages);
  }
  vector.store(shared, planes - 1, (planes - K) * params.out.stride[1]);
}

}  // namespace

void depthwise_mma(const ConvCall& call, const DepthwisePlan& plan, const DepthwiseParams& p, const Launch& launch) {
  const View& y = call.out;
  const DepthwiseOutput out{y.data,
                            {y.stride[0], y.stride[2], y.stride[3], y.stride[4]},
                            {static_cast<int>(y.size[3]), static_cast<int>(y.size[4])}};
  dispatch_cuda(Types<BFloat16, Float16>(), y.dtype, call.op, [&]<class T>() {
    launch_with_shared(depthwise_mma<T, 5>, static_cast<unsigned>(plan.ctas), kThreads, plan.shared_bytes,
                       launch.stream, Params{p, out});
  });
  check_launch(call.op);
}

}  // namespace voxgrad::cuda
