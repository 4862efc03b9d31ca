// Wgrad of convolutions whose input has few channels: an implicit GEMM with mma.sync and split-K. Its rows are channels
// of y, its columns are pairs of an input channel and a tap, and its K dimension consists of the voxels of y
// (few_inputs.cuh). A CTA copies y and the inputs of one CTA tile after another to shared memory. Its warps divide the
// columns and the voxels among themselves and add their sums in a fixed order. A second kernel adds the sums of all
// CTAs.
//
// A CTA tile may have more voxels than y. These voxels are zero, and they are multiplied by inputs that other voxels of
// y read. If such an input is infinite or NaN, the sums of taps that do not read it may be NaN.
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/direct/few_inputs.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kVoxels = kFewInputsWgradVoxels;

struct FewInputsWgradParams {
  FewInputs in;
  const void* y;   // dense and channels-last
  float* partial;  // (range, channel of y, pair)
  int channels;    // of y
  int taps;        // pairs
  int sets;        // warps among which pairs are divided
};

/// Copies the voxels of y of a CTA tile to shared memory asynchronously. Other voxels are zero.
template <class T, int kChannels, int kPitch>
__device__ void load_voxels(const FewInputsWgradParams& p, const FewInputsTile& tile, int first_channel,
                            uint32_t voxels, uint32_t to) {
  constexpr int kWidth = 16 / sizeof(T), kVectors = kChannels / kWidth;
  const T* const y = static_cast<const T*>(p.y) + tile.first_voxel(p.in) * p.channels + first_channel;
#pragma unroll
  for (int i = 0; i < kVoxels * kVectors / kFewInputsThreads; ++i) {
    const int at = i * kFewInputsThreads + static_cast<int>(threadIdx.x), channel = at % kVectors * kWidth;
    const FewInputsVoxel voxel = load_voxel(voxels, at / kVectors);
    const bool exists = voxel.lies_in(tile) && first_channel + channel < p.channels;
    cp_async(to + at / kVectors * kPitch + channel * static_cast<int>(sizeof(T)),
             exists ? y + int64_t{voxel.number} * p.channels + channel : static_cast<const T*>(p.y), exists);
  }
  cp_async_commit();
}

/// Loads the fragments of y for a k-step that begins at address `y`.
template <class Arithmetic, int kM16, int kPitch>
__device__ void load_y(uint32_t (&a)[kM16][4], uint32_t y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kM16; ++m)
    if constexpr (Arithmetic::kElements == 2) {
      load_transposed(a[m], y + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16 + m * 32);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = round_for_tensor_cores(
            __uint_as_float(load_shared(y + (lane % 4 + i / 2 * 4) * kPitch + (m * 16 + i % 2 * 8 + lane / 4) * 4)));
    }
}

/// Adds the sums of the warps of each set in shared memory, one warp after another, and stores the partial sums of the
/// CTA.
template <int kM16, int kN8>
__device__ void store_sums(const FewInputsWgradParams& p, const Accumulator (&sum)[kM16][kN8], float* shared,
                           int first_channel, int first_pair) {
  constexpr int kRows = 16 * kM16, kColumns = 8 * kN8, kPitch = kColumns + 8;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  for (int turn = 0; turn < kFewInputsWarps / p.sets; ++turn) {
    __syncthreads();
    if (warp / p.sets != turn) continue;
#pragma unroll
    for (int m = 0; m < kM16; ++m)
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& total = shared[(warp % p.sets * kRows + m * 16 + i / 2 * 8 + g) * kPitch + n * 8 + 2 * t + i % 2];
          total = (turn > 0 ? total : 0.0f) + sum[m][n][i];
        }
  }
  __syncthreads();
  float* const partial = p.partial + int64_t{blockIdx.x} * p.channels * p.taps;
  for (int i = thread; i < p.sets * kRows * kColumns; i += kFewInputsThreads) {
    const int row = i / kColumns, channel = first_channel + row % kRows;
    const int pair = first_pair + row / kRows * kColumns + i % kColumns;
    if (channel < p.channels && pair < p.taps) partial[channel * p.taps + pair] = shared[row * kPitch + i % kColumns];
  }
}

/// Computes partial sums. Launch: a 3-D grid of ranges of CTA tiles by tiles of channels by tiles of pairs. Dynamic
/// shared memory: the list of voxels, y, the list of rows, and the box; later the sums of the CTA.
template <class Arithmetic, int kM16, int kN8>
__global__ void __launch_bounds__(kFewInputsThreads, 2)
    few_inputs_wgrad_kernel(const __grid_constant__ FewInputsWgradParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kStep = 8 * kElements;  // voxels of a k-step
  constexpr int kPitch = 16 * kM16 * static_cast<int>(sizeof(T)) + 8 * static_cast<int>(sizeof(T));
  extern __shared__ uint4 dynamic_shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t voxels = shared_address(dynamic_shared), y = voxels + kVoxels * kFewInputsVoxelBytes;
  const uint32_t rows = y + kVoxels * kPitch, box = rows + p.in.rows * kFewInputsRowBytes;
  const int first_channel = static_cast<int>(blockIdx.y) * 16 * kM16;
  const int first_pair = static_cast<int>(blockIdx.z) * p.sets * 8 * kN8;
  list_box(p.in, voxels, kVoxels, rows);
  uint32_t at[kN8];  // of the pair of this lane, for the first voxel
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    int number = first_pair + (warp % p.sets * kN8 + n) * 8 + lane / 4;
    if (number >= p.taps) number = 0;
    const int w = p.in.kernel[2].take_digit(number), h = p.in.kernel[1].take_digit(number),
              d = p.in.kernel[0].take_digit(number);
    at[n] = box + tap_offset(p.in, number, d, h, w);
  }
  Accumulator sum[kM16][kN8] = {};
  for (int number = static_cast<int>(blockIdx.x); number < p.in.count; number += static_cast<int>(gridDim.x)) {
    const FewInputsTile tile(p.in, number);
    __syncthreads();  // the lists are complete, and all warps have read the previous tile
    load_voxels<T, 16 * kM16, kPitch>(p, tile, first_channel, voxels, y);
    load_box<T>(p.in, tile, rows, box);
    cp_async_wait<0>();
    __syncthreads();
    for (int first = warp / p.sets * kStep; first < kVoxels; first += kFewInputsWarps / p.sets * kStep) {
      uint32_t a[kM16][4], b[kN8][2], offset[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) offset[i] = load_voxel_offset(voxels, first + (i * 4 + lane % 4) * kElements);
      load_y<Arithmetic, kM16, kPitch>(a, y + first * kPitch);
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[n][i] = load_shared(at[n] + offset[i]);
      Arithmetic::multiply_words(sum, a, b);
    }
  }
  store_sums<kM16, kN8>(p, sum, reinterpret_cast<float*>(dynamic_shared), first_channel, first_pair);
}

}  // namespace

void few_inputs_wgrad(const ConvCall& call, const ConvProblem& problem, const FewInputsPlan& plan,
                      const Launch& launch) {
  const View& w = call.w;
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  const FewInputsWgradParams p{.in = describe_few_inputs(call.in, problem, plan),
                               .y = call.out.data,
                               .partial = partial.as<float>(),
                               .channels = static_cast<int>(problem.out_channels),
                               .taps = plan.taps,
                               .sets = plan.sets};
  const StridedWeights sum(w, p.partial, plan.ranges, {4, 3, 2, 1, 0});
  const dim3 grid(static_cast<unsigned>(plan.ranges), static_cast<unsigned>(plan.channel_tiles),
                  static_cast<unsigned>(plan.set_tiles));
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    if constexpr (Arithmetic::kParts == 1) {
      const auto start = [&](auto* kernel) {
        launch_kernel(call.op, kernel, grid, kFewInputsThreads, plan.shared_bytes, launch.stream, p);
      };
      if (plan.channels == 64)
        start(few_inputs_wgrad_kernel<Arithmetic, 4, 4>);
      else if (plan.columns == 64)
        start(few_inputs_wgrad_kernel<Arithmetic, 2, 8>);
      else
        start(few_inputs_wgrad_kernel<Arithmetic, 2, 4>);
      reduce_ranges<typename Arithmetic::Element>(sum, launch.stream);
    }
  });
}

}  // namespace voxgrad::cuda
