// Code that the depthwise kernels on tensor cores share: their shared memory, the transposition of input planes, and
// the steps in which the warps of a CTA move along the depth (depthwise_mma.cu and depthwise_mma_wgrad.cu).
//
// A CTA has 16 warps, and each warp computes one channel of a tile of 16 x 16 positions. TMA copies planes as
// [row][column][channel], with zeros outside of the volume. The warps transpose each plane together to
// [channel][row][column].
#pragma once

#include "cuda/conv/direct/depthwise.cuh"

namespace voxgrad::cuda::banded {

using Bytes = DepthwiseMmaShared;
inline constexpr int kTile = 16;           // rows and columns of a tile
inline constexpr int kInputs = kTile + 4;  // rows and columns of an input plane
inline constexpr int kWarps = kDepthwiseMmaChannels, kThreads = 32 * kWarps;

__device__ inline void load_matrices(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}

/// Adds zero times a pair of halves. A half of the sum becomes NaN if the half of the pair is infinite or NaN.
template <class T>
__device__ void add_zero_times(uint32_t& sum, uint32_t pair) {
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
}

/// Returns the offset of a row or column in an input plane of a channel. The even rows precede the odd rows. Block q of
/// a row consists of the inputs in columns 4q to 4q + 7, so that each half of a row of results finds its inputs
/// aligned.
__device__ constexpr int row_offset(int row) { return (row / 2 + row % 2 * (kInputs / 2)) * Bytes::row; }
__device__ inline int column_offset(int column) { return 2 * column + 8 * min(column / 4, 3); }

/// The dynamic shared memory of a CTA: a ring of Bytes::buffers planes of each kind. The addresses are those of the
/// shared state space.
struct Shared {
  uint32_t boxes;    ///< input planes, as TMA copies them
  uint32_t outputs;  ///< output planes or planes of y, as TMA copies them
  uint32_t planes;   ///< input planes of each channel
  uint32_t results;  ///< output planes of each channel, two halves of 8 columns as [row][column], or planes of y
  uint32_t barriers;
  float* weights;  ///< [channel][tap]; the sums of wgrad as [tap][channel]

  __device__ explicit Shared(unsigned char* begin) {
    unsigned char* const aligned = begin + (-shared_address(begin) & (kDepthwiseMmaAlignment - 1));
    boxes = shared_address(aligned);
    outputs = boxes + Bytes::buffers * Bytes::box;
    planes = outputs + Bytes::buffers * Bytes::output;
    results = planes + Bytes::buffers * kWarps * Bytes::plane;
    barriers = results + Bytes::buffers * kWarps * Bytes::results;
    weights = reinterpret_cast<float*>(aligned + (barriers + Bytes::barriers - boxes));
  }
  __device__ static uint32_t slot(int number) { return static_cast<uint32_t>(number) % Bytes::buffers; }
  __device__ uint32_t box(int number) const { return boxes + slot(number) * Bytes::box; }
  __device__ uint32_t output(int number) const { return outputs + slot(number) * Bytes::output; }
  __device__ uint32_t plane(int number) const { return planes + slot(number) * (kWarps * Bytes::plane); }
  __device__ uint32_t result(int number) const { return results + slot(number) * (kWarps * Bytes::results); }
  /// Barriers: all warps have completed a step, and a box has been loaded.
  __device__ uint32_t step(int number) const { return barriers + static_cast<uint32_t>(number) % 2 * 8; }
  __device__ uint32_t loaded(int number) const { return barriers + 16 + slot(number) * 8; }
  /// The number of the last plane in this slot that has an infinite or NaN input.
  __device__ uint32_t not_finite(int number) const { return barriers + 48 + slot(number) * 4; }
};

/// Transposes a box to planes. Returns whether an input that this lane copied is infinite or NaN.
template <class T>
__device__ bool transpose_box(uint32_t box, uint32_t planes, int warp, int lane) {
  // A warp copies 8 channels of each eighth row. Each matrix of ldmatrix has 8 columns by 8 channels, and the fourth
  // one is not used. TMA has exchanged the halves of some voxels (32-byte swizzle).
  const int half = warp % 2, row = warp / 2, column = min(lane, kInputs - 1), pair = lane % 4;
  const uint32_t from = box + static_cast<uint32_t>((row * kInputs + column) * 32 + (half + row + column / 4) % 2 * 16);
  const uint32_t to = planes + static_cast<uint32_t>((half * 8 + lane / 4) * Bytes::plane + row_offset(row) + pair * 4);
  // Two blocks contain the columns 4 to 15. The last store copies columns 16 to 19, and columns 4 to 7 again.
  const uint32_t middle = to + (pair < 2 ? 24 : 40), ends = to + (pair < 2 ? 56 : 8);
  uint32_t sum = 0, pairs[3][4];
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (i < 2 || row < kInputs - 16) load_transposed(pairs[i], from + i * (8 * kInputs * 32));
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (i == 2 && row >= kInputs - 16) break;
    const uint32_t last = pair < 2 ? pairs[i][2] : pairs[i][0];
    store_shared(to + i * 4 * Bytes::row, pairs[i][0]);
    store_shared(to + i * 4 * Bytes::row + 32, pairs[i][1]);
    store_shared(middle + i * 4 * Bytes::row, pairs[i][1]);
    store_shared(ends + i * 4 * Bytes::row, last);
    for (const uint32_t word : {pairs[i][0], pairs[i][1], last}) add_zero_times<T>(sum, word);
  }
  return sum & 0x7fff7fff;
}

/// The steps of a warp. Step s transposes input plane s and multiplies plane s - 2. At the beginning of a step, all
/// warps have completed the step before the previous one. A warp thus waits for another one only if it is a whole step
/// ahead.
struct Steps {
  const Shared& shared;
  const int warp;
  const int lane;

  /// Initializes the barriers and loads the first two planes by load(number). One thread calls this function.
  template <class Load>
  __device__ void start(const Load& load) const {
    for (int i = 0; i < 2; ++i) init_barrier(shared.step(i), kWarps);
    for (int i = 0; i < Bytes::buffers; ++i) {
      init_barrier(shared.loaded(i), 1);
      store_shared(shared.not_finite(i), static_cast<uint32_t>(-1));
    }
    fence_barrier_init();
    for (int i = 0; i < 2; ++i) load(i);
  }
  /// Waits for the other warps. Returns whether this lane must load plane step + 2. The last warp loads and stores
  /// planes, because it has fewer rows to transpose.
  __device__ bool begin(int step) const {
    if (step >= 2) wait_barrier(shared.step(step), step / 2 - 1);
    return warp == kWarps - 1 && lane == 0;
  }
  /// Waits until TMA has loaded a plane.
  __device__ void wait_loaded(int number) const {
    wait_barrier(shared.loaded(number), static_cast<int>(static_cast<uint32_t>(number) / Bytes::buffers));
  }
  __device__ void end(int step) const {
    __syncwarp();
    if (lane == 0) arrive(shared.step(step));
  }
};

}  // namespace voxgrad::cuda::banded
