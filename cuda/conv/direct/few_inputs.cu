// Fprop of convolutions whose input has few channels: an implicit GEMM with mma.sync whose K dimension consists of the
// words of all input channels and taps (few_inputs.cuh). A CTA keeps the weights of 32 or 64 output channels in shared
// memory, in the order in which lanes read them, and computes one CTA tile after another.
//
// If halves have an odd number of taps along the width, the last word of a line repeats a tap with a weight of zero. If
// the number of words is no multiple of 8, words that repeat the first word with weights of zero follow. An infinite
// input at such a tap gives NaN instead of infinity.
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/common/store_vectors.cuh"
#include "cuda/conv/direct/few_inputs.cuh"

namespace voxgrad::cuda {
namespace {

struct FewInputsFpropParams {
  FewInputs in;
  const void* weight;
  EpilogueParams epilogue;
  void* out;                      // dense and channels-last
  int64_t weight_stride[5] = {};  // elements
  Divisor line_words;             // words of a line of taps
  int words;                      // of all channels and taps
  int steps;                      // k-steps of 8 words
  int channels;                   // of y
};

/// The channel and the taps of a word.
template <int kElements>
struct TapWord {
  int channel, d, h;
  int w;             // first tap along the width
  bool repeats_tap;  // the previous word contains the first tap, too
  __device__ TapWord(const FewInputsFpropParams& p, int word) {
    w = p.line_words.take_digit(word) * kElements;
    repeats_tap = w > 0 && w + kElements > p.in.kernel[2].value();
    if (repeats_tap) --w;
    h = p.in.kernel[1].take_digit(word);
    d = p.in.kernel[0].take_digit(word);
    channel = word;
  }
};

/// Copies the offsets of all words and the weights of a tile of channels to shared memory, the weights as
/// [step][8 channels][lane][2 words]. Weights of missing channels and words are zero.
template <class Arithmetic, int kN8>
__device__ void list_weights(const FewInputsFpropParams& p, int first_channel, uint32_t offsets, uint32_t weights) {
  using T = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements;
  for (int i = static_cast<int>(threadIdx.x); i < p.steps * 8; i += kFewInputsThreads) {
    const TapWord<kElements> word(p, i < p.words ? i : 0);
    store_shared(offsets + i * 4, tap_offset(p.in, word.channel, word.d, word.h, word.w));
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.steps * kN8 * 64; i += kFewInputsThreads) {
    const int lane = i / 2 % 32, n = i / 64 % kN8, number = i / (64 * kN8) * 8 + i % 2 * 4 + lane % 4;
    const int channel = first_channel + n * 8 + lane / 4;
    const TapWord<kElements> word(p, number);
    T value[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      value[e] = T(0.0f);
      if (number < p.words && channel < p.channels && word.w + e < p.in.kernel[2].value() &&
          !(word.repeats_tap && e == 0))
        value[e] = static_cast<const T*>(
            p.weight)[channel * p.weight_stride[0] + word.channel * p.weight_stride[1] + word.d * p.weight_stride[2] +
                      word.h * p.weight_stride[3] + (word.w + e) * p.weight_stride[4]];
    }
    store_shared(weights + i * 4, Arithmetic::word(value));
  }
}

/// Rounds max(sum, floor), for store_vectors().
template <class T>
struct Floor {
  float floor;
  __device__ float operator()(float sum, int, int) const { return max_or_nan(sum, floor); }
  __device__ uint32_t pair(float first, float second, int) const { return round_pair<T>(first, second, floor); }
};

/// Stores the results of a warp. `staged` is the shared memory of all warps for store_vectors().
template <class T, int kM16, int kN8>
__device__ void store_results(const FewInputsFpropParams& p, const FewInputsTile& tile, uint32_t voxels,
                              const Accumulator (&sum)[kM16][kN8], int first_channel, uint32_t staged) {
  const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
  T* const out = static_cast<T*>(p.out) + tile.first_voxel(p.in) * p.channels + first_channel;
#pragma unroll
  for (int m = 0; m < kM16; ++m) {
    T* to[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const FewInputsVoxel voxel = load_voxel(voxels, ((warp * kM16 + m) * 2 + r) * 8 + g);
      to[r] = out + int64_t{voxel.number} * p.channels;
      exists[r] = voxel.lies_in(tile);
    }
    store_vectors<kN8>(staged + warp * kStagedBytes, to, exists, sum[m], Floor<T>{p.epilogue.floor},
                       p.channels - first_channel);
  }
}

/// Computes fprop. Launch: a 2-D grid of ranges of CTA tiles by tiles of channels. Dynamic shared memory: the list of
/// voxels, the weights, the bias, the offsets of words, the list of rows, and the box.
template <class Arithmetic, int kM16, int kN8>
__global__ void __launch_bounds__(kFewInputsThreads, 2)
    few_inputs_fprop(const __grid_constant__ FewInputsFpropParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kVoxels = kFewInputsWarps * 16 * kM16;
  extern __shared__ uint4 dynamic_shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t voxels = shared_address(dynamic_shared), weights = voxels + kVoxels * kFewInputsVoxelBytes;
  const uint32_t biases = weights + p.steps * kN8 * 256, offsets = biases + kN8 * 32;
  const uint32_t rows = offsets + p.steps * 32, box = (rows + p.in.rows * kFewInputsRowBytes + 127) & ~127u;
  const int first_channel = static_cast<int>(blockIdx.y) * 8 * kN8;
  list_box(p.in, voxels, kVoxels, rows);
  list_weights<Arithmetic, kN8>(p, first_channel, offsets, weights);
  if (const int n = static_cast<int>(threadIdx.x); n < 8 * kN8) {
    const float bias = first_channel + n < p.channels ? p.epilogue.bias_of<T>(first_channel + n) : 0.0f;
    store_shared(biases + n * 4, __float_as_uint(bias));
  }
  __syncthreads();
  uint32_t at[2 * kM16];  // of the results of this lane, for its first word
#pragma unroll
  for (int i = 0; i < 2 * kM16; ++i) at[i] = box + load_voxel_offset(voxels, (warp * kM16 * 2 + i) * 8 + lane / 4);

  for (int number = static_cast<int>(blockIdx.x); number < p.in.count; number += static_cast<int>(gridDim.x)) {
    const FewInputsTile tile(p.in, number);
    __syncthreads();  // no warp uses the memory of the previous box any more
    load_box<T>(p.in, tile, rows, box);
    __syncthreads();
    Accumulator sum[kM16][kN8];
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
      uint32_t bias[2];
      load_shared(biases + (n * 8 + lane % 4 * 2) * 4, bias);
#pragma unroll
      for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = __uint_as_float(bias[i % 2]);
    }
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      uint32_t offset[2], b[kN8][2], a[kM16][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) offset[i] = load_shared(offsets + (step * 8 + i * 4 + lane % 4) * 4);
#pragma unroll
      for (int n = 0; n < kN8; ++n) load_shared(weights + ((step * kN8 + n) * 32 + lane) * 8, b[n]);
#pragma unroll
      for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = load_shared(at[2 * m + i % 2] + offset[i / 2]);
      Arithmetic::multiply_words(sum, a, b);
    }
    if constexpr (sizeof(T) == 2) __syncthreads();  // all warps have read the box, through which the results pass
    store_results<T>(p, tile, voxels, sum, first_channel, box);
  }
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const FewInputsPlan& plan, const Launch& launch) {
  if (call.pass == ConvPass::wgrad) return few_inputs_wgrad(call, problem, plan, launch);
  const View& w = call.w;
  const int elements = w.dtype == DType::f32 ? 1 : 2;
  const int line_words = divide_up(static_cast<int>(problem.kernel[2]), elements);
  FewInputsFpropParams p{
      .in = describe_few_inputs(call.in, problem, plan),
      .weight = w.data,
      .epilogue = EpilogueParams(call.epilogue),
      .out = call.out.data,
      .line_words = Divisor(line_words),
      .words = static_cast<int>(problem.in_channels * problem.kernel[0] * problem.kernel[1] * line_words),
      .steps = plan.steps,
      .channels = static_cast<int>(problem.out_channels)};
  std::copy_n(w.stride, 5, p.weight_stride);
  const dim3 grid(static_cast<unsigned>(plan.ranges), static_cast<unsigned>(plan.channel_tiles));
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    if constexpr (Arithmetic::kParts == 1)
      with_width<32, 64>(plan.channels, [&]<int kChannels>() {
        launch_kernel(call.op, few_inputs_fprop<Arithmetic, few_inputs_m16(kChannels), kChannels / 8>, grid,
                      kFewInputsThreads, plan.shared_bytes, launch.stream, p);
      });
  });
}

}  // namespace voxgrad::cuda
